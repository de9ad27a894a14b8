"""`llamarium bench cache`: one prompt continued greedily with and without the KV cache.

Without it every token costs a pass over the whole text so far; with it, over one token, for the price of keeping each
token's keys and values. The tokens must be the same (in float32, as rounding in bfloat16 may part them).
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from llamarium.cli.options import load_llama
from llamarium.cli.output import emit, note, show, size, status, table
from llamarium.errors import ContextLengthError, InputError, counted

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.config import ModelConfig

LENGTHS = (16, 32, 64, 128)
_PROMPT = "The history of the city begins with a small river, a bridge and a market that was held each week."


@dataclass(frozen=True, slots=True)
class CacheRun:
    """A measurement of one length, with or without the KV cache; counts include the prompt."""

    num_prompt_tokens: int
    num_new_tokens: int
    cache: bool
    seconds: float
    flops: int
    kv_bytes_computed: int
    kv_bytes_kept: int
    token_ids: tuple[int, ...]


def run(args: argparse.Namespace) -> int:
    """Measure every length of `args` with and without the KV cache; fail if the tokens differ."""
    lengths: tuple[int, ...] = args.lengths or LENGTHS
    if min(lengths) < 2:
        raise InputError(f"--lengths are {list(lengths)}; expected 2 or more: the first token needs no cache")
    args.dtype = "float32" if args.dtype == "auto" else args.dtype
    llama = load_llama(args)
    prompt = llama.encode(_PROMPT)
    if len(prompt) + max(lengths) > llama.config.max_position_embeddings:
        raise ContextLengthError(
            f"{len(prompt)} prompt tokens and {max(lengths)} new ones; the model's context holds "
            f"{llama.config.max_position_embeddings}: use shorter --lengths"
        )
    measure(llama, prompt, 2, cache=True)  # warm-up
    pairs: list[tuple[CacheRun, CacheRun]] = []
    for length in lengths:
        with status(f"generating {counted(length, 'token')} with and without the cache"):
            pairs.append((measure(llama, prompt, length, cache=True), measure(llama, prompt, length, cache=False)))
        if args.json:
            for result in pairs[-1]:
                emit(asdict(result))
    if not args.json:
        _print(llama, pairs)
    different = [cached.num_new_tokens for cached, anew in pairs if cached.token_ids != anew.token_ids]
    note(f"greedy tokens: {f'different at lengths {different}' if different else 'the same both ways'}")
    return 1 if different else 0


def measure(llama: "Llama", prompt: Sequence[int], length: int, *, cache: bool) -> CacheRun:
    """Generate exactly `length` tokens greedily, and measure time, operations and memory."""
    from llamarium.cost import kv_bytes_per_token
    from llamarium.generation.loop import generate_tokens
    from llamarium.sampling.params import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=length)
    start = time.perf_counter()
    events = list(generate_tokens(llama.runner, [prompt], [greedy], stop_ids=(), use_cache=cache))
    seconds = time.perf_counter() - start
    kv_bytes = kv_bytes_per_token(llama.config, llama.runner.kv_dtype)
    num_kept = len(prompt) + length - 1  # the last token is sampled, but not computed
    num_computed = num_kept if cache else sum(range(len(prompt), num_kept + 1))
    return CacheRun(
        num_prompt_tokens=len(prompt),
        num_new_tokens=length,
        cache=cache,
        seconds=seconds,
        flops=count_flops(llama.config, len(prompt), length, cache=cache),
        kv_bytes_computed=num_computed * kv_bytes,
        kv_bytes_kept=num_kept * kv_bytes if cache else 0,
        token_ids=tuple(event.token_id for event in events),
    )


def count_flops(config: "ModelConfig", num_prompt: int, num_new: int, *, cache: bool) -> int:
    """Return the operations for generating `num_new` tokens, including the prompt."""
    from llamarium.cost import flops

    texts = range(num_prompt, num_prompt + num_new)  # length of the text when each new token is sampled
    if not cache:
        return sum(flops(config, num_tokens) for num_tokens in texts)
    return flops(config, num_prompt) + sum(flops(config, 1, num_tokens - 1) for num_tokens in texts[1:])


def _print(llama: "Llama", pairs: Sequence[tuple[CacheRun, CacheRun]]) -> None:
    numbers = ("new tokens", "time", "faster", "GFLOP", "K/V computed", "K/V kept")
    result = table("new tokens", "cache", *numbers[1:], right=numbers)
    for cached, anew in pairs:
        for measured in (cached, anew):
            result.add_row(
                str(measured.num_new_tokens) if measured.cache else "",
                "with" if measured.cache else "without",
                f"{measured.seconds:.2f} s",
                f"{anew.seconds / cached.seconds:.1f}x" if measured.cache else "",
                f"{measured.flops / 1e9:,.1f}",
                size(measured.kv_bytes_computed),
                size(measured.kv_bytes_kept),
            )
    print(
        f"{llama.name} in {llama.runner.dtype}, after a prompt of {counted(pairs[0][0].num_prompt_tokens, 'token')}\n"
    )
    show(result)
    print()
