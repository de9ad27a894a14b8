"""Arguments from a real model for steps outside the forward pass, e.g. sampling, loss and optimizer. Torch-free."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamarium.course.passes import RIGHT, Pass, Weights
from llamarium.course.steps import STEPS
from llamarium.course.steps.types import Floats
from llamarium.errors import InputError, TokenizerError, escape
from llamarium.generation.completion import stop_ids_of
from llamarium.quant.ggml.encode import encode
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.bpe import ByteLevelBPE

SENTENCES = (
    "The capital of France is Paris.",
    "The cat that the dog chased ran away.",
    "I love to drink tea in the morning",
    "She read the book, and then she read it again.",
    "Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich.",
    "Water boils at 100 degrees; ice melts at 0.",
    "def add(a, b): return a + b",
    "Once upon a time there was a small dragon",
    "The bank of the river was muddy 🐸",
    "To be, or not to be: that is the question.",
)
"""Default texts of a course."""

_WIDE = 1e-3
"""Minimum probability of a token to be chosen. Cumulative float32 sums over a vocabulary are accurate to 1e-5."""


_LOSS_TOKENS = 1000
"""Vocabulary entries used for the loss, besides the text's tokens. Sequential float32 sums of 50,000 terms are off by
up to 0.1 %, as much as some mistakes; sums of 1,000 terms are not."""


@dataclass(frozen=True)
class Source:
    """The model and texts that arguments are made from.

    Raises:
        InputError: If the tokenizer cannot encode one of the texts.

    Attributes:
        weights: The model's weights.
        tokenizer: The model's tokenizer.
        texts: Texts to choose sentences from.
    """

    weights: Weights
    tokenizer: Tokenizer
    texts: Sequence[str] = SENTENCES

    def __post_init__(self) -> None:
        for text in self.texts:
            try:
                self.tokenizer.encode(text)
            except TokenizerError as error:
                advice = "the course's model cannot encode it; pack a course with other texts (`llamarium build pack`)"
                raise InputError(f"the text {escape(text)!r}: {advice} ({escape(error)})") from None

    def sentences(self, rng: np.random.Generator, count: int = 2) -> list[list[int]]:
        """Return the first 12 token ids of `count` randomly chosen texts."""
        return [self.tokenizer.encode(text)[:12] for text in self.some_texts(rng, count)]

    def prompts(self, rng: np.random.Generator) -> list[list[int]]:
        """Return token ids of three prompts with the same first token, up to 12 each.

        The second one is the first one with another token in the middle; the third one is shorter.
        """
        first, *others = self.sentences(rng)
        other = others[0] if others else first[::-1]
        middle = (len(first) - 2) // 2
        another = next((token for token in other[1:] if token != first[middle]), other[0])
        second = [*first[:middle], another, *first[middle + 1 :]]
        return [first, second, [first[0], *other[1 : max(3, len(first) // 2)]]]

    def vocabulary(self) -> ByteLevelBPE:
        """Return the model's BPE vocabulary and merges; InputError if it has none."""
        try:
            return self.tokenizer.backend.byte_level_bpe()
        except TokenizerError as error:
            raise InputError(f"the course's model has no merges for the step merge ({escape(error)})") from None

    @property
    def bos_id(self) -> int | None:
        """The BOS id, or None if the tokenizer does not prepend one."""
        return next(iter(self.tokenizer.encode("")), None)

    def some_texts(self, rng: np.random.Generator, count: int) -> list[str]:
        """Return up to `count` different texts, randomly chosen."""
        chosen: list[int] = rng.permutation(len(self.texts))[:count].tolist()
        return [self.texts[idx] for idx in chosen]


