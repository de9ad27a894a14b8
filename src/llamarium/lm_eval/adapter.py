"""The harness's three tasks: log-probabilities of continuations and of whole texts, and generation.

Numbers compare with those of the harness's own `hf` model:

- A context and its continuation are encoded together and cut where the context alone ends; the context's last spaces
  belong to the continuation.
- A text beyond the context length is cut on the left, BOS included, and a warning counts such requests.
- Control tokens in a text are parsed as such, since texts come from tasks and chat templates.

Two points follow the harness's documentation, unlike `hf`. A text for perplexity is each of its tokens once, the first
after BOS; `hf` also scores a BOS after that BOS if the tokenizer adds one. And log-probabilities are always float32.
"""

import importlib
import logging
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from llamarium.api import Llama, load
from llamarium.errors import ContextLengthError, OptionError, show_value
from llamarium.inspect.forward import logits_of, num_rows, rows_logits
from llamarium.inspect.numbers import Floats
from llamarium.inspect.score import scored_tokens
from llamarium.inspect.tokens import check_count
from llamarium.lm_eval.harness import harness
from llamarium.sampling.params import parameters_of

Answer = tuple[float, bool]
"""log P of a continuation, natural, and whether it is the greedy one."""

_MAX_TOKENS_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = tuple(one.name for one in parameters_of("harness") if one.name != "temperature")
_LARGEST_BATCH = 4096


LM: Any = harness("api.model").LM
_log = logging.getLogger("lm_eval.llamarium")  # below the harness's own logger

harness("models")  # registers its own models, which it only does itself before others


