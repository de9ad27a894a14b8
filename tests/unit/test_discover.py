"""The Python API can be discovered: `help`, `dir`, Tab, signatures, unknown names; without PyTorch, too."""

import importlib
import inspect
import pydoc
import rlcompleter
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import llamarium
from llamarium.errors import LlamariumError, MissingPackageError, OptionError, SamplingError, TrainingError
from llamarium.generation.answers import Answers
from llamarium.generation.conversation import Conversation
from llamarium.generation.dialog import CHAT_MAX_TOKENS
from llamarium.generation.options import PassOptions
from llamarium.generation.text_engine import TextEngine
from llamarium.inspect.inspector import Inspector
from llamarium.keywords import FOREIGN, unknown_names
from llamarium.sampling.params import SamplingParams
from llamarium.train.config import DPOConfig, FinetuneConfig, GRPOConfig, PretrainConfig

CLASSES = (llamarium.Llama, TextEngine, Answers, Conversation, Inspector, SamplingParams)


@pytest.fixture(params=["as it is", "without PyTorch"])
def no_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether PyTorch is looked for in vain."""
    if request.param == "without PyTorch":
        monkeypatch.setattr("llamarium.extras.find_spec", lambda name: None)
    return not importlib.import_module("llamarium.extras").has_torch()


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function and method, as they are called."""
    for name in llamarium.__all__:
        value = getattr(llamarium, name)
        if inspect.isfunction(value):
            yield name, value
    for one in CLASSES:
        for name, value in inspect.getmembers(one):
            if not name.startswith("_") and callable(value):
                yield f"{one.__name__}.{name}", value


@pytest.mark.usefixtures("no_torch")
def test_everything_is_there_by_name() -> None:
    assert set(llamarium.__all__) <= set(dir(llamarium))
    members = dict(inspect.getmembers(llamarium))
    assert set(llamarium.__all__) | {"errors"} <= members.keys()
    scope: dict[str, Any] = {}
    exec("from llamarium import *", scope)
    assert set(llamarium.__all__) <= scope.keys()
    completer = rlcompleter.Completer({"llamarium": llamarium})
    completed = [completer.complete("llamarium.", i) for i in range(2 * len(dir(llamarium)))]
    assert {text.split(".")[1].rstrip("()") for text in completed if text} >= set(llamarium.__all__) - {"__version__"}
    shown = pydoc.render_doc(llamarium, renderer=pydoc.plaintext)
    assert all(name in shown for name in llamarium.__all__ if name != "__version__")


def test_what_needs_torch_says_so_when_it_is_used(no_torch: bool) -> None:
    named = llamarium.LlamaForCausalLM
    assert inspect.isclass(named) and named.__name__ == "LlamaForCausalLM" and named.__doc__
    if not no_torch:
        return
    assert not isinstance(3, named) and "PyTorch" in pydoc.render_doc(named)
    with pytest.raises(MissingPackageError, match=r"pip install 'llamarium\[torch\]'"):
        named(llamarium.ModelConfig)  # pyright: ignore[reportArgumentType]
    with pytest.raises(MissingPackageError):
        named.from_config  # pyright: ignore  # noqa: B018
    with pytest.raises(MissingPackageError):

        class Own(named):  # pyright: ignore
            pass

    with pytest.raises(MissingPackageError, match="device 'cuda' needs PyTorch"):
        llamarium.load("shakespeare-char", device="cuda")
    assert llamarium.load("shakespeare-char", device="auto").runner.device == "cpu"
    for train in (llamarium.pretrain, llamarium.finetune, llamarium.dpo, llamarium.grpo):
        with pytest.raises(MissingPackageError, match="training needs PyTorch"):
            train()
    with pytest.raises(MissingPackageError):
        llamarium.merge("adapter", "out")


def test_a_gpu_is_called_cuda() -> None:
    with pytest.raises(OptionError, match="device is 'gpu'; expected 'cuda'"):
        llamarium.load("shakespeare-char", device="gpu")


def test_a_misspelt_name_of_the_module_is_told_the_right_one() -> None:
    with pytest.raises(AttributeError, match="did you mean pretrain"):
        llamarium.pretrian  # pyright: ignore  # noqa: B018
    assert not hasattr(llamarium, "zzz")


