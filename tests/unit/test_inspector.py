"""`llama.inspect`: the same numbers as the functions behind it, words as tokens, and refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamarium
from llamarium.errors import InputError, SamplingError
from llamarium.inspect.interventions.edits import ablate
from llamarium.inspect.interventions.experiments import Experiment
from llamarium.inspect.lens import lens
from llamarium.inspect.probes import attribution, heads
from llamarium.inspect.probes.sampling import sampler_steps

pytestmark = pytest.mark.torch

TEXT = "The capital of France is"


def test_answers_are_those_of_the_functions(smollm2: llamarium.Llama) -> None:
    seen, paris, rome = smollm2.trace(TEXT), smollm2.encode(" Paris")[0], smollm2.encode(" Rome")[0]
    found = smollm2.inspect.attribution(TEXT, "Paris", against=rome, position=3)
    expected = attribution.attribute(smollm2.runner, seen, paris, against_id=rome, position=3)
    assert found.logit == pytest.approx(expected.logit, abs=1e-4)
    assert [(a.part, a.layer, a.head) for a in found.heads] == [(a.part, a.layer, a.head) for a in expected.heads]
    places = smollm2.inspect.lens(TEXT, paris, k=1, layers=[-1], positions=[-1, 2])
    assert places == lens(smollm2.runner, _part(smollm2, [-1, 2]), 1, smollm2.tokenizer, chosen_id=paris)
    joined = smollm2.inspect.heads(TEXT, -2, positions=[1])
    again = heads.heads_joined(smollm2.runner, smollm2.trace(TEXT, positions=[1]), 28)
    assert (joined.layer, joined.positions) == (28, (1,)) and np.array_equal(joined.added_TND, again.added_TND)


def _part(llama: llamarium.Llama, positions: list[int]) -> Any:
    return llama.trace(TEXT, names=["resid_mid", "resid"], layers=[-1], positions=positions)


def test_the_sampler_is_asked_as_generate_is(smollm2: llamarium.Llama) -> None:
    options: dict[str, Any] = {"temperature": 0.7, "seed": 11, "choice": ["Paris", "Rome"]}
    answer = smollm2.generate(TEXT, **options).completions[0].token_ids
    for i, token_id in enumerate(answer):
        assert smollm2.inspect.sampler_steps(TEXT, answer_ids=answer[:i], **options).token_id == token_id
    params = smollm2.sampling_params(temperature=0.7, seed=11)
    free = smollm2.inspect.sampler_steps(TEXT, k=2, temperature=0.7, seed=11)
    assert free == sampler_steps(smollm2.runner, smollm2.encode(TEXT), params, k=2, tokenizer=smollm2.tokenizer)
    assert isinstance(smollm2.inspect.sampler_steps([1, 2]).seed, int)
    with pytest.raises(SamplingError, match="temprature"):
        smollm2.inspect.sampler_steps(TEXT, temprature=1)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("word", ["antidisestablishmentarianism", 49152, -1, True, None, 1.5])
def test_what_is_no_token_is_refused(smollm2: llamarium.Llama, word: Any) -> None:
    with pytest.raises(InputError, match=r"no single token|within 0|the word is"):
        smollm2.inspect.attribution(TEXT, word)


def test_a_position_that_there_is_not_is_refused(smollm2: llamarium.Llama) -> None:
    with pytest.raises(InputError, match=r"positions are \[5\]; expected some within -5\.\.4"):
        smollm2.inspect.attribution(TEXT, "Paris", position=5)


def test_an_edited_model_answers_and_the_model_itself_stays(smollm2: llamarium.Llama) -> None:
    plain = smollm2.generate(TEXT, temperature=0.0, max_tokens=3).text
    with smollm2.inspect.edited(*(ablate("attention", layer=i) for i in range(20, 30))) as other:
        assert other.generate(TEXT, temperature=0.0, max_tokens=3).text != plain
        assert smollm2.generate(TEXT, temperature=0.0, max_tokens=3).text == plain
        assert other.trace(TEXT, names=["attn_out"], layers=[25])["layers.25.attn_out"].abs().max() == 0
        assert other.inspect.attribution(TEXT, "Paris").additions[2 * 25 + 1].logit == 0
    assert other.generate(TEXT, temperature=0.0, max_tokens=3).text == plain


def test_steering_and_patching_take_texts_and_words(smollm2: llamarium.Llama) -> None:
    edit = smollm2.inspect.steer("happy", "sad", 12, scale=2.0, positions=[1])
    assert (edit.part, edit.layer, edit.positions) == ("residual", 12, (1,)) and edit.add is not None
    grid = smollm2.inspect.patch_grid(
        TEXT, "The capital of Italy is", "Rome", against="Paris", part="mlp", layers=[28, 29], positions=[-1]
    )
    cells = list(grid.cells())
    assert grid.base.logit < 0 < grid.source.logit and [(c.layer, c.position) for c in cells] == [(28, 4), (29, 4)]
    seen = smollm2.inspect.trace_experiment(TEXT, Experiment(bidirectional=True), names=["pattern"], layers=[3])
    assert (seen["layers.3.pattern"][:, 0, 1:] > 0).any()


def test_the_lens_ends_in_what_the_pass_says(smollm2_path: Path) -> None:
    """Packed weights' streams are not rounded to what their norms are stored in: the kernels' are not."""
    llama = llamarium.load(smollm2_path)
    last = llama.config.num_hidden_layers - 1
    seen = llama.trace(TEXT, names=["resid", "logits"], layers=[last])
    assert np.array_equal(llama.runner.read_stream(seen.arrays["resid", last]), seen.arrays["logits", None])