@harness("api.registry").register_model("llamarium")
class LlamariumLM(LM):
    """A model of Llamarium for the harness; arguments without a description are those of `llamarium.load`.

    `model` may be a loaded `Llama`. `batch_size` is the rows of a batch, a number, not "auto", and at most
    `max_batch_size`, which the harness gives for "auto". `max_length` is the tokens of the context, None the model's
    own; `max_gen_toks` the new tokens where a task does not say how many.

    Raises:
        OptionError, InputError: If one of them cannot be.
        LlamariumError: Whatever `llamarium.load` raises.
    """

    def __init__(
        self,
        model: str | Llama = "smollm2-135m",
        *,
        dtype: Any = "auto",
        device: str | None = None,
        quantize: Any = None,
        dequantize: Any = "auto",
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
    ) -> None:
        super().__init__()
        self.batch_size = _batch_size(batch_size, max_batch_size)
        if isinstance(model, Llama):
            self.llama = model
        else:
            device = "auto" if device is None else device
            self.llama = load(model, dtype=dtype, device=device, quantize=quantize, dequantize=dequantize)
        limit = self.llama.config.max_position_embeddings
        self.max_length = limit if max_length is None else max_length
        check_count(self.max_length, "max_length", limit)
        self.max_gen_toks = max_gen_toks
        check_count(max_gen_toks, "max_gen_toks", sys.maxsize)
        self._device = torch.device(self.llama.runner.device)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Answer]:
        """Return log P(continuation | context) of each request, and whether the continuation is the greedy one."""
        pairs = [self._encode_pair(*request.args) for request in requests]
        too_long = sum(len(context) + len(continuation) > self.max_length + 1 for context, continuation in pairs)
        self._warn_of_cuts(too_long, len(requests))
        answers: dict[int, Answer] = {}
        for i, answer in self._score(pairs, "loglikelihood", disable_tqdm):
            answers[i] = answer
            self.cache_hook.add_partial("loglikelihood", requests[i].args, answer)
        return [answers[i] for i in range(len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return log P of each whole text, in windows as long as the context; every token is scored once."""
        owners: list[int] = []
        pairs: list[tuple[list[int], list[int]]] = []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            found = list(rolling_pairs(ids, self.prefix_token_id, self.max_length))
            owners += [i] * len(found)
            pairs += found
        parts: list[list[float]] = [[] for _ in requests]
        for i, (logprob, _) in self._score(pairs, "loglikelihood_rolling", disable_tqdm):
            parts[owners[i]].append(logprob)
        totals = [math.fsum(part) for part in parts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each context until one of its stop strings, an end-of-text token or its number of tokens.

        Requests of the same arguments are computed side by side. Those that are sampled go one by one, each with a seed
        of its own from torch's generator, which the harness seeds. OptionError for an unknown argument, or one that
        leaves no room for a context.
        """
        groups: dict[str, list[int]] = {}
        prompts: list[list[int]] = []
        cut = 0
        for i, request in enumerate(requests):
            context, given = request.args
            room = self.max_length - generation_options(given, self.max_gen_toks)["max_new_tokens"]
            if room < 1:
                raise OptionError(
                    f"a task asks for {self.max_length - room} new tokens, and the context holds {self.max_length}; "
                    "set a smaller max_gen_toks in --gen_kwargs"
                )
            ids = self.tok_encode(context) or [self.prefix_token_id]
            cut += len(ids) > room
            prompts.append(ids[-room:])
            groups.setdefault(repr(sorted(given.items())), []).append(i)
        self._warn_of_cuts(cut, len(requests))
        answers: dict[int, str] = {}
        with _bar(len(requests), "generate_until", disable_tqdm) as bar:
            for group in groups.values():
                for i, text in self._generate(group, prompts, requests[group[0]].args[1]):
                    answers[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
                    bar.update()
        return [answers[i] for i in range(len(requests))]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that is scored as a whole: BOS, or else the end-of-text token.

        OptionError if the vocabulary has neither.
        """
        tokenizer = self.llama.tokenizer
        found = tokenizer.eos_token_ids[:1] if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
        if not found:
            raise OptionError(
                f"{tokenizer.source}: no BOS and no end-of-text token, so a text's first token has no context"
            )
        return found[0]

    def tok_encode(self, string: str, add_special_tokens: bool = True) -> list[int]:
        """Return a text's ids, control tokens read as such; BOS first once, where the vocabulary has it so."""
        return self.llama.tokenizer.encode(string, add_special_tokens=add_special_tokens, parse_special=True)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        stem = context.rstrip()
        if not stem:
            ids = self.tok_encode(context + continuation, add_special_tokens=False)
            prefix = self.prefix_token_id
            return (ids[:1], ids[1:]) if ids[:1] == [prefix] else ([prefix], ids)
        before = self.tok_encode(stem)
        return before, self.tok_encode(context + continuation)[len(before) :]

    @property
    def tokenizer_name(self) -> str:
        """The model's name, as part of a file's."""
        return self.llama.name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the template for the harness's records; OptionError for a template by name; a model has one."""
        if isinstance(chat_template, str) and chat_template:
            raise OptionError(f"no chat template {show_value(chat_template)}: the model has one, without a name")
        tokenizer = self.llama.tokenizer
        if not chat_template or tokenizer.chat_format is None:
            return ""
        return tokenizer.chat_template or tokenizer.chat_format.name

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a dialog as text, control tokens spelled; without a generation prompt the last message stays open.

        ChatFormatError if the model has no chat format, or the dialog does not fit it.
        """
        tokenizer = self.llama.tokenizer
        messages, begun = (
            (chat_history, "") if add_generation_prompt else (chat_history[:-1], chat_history[-1]["content"])
        )
        return tokenizer.decode(tokenizer.chat(messages), skip_special_tokens=False) + begun

    def _score(
        self, pairs: Sequence[tuple[list[int], list[int]]], what: str, disable_tqdm: bool
    ) -> Iterator[tuple[int, Answer]]:
        """Yield each pair's number and answer, the longest first; rows that several pairs share are computed once."""
        rows: dict[tuple[int, ...], list[int]] = {}
        for i, (context, continuation) in enumerate(pairs):
            if not continuation:
                yield i, (0.0, True)  # the empty product
                continue
            rows.setdefault(self._row(context, continuation), []).append(i)
        order = sorted(rows, key=len, reverse=True)
        with _bar(len(pairs), what, disable_tqdm) as bar:
            for begin in range(0, len(order), self.batch_size):
                batch = order[begin : begin + self.batch_size]
                asked = [(b, i) for b, row in enumerate(batch) for i in rows[row]]
                answers = self._answers(batch, [(b, pairs[i][1]) for b, i in asked])
                yield from zip([i for _, i in asked], answers, strict=True)
                bar.update(len(asked))

    def _row(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[int, ...]:
        """Return the model's input: all but the last token, the last `max_length` of it."""
        if len(continuation) > self.max_length:
            raise ContextLengthError(
                f"a continuation has {len(continuation)} tokens, and the context holds {self.max_length}; expected one "
                "that fits"
            )
        return (*context, *continuation)[-self.max_length - 1 : -1]

    def _answers(self, batch: Sequence[Sequence[int]], asked: Sequence[tuple[int, list[int]]]) -> list[Answer]:
        """Compute rows and score continuations, each the last tokens of its row and one more."""
        runner = self.llama.runner
        wanted = [max(len(ids) for b, ids in asked if b == row) for row in range(len(batch))]
        if sum(wanted) > num_rows(runner.config.vocab_size):  # then a batch has no advantage
            return [_answer(logits_of(runner, batch[b], len(ids)), ids) for b, ids in asked]
        logits = rows_logits(runner, batch, wanted)
        return [_answer([logits[b][len(logits[b]) - len(ids) :]], ids) for b, ids in asked]

    def _generate(
        self, group: Sequence[int], prompts: Sequence[list[int]], given: Mapping[str, Any]
    ) -> Iterator[tuple[int, str]]:
        options = generation_options(given, self.max_gen_toks)
        sampled = options.get("temperature") != 0
        size = 1 if sampled else self.batch_size
        order = sorted(group, key=lambda i: len(prompts[i]), reverse=True)
        for begin in range(0, len(order), size):
            batch = order[begin : begin + size]
            if sampled and "seed" not in given:
                options["seed"] = int(torch.randint(2**31, ()))
            made = self.llama.generate([prompts[i] for i in batch], **options)
            yield from zip(batch, [generation.text for generation in made], strict=True)

    def _warn_of_cuts(self, num_cut: int, num_requests: int) -> None:
        if num_cut:
            _log.warning(
                "%d of %d requests exceed the context length of %d: their contexts lose their first tokens",
                num_cut, num_requests, self.max_length,
            )  # fmt: skip


def _answer(logits: Iterable[Floats], ids: Sequence[int]) -> Answer:
    """Return the log-probability of a continuation, and whether it is the greedy one."""
    scored = list(scored_tokens(logits, ids))
    total = math.fsum(chain.from_iterable(part.logprobs_C.tolist() for part in scored))  # sync: to report
    return total, all(bool(part.greedy_C.all()) for part in scored)


def rolling_pairs(ids: Sequence[int], prefix: int, max_length: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (context, continuation) pairs of a whole text, as the harness documents `loglikelihood_rolling`."""
    for begin in range(0, len(ids), max_length):
        end = min(begin + max_length, len(ids))
        context = [prefix] if begin == 0 else list(ids[end - max_length - 1 : begin])
        yield context, list(ids[begin:end])


def generation_options(given: Mapping[str, Any], max_gen_toks: int) -> dict[str, Any]:
    """Return a task's generation arguments as `Llama.generate` takes them.

    As in the harness, an answer is greedy unless `do_sample` or a temperature says otherwise. OptionError for an
    argument that is not known.
    """
    known = {"until", "do_sample", "temperature", *_MAX_TOKENS_NAMES, *_SAMPLING}
    if unknown := sorted(set(given) - known):
        raise OptionError(f"unknown generation arguments: {', '.join(unknown)}; there are: {', '.join(sorted(known))}")
    until = given.get("until") or ()
    lengths = [given[name] for name in _MAX_TOKENS_NAMES if given.get(name) is not None]
    options = {name: given[name] for name in _SAMPLING if given.get(name) is not None}
    options["stop"] = tuple(text for text in ((until,) if isinstance(until, str) else until) if text)
    options["max_new_tokens"] = int(lengths[0]) if lengths else max_gen_toks
    temperature = given.get("temperature")
    do_sample = bool(temperature) if given.get("do_sample") is None else given["do_sample"]
    if not do_sample:
        options["temperature"] = 0.0
    elif temperature is not None:
        options["temperature"] = float(temperature)
    return options


def _batch_size(value: int | str, largest: int | None) -> int:
    try:
        size = int(value)
    except ValueError:
        raise OptionError(f"batch_size is {show_value(value)}; expected a number") from None
    check_count(size, "batch_size", _LARGEST_BATCH if largest is None else int(largest))
    return size


def _bar(total: int, what: str, disable: bool) -> Any:
    tqdm = importlib.import_module("tqdm").tqdm
    return tqdm(total=total, desc=what, disable=disable or None)