@pytest.mark.parametrize(
    ("name", "function"), [*public_functions()], ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_option_is_in_the_signature(name: str, function: Callable[..., Any]) -> None:
    signature = inspect.signature(function)
    variable = {one.name: one.annotation for one in signature.parameters.values() if one.kind is one.VAR_KEYWORD}
    assert variable == {}
    for one in signature.parameters.values():
        assert one.name == "self" or one.annotation is not one.empty, one.name
        assert one.kind is not one.VAR_POSITIONAL or name in ("Inspector.edited", "Inspector.effect")
    assert function.__doc__


@pytest.mark.parametrize(
    ("function", "declared", "others"),
    [
        (llamarium.Llama.generate, (SamplingParams, PassOptions), {}),
        (llamarium.Llama.stream, (SamplingParams, PassOptions), {}),
        (llamarium.Llama.chat, (SamplingParams, PassOptions), {"max_tokens": CHAT_MAX_TOKENS}),
        (llamarium.Llama.stream_chat, (SamplingParams, PassOptions), {"max_tokens": CHAT_MAX_TOKENS}),
        (Conversation.say, (SamplingParams, PassOptions), {"max_tokens": CHAT_MAX_TOKENS}),
        (Conversation.go_on, (SamplingParams, PassOptions), {"max_tokens": CHAT_MAX_TOKENS}),
        (TextEngine.submit, (SamplingParams,), {}),
        (TextEngine.stream, (SamplingParams,), {}),
        (TextEngine.stream_chat, (SamplingParams,), {"max_tokens": CHAT_MAX_TOKENS}),
        (Inspector.sampler_steps, (SamplingParams,), {}),
        (llamarium.pretrain, (PretrainConfig,), {}),
        (llamarium.finetune, (FinetuneConfig,), {}),
        (llamarium.dpo, (DPOConfig,), {}),
        (llamarium.grpo, (GRPOConfig,), {}),
    ],
)
def test_defaults_are_those_that_are_declared(
    function: Callable[..., Any], declared: tuple[Any, ...], others: dict[str, Any]
) -> None:
    parameters = inspect.signature(function).parameters
    for item in (item for one in declared for item in fields(one)):
        default = others.get(item.name, item.default)
        shown = parameters[item.name]
        if item.name == "logit_bias":
            assert shown.default is None  # its default is an empty dict of each
        else:
            assert (type(shown.default), shown.default) == (type(default), default), item.name
        assert shown.kind is shown.KEYWORD_ONLY


def test_merging_loads_as_load_does() -> None:
    load, merge = (inspect.signature(one).parameters for one in (llamarium.load, llamarium.merge))
    for name in ("device", "dtype", "quantize", "dequantize", "strict", "progress"):
        assert (merge[name].default, merge[name].annotation) == (load[name].default, load[name].annotation)


def test_a_request_has_the_defaults_of_what_begins_it() -> None:
    shown, begins = (inspect.signature(one).parameters for one in (TextEngine.submit, TextEngine.begin))
    names = ("timeout_s", "adapter", "salt", "ngram_pool", "must_keep_up", "edits", "places")
    assert [shown[name].default for name in names] == [begins[name].default for name in names]
    engine, made = inspect.signature(llamarium.Llama.engine).parameters, inspect.signature(TextEngine).parameters
    assert {name: one.default for name, one in engine.items() if name != "self"} == {
        name: one.default for name, one in made.items() if name != "model"
    }


# --- names of other libraries -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shakespeare() -> llamarium.Llama:
    return llamarium.load("shakespeare-char", device="cpu")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("stream", "stream(...)"),
        ("do_sample", "temperature=0"),
        ("max_length", "max_tokens"),
        ("num_return_sequences", "use n"),
        ("adapter", "load(adapter="),
        ("device", "load(..., device=...)"),
        ("temprature", "did you mean temperature?"),
        ("draft", "did you mean draft_model?"),
        ("zzz\x1b", "params, temperature, top_k"),
    ],
)
def test_a_foreign_name_gets_the_sentence_that_helps(shakespeare: llamarium.Llama, name: str, expected: str) -> None:
    for answer in (shakespeare.generate, shakespeare.stream, shakespeare.conversation().say):
        with pytest.raises(SamplingError) as raised:
            answer("x", **{name: 1})
        message = str(raised.value)
        assert message.startswith("unknown option ") and expected in message and "\x1b" not in message
        assert "top_k" in expected or len(message) < 200


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch_dtype", "use dtype"),
        ("device_map", "use device"),
        ("load_in_4bit", 'quantize="NF4"'),
        ("n_ctx", "whole context"),
        ("adaptor", "did you mean adapter?"),
        ("trust_remote_code", "no code"),
    ],
)
def test_loading_explains_names_too(name: str, expected: str) -> None:
    with pytest.raises(OptionError) as raised:
        llamarium.load("shakespeare-char", **{name: 1})
    assert expected in str(raised.value)


