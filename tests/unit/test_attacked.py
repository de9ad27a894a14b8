"""What was found by trying to break a loaded model: edits between turns, interleaved streams, odd arguments."""

import copy
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import llamarium
import llamarium.runtime.native.cache
from llamarium.attention import paged
from llamarium.errors import InputError, LlamariumError, MemoryBudgetError, OptionError
from llamarium.generation.loop import DialogEngine, generate_tokens
from llamarium.runtime.batch import BLOCK_SIZE
from llamarium.runtime.loaded_model import LoadedModel
from llamarium.runtime.runner import Runner
from llamarium.sampling.params import SamplingParams
from native_models import CONFIG, build, native_runner

pytestmark = pytest.mark.torch

PROMPT = [5, 17, 250, 3, 42, 8, 90]
GREEDY = SamplingParams(temperature=0, max_tokens=6)


def loaded(*, native: bool) -> LoadedModel:
    model = build(None)
    return LoadedModel(native_runner(model), lambda: model) if native else LoadedModel.of_modules(model)


def answer(runner: Runner, prefix: DialogEngine | None = None, ids: list[int] = PROMPT) -> list[int]:
    return [event.token_id for event in generate_tokens(runner, [ids], [GREEDY], prefix=prefix)]


def turn(model: LoadedModel, prefix: DialogEngine) -> list[int]:
    return answer(model.runner(), prefix)


def _scale(model: LoadedModel) -> None:
    with torch.no_grad():
        model.model.model.layers[0].self_attn.v_proj.weight.mul_(-3)


def _hook(model: LoadedModel) -> None:
    model.model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda *args: -3 * args[2])


def _delete(model: LoadedModel) -> None:
    del model.model.model.layers[1]


def _double(model: LoadedModel) -> None:
    model.model.to(torch.float64)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("edit", [_scale, _hook, _delete, _double])
def test_a_dialog_does_not_go_on_with_keys_of_other_weights(native: bool, edit: Callable[[LoadedModel], None]) -> None:
    model = loaded(native=native)
    prefix = DialogEngine(model.runner())
    turn(model, prefix)
    kept = prefix.engine
    turn(model, prefix)
    assert prefix.engine is kept, "nothing was changed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        edit(model)
        after = turn(model, prefix)
    assert prefix.engine is not kept
    assert after == answer(model.runner())
    kept = prefix.engine
    turn(model, prefix)
    assert prefix.engine is kept


def test_a_layer_that_stands_twice_is_refused() -> None:
    model = loaded(native=False)
    model.model.model.layers.append(model.model.model.layers[1])
    with pytest.raises(InputError, match="overwrite the keys"):
        answer(model.runner())


@pytest.mark.parametrize("native", [True, False])
def test_two_answers_at_once_in_one_dialog_are_refused(native: bool) -> None:
    runner = loaded(native=native).runner()
    prefix = DialogEngine(runner)
    first = generate_tokens(runner, [PROMPT], [GREEDY], prefix=prefix)
    next(first)
    assert answer(runner, prefix, PROMPT[:4]) == answer(runner, ids=PROMPT[:4])
    with pytest.raises(InputError, match="another answer was started in the same dialog"):
        next(first)


