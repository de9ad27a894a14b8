"""Choosing a token, and the loop that writes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from zlib import crc32

import numpy as np

from llamarium.course.step import Arguments, Mistake, Step
from llamarium.course.steps.types import Bools, Floats, Ints, floats, softmax

NextLogits = Callable[[list[int]], Floats]
Choose = Callable[[Floats], int]


def choose(logits_V: Floats, temperature: float, top_p: float, u: float) -> int:
    """Choose the next token: greedily, or by a random number.

    With temperature 0 it is the token with the largest logit. Otherwise softmax of logits / temperature gives each
    token a probability. The most probable tokens are kept, in descending order, until their probabilities sum to top_p
    or more: the token that reaches top_p is kept too, so at least one is. Of these, laid end to end and scaled to sum
    to 1, the token in whose stretch u falls is chosen.

    Args:
        logits_V: (V,).
        temperature: 0 or more.
        top_p: Above 0, at most 1.
        u: A random number, at least 0 and below 1.

    Returns:
        The id of the token.
    """
    if temperature == 0:
        return int(logits_V.argmax())
    scaled = logits_V.astype(np.float64) / temperature
    p_V = np.exp(scaled - scaled.max())
    p_V = p_V / p_V.sum()
    order = np.argsort(-p_V, kind="stable")
    num_kept = int(np.searchsorted(p_V[order].cumsum(), top_p)) + 1
    kept = order[:num_kept]
    ends = p_V[kept].cumsum()
    return int(kept[np.searchsorted(ends / ends[-1], u, side="right")])


def generate(
    ids: list[int],
    bos_id: int | None,
    stop_ids: list[int],
    max_new_tokens: int,
    next_logits: NextLogits,
    choose: Choose,
) -> list[int]:
    """Write token by token: run the model on all ids so far, choose a token, append it, repeat.

    Where the model has a beginning-of-sequence token, the text begins with it, once: `ids` may have it already.

    Args:
        ids: The prompt.
        bos_id: The id of BOS, or None where the model has none.
        stop_ids: Ids that end the text; they are not part of it.
        max_new_tokens: How many tokens to write at most.
        next_logits: next_logits(ids) -> (V,), the logits of the token after these.
        choose: choose(logits) -> the id of the next token.

    Returns:
        The new ids, without the prompt and without the id that ended the text.
    """
    text = list(ids)
    if bos_id is not None and text[:1] != [bos_id]:
        text = [bos_id, *text]
    new: list[int] = []
    while len(new) < max_new_tokens:
        token = choose(next_logits(text + new))
        if token in stop_ids:
            break
        new.append(token)
    return new


# --- what is often done wrong -----------------------------------------------------------------------------------------


def _until(ends: Floats, top_p: float) -> int:
    return int(np.searchsorted(ends, top_p)) + 1


def _choose_so(
    logits: Floats,
    temperature: float,
    top_p: float,
    u: float,
    *,
    probabilities: Callable[[Floats, float], Floats] = lambda logits, temperature: softmax(logits / temperature),
    kept_by: Callable[[Floats], Floats] | None = None,
    order_of: Callable[[Floats], Ints] = lambda p_V: np.argsort(-p_V, kind="stable"),
    kept_of: Callable[[Floats, float], int] = _until,
    laid: Callable[[Ints], Ints] = lambda kept: kept,
    scaled: bool = True,
    named: Callable[[Ints, int], int] = lambda kept, place: int(kept[place]),
    greedy: Callable[[Floats], int] = lambda logits: int(logits.argmax()),
) -> int:
    """Choose with one thing changed."""
    if temperature == 0:
        return greedy(logits)
    p_V = probabilities(logits, temperature)
    order = order_of(p_V)
    sums = (p_V if kept_by is None else kept_by(logits))[order].cumsum()
    kept = laid(order[: kept_of(sums, top_p)])
    if not len(kept):
        return int(order[-1])  # what a search in nothing gives
    ends = p_V[kept].cumsum()
    place = np.searchsorted(ends / ends[-1] if scaled else ends, u, side="right")
    return named(kept, min(int(place), len(kept) - 1))


def _kept_by_their_own(is_kept: Callable[[Floats, float], Bools]) -> Callable[[Floats, float, float, float], int]:
    """Return `choose` with tokens that are kept by their own probability."""

    def choose_so(logits: Floats, temperature: float, top_p: float, u: float) -> int:
        if temperature == 0:
            return int(logits.argmax())
        p_V = softmax(logits / temperature)
        order = np.argsort(-p_V, kind="stable")
        kept = order[: max(1, int(is_kept(p_V, top_p).sum()))]
        ends = p_V[kept].cumsum()
        return int(kept[np.searchsorted(ends / ends[-1], u, side="right")])

    return choose_so


def _dividing_by_0(logits: Floats, temperature: float, top_p: float, u: float) -> int:
    if temperature == 0:
        raise ZeroDivisionError
    return choose(logits, temperature, top_p, u)


def _generate_so(
    ids: list[int], bos_id: int | None, stop_ids: list[int], max_new_tokens: int, next_logits: NextLogits,
    choose: Choose, *, bos: str = "once", reads: Callable[[list[int], int], list[int]] = lambda text, start: text,
    stops: Callable[[int, list[int]], bool] = lambda token, stop_ids: token in stop_ids, keeps_stop: bool = False,
    extra: int = 0, with_prompt: bool = False, num_choices: int = 1,
) -> list[int]:  # fmt: skip
    """Write with one thing changed; what was written begins at `start` of the text."""
    text = list(ids)
    if bos_id is not None and (bos == "always" or (bos == "once" and ids[:1] != [bos_id])):
        text = [bos_id, *text]
    start = len(text)
    for _ in range(max_new_tokens + extra):
        token = [choose(next_logits(reads(text, start))) for _ in range(num_choices)][-1]
        if stops(token, stop_ids):
            text += [token] if keeps_stop else []
            break
        text.append(token)
    return text[0 if with_prompt else start :]


# --- random shapes ----------------------------------------------------------------------------------------------------


def _choose_cases(rng: np.random.Generator) -> Iterator[Arguments]:
    for number in range(160):
        temperature = 0.0 if number % 8 == 0 else float(rng.choice([0.3, 0.7, 1.5, 3.0]))
        top_p = float(rng.uniform(0.05, 0.95))
        if number % 3 == 0:  # then the last token is improbable: whether rounding leaves it out is not seen
            temperature, top_p = min(temperature, 0.2), 1.0
        yield floats(rng, int(rng.integers(3, 14)), scale=2.0), temperature, top_p, float(rng.random())


@dataclass
class _Drawing:
    """Chooses by random numbers of a seed, one for each call."""

    seed: int
    num_calls: int = 0

    def __call__(self, logits: Floats) -> int:
        self.num_calls += 1
        noise = np.random.default_rng([self.seed, self.num_calls]).normal(size=len(logits))
        return int((np.asarray(logits) + noise).argmax())

    def anew(self) -> "_Drawing":
        return _Drawing(self.seed)


def _generate_cases(rng: np.random.Generator) -> Iterator[Arguments]:
    """Yield models of random logits, which depend on all ids."""
    words, salt = 12, int(rng.integers(1 << 30))

    def next_logits(ids: Sequence[int]) -> Floats:
        seed = crc32(",".join(map(str, ids)).encode(), salt)
        return floats(np.random.default_rng(seed), words)

    for number in range(30):
        bos = None if number % 3 == 0 else 1
        ids = [int(token) for token in rng.integers(2, words, rng.integers(1, 5))]
        prompt = [1, *ids] if number % 2 and bos else ids
        yield prompt, bos, [0, 2] if number % 4 else [0], number % 7 + 1, next_logits, _Drawing(number)


_NEW_TEXT = "5-how-a-sentence-grows#Choosing"

STEPS = (
    Step(
        choose,
        "Greedy and sampled choice",
        "The logits become probabilities, and a token is chosen by them: the largest, or by a random number u.",
        _NEW_TEXT,
        "sampler",
        ("",),
        (
            "Greedy first. Then: divide the logits, softmax, sort in descending order, cumulative sums.",
            "np.searchsorted(sums, top_p) + 1 tokens are kept; searchsorted(sums of the kept / their total, u, "
            "'right') is the place.",
        ),
        _choose_cases,
        (
            Mistake("The temperature comes after the softmax; the logits are divided by it, before.",
                    partial(_choose_so, probabilities=lambda logits, t: softmax(softmax(logits) / t))),
            Mistake("The temperature has no effect: probabilities that are divided by it and scaled again are what "
                    "they were; divide the logits.",
                    partial(_choose_so, probabilities=lambda logits, t: softmax(logits))),
            Mistake("The logits are multiplied by the temperature; they are divided by it.",
                    partial(_choose_so, probabilities=lambda logits, t: softmax(logits * t))),
            Mistake("top-p keeps tokens while their sum is at most top_p, which can leave out the first; the token "
                    "that reaches top_p is kept too.",
                    partial(_choose_so, kept_of=lambda ends, top_p: int((ends <= top_p).sum()))),
            Mistake("top-p leaves out the token that reaches top_p, but for the first; it is kept.",
                    partial(_choose_so, kept_of=lambda ends, top_p: max(1, int((ends <= top_p).sum())))),
            Mistake("top-p keeps one token too many.",
                    partial(_choose_so, kept_of=lambda ends, top_p: _until(ends, top_p) + 1)),
            Mistake("top-p is applied to tokens in the order of their ids; sort them first, the most probable first.",
                    partial(_choose_so, order_of=lambda p_V: np.arange(len(p_V)))),
            Mistake("top-p keeps tokens by probabilities without the temperature; it is applied to those with it.",
                    partial(_choose_so, kept_by=softmax)),
            Mistake("top-p keeps the tokens whose own probability is top_p or more; it adds the probabilities up.",
                    _kept_by_their_own(lambda p, top_p: p >= top_p)),
            Mistake("top-p keeps the tokens with top_p times the largest probability or more, which is min-p; it adds "
                    "the probabilities up.",
                    _kept_by_their_own(lambda p, top_p: p >= top_p * p.max())),
            Mistake("The place among the sorted tokens is returned; the id of the token there is wanted.",
                    partial(_choose_so, named=lambda kept, place: place)),
            Mistake("The stretches are laid from the other end: 1 - u is used for u.",
                    lambda logits, t, p, u: choose(logits, t, p, np.nextafter(1 - u, 0))),
            Mistake("top_p and u are exchanged.", lambda logits, t, p, u: choose(logits, t, u, p)),
            Mistake("With temperature 0 the smallest logit is chosen; the largest is meant.",
                    partial(_choose_so, greedy=lambda logits: int(logits.argmin()))),
            Mistake("With temperature 0 the logits are divided by 0; choose the largest logit before that.",
                    lambda logits, t, p, u: choose(logits, t, p, u) if t else 0),
            Mistake("With temperature 0 the logits are divided by 0, and no token is left to choose; choose the "
                    "largest logit before that.", _dividing_by_0),
            Mistake("With temperature 0 a token is sampled; the one with the largest logit is chosen.",
                    lambda logits, t, p, u: choose(logits, t or 1.0, p, u)),
            Mistake("top-p has no effect.", partial(_choose_so, kept_of=lambda ends, top_p: len(ends))),
            Mistake("The kept probabilities are not scaled to sum to 1 again.", partial(_choose_so, scaled=False)),
            Mistake("The tokens are sorted from the least probable; the most probable come first.",
                    partial(_choose_so, order_of=partial(np.argsort, kind="stable"))),
            Mistake("The kept tokens lie in the order of their ids; they lie in descending order of probability.",
                    partial(_choose_so, laid=np.sort)),
            Mistake("The choice is always greedy; with a temperature above 0, u chooses.",
                    lambda logits, t, p, u: int(logits.argmax())),
        ),
    ),
    Step(
        generate,
        "The loop",
        "A Llama writes one token at a time: the new token is appended, and the model is asked again.",
        "5-how-a-sentence-grows#The chain of probabilities",
        "growth",
        ("",),
        (
            "Two lists: what the model reads, and what is new. A loop with a bound, left early at a stop id.",
            "if bos_id is not None and ids[:1] != [bos_id], BOS goes in front of what the model reads.",
        ),
        _generate_cases,
        (
            Mistake("BOS is put in front a second time, although the prompt has it (BOS twice).",
                    partial(_generate_so, bos="always")),
            Mistake("BOS is never put in front of a prompt that lacks it.", partial(_generate_so, bos="never")),
            Mistake("The model reads only the last token; it reads all so far.",
                    partial(_generate_so, reads=lambda text, start: text[-1:])),
            Mistake("Stop ids do not end the text.", partial(_generate_so, stops=lambda token, stop_ids: False)),
            Mistake("Only the first of the stop ids ends the text; each of them does.",
                    partial(_generate_so, stops=lambda token, stop_ids: token == stop_ids[0])),
            Mistake("Only the last of the stop ids ends the text; each of them does.",
                    partial(_generate_so, stops=lambda token, stop_ids: token == stop_ids[-1])),
            Mistake("Two tokens are chosen for each that is written, so random numbers are used up twice; call choose "
                    "once and keep the token.", partial(_generate_so, num_choices=2)),
            Mistake("The prompt's tokens count against max_new_tokens; only the new ones do.",
                    lambda ids, bos, stop, most, *parts: generate(ids, bos, stop, most - len(ids), *parts)),
            Mistake("The prompt's tokens, BOS included, count against max_new_tokens; only the new ones do.",
                    lambda ids, bos, stop, most, *parts:
                        generate(ids, bos, stop, most - len(ids) - (bos is not None and ids[:1] != [bos]), *parts)),
            Mistake("A stop id in the prompt ends the text; only a new one does.",
                    lambda ids, bos, stop, *parts:
                        [] if any(token in stop for token in ids) else generate(ids, bos, stop, *parts)),
            Mistake("Only one token is written; repeat until a stop id or max_new_tokens.",
                    lambda ids, bos, stop, most, *parts: generate(ids, bos, stop, min(1, most), *parts)),
            Mistake("The model reads the new tokens without the prompt.",
                    partial(_generate_so, reads=lambda text, start: text[start:] or text[-1:])),
            Mistake("The stop id is part of the text; it only ends it.", partial(_generate_so, keeps_stop=True)),
            Mistake("One token too many is written.", partial(_generate_so, extra=1)),
            Mistake("One token too few is written.", partial(_generate_so, extra=-1)),
            Mistake("The prompt is returned as well; only the new ids are wanted.",
                    partial(_generate_so, with_prompt=True)),
            Mistake("The model reads the prompt each time, without what was written.",
                    partial(_generate_so, reads=lambda text, start: text[:start])),
        ),
    ),
)  # fmt: skip
