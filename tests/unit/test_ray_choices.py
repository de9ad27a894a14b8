"""What fronts of Ray Serve decide by, without Ray: a conversation's replica, and the options of an application."""

import argparse
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import llamarium
from llamarium.cli import serve
from llamarium.cli.options import name_base
from llamarium.errors import OptionError
from llamarium.server.http.access_keys import KEY_VARIABLE
from llamarium.server.ray_serve.conversation import conversation_of
from llamarium.server.ray_serve.forward import path_of
from llamarium.server.ray_serve.options import options_of
from llamarium.server.ray_serve.ranking import BALANCE, Places, by_choice, ranking
from serving import CHAT

pytestmark = pytest.mark.torch

LEAST: dict[str, Any] = {"num_cpus": 2, "allow_anyone": True}


# --- which replica ----------------------------------------------------------------------------------------------------


def turns(*contents: str, system: str | None = None, **fields: Any) -> dict[str, Any]:
    said = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"messages": said if system is None else [{"role": "system", "content": system}, *said], **fields}


def test_a_conversation_is_known_by_its_beginning() -> None:
    first = conversation_of(CHAT, turns("Hello", system="Be kind", temperature=0.5))
    assert first is not None
    assert first == conversation_of(CHAT, turns("Hello", "Hi", "And now?", system="Be kind", stream=True))
    others = [
        turns("Hello!", system="Be kind"),
        turns("Hello", system="Be quick"),
        turns("Hello"),
        turns("Hello", system="Be kind", model="other"),
        turns("Hello", system="Be kind", cache_salt="mine"),
        turns("Hello", system="Be kind", tools=[{"type": "function", "function": {"name": "add"}}]),
        turns("Hello", system="Be kind", prompt_cache_key="mine"),
    ]
    names = {conversation_of(CHAT, one) for one in others}
    assert len(names) == len(others) and first not in names


def test_every_protocol_has_conversations() -> None:
    message = {"role": "user", "content": "Hi"}
    assert named("/v1/messages", system="a", messages=[message]) != named("/v1/messages", messages=[message])
    assert named("/v1/responses", input=[message], instructions="a") != named("/v1/responses", input=[message])
    assert named("/v1/responses", input="Hi") != named("/v1/responses", input="Ho")
    long = "word " * 100
    for path, name in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        assert named(path, **{name: long}) == named(path, **{name: long + "and more"})
        assert named(path, **{name: [1, 2, 3]}) != named(path, **{name: [1, 2, 4]})
        assert named(path, **{name: list(range(99))}) == named(path, **{name: list(range(100))})
        assert named(path, **{name: [long, "b"]}) == named(path, **{name: [long]})
    assert named("/v1/responses", input=long) != named("/v1/responses", input=long + "and more")  # a turn is whole


def test_what_clients_write_in_several_ways_is_one_conversation() -> None:
    plain = [{"role": "user", "content": "Hi"}]
    marked = [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}]
    system = [{"type": "text", "text": "Be kind", "cache_control": {"type": "ephemeral"}}]
    assert named("/v1/messages", messages=plain) == named("/v1/messages", messages=marked)
    first, second = (named("/v1/messages", messages=plain, system=one) for one in ("Be kind", system))
    assert first == second
    turns_of_response = [{"type": "message", **marked[0]}, {"type": "function_call_output", "output": "12"}]
    assert named("/v1/responses", input="Hi") == named("/v1/responses", input=turns_of_response)
    assert named("/v1/responses", input="Hi") != named("/v1/responses", input=[{"role": "developer", "content": "Hi"}])


def test_a_clients_own_word_for_a_conversation_is_taken() -> None:
    first, second = (turns(text, prompt_cache_key="mine") for text in ("Hello", "Good morning"))
    assert conversation_of(CHAT, first) == conversation_of(CHAT, second)
    assert conversation_of(CHAT, first) != conversation_of(CHAT, first | {"prompt_cache_key": "other"})
    assert conversation_of(CHAT, first) != conversation_of(CHAT, first | {"cache_salt": "other"})


