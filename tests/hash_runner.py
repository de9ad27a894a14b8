"""A stand-in for a runner whose cache really is memory: logits are a hash of all that a sequence's blocks hold.

So a block that was given twice, overwritten, shared too early or not copied shows as another token.
"""

import dataclasses
import hashlib
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from llamarium.config import ModelConfig
from llamarium.engine.engine import Engine
from llamarium.engine.pooling import Places
from llamarium.engine.proposers.lookup import PromptLookup
from llamarium.engine.request import Request, TokenEvent
from llamarium.presets import preset
from llamarium.runtime.batch import BLOCK_SIZE, Batch
from llamarium.runtime.intervention import Edit, edits_key
from llamarium.runtime.runner import Cache, CacheDtype
from llamarium.runtime.taps import Taps
from llamarium.sampling.params import SamplingParams

CONFIG = dataclasses.replace(preset("tiny"), vocab_size=50, max_position_embeddings=400)
SLOTS = 4  # of a block


class HashCache:
    """A token, and a number for the adapter and the edits that it was run with, in each slot."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.slots = np.full((num_blocks, block_size, 2), -9, np.int64)
        self.num_copies = 0

    @property
    def num_bytes(self) -> int:
        return self.slots.nbytes

    def parts(self, block: int) -> list[memoryview]:
        return [self.slots[block].data]

    def copy_block(self, source: int, target: int) -> None:
        self.slots[target] = self.slots[source]
        self.num_copies += 1

    def grow(self, num_blocks: int) -> None:
        raise NotImplementedError

    def read(self, layer_idx: int, blocks: Sequence[int], num_slots: int) -> tuple[object, object]:
        raise NotImplementedError


class HashRunner:
    """Logits are a hash of what a sequence's slots hold, from the first one to its own."""

    is_row_exact, device, dtype, kv_dtype, name, takes_edits = True, "cpu", "float32", "float32", "hash", True

    def __init__(self, config: ModelConfig = CONFIG, circle: float = 0.0) -> None:
        self.config, self.circle = config, circle
        self.batches: list[Batch] = []

    def fingerprint(self) -> str:
        return "hash"

    def adapter_fingerprint(self, adapter: int) -> str:
        return f"content of {adapter}"

    def new_cache(self, num_blocks: int, dtype: CacheDtype = "auto", block_size: int = BLOCK_SIZE) -> HashCache:
        return HashCache(num_blocks, block_size)

    def run(self, batch: Batch, cache: Cache, taps: Taps | None = None) -> NDArray[np.float32]:
        assert isinstance(cache, HashCache)
        self.batches.append(batch)
        rows, seen = [], []
        for i, (token, place, sequence) in enumerate(
            zip(batch.token_ids, batch.positions, batch.sequences, strict=True)
        ):
            table = batch.block_tables[sequence]
            adapter = -1 if batch.adapters is None else batch.adapters[sequence]
            how = mark_of(adapter, () if batch.edits is None else batch.edits[sequence])
            cache.slots[table[place // cache.block_size], place % cache.block_size] = token, how
            past = cache.slots[table[: place // cache.block_size + 1]].reshape(-1, 2)[: place + 1]
            seen.append(None if taps is None else past.copy())
            if i in batch.logit_rows:
                rows.append(logits_after(past, self.config.vocab_size))
                rows[-1][4 + (token - 3) % 7] += self.circle  # 4, 5, ..., 10, 4: so that there is something to guess
        for key in () if taps is None else taps.keys:
            assert taps is not None and key[1] is not None
            taps.put(key, np.stack([stream_after(past, key[1]) for past in seen if past is not None]))
        return np.array(rows, np.float32).reshape(len(rows), self.config.vocab_size)


def mark_of(adapter: int, edits: tuple[Edit, ...]) -> int:
    return int(adapter) + (int.from_bytes(edits_key(edits)[:4], "big") << 8 if edits else 0)


def stream_after(past: NDArray[np.int64], layer: int) -> NDArray[np.float32]:
    return logits_after(past, 3) + layer


def logits_after(past: NDArray[np.int64], vocab_size: int) -> NDArray[np.float32]:
    digest = hashlib.blake2b(np.ascontiguousarray(past).tobytes(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).normal(size=vocab_size).astype(np.float32)


def alone(request: Request, circle: float = 0.0) -> list[list[int]]:
    """What a request gets in an engine of its own with room for everything, without anything that is shared."""
    engine = Engine(HashRunner(circle=circle), 400, block_size=SLOTS, shares=False)
    engine.add(request)
    return answers(list(engine.run()), [0])[0]


def answers(events: Sequence[TokenEvent], numbers: Sequence[int]) -> list[list[list[int]]]:
    found: dict[int, dict[int, list[int]]] = {number: {} for number in numbers}
    for event in events:
        found[event.request].setdefault(event.row, []).append(event.token_id)
    return [[rows[row] for row in sorted(rows)] for rows in found.values()]


def request_of(rng: random.Random, *, longest: int = 40, n: int = 1, **params) -> Request:
    """Prompts have their beginnings in common, and end within a block."""
    start = rng.choice([[], [1] * 7, [1] * 9 + [2] * 6])
    prompt = [*start, *(rng.randrange(50) for _ in range(rng.randint(1, longest)))]
    wanted = {"temperature": 1.0, "seed": rng.randrange(1000), "max_tokens": rng.randint(1, 20), "n": n, **params}
    edits = rng.choice(((), (), (Edit("mlp", 0),), (Edit("mlp", 1),)))
    positions = rng.sample(range(len(prompt) + int(wanted["max_tokens"]) - 1), 1) if rng.random() < 0.3 else []
    places = Places((0, 1), [*positions, len(prompt) - 1]) if positions else None
    how = {"adapter": rng.choice((-1, 0)), "edits": edits, "places": places}
    return Request(prompt, SamplingParams(**wanted), stop_ids=(3,), **how)


def check_states(events: Sequence[TokenEvent], number: int, request: Request) -> None:
    """Each answer has the hidden states that were asked for once, of the tokens that were computed of it."""
    if request.places is None:
        assert not any(event.states for event in events if event.request == number)
        return
    how = mark_of(request.adapter, request.edits)
    for row in range(request.params.n):
        own = [event for event in events if (event.request, event.row) == (number, row)]
        if not own or own[-1].finish_reason is None:
            continue  # it was aborted
        ids = [*request.prompt_ids, *(event.token_id for event in own)]
        past = np.array([(token_id, how) for token_id in ids], np.int64)
        computed = [one for one in sorted(set(request.places.positions)) if one < len(ids) - 1]
        found = {(one.position, one.layer): one.values for event in own for one in event.states}
        assert len(found) == sum(len(event.states) for event in own)
        assert list(found) == [(position, layer) for position in computed for layer in request.places.layers]
        for (position, layer), values in found.items():
            assert (values == stream_after(past[: position + 1], layer)).all()


def check_scores(events: Sequence[TokenEvent], number: int, request: Request) -> None:
    """An answer is told about each token of its prompt with its own first token, if that was asked for."""
    num_top = request.params.prompt_logprobs
    for row in range(request.params.n):
        told = [event.prompt_scores for event in events if (event.request, event.row) == (number, row)]
        assert all(scores is None for scores in told[1:])
        if num_top is None or not told:
            assert told[:1] in ([], [None])
            continue
        scores = told[0]
        assert scores is not None and math.isnan(scores.logprobs[0])
        assert len(scores.logprobs) == len(scores.top_ids) == len(scores.top_logprobs) == len(request.prompt_ids)
        past = np.array([(one, mark_of(request.adapter, request.edits)) for one in request.prompt_ids], np.int64)
        for place in range(1, len(past)):
            logits = logits_after(past[:place], CONFIG.vocab_size).astype(np.float64)
            logprobs = logits - np.log(np.exp(logits).sum())
            best = np.argsort(-logprobs)[:num_top]
            assert scores.logprobs[place] == pytest.approx(logprobs[request.prompt_ids[place]], abs=1e-5)
            assert scores.top_ids[place].tolist() == best.tolist()
            assert scores.top_logprobs[place] == pytest.approx(logprobs[best], abs=1e-5)


class Cheap(PromptLookup):
    """A guessed token costs next to nothing, so that much is guessed."""

    def record_pass(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        super().record_pass(num_rows, num_drafted, 1 + num_drafted / 1000)
