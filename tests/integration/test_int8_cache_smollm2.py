"""A real model over keys and values in 8 bits says what it says over its own dtype."""

from pathlib import Path

import torch

import llamarium
from llamarium.generation.loop import decode_one, new_cache, prefill

# Logits: the greedy token is the same where the best two are further apart. They come in bfloat16, in steps of 1/8.
BOUND = 1.5
TEXT = "Once upon a time, there was a little girl who lived in a village near the forest. Every day she"


@torch.no_grad()
def test_greedy_tokens_are_the_same_where_the_best_two_are_apart(smollm2_path: Path) -> None:
    model = llamarium.load(smollm2_path, device="cpu").model
    ids = llamarium.load_tokenizer(smollm2_path).encode(TEXT)
    caches = [new_cache(model, 1, len(ids) + 40, kind) for kind in ("auto", "int8")]
    expected, found = (prefill(model, cache, [ids])[0].float() for cache in caches)
    num_apart, largest = 0, 0.0
    for position in range(len(ids), len(ids) + 40):
        best = expected.topk(2)
        chosen = int(best.indices[0])
        if best.values[0] - best.values[1] > BOUND:
            num_apart += 1
            assert int(found.argmax()) == chosen
        largest = max(largest, float((found - expected)[best.indices].abs().max()))
        expected, found = (decode_one(model, cache, [chosen], [position])[0].float() for cache in caches)
    assert num_apart >= 8
    assert 0 < largest < BOUND / 2, "so that two cannot change places"