def named(path: str, **body: Any) -> str:
    found = conversation_of(path, body)
    assert found is not None
    return found


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(["messages", "input", "prompt", "model", "system", "tools", "prompt_cache_key"]), JSON_VALUES
    )
    | JSON_VALUES
)
def test_whatever_is_sent_has_a_conversation_or_none(body: object) -> None:
    for path in (CHAT, "/v1/responses"):
        found = conversation_of(path, body)
        assert found is None or re.fullmatch("[0-9a-f]{32}", found)


def test_a_replica_that_comes_takes_only_its_share_along_and_one_that_goes_only_its_own() -> None:
    names = [f"replica-{i}" for i in range(4)]
    conversations = [str(i) for i in range(4000)]
    before = {one: ranking(one, names)[0] for one in conversations}
    after = {one: ranking(one, [*names, "new"])[0] for one in conversations}
    moved = [one for one in conversations if before[one] != after[one]]
    assert {after[one] for one in moved} == {"new"}
    assert 0.17 < len(moved) / len(conversations) < 0.23  # a fifth
    gone = {one: ranking(one, names[1:])[0] for one in conversations}
    assert all(gone[one] == before[one] for one in conversations if before[one] != names[0])
    assert all(800 < list(before.values()).count(name) < 1200 for name in names)


def test_the_order_in_which_replicas_are_told_does_not_matter() -> None:
    assert ranking("a", ["x", "y", "z"]) == ranking("a", ["z", "x", "y"])


def test_a_replica_with_much_more_to_do_than_its_share_is_not_asked() -> None:
    names, places = ["first", "second", "third", "fourth"], Places(64, 256)
    assert by_choice(names, {}, places) == [["first"], ["second", "third"], ["fourth"]]
    assert by_choice(names, {"first": 1}, places) == [["second"], ["third", "fourth"], ["first"]]
    assert by_choice(names, dict.fromkeys(names, 1), places) == [["first"], ["second", "third"], ["fourth"]]
    assert by_choice(names, {"first": 9, "second": 8, "third": 8, "fourth": 8}, places)[0] == ["first"]
    assert by_choice(names, {"first": 20}, places) == [["second"], ["third", "fourth"], ["first"]]
    assert by_choice(["only"], {"only": 1000}, places) == [["only"]]


def test_nobody_waits_while_another_replica_has_a_place_and_nobody_is_refused_while_another_can_wait() -> None:
    names, places = ["first", "second"], Places(4, 2)
    assert by_choice(names, {"first": 3, "second": 3}, places) == [["first"], ["second"]]
    assert by_choice(names, {"first": 4, "second": 3}, places) == [["second"], ["first"]]
    assert by_choice(names, {"first": 4, "second": 4}, places) == [["first"], ["second"]]
    assert by_choice(names, {"first": 6, "second": 5}, places) == [["second"], ["first"]]
    assert by_choice(names, {"first": 6, "second": 6}, places) == [["first"], ["second"]]


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 20), min_size=1), st.integers(1, 9), st.integers(0, 9)
)
def test_all_replicas_may_be_asked_and_the_first_has_a_place(under_way: dict[str, int], runs: int, waits: int) -> None:
    groups = by_choice(list(under_way), under_way, Places(runs, waits))
    assert sorted(name for group in groups for name in group) == sorted(under_way)
    first, least = under_way[groups[0][0]], min(under_way.values())
    assert first < runs or least >= runs
    assert first < runs + waits or least >= runs + waits
    assert first <= BALANCE * (sum(under_way.values()) + 1) / len(under_way) or least >= runs + waits


@pytest.mark.parametrize(("root", "path"), [("", "/health"), ("/", "/health"), ("/llama", "/llama/health")])
def test_a_path_is_the_one_within_the_application(root: str, path: str) -> None:
    assert path_of({"path": path, "root_path": root}) == "/health"


# --- what it is told --------------------------------------------------------------------------------------------------