@pytest.mark.parametrize("native", [True, False])
def test_a_cache_that_cannot_grow_stays_as_it_was(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = loaded(native=native).runner()
    prefix = DialogEngine(runner, "int8")
    wanted: Any = {"kv_cache_dtype": "int8"}
    list(generate_tokens(runner, [PROMPT], [GREEDY], prefix=prefix, **wanted))
    cache = prefix.engine.cache
    before = [array.copy() if native else array.clone() for array in _arrays(cache)]
    reserve, calls = llamarium.runtime.native.cache.reserve, []

    def fail_late(*args: object) -> object:
        calls.append(args)
        if len(calls) > 2 * CONFIG.num_hidden_layers:  # the scales
            raise MemoryError
        return reserve(*args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(llamarium.runtime.native.cache, "reserve", fail_late)
    monkeypatch.setattr(paged, "reserve", fail_late)
    with pytest.raises(MemoryBudgetError):
        prefix.engine.reserve(1000)
    monkeypatch.undo()
    assert cache.num_blocks == len(before[0]) // (1 if native else BLOCK_SIZE)
    assert all((a == b).all() for a, b in zip(before, _arrays(cache), strict=True))
    again = [e.token_id for e in generate_tokens(runner, [PROMPT], [GREEDY], prefix=prefix, **wanted)]
    assert prefix.engine.cache is cache
    assert again == [e.token_id for e in generate_tokens(runner, [PROMPT], [GREEDY], **wanted)]


def _arrays(cache: object) -> list:  # type: ignore[type-arg]
    return [*cache.k, *cache.v, *cache.k_scales, *cache.v_scales]  # type: ignore[attr-defined]


def test_a_loaded_model_says_that_it_cannot_be_copied() -> None:
    model = llamarium.Llama("x", loaded(native=True), None)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(OptionError, match="cannot be pickled or deep-copied"):
            copied(model)
    copy.deepcopy(model.model)


class _NoEqual:
    """An object whose == is an error."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    __hash__ = None  # type: ignore[assignment]


ODD: list[Callable[[llamarium.Llama], object]] = [
    lambda llama: llama.trace(5),
    lambda llama: llama.trace("a", names=3),
    lambda llama: llama.trace("a", layers="x"),
    lambda llama: llama.trace("a", layers=1.5),
    lambda llama: llama.trace("a", positions=["x"]),
    lambda llama: llama.trace("a", names=["resid"]).select(layers=3),
    lambda llama: llama.score(None),
    lambda llama: llama.neighbors(True),
    lambda llama: llama.neighbors("a", minus=3),
    lambda llama: llama.neighbors("a", k="a"),
    lambda llama: llama.next_tokens("a", k="a"),
    lambda llama: llama.perplexity(3),
    lambda llama: llama.divergence("abc", against=3),
    lambda llama: llama.decode(None),
    lambda _: llamarium.load(device=_NoEqual()),
    lambda _: llamarium.load(device="privateuseone"),
    lambda _: llamarium.load(dtype=_NoEqual()),
    lambda _: llamarium.load(strict=_NoEqual()),
]


@pytest.mark.parametrize("number", range(len(ODD)))
def test_wrong_types_are_refused_in_our_words(number: int, smollm2: llamarium.Llama) -> None:
    with pytest.raises(LlamariumError, match=r"expected|cannot be used"):
        ODD[number](smollm2)


CUT_SHORT = """
import os, sys, llamarium
llama = llamarium.load(sys.argv[1])
os.truncate(sys.argv[1] + "/model.safetensors", 1000)
try:
    llama.model.model.layers[-1].mlp.down_proj.weight.sum()
except llamarium.LlamariumError as error:
    print(error)
"""


def test_modules_of_a_file_that_was_cut_short_are_refused(model_files: Callable[..., object]) -> None:
    files = model_files()
    weights = {key: weight.bfloat16() for key, weight in files.weights.items()}  # type: ignore[attr-defined]
    folder = replace(files, weights=weights).huggingface()  # type: ignore[type-var]
    done = subprocess.run([sys.executable, "-c", CUT_SHORT, str(folder)], capture_output=True, text=True, check=False)
    assert (done.returncode, "was written to" in done.stdout) == (0, True), done


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "n": 3, "seed": 1}]
)
def test_a_prompt_whose_logits_are_nan_ends_alone(native: bool, options: dict[str, float]) -> None:
    tokenizer = llamarium.load("shakespeare-char").tokenizer
    config = replace(CONFIG, vocab_size=tokenizer.vocab_size, tie_word_embeddings=False)
    model = build(None, config=config)
    with torch.no_grad():
        model.model.embed_tokens.weight[tokenizer.encode("Z")[-1]] = float("nan")
    held = LoadedModel(native_runner(model), lambda: model) if native else LoadedModel.of_modules(model)
    llama = llamarium.Llama("x", held, tokenizer)
    alone = llama.generate("KING", max_tokens=5, logit_bias={tokenizer.encode("Z")[-1]: -100}, **options)
    first, bad, last = llama.generate(
        ["KING", "AZA", "KING"], max_tokens=5, logit_bias={tokenizer.encode("Z")[-1]: -100}, **options
    )
    assert {completion.finish_reason for completion in bad.completions} == {"error"}
    answers = [[c.token_ids for c in found.completions] for found in (first, last, alone)]
    assert answers[0] == answers[1] == answers[2]
    with pytest.raises(LlamariumError, match="NaN or infinite"):
        llama.generate("AZA", max_tokens=5, **options)
