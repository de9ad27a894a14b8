"""Which runner answers: C, until somebody has done something to the modules that C does not see."""

import copy
import gc
import pickle
import threading
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from llamarium.errors import InputError, OptionError
from llamarium.inspect.forward import Memory, advance, batches
from llamarium.inspect.trace import trace, trace_steps
from llamarium.model import LlamaForCausalLM
from llamarium.runtime.loaded_model import LoadedModel
from llamarium.runtime.native.runner import NativeRunner
from llamarium.runtime.taps import Taps
from native_models import CONFIG, build, native_runner

pytestmark = pytest.mark.torch


def loaded(type_name: str | None = "Q8_0", **options: Any) -> LoadedModel:
    model = build(type_name, torch.bfloat16)
    return LoadedModel(native_runner(model), lambda: model, **options)


def answer(one: LoadedModel) -> np.ndarray:
    runner = one.runner()
    memory = Memory(runner, 8)
    return advance(runner, memory.cache, [memory.begin([1, 2, 3], 8)])


def _copied(layer: Any, layer_idx: int) -> Any:
    """A layer keeps its keys and values under its own number."""
    layer = copy.deepcopy(layer)
    layer.self_attn.layer_idx = layer_idx
    return layer


EDITS: dict[str, Callable[[LlamaForCausalLM], Any]] = {
    "a Linear": lambda model: setattr(
        model.model.layers[0].self_attn, "q_proj", copy.deepcopy(model.model.layers[1].self_attn.q_proj)
    ),
    "a weight's memory": lambda model: setattr(
        model.model.layers[0].mlp.down_proj, "weight", model.model.layers[1].mlp.down_proj.weight.clone()
    ),
    "a block": lambda model: setattr(model.model.layers[2], "mlp", copy.deepcopy(model.model.layers[0].mlp)),
    "a layer less": lambda model: model.model.layers.__delitem__(1),
    "a layer twice": lambda model: model.model.layers.__setitem__(2, _copied(model.model.layers[1], 2)),
    "another head": lambda model: setattr(model, "lm_head", nn.Linear(96, 300, bias=False, dtype=torch.bfloat16)),
    "a norm's memory": lambda model: setattr(
        model.model.norm.weight, "data", torch.full((96,), 3.0, dtype=model.dtype)
    ),
    "a norm's number": lambda model: setattr(model.model.norm, "eps", 0.5),
    "a hook": lambda model: model.model.layers[0].mlp.register_forward_hook(lambda module, given, made: made * 2),
    "a hook before": lambda model: model.model.layers[0].mlp.register_forward_pre_hook(lambda module, given: None),
    "a patched forward": lambda model: setattr(
        model.model.layers[0].mlp, "forward", types.MethodType(lambda self, x: x * 2, model.model.layers[0].mlp)
    ),
    "a patched method": lambda model: setattr(
        model.model.layers[0].self_attn, "project", model.model.layers[1].self_attn.project
    ),
    "the dtype": lambda model: model.to(torch.float32),
}


@pytest.mark.parametrize("name", EDITS)
def test_edited_modules_answer_through_the_modules_and_say_so_once(name: str) -> None:
    one = loaded()
    assert isinstance(one.runner(), NativeRunner)
    before = answer(one)
    assert isinstance(one.runner(), NativeRunner), "asking for the model is no edit"
    EDITS[name](one.model)
    with pytest.warns(UserWarning, match="PyTorch answers from now on"):
        after = answer(one)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (answer(one) == after).all()
    assert name == "a hook before" or not np.allclose(before, after, atol=1e-3)


def test_an_edit_that_is_taken_back_is_forgotten() -> None:
    one = loaded()
    before = answer(one)
    handle = one.model.model.norm.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="PyTorch answers"):
        answer(one)
    handle.remove()
    assert isinstance(one.runner(), NativeRunner) and (answer(one) == before).all()


def test_a_hook_for_all_modules_is_seen() -> None:
    one, seen = loaded(), list[nn.Module]()
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        assert one.model is not None
        with pytest.warns(UserWarning, match="PyTorch answers"):
            answer(one)
    finally:
        handle.remove()
    assert one.model.model.layers[1] in seen


def test_a_weight_that_is_changed_in_place_is_the_runners_too() -> None:
    one = loaded(None)
    before = answer(one)
    with torch.no_grad():
        one.model.model.layers[1].mlp.up_proj.weight.zero_()
    assert isinstance(one.runner(), NativeRunner) and not np.allclose(answer(one), before, atol=1e-3)


@pytest.mark.parametrize(
    "name", ["model", "model.embed_tokens", "model.layers.1", "model.layers.1.mlp.act_fn", "model.norm", "lm_head"]
)
def test_no_modules_hook_is_passed_over(name: str) -> None:
    one, seen = loaded(), list[str]()
    names = {module: path for path, module in one.model.named_modules()}
    assert name in names.values(), sorted(names.values())
    one.model.get_submodule(name).register_forward_hook(lambda *_: seen.append(name))
    with pytest.warns(UserWarning, match="PyTorch answers"):
        answer(one)
    assert seen == [name]


CHANGES_IN_PLACE: dict[str, Callable[[LlamaForCausalLM], Any]] = {
    "packed": lambda model: model.model.layers[1].mlp.up_proj.weight[..., :512].random_(0, 255),
    "a norm": lambda model: model.model.norm.weight.mul_(2),
}