def test_options_become_settings_and_what_a_replica_loads(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first\nsecond\n")
    (tmp_path / "keys").chmod(0o600)
    options = options_of(
        {
            "model": str(tmp_path),
            "num_cpus": "4",
            "quantize": "NF4",
            "api_key_file": str(tmp_path / "keys"),
            "allowed_host": "llama.example",
            "request_timeout": "0",
            "max_num_seqs": "8",
        }
    )
    settings = options.settings()
    assert settings.api_keys == ("first", "second")
    assert settings.allowed_hosts == ("llama.example",)
    assert (settings.request_timeout_s, settings.max_num_seqs) == (None, 8)
    assert options.of_model().load_options()["quantize"] == "NF4"
    assert options.of_model().load_options().keys() <= inspect.signature(llamarium.load).parameters.keys()
    assert options.of_model().engine_options().keys() <= inspect.signature(llamarium.Llama.engine).parameters.keys()
    assert options.of_model().engine_options()["max_num_seqs"] == 8


def adapter_on(base: str | None, folder: Path) -> str:
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_model_is_called_and_loaded_as_llamarium_serve_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mine, law = Path("mine").absolute(), adapter_on("org/base", Path("law").absolute())
    adapter_on("org/base", mine)
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    for words, args, name, model in (
        ([], {}, "smollm2-135m", None),
        (["-m", "."], {"model": "."}, tmp_path.name, "."),
        (["-m", str(mine)], {"model": str(mine)}, "mine", str(mine)),
        (["-m", "org/base"], {"model": "org/base"}, "org/base", "org/base"),
        (["--adapter", str(mine)], {"adapter": str(mine)}, "mine", "org/base"),
        (["-m", "a", "--adapter", str(mine)], {"model": "a", "adapter": str(mine)}, "a", "a"),
        (["--adapter", f"law={law}"], {"adapters": {"law": law}}, "org/base", "org/base"),
        (["-m", "a", "--adapter", f"law={law}"], {"model": "a", "adapters": {"law": law}}, "a", "a"),
        (["--served-model-name", "x", "--served-model-name", "y"], {"served_model_name": ["x", "y"]}, "x", None),
    ):
        of_ray, of_command = options_of(LEAST | args), parser.parse_args(words)
        assert serve.served_names(of_command) == of_ray.served_names()
        assert of_ray.served_names()[0] == name
        name_base(of_command)
        assert of_command.model == of_ray.of_model().load_options()["model"] == model


def test_an_adapter_that_names_no_base_is_refused(tmp_path: Path) -> None:
    options = options_of(LEAST | {"adapters": {"law": adapter_on(None, tmp_path / "law")}})
    with pytest.raises(OptionError, match="names no base model"):
        options.served_names()
    with pytest.raises(OptionError, match="names no base model"):
        options.of_model().load_options()


def test_a_key_of_the_environment_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "mine")
    assert options_of({"num_cpus": 1}).settings().api_keys == ("mine",)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "num_cpus has to be given"),
        (LEAST | {"modle": "x"}, "unknown option modle: did you mean model"),
        (LEAST | {"disk_cache": "x"}, "unknown option disk_cache"),
        (LEAST | {"num_gpus": "many"}, "num_gpus: "),
        (LEAST | {"request_timeout": -1}, "request_timeout is -1"),
        (LEAST | {"dtype": "int3"}, "dtype is 'int3'"),
        (LEAST | {"max_num_seqs": 0}, "max_num_seqs is 0"),
        (LEAST | {"min_replicas": 3, "max_replicas": 2}, "min_replicas is 3, more than max_replicas, 2"),
        (LEAST | {"model": "m", "adapters": {"m": "a"}}, "adapters: m is what the model itself is called"),
        (LEAST | {"adapter": "a", "adapters": {"b": "b"}}, "adapter is in all answers"),
        ({"num_cpus": 1}, "api_key_file or the variable LLAMARIUM_API_KEY, or allow_anyone=true"),
        ({"num_cpus": 1, "api_key_file": "empty"}, "empty"),
        ({"num_cpus": 1, "api_key_file": "nowhere"}, "nowhere.* cannot be read: No such file"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    args: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").touch(0o600)
    with pytest.raises(OptionError, match=message):
        options = options_of(args)
        options.settings()
        options.served_names()
