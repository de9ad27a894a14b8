"""A real model over keys and values in 8 bits says what it says over its own dtype."""

from pathlib import Path

import numpy as np

import llamarium
from llamarium.inspect.forward import KeptSequence, Memory, advance
from llamarium.runtime.native.runner import NativeRunner

# Logits: the greedy token is the same where the best two are further apart.
# The packed Linears round their inputs to 8 bits, which carries a small difference on as one of three times its size.
BOUND = 1.75
TEXT = "Once upon a time, there was a little girl who lived in a village near the forest. Every day she"


def test_greedy_tokens_are_the_same_where_the_best_two_are_apart(smollm2_path: Path) -> None:
    runner = llamarium.load(smollm2_path, device="cpu").runner
    assert isinstance(runner, NativeRunner)
    ids = llamarium.load_tokenizer(smollm2_path).encode(TEXT)
    kept: list[tuple[Memory, KeptSequence]] = []
    for kind in ("auto", "int8"):
        memory = Memory(runner, len(ids) + 40, kind)
        kept.append((memory, memory.begin(ids, len(ids) + 40)))
    num_apart, largest = 0, 0.0
    for _ in range(40):
        expected, found = (advance(runner, memory.cache, [sequence])[0] for memory, sequence in kept)
        second, chosen = np.argsort(expected)[-2:]
        if expected[chosen] - expected[second] > BOUND:
            num_apart += 1
            assert found.argmax() == chosen
        largest = max(largest, float(np.abs(found - expected)[[chosen, second]].max()))
        for _, sequence in kept:
            sequence.ids.append(int(chosen))
    assert num_apart >= 8
    assert 0 < largest < BOUND / 2, "so that two cannot change places"