def test_training_explains_names_too() -> None:
    for function, name, expected in (
        (llamarium.pretrain, "max_steps", "use steps"),
        (llamarium.finetune, "lora_alpha", "use alpha"),
        (llamarium.dpo, "num_train_epochs", "use epochs"),
        (llamarium.grpo, "num_generations", "use group_size"),
        (llamarium.pretrain, "learning_rat", "did you mean learning_rate?"),
    ):
        with pytest.raises(TrainingError) as raised:
            function(**{name: 1})
        assert expected in str(raised.value)


def test_the_table_names_what_there_is() -> None:
    """A name leads to an option that some public function has, or to a sentence without a full stop."""
    options = {name for _, function in public_functions() for name in inspect.signature(function).parameters}
    for name, leads in FOREIGN.items():
        for lead in leads:
            is_sentence = " " in lead or "=" in lead
            assert not lead.endswith(".") and (is_sentence or lead in options), name
        assert unknown_names([name], ["temperature"]).startswith(f"unknown option {name}")


# --- SamplingParams, wherever options are -----------------------------------------------------------------------------


def test_sampling_params_are_taken_wherever_options_are(shakespeare: llamarium.Llama) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, top_k=5)
    options: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 12, "top_k": 5}
    expected = shakespeare.generate("To be", **options)
    assert shakespeare.generate("To be", params) == shakespeare.generate("To be", params=params) == expected
    assert "".join(piece.text for piece in shakespeare.stream("To be", params)) == expected.text
    with shakespeare.engine() as engine:
        assert engine.submit("To be", params).result() == engine.stream("To be", params).result() == expected
    assert shakespeare.inspect.sampler_steps("To be", params).token_id == expected.completions[0].token_ids[0]
    shorter = shakespeare.generate("To be", params, max_new_tokens=4, temperature=None)
    assert shorter.completions[0].token_ids == expected.completions[0].token_ids[:4]


def test_sampling_params_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go over what the publisher recommends, and options over them."""
    llama = llamarium.load("shakespeare-char", device="cpu")
    monkeypatch.setattr(llama, "generation_config", {"temperature": 0.3, "top_k": 7, "max_new_tokens": 9})
    assert llama.sampling_params().temperature == 0.3
    made = llama.sampling_params(SamplingParams(), top_k=2)
    assert (made.temperature, made.top_k, made.max_tokens) == (1.0, 2, 128)
    assert llama.chat_params(SamplingParams(max_tokens=5)).max_tokens == 5


def test_options_replace_what_params_say_in_another_form(shakespeare: llamarium.Llama) -> None:
    params = SamplingParams(grammar=llamarium.Grammar.regex("a+"), max_tokens=3, temperature=0.0)
    assert set(shakespeare.generate("x", params).text) == {"a"}
    assert shakespeare.generate("x", params, choice=["yes", "no"], max_tokens=5).text in ("yes", "no")


@pytest.mark.parametrize("wrong", [{"temperature": 0}, 5, "greedy"])
def test_other_params_are_refused(shakespeare: llamarium.Llama, wrong: Any) -> None:
    with pytest.raises(SamplingError, match="expected SamplingParams"):
        shakespeare.generate("x", wrong)


def test_a_path_is_a_path(tmp_path: Path, shakespeare: llamarium.Llama) -> None:
    with pytest.raises(LlamariumError, match="missing"):
        llamarium.load(tmp_path / "missing")
    with pytest.raises(LlamariumError, match="missing"):
        llamarium.load_tokenizer(tmp_path / "missing")