def _pieces(source: Source, rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    vocabulary = source.vocabulary()
    for text in source.some_texts(rng, 4):
        for piece in vocabulary.cut(text):
            yield piece.encode(), vocabulary.rank


def _model_logits(source: Source, ids: Sequence[int]) -> Any:
    running = Pass(source.weights)
    return running.logits(np.array(ids), running.empty())[0]


def _choices(source: Source, rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    for logits_V in _model_logits(source, source.sentences(rng, 1)[0]):
        yield logits_V, 0.0, 1.0, 0.5
        for temperature, top_p in ((0.8, 0.9), (1.0, 0.5), (1.3, 0.99)):
            yield logits_V, temperature, *far_from_borders(logits_V, temperature, top_p, rng)


def far_from_borders(
    logits_V: Floats, temperature: float, top_p: float, rng: np.random.Generator
) -> tuple[float, float]:
    """Return top_p and u far from the boundaries between tokens, so that float32 rounding does not change the choice.

    Args:
        logits_V: Logits (V,).
        temperature: Sampling temperature.
        top_p: Approximate top_p.
        rng: Chooses the token.

    Returns:
        top_p, and the uniform random number u that selects a token from the middle of its interval.
    """
    powers = np.exp((logits_V - logits_V.max()).astype(np.float64) / temperature)
    ends = np.sort(powers / powers.sum())[::-1].cumsum()
    num_wide = max(1, int((np.diff(ends, prepend=0.0) > _WIDE).sum()))
    last = min(int(np.searchsorted(ends, top_p)), num_wide - 1)
    chosen = int(rng.integers(last + 1))
    middles = ends - np.diff(ends, prepend=0.0) / 2
    return float(middles[last]), float(middles[chosen] / ends[last])


def _writings(source: Source, rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    ids = source.sentences(rng, 1)[0][:4]

    def next_logits(ids: list[int]) -> Any:
        return _model_logits(source, ids)[-1]

    def greedy(logits_V: Any) -> int:
        return int(np.asarray(logits_V).argmax())

    yield (ids, source.bos_id, sorted(stop_ids_of(source.weights.config, source.tokenizer, ())), 3, next_logits, greedy)


def _blocks(source: Source, rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    for layer in rng.choice(source.weights.config.num_hidden_layers, 3):
        rows = source.weights[f"model.layers.{layer}.mlp.up_proj.weight"][:2, :64]
        packed = encode(rows, "Q4_0").reshape(-1, 18)
        for block in packed:
            yield (block.tobytes(),)


def _answers(source: Source, rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    for ids in source.sentences(rng):
        is_answer = np.arange(len(ids)) >= rng.integers(1, len(ids) - 2)
        columns = np.union1d(ids, np.arange(min(_LOSS_TOKENS, source.weights.config.vocab_size)))
        yield _model_logits(source, ids)[:, columns], np.searchsorted(columns, ids), is_answer


def _updates(source: Source, rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    w = source.weights["model.layers.0.self_attn.q_proj.weight"][:16, :32]
    m = v = np.zeros_like(w)
    for step in (1, 2, 3):
        gradient = rng.normal(size=w.shape).astype(np.float32)
        args = (w, gradient, m, v, step, 1e-3, 0.9, 0.95, 1e-8, 0.1)
        yield args
        w, m, v = RIGHT["adamw_step"](*args)


def _corrections(source: Source, rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    x_TD = source.weights.table[source.sentences(rng, 1)[0]]
    for layer in rng.choice(source.weights.config.num_hidden_layers, 3):
        w = source.weights[f"model.layers.{layer}.self_attn.k_proj.weight"]
        factors = (rng.normal(size=shape).astype(np.float32) for shape in ((8, w.shape[1]), (w.shape[0], 8)))
        yield x_TD, w, *factors, 16.0


ARGUMENTS = {
    "merge": _pieces, "choose": _choices, "generate": _writings, "unpack_q4_0": _blocks,
    "loss": _answers, "adamw_step": _updates, "lora": _corrections
}  # fmt: skip
"""Generators of arguments for steps outside the forward pass, by name of the step."""

STEPS_OF_A_PASS = tuple(step for step in STEPS if step.name not in ARGUMENTS)
"""The steps that make up the forward pass."""
