"""Prompt lookup over the built-in model: the same answers, with fewer passes, where a text repeats itself."""

from pathlib import Path

import pytest

import llamarium

pytestmark = pytest.mark.torch

LIST = "1. apples\n2. pears\n3. plums\n4. cherries\n"
TEXT = f"Copy the list.\n\n{LIST}\nCopy the list.\n\n{LIST}\nCopy the list.\n\n1."


def answers(llama: llamarium.Llama, **options) -> tuple[llamarium.PromptLookup, llamarium.Generation]:
    """Answer with and without, and hold the two to be equal."""
    lookup = llamarium.PromptLookup()
    options |= {"max_new_tokens": 20, "seed": 4}
    found = llama.generate(TEXT, prompt_lookup=lookup, **options)
    assert found == llama.generate(TEXT, **options)
    return lookup, found


@pytest.fixture(scope="module")
def packed(smollm2_path: Path) -> llamarium.Llama:
    """The model as it is loaded on a CPU."""
    return llamarium.load(smollm2_path, device="cpu")


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_packed_weights_give_the_same_answers_to_the_bit(packed: llamarium.Llama, temperature: float) -> None:
    lookup, found = answers(packed, temperature=temperature, logprobs=2, n=2 if temperature else 1)
    if temperature == 0:
        assert "pears" in found.text and lookup.accepted > 0 and lookup.passes < 19


def test_float32_gives_the_same_greedy_answer(smollm2: llamarium.Llama) -> None:
    lookup, found = answers(smollm2, temperature=0.0)
    assert "pears" in found.text and lookup.accepted > 0