@pytest.mark.parametrize("name", CHANGES_IN_PLACE)
def test_what_is_changed_in_place_is_what_the_modules_compute(name: str) -> None:
    model = build("Q8_0", torch.float32)
    one = LoadedModel(native_runner(model), lambda: model)
    before = answer(one)
    with torch.no_grad():
        CHANGES_IN_PLACE[name](one.model)
    assert isinstance(one.runner(), NativeRunner)
    found, expected = answer(one), answer(LoadedModel.of_modules(model))
    # An input near the middle of two codes may be rounded the other way: 1/254 of the largest of its group.
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-2 * float(expected.std()))
    assert np.abs(found - before).max() > 0.2 * before.std()


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens"])
def test_what_was_moved_to_another_device_is_not_read_by_the_kernels(name: str) -> None:
    one = loaded()
    one.model.get_submodule(name).to("meta")
    with pytest.warns(UserWarning, match="PyTorch answers"):
        assert not isinstance(one.runner(), NativeRunner)


@torch.no_grad()
def test_copies_are_independent() -> None:
    one, ids = loaded(), torch.tensor([[1, 2, 3]])
    before, expected = answer(one), one.model(ids)
    for copied in (copy.deepcopy(one.model), pickle.loads(pickle.dumps(one.model))):
        assert torch.equal(copied(ids), expected)
        copied.model.layers[0].mlp.down_proj.weight.zero_()
        assert not torch.equal(copied(ids), expected) and torch.equal(one.model(ids), expected)
    assert isinstance(one.runner(), NativeRunner) and (answer(one) == before).all(), "copying is no edit"


def test_the_modules_give_gradients() -> None:
    one = loaded()
    x_1TD = one.model.model.embed_tokens(torch.tensor([[1, 2, 3]])).clone().requires_grad_()
    one.model.model.layers[0].mlp(x_1TD).sum().backward()
    assert x_1TD.grad is not None and bool(x_1TD.grad.any())


def test_a_shallow_copy_with_a_hook_runs_it() -> None:
    model, seen = loaded().model, list[int]()
    copied = copy.copy(model)
    copied._forward_hooks = copied._forward_hooks.copy()
    copied.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        copied(torch.tensor([[1, 2]]))
    assert seen == [1]


def test_the_modules_are_plain_ones() -> None:
    model = loaded().model
    assert type(model) is LlamaForCausalLM and type(model.model).__name__ == "LlamaModel"
    assert type(model.model).__module__ == "llamarium.model.llama"


def test_a_deterministic_model_refuses_edits() -> None:
    one = loaded(deterministic=True)
    one.model.model.norm.register_forward_hook(lambda *_: None)
    with pytest.raises(OptionError, match="load it without deterministic"):
        one.runner()


def test_a_changed_file_ends_the_request_not_the_process() -> None:
    def check() -> None:
        raise OptionError("changed")

    with pytest.raises(OptionError, match="changed"):
        loaded(check=check).runner()


def test_modules_alone_are_a_model() -> None:
    one = LoadedModel.of_modules(build(None, torch.float32))
    assert (
        one.runner().adapters is None and one.config.hidden_size == CONFIG.hidden_size and answer(one).shape == (1, 300)
    )
    gc.collect()


@pytest.mark.parametrize("tapped", [False, True])
def test_a_hook_on_the_model_itself_runs(tapped: bool) -> None:
    one, seen = loaded(), list[torch.Size]()
    expected = answer(one)
    one.model.register_forward_hook(lambda _, given, made: seen.append(made.shape) or made * 2)
    with pytest.warns(UserWarning, match="PyTorch answers"):
        runner = one.runner()
    memory = Memory(runner, 8)
    (batch,) = batches([memory.begin([1, 2, 3], 8)])
    found = runner.run(batch, memory.cache, Taps([("gate", 1)]) if tapped else None)
    assert seen == [(1, 3, 300)] and np.allclose(found, 2 * expected, atol=0.1 * float(expected.std()))


def test_a_method_that_is_patched_on_its_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    one = loaded()
    kind = type(one.model.model.layers[0].self_attn)
    before, project = answer(one), kind.project
    with monkeypatch.context() as patched:
        patched.setattr(kind, "project", lambda self, x_BTD: [2 * part for part in project(self, x_BTD)])
        with pytest.warns(UserWarning, match="PyTorch answers"):
            assert not np.allclose(answer(one), before, atol=1e-3)
    assert isinstance(one.runner(), NativeRunner) and (answer(one) == before).all()


def test_threads_that_ask_for_the_modules_at_once_get_the_same() -> None:
    model, built = build("Q8_0", torch.bfloat16), list[LlamaForCausalLM]()

    def slowly() -> LlamaForCausalLM:
        time.sleep(0.05)
        built.append(copy.copy(model))
        return built[-1]

    one, found = LoadedModel(native_runner(model), slowly), list[LlamaForCausalLM]()
    threads = [threading.Thread(target=lambda: found.append(one.model)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1 and len(found) == 4 and all(each is built[0] for each in found)


def test_a_trace_says_what_it_cannot_see() -> None:
    one = loaded()
    with pytest.raises(InputError):
        next(trace_steps(one.runner(), [], 2))
    mlp = one.model.model.layers[0].mlp
    mlp.forward = lambda x_BTD, whole=mlp.forward: whole(x_BTD)
    with pytest.warns(UserWarning, match="PyTorch answers"):
        runner = one.runner()
    with pytest.raises(InputError, match="gate: the modules that compute them were not called"):
        trace(runner, [1, 2, 3], names=["gate"])
    assert trace(runner, [1, 2, 3], names=["gate"], layers=[1])["layers.1.gate"].shape == (3, 160)
