"""The small encoder-decoder in numpy: it is the modules that were trained, and translates what its file says."""

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llamarium.attention import CausalAttend
from llamarium.errors import InputError
from llamarium.inspect.probes.translation import Translator, packaged_translator

pytestmark = pytest.mark.torch

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXT = "the black cat does not see the small house"


@pytest.fixture(scope="module")
def example() -> Any:
    """The script that made the model."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module("english_french")
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def one() -> Translator:
    return packaged_translator()


@pytest.fixture(scope="module")
def modules(example: Any, one: Translator) -> Any:
    """The same weights in the modules that were trained."""
    found = example.Translator(one.about["words"], 48)
    state = {key: torch.from_numpy(values) for key, values in one._weights.items()}
    found.model.load_state_dict(state)
    return found


@torch.no_grad()
def test_numpy_is_the_modules(example: Any, modules: Any, one: Translator) -> None:
    found = one.translate(TEXT)
    source = modules.model.read(modules.encode([f"{TEXT} {example.END}"]))
    target_1T = modules.encode([" ".join(found.written)])
    logits_TV = modules.model.write(target_1T, source)[0]
    memory_SD, _ = one.read(one.ids(TEXT))
    ours_TV, *_ = one.write(target_1T[0].tolist(), memory_SD)
    np.testing.assert_allclose(ours_TV, logits_TV.numpy(), rtol=2e-4, atol=2e-4)
    k_SKH, v_SKH = (part[0] for part in source.memory[0])
    theirs_SD = modules.model.encoder(
        modules.encode([f"{TEXT} {example.END}"]), torch.arange(10)[None], CausalAttend(bidirectional=True)
    )[0]
    np.testing.assert_allclose(memory_SD, theirs_SD.numpy(), rtol=2e-4, atol=2e-4)
    assert k_SKH.shape == v_SKH.shape == (10, 4, 12)


def test_three_attentions_see_what_they_may(one: Translator) -> None:
    found = one.translate(TEXT)
    assert found.source == (*TEXT.split(), "□")
    assert found.written == ("▷", *"le chat noir ne voit pas la petite maison".split())
    for patterns, queries, keys in (
        (found.encoder_LNSS, 10, 10), (found.decoder_LNTT, 10, 10), (found.cross_LNTS, 10, 10)
    ):  # fmt: skip
        assert patterns.shape == (2, 4, queries, keys)
        np.testing.assert_allclose(patterns.sum(-1), 1, rtol=1e-5)
    assert np.triu(found.decoder_LNTT, 1).max() == 0, "no word sees a later one"
    assert np.triu(found.encoder_LNSS, 1).max() > 0.1, "the encoder has no mask"
    # "noir" stands after "chat", "black" before "cat": to write it, the decoder looks across at what comes earlier.
    at = found.written.index("chat")
    assert found.candidates[at][0].text == "noir"
    assert found.source[int(found.cross_LNTS[:, :, at].max((0, 1)).argmax())] == "black"


def test_the_set_is_what_the_file_says(example: Any, one: Translator) -> None:
    data = example.pairs(9000)
    about = one.about
    assert (about["learned"], about["asked"]) == (8000, 1000) and len(dict(data)) == 9000
    assert example.vocabulary(data) == about["words"]
    asked = data[8000:8060]
    right = sum(" ".join(one.translate(english).written[1:]) == french for english, french in asked)
    assert right == len(asked) and about["right"] == about["asked"], "the file counts all of them right"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("I love dogs", "j' aime les chiens"),
        ("I see dogs", "je vois des chiens"),
        ("he sees a tree", "il voit un arbre"),
        ("he does not see a tree", "il ne voit pas d' arbre"),
        ("my friend loves this song", "mon ami aime cette chanson"),
    ],
)
def test_a_word_of_one_language_depends_on_several_of_the_other(one: Translator, text: str, expected: str) -> None:
    assert " ".join(one.translate(text).written[1:]) == expected


@pytest.mark.parametrize("text, said", [("I love zebras", "'zebras' is none of its words"), (" ", "it has 0 words")])
def test_other_words_are_refused(one: Translator, text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        one.translate(text)
