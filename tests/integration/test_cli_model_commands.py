"""The commands that run a model, in this process: a small random one where any will do."""

import dataclasses
import io
import json
import re
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from llamarium.adapters.model_names import public_name
from llamarium.api import Llama, load
from llamarium.checkpoints.tokenizers import load_tokenizer
from llamarium.cli.answer import say
from llamarium.cli.main import main
from llamarium.cli.repl import Repl
from llamarium.cost import flops
from llamarium.engine.tiers.disk_cache import DiskCache
from llamarium.inspect.measures.speed import weight_bytes
from llamarium.kernels import native
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import PRESETS
from llamarium.runtime.batch import BLOCK_SIZE, Batch
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.runtime.native.runner import NativeRunner
from llamarium.sampling.params import parameters_of
from serving import small_llama

pytestmark = pytest.mark.torch

STORY = ["Once upon a time", "--temperature", "0", "-n", "12"]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Llama:
    return load(smollm2_path)


@pytest.fixture(scope="module")
def small(smollm2_path: Path) -> Llama:
    config = dataclasses.replace(
        PRESETS["smollm2-135m"],
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
    )
    model = init_weights(LlamaForCausalLM(config), seed=1).requires_grad_(False)
    return Llama("smollm2-135m", model, load_tokenizer(smollm2_path))


@pytest.fixture
def llama(request: pytest.FixtureRequest) -> Llama:
    """The model that commands get; `small` unless the test is marked otherwise."""
    return request.getfixturevalue(getattr(request, "param", "small"))


@pytest.fixture
def asked(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Give every command the loaded model; returns what the last one asked `load` for."""
    seen: dict[str, Any] = {}

    def give(path: Path, **options: Any) -> Llama:
        seen.update(options)
        return llama

    monkeypatch.setattr("llamarium.api.load", give)
    monkeypatch.setenv("COLUMNS", "80")
    return seen


@pytest.fixture
def run(asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that succeeds and says nothing on stderr, but for bench's duration; returns its output."""
    measures = ("all", "prefill", "decode", "batch")

    def run(*words: str) -> str:
        code = main(list(words))
        out, err = capsys.readouterr()
        if words[0] == "bench" and words[1] in measures:
            assert re.fullmatch(r"\d+ measurements? of \d+ rounds?: about \d+ (s|min \d+ s)\n", err), err
            err = ""
        assert (code, err) == (0, "")
        return out

    return run


def table_fits(out: str) -> bool:
    return max(map(len, out.splitlines())) <= 80 and all(line == line.rstrip() for line in out.splitlines())


# --- generate ---------------------------------------------------------------------------------------------------------


def test_generate_prints_what_the_api_gives(run: Callable[..., str], llama: Llama) -> None:
    expected = llama.generate("Once upon a time", temperature=0.0, max_tokens=12).text
    assert run("generate", *STORY) == f"{expected}\n"
    assert run("generate", *STORY, "--no-cache") == f"{expected}\n"


def test_generate_ends_before_a_stop_text(run: Callable[..., str], llama: Llama) -> None:
    full = llama.generate("Once upon a time", temperature=0.0, max_tokens=12).text
    stop = full[9:14]
    assert run("generate", *STORY, "--stop", "never", "--stop", stop) == full[: full.index(stop)] + "\n"


def test_no_cache_really_computes_everything_anew(
    run: Callable[..., str], llama: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, plain, num_prompt = list[int](), ModuleRunner.run, len(llama.encode(STORY[0]))

    def count(self: ModuleRunner, batch: Batch, *rest: Any) -> Any:
        counts.append(len(batch.token_ids))
        return plain(self, batch, *rest)

    monkeypatch.setattr(ModuleRunner, "run", count)
    run("generate", *STORY, "--no-cache")
    assert counts == list(range(num_prompt, num_prompt + 12))
    counts.clear()
    run("generate", *STORY)
    assert counts == [num_prompt, *[1] * 11]


def test_generate_several_answers_as_json(run: Callable[..., str], llama: Llama) -> None:
    lines = run(
        "generate", "Hello", "--num-answers", "2", "-n", "5", "--seed", "3", "--logprobs", "2", "--json"
    ).splitlines()
    answers = [json.loads(line) for line in lines]
    expected = llama.generate("Hello", n=2, max_tokens=5, seed=3)
    assert [answer["text"] for answer in answers] == [completion.text for completion in expected.completions]
    assert [answer["index"] for answer in answers] == [0, 1]
    assert [answer["seed"] for answer in answers] == [3, 4]
    assert len(answers[0]["logprobs"][0]["top"]) == 2
    assert answers[0]["num_prompt_tokens"] == 1


def test_generate_several_answers_as_text(run: Callable[..., str], llama: Llama) -> None:
    first, second = llama.generate("Hello", n=2, max_tokens=5, seed=3).completions
    assert (
        run("generate", "Hello", "--num-answers", "2", "-n", "5", "--seed", "3") == f"{first.text}\n\n{second.text}\n"
    )


def test_generate_reports_what_gives_the_same_text_again(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "Hello", "-n", "6", "--stats"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("[6 tokens in ") and "1 prompt token," in err
    seed = err.rpartition("seed ")[2].rstrip("]\n")
    assert main(["generate", "Hello", "-n", "6", "--seed", seed]) == 0
    assert capsys.readouterr().out == out


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_generate_with_a_greedy_model_warns_of_nothing(
    more: list[str], small: Llama, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    greedy = Llama("greedy", small.model, small.tokenizer, generation_config={"do_sample": False})
    monkeypatch.setattr("llamarium.api.load", lambda path, **_: greedy)
    assert main(["generate", "Hello", "-n", "3", *more]) == 0
    assert capsys.readouterr().err == ""
    assert main(["generate", "Hello", "-n", "3", "--stats", *more]) == 0
    assert "seed" not in capsys.readouterr().err
    assert main(["generate", "Hello", "-n", "3", "--seed", "1", *more]) == 0  # here somebody did ask
    assert "seed: no effect" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["generate"], 2, "no PROMPT; give it"),
        (["generate", "a", "--logprobs", "2"], 2, "needs --json"),
        (["generate", "a", "--temperature", "warm"], 2, "--temperature: expected a number, 0 (greedy) or 1e-5 to 1e5"),
        (["generate", "a", "--temperature", "-1"], 2, "to 1e5, found '-1'"),
        (["generate", "a", "--temperature", "nan"], 2, "to 1e5, found 'nan'"),
        (["generate", "a", "--num-answers", "2", "--temperature", "0"], 2, "answers are all equal"),
        (["generate", ""], 1, "no tokens"),
        (["generate", "a " * 300], 1, "maximum context length is 256"),
        (["next", "a", "-k", "0"], 2, "argument -k: expected a whole number, at least 1, found '0'"),
        (["lens", "a", "--layers", "99"], 1, "llamarium: error: --layers are [99]; expected"),
        (["generate", "a", "--stop-id", "999999"], 1, "error: --stop-id names token 999999; expected"),
        (["attention", "a", "--layer", "99"], 2, "argument --layer: 99 is not within"),
        (["trace", "-", "-"], 2, "standard input is given twice"),
        (["neighbors", "antidisestablishmentarianism"], 1, "no single token"),
        (["trace", "a", "--names", "q,nothing"], 1, "unknown activations nothing"),
        (["trace", "a b c", "--budget-mb", "0.01"], 1, "budget is 0.0 MB"),
        (["info", "a", "-m", "b"], 2, "given twice"),
        (["info", "llama-3.2-1b", "--quantize", "nf4"], 2, "is a preset"),
        (["chat", "--json"], 2, "needs a QUESTION"),
        (["bench", "cache", "--lengths", "1"], 1, "expected 2 or more"),
        (["bench", "cache", "--lengths", "250"], 1, "context holds 256"),
        (["bench", "cache", "--rows", "2"], 2, "bench cache has no --rows; it is for batch and all"),
        (["bench", "cache", "--kv-cache-dtype", "int8"], 2, "bench cache has no --kv-cache-dtype"),
        (["bench", "prefill", "-n", "2"], 2, "bench prefill has no --max-tokens"),
        (["bench", "decode", "--lengths", "2"], 2, "it is for prefill and all and cache"),
        (["bench", "decode", "--depths", "9,0"], 1, "--depths are [9, 0]; expected numbers of at least 1"),
        (["bench", "decode", "--depths", "9", "--rounds", "0"], 2, "at least 1, found '0'"),
        (["bench", "all", "--depths", "9,300"], 1, "334 positions are needed, and the model's context holds 256"),
    ],
)
def test_mistakes(
    words: list[str], code: int, message: str, asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == code
    out, err = capsys.readouterr()
    assert not out
    assert message in err.splitlines()[-1]
    assert code == 2 or err.count("\n") == 1


# --- chat -------------------------------------------------------------------------------------------------------------


def test_chat_answers_one_question(run: Callable[..., str], llama: Llama) -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 2+2?"}]
    expected = llama.chat(messages, temperature=0.0, max_new_tokens=16)
    words = ["chat", "What is 2+2?", "--system", "Be short.", "--temperature", "0", "-n", "16"]
    assert run(*words) == f"{expected.text}\n"
    answer = json.loads(run(*words, "--json"))
    assert answer["text"] == expected.text
    assert answer["num_prompt_tokens"] == len(expected.prompt_ids)


@pytest.fixture
def talk(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Pipe lines into `llamarium chat`; returns its exit code and output."""

    def talk(*lines: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = main(["chat", "--temperature", "0", "-n", "8"])
        return code, *capsys.readouterr()

    return talk


def test_chat_remembers_and_saves(talk: Callable[..., tuple[int, str, str]], llama: Llama, tmp_path: Path) -> None:
    file = tmp_path / "my dialog.json"
    code, out, err = talk("/system Be kind.", "I am Ann.", "", "//who am I?", f"/save {file}")
    assert code == 0
    saved = json.loads(file.read_text())
    assert saved["model"] == "smollm2-135m"
    assert [(m["role"], m["content"]) for m in saved["messages"][:2]] == [("system", "Be kind."), ("user", "I am Ann.")]
    assert saved["messages"][3] == {"role": "user", "content": "/who am I?"}
    assert out == "".join(f"{m['content']}\n" for m in saved["messages"] if m["role"] == "assistant")
    expected = llama.chat(saved["messages"][:4], temperature=0.0, max_new_tokens=8).text
    assert saved["messages"][4]["content"] == expected
    assert err == f"[system prompt set]\n[saved {file}]\n"


def test_chat_save_replaces_nothing_unless_forced(talk: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    file = tmp_path / "dialog.json"
    file.write_text("mine")
    code, _, err = talk("hi", f"/save {file}")
    assert code == 1
    assert "exists; /save --force" in err
    assert file.read_text() == "mine"
    assert talk("hi", f"/save --force {file}")[0] == 0
    assert len(json.loads(file.read_text())["messages"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["dialog.json"]
    assert "cannot be written: No such file or directory" in talk(f"/save {tmp_path}/no/x.json")[2]


def test_chat_goes_on_with_a_dialog_that_was_saved(
    talk: Callable[..., tuple[int, str, str]], llama: Llama, tmp_path: Path
) -> None:
    talk("/system Be kind.", "I am Ann.", f"/save {tmp_path / 'a'}")
    saved = json.loads((tmp_path / "a").read_text())["messages"]
    code, out, err = talk(f"/load {tmp_path / 'a'}", "Who am I?", f"/save {tmp_path / 'b'}")
    assert code == 0 and f"[loaded {tmp_path / 'a'}: 3 messages]" in err
    assert "user: I am Ann.\n" in err  # what is gone on with is shown
    more = json.loads((tmp_path / "b").read_text())["messages"]
    assert more[:3] == saved and [m["role"] for m in more[3:]] == ["user", "assistant"]
    expected = llama.chat(more[:4], temperature=0.0, max_new_tokens=8).text
    assert out == f"{expected}\n"


def test_a_dialog_that_was_saved_goes_on_at_once_from_disk(
    smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama, found = small_llama(smollm2_path), list[int]()
    for first in (["word " * 200, f"/save {tmp_path / 'a'}"], [f"/load {tmp_path / 'a'}"]):
        with closing(DiskCache(tmp_path / "cache")) as disk:
            options = {"temperature": 0.0, "max_tokens": 4}
            repl = Repl(llama, "Be kind.", options, stats=False, disk_cache=disk)
            for line in (*first, "And now?"):
                repl.take(line)
            found.append(repl.conversation._prefix.engine.counts.disk_tokens)
            repl.conversation.close()
    assert found == [0, BLOCK_SIZE]
    for words in (["hi", "--json", "--cache-dir", str(tmp_path / "cache")], ["hi", "--cache-disk", "1GiB"]):
        assert main(["chat", *words]) == 2
    assert "--cache-disk: bounds --cache-dir" in capsys.readouterr().err


def test_chat_takes_a_text_of_several_lines_between_quotes(
    talk: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    talk('"""', "one", "", "  two", '"""', '"""three"""', f"/save {tmp_path / 'a'}")
    said = [m["content"] for m in json.loads((tmp_path / "a").read_text())["messages"] if m["role"] == "user"]
    assert said == ["one\n\n  two", "three"]
    code, _, err = talk('"""', "one")
    assert code == 1 and 'has no end; write """' in err


def test_a_full_context_is_said(
    small: Llama, asked: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["generate", "word " * 240, "--temperature", "0"]
    for more in ([], ["--json"]):
        assert main([*words, *more]) == 0
        assert "the context of 256 is full]" in capsys.readouterr().err
    assert main([*words, "-n", "5"]) == 0
    assert capsys.readouterr().err == ""

    for can_set, hint in ((False, ""), (True, "; /reset begins a new dialog")):
        say(small.conversation(), "word " * 200, {"temperature": 0.0}, False, may_repeat=True, can_set=can_set)
        assert capsys.readouterr().err == f"[cut: the context of 256 tokens is full{hint}]\n"
    say(small.conversation(), "a", {"temperature": 0.0, "max_tokens": 3}, stats=False)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("llamarium.generation.text_methods.CHAT_MAX_TOKENS", 3)
    for can_set, hint in ((False, "-n"), (True, "/set max_tokens")):
        say(small.conversation(), "a", {"temperature": 0.0}, stats=False, can_set=can_set)
        assert capsys.readouterr().err == f"[cut at 3 tokens; {hint} allows more]\n"


def test_a_dialog_past_the_context_names_reset(small: Llama, capsys: pytest.CaptureFixture[str]) -> None:
    repl = Repl(small, None, {"temperature": 0.0}, stats=False)
    repl.interactive = True
    lines = iter(["word " * 300, None])
    repl.read_line = lambda: next(lines)
    repl.run()
    assert "maximum context length is 256 tokens" in (err := capsys.readouterr().err)
    assert err.endswith("; /reset begins a new dialog\n")


def test_an_answer_that_repeats_itself_is_stopped_unless_it_may(
    small: Llama, capsys: pytest.CaptureFixture[str]
) -> None:
    same = {"temperature": 0.0, "logit_bias": {100: 100.0}, "max_tokens": 100}
    conversation = small.conversation()
    say(conversation, "a", same, stats=False)
    token = small.tokenizer.token_bytes(100).decode()
    assert conversation.messages[-1]["content"] == token * 64
    stopped = "[stopped: the last 64 tokens are the same 1 again and again. "
    hint = "--repetition-penalty 1.1 makes that rarer, --allow-repetition lets it go on]\n"
    assert capsys.readouterr().err == stopped + hint
    Repl(small, None, same, stats=False).take("a")
    assert capsys.readouterr().err == f"{stopped}/set repetition_penalty 1.1 makes that rarer]\n", "what one can type"
    say(conversation, "a", same, stats=False, may_repeat=True)
    assert conversation.messages[-1]["content"] == token * 100
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["~nosuchuser/x", "x" * 300, "a\0b", "\ud800", ""])
def test_chat_survives_a_name_that_cannot_be_saved(
    name: str, small: Llama, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    repl = Repl(small, "Be kind.", {}, stats=False)
    repl.interactive = True
    lines = iter([f"/save {name}", "/system"])
    monkeypatch.setattr(repl, "read_line", lambda: next(lines, None))
    repl.run()
    err = capsys.readouterr().err.splitlines()
    assert "llamarium: error: " in err[1]
    assert err[2] == "Be kind."  # the dialog is still there
    assert list(tmp_path.iterdir()) == []


def test_chat_reset_forgets_all_but_the_system_prompt(
    talk: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    talk("/system Be kind.", "hi", "/reset", f"/save {tmp_path / 'a'}", "/quit", "not said")
    assert json.loads((tmp_path / "a").read_text())["messages"] == [{"role": "system", "content": "Be kind."}]
    for name in ("/exit", "/bye"):
        assert talk(f"/save {tmp_path / name[1:]}", name, "/nonsense")[0] == 0
    talk("hi", "/reset", f"/save {tmp_path / 'b'}", "/system New.", "/system Newer.", f"/save {tmp_path / 'c'}")
    assert json.loads((tmp_path / "b").read_text())["messages"] == []
    assert json.loads((tmp_path / "c").read_text())["messages"] == [{"role": "system", "content": "Newer."}]


def test_chat_goes_on_in_branches_that_leave_each_other_alone(
    talk: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    files = [tmp_path / name for name in ("trunk", "left", "again")]
    code, _, err = talk(
        "hi", "/fork left", "you", f"/save {files[1]}", "/switch main", f"/save {files[0]}", "/fork right", "you",
        f"/save {files[2]}", "/switch",
    )  # fmt: skip
    assert code == 0 and "  left: 4 messages\n  right: 4 messages (this one)\n" in err
    trunk, left, again = (json.loads(file.read_text())["messages"] for file in files)
    assert len(trunk) == 2 and left[:2] == trunk and left == again  # greedy, so the same again
    for line, message in (("/fork", "new name"), ("/fork main", "new name"), ("/switch nowhere", "no branch nowhere")):
        code, _, err = talk(line)
        assert code == 1 and message in err


def test_chat_takes_back_tries_again_and_sets_options(
    talk: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    file = tmp_path / "a"
    code, _, err = talk("hi", "you", "/undo", "/undo", "/undo", f"/save {file}")
    assert code == 0 and "[taken back: you]" in err and "[nothing to take back]" in err
    assert json.loads(file.read_text())["messages"] == []
    code, out, err = talk("hi", "/set temperature 0.0", "/retry", "/set", f"/save --force {file}")
    first, second = out.splitlines()
    assert code == 0 and first == second and "[temperature is 0.0]" in err  # greedy, so the same again
    assert len(json.loads(file.read_text())["messages"]) == 2
    for line, message in (
        ("/set temperature hot", "expected a number"),
        ("/set temprature 1", "/set does not take temprature; it takes temperature, "),
        ("/set top_p 2", "top_p"),
    ):
        code, _, err = talk(line)
        assert code == 1 and message in err


def test_chat_lists_what_can_be_set_and_what_is_in_effect(
    talk: Callable[..., tuple[int, str, str]], llama: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama, "generation_config", {"top_p": 0.9})

    def listed(*lines: str) -> dict[str, str]:
        code, out, err = talk(*lines, "/set")
        assert (code, out) == (0, "")
        return dict(line.split()[:2] for line in err.splitlines() if not line.startswith("["))

    found = listed()
    assert found["temperature"] == "0.0" and found["max_tokens"] == "8" and found["top_p"] == "0.9", "of the model"
    assert found["seed"] == "random" and found.keys() == {one.name for one in parameters_of("cli")} | {"max_tokens"}
    found = listed("/set max-tokens 30", "/set seed 4", "/set temperature 0.5")
    assert (found["max_tokens"], found["seed"], found["temperature"]) == ("30", "4", "0.5")
    for name in ("foo", "stop", "n", "logprobs", "grammar", "kv_cache_dtype"):
        for value in ("", " 2", " -"):
            code, _, err = talk(f"/set {name}{value}")
            assert code == 1 and err.endswith(f"error: /set does not take {name}; it takes {', '.join(found)}\n")


def test_chat_takes_an_option_back_and_shows_one(
    talk: Callable[..., tuple[int, str, str]], llama: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama, "generation_config", {"temperature": 0.7})
    for word in ("-", "none", "None"):
        assert talk("/set seed 4", f"/set seed {word}")[2] == "[seed is 4]\n[seed is random]\n"
    _, _, err = talk("/set temperature", "/set temperature -", "/set max-tokens -", "/set min_tokens 200", "/set seed")
    shown, back, length, least, seed = err.splitlines()
    assert shown.split()[:2] == ["temperature", "0.0"] and seed.split()[:2] == ["seed", "random"]
    assert (back, length, least) == ("[temperature is 0.7]", "[max_tokens is 1024]", "[min_tokens is 200]")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert main(["chat", "--min-tokens", "200"]) == 0, "the bound is the dialog's 1024"


@pytest.mark.parametrize(
    "line", ["/bye now", "/exit 1", "/quit it", "/reset all", "/undo two", "/retry it", "/help me"]
)
def test_chat_says_that_a_command_takes_no_words(talk: Callable[..., tuple[int, str, str]], line: str) -> None:
    code, out, err = talk(line)
    assert (code, out) == (1, "") and f"error: {line.split()[0]} takes no words behind it" in err


def test_a_piped_dialog_goes_on_after_a_wrong_command(talk: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = talk("/set top_p 7", "/no-such-command", "/set temperature 0.5")
    assert (code, out) == (1, "")
    first, second, third = err.splitlines()
    assert first.startswith("llamarium: error: top_p") and second.startswith("llamarium: error: no command")
    assert third == "[temperature is 0.5]"


def test_chat_begins_with_the_models_name_and_the_adapters(
    llama: Llama, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    for adapter, said in ((None, ". "), (Path("runs/mine/best"), " with the adapter runs/mine/best.\n")):
        repl = Repl(llama, None, {}, None, adapter=adapter)
        repl.interactive = True
        repl.run()
        assert capsys.readouterr().err.startswith(f"{public_name(llama.name, None, {})}{said}/help lists commands")


def test_chat_help_and_an_unknown_command(talk: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = talk("/help", "/system", "/nonsense")
    assert (code, out) == (1, "")
    for name in ("/reset", "/system", "/load", "/save", "/help", "/quit", '"""', "//", "[no system prompt]"):
        assert name in err
    assert (
        err.splitlines()[-1]
        == "llamarium: error: no command /nonsense; /help lists them; // begins a text with a slash"
    )


def test_chat_interrupted_while_writing_keeps_the_answer_so_far(
    small: Llama, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        if len(written) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("llamarium.cli.answer.write_text", write)
    conversation = small.conversation()
    with pytest.raises(KeyboardInterrupt) as caught:  # holds every frame, so that nothing is closed by chance
        say(conversation, "hi", {"temperature": 0.0}, stats=False)
    assert caught.value is not None
    assert [message["content"] for message in conversation.messages] == ["hi", "".join(written)]


# --- looking inside ---------------------------------------------------------------------------------------------------


def test_next(run: Callable[..., str], llama: Llama) -> None:
    words = ["next", "I love to drink", "-k", "3", "--steps", "2"]
    out = run(*words)
    assert table_fits(out)
    steps = [json.loads(line) for line in run(*words, "--json").splitlines()]
    expected = llama.next_tokens("I love to drink", k=3, steps=2)
    assert [step["context_ids"] for step in steps] == [list(step.context_ids) for step in expected]
    for step in expected:
        assert all(f'"{candidate.text}"' in out for candidate in step.candidates)


def test_next_draws_as_generate_does(run: Callable[..., str], llama: Llama) -> None:
    options = {"temperature": 3.0, "top_k": 50, "seed": 5}
    words = ["next", "I love to drink", "-k", "2", "--steps", "4"]
    words += [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    out = run(*words)
    assert table_fits(out) and out.count("→") == 4 and " … " in out  # drawn from further down than two
    steps = [json.loads(line) for line in run(*words, "--json").splitlines()]
    expected = llama.generate("I love to drink", max_tokens=4, **options).completions[0]
    assert [step["chosen"]["token_id"] for step in steps] == list(expected.token_ids)
    greedy = json.loads(run("next", "I love to drink", "-k", "2", "--json"))
    for mine, other in zip(steps[0]["candidates"], greedy["candidates"], strict=True):
        assert mine["token_id"] == other["token_id"] and mine["logprob"] == pytest.approx(other["logprob"], abs=1e-4)


def test_lens(run: Callable[..., str], llama: Llama) -> None:
    out = run("lens", "The cat sat", "-k", "2", "--layers", "0,-1", "--positions", "1,-1")
    assert table_fits(out) and 'after token 1, " cat"' in out and 'after token 2, " sat"' in out
    data = json.loads(run("lens", "The cat sat", "-k", "2", "--layers", "0,-1", "--json"))
    assert [layer["layer"] for layer in data["layers"]] == [0, 11] and data["positions"] == [2]
    best = json.loads(run("next", "The cat sat", "-k", "2", "--json"))["candidates"]
    assert [c["token_id"] for c in data["layers"][-1]["candidates"][0]] == [c["token_id"] for c in best]


@pytest.mark.parametrize("text", ["The cat sat", "The cat sat on the mat and then it went to sleep again today"])
def test_attention(text: str, run: Callable[..., str], llama: Llama) -> None:
    out = run("attention", text, "--layer=-1", "--head", "2")
    assert table_fits(out) and out.startswith("layer 11 of 12, head 2 of 4;")
    assert f"{text.split()[-1]}" in out
    data = json.loads(run("attention", text, "--layer=-1", "--head=-2", "--json"))
    assert (data["layer"], data["head"]) == (11, 2)
    expected = llama.trace(text, names=["pattern"], layers=[11])["layers.11.pattern"][2]
    assert data["pattern"] == expected.tolist()


def test_a_head_that_there_is_not(asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attention", "a", "--head", "4"]) == 2
    assert "--head: 4 is not within -4..3" in capsys.readouterr().err


def test_the_cosine_of_two_words(run: Callable[..., str], llama: Llama) -> None:
    rows = [llama.model.model.embed_tokens.weight[llama.encode(word)[0]].float() for word in (" king", " queen")]
    expected = float(torch.nn.functional.cosine_similarity(*rows, dim=0))
    out = run("neighbors", "king", "--with", "queen")
    assert out.startswith('" king" (') and out.endswith(f": cosine {expected:.4f}\n")
    found = json.loads(run("neighbors", "king", "--with", "queen", "--json"))
    assert found["cosine"] == pytest.approx(expected, abs=1e-6)
    assert main(["neighbors", "king", "--with", "queen", "--plus", "man"]) == 2


def test_trace_takes_several_texts(run: Callable[..., str], llama: Llama, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The dog")
    words = ["trace", "The cat", "The cat", "-p", "The cow", "--file", str(tmp_path / "a.txt"), "--names", "logits"]
    assert run(*words).count("logits") == 4
    traced = [json.loads(line)["token_ids"] for line in run(*words, "--json").splitlines()]
    assert traced == [llama.encode(text) for text in ("The cat", "The cat", "The cow", "The dog")]


@pytest.mark.usefixtures("llama3_tokenizer_path")  # which is there before, or fetching it is told
def test_trace_of_a_preset_is_shapes_alone(run: Callable[..., str]) -> None:
    out = run("trace", "The cat sat", "-m", "llama-3.2-1b", "--layers", "0")
    assert table_fits(out) and "layers.0.gate        T=4 F=8192" in out
    out = run("trace", "The cat sat", "-m", "llama-3.2-1b")
    assert len(out.splitlines()) < 30 and "layers.0-15.gate        T=4 F=8192        2.1 MB" in out
    data = json.loads(run("trace", "The cat sat", "-m", "llama-3.2-1b", "--positions=-1", "--json"))
    assert data["activations"]["layers.15.pattern"]["shape"] == [32, 1, 4]
    assert data["activations"]["logits"]["num_bytes"] == 4 * 128256
    assert main(["trace", "a", "-m", "nano-gpt"]) == 2


def test_score(run: Callable[..., str], llama: Llama) -> None:
    out = run("score", "The cat sat on the mat")
    assert table_fits(out)
    data = json.loads(run("score", "The cat sat on the mat", "--json"))
    assert data["perplexity"] == llama.score("The cat sat on the mat").perplexity
    assert f" {data['perplexity']:,.2f}\n" in out, "as many digits as the sum has"


@pytest.mark.parametrize("llama", ["smollm2"], indirect=True)
def test_neighbors(run: Callable[..., str]) -> None:
    words = ["neighbors", "king", "--minus", "man", "--plus", "woman", "-k", "4"]
    out = run(*words)
    assert table_fits(out)
    data = json.loads(run(*words, "--json"))
    assert data["neighbors"][0]["text"] == " queen"
    assert len(data["neighbors"]) == 4
    assert '" queen"' in out


@pytest.mark.parametrize("llama", ["smollm2"], indirect=True)
def test_info_of_a_model(run: Callable[..., str], asked: dict[str, Any]) -> None:
    out = run("info", "--dtype", "float32")
    assert asked["dtype"] == "float32"
    assert table_fits(out)
    assert "134,515,008" in out and "Q4_1" in out
    data = json.loads(run("info", "smollm2-135m", "--json"))
    assert data["parameters"]["total"] == 134_515_008
    assert any(source["permuted"] for source in data["sources"])


def test_info_of_a_preset_loads_nothing(run: Callable[..., str], asked: dict[str, Any]) -> None:
    assert "1,235,814,400" in run("info", "llama-3.2-1b")
    assert json.loads(run("info", "-m", "llama-3.1-8b", "--json"))["parameters"]["total"] == 8_030_261_248
    assert asked == {}


def test_trace(run: Callable[..., str], llama: Llama, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "The cat sat"]) == 0
    out, err = capsys.readouterr()
    assert table_fits(out) and err == "219 activations; --layers or --names shows fewer\n"
    assert out.startswith("0 The | 1  cat | 2  sat\n")
    names = [line.split()[0] for line in out.splitlines()[4:]]
    assert names == list(llama.trace("The cat sat"))
    words = ["trace", "The cat sat", "--layers=0,-1", "--positions=-1", "--names", "resid,pattern", "--json"]
    data = json.loads(run(*words))
    assert list(data["activations"]) == ["layers.0.pattern", "layers.0.resid", "layers.11.pattern", "layers.11.resid"]
    assert data["positions"] == [2]
    assert data["activations"]["layers.11.resid"]["shape"] == [1, 64]


def test_bench_shows_what_fits_the_context(run: Callable[..., str], llama: Llama) -> None:
    """The kernels do not multiply the small model's float32: nothing is said of what they would read."""
    out = run("bench", "all", "--rounds", "1", "-n", "2", "--threads", "1")
    assert table_fits(out)
    lines = out.splitlines()
    assert lines[:2] == ["smollm2-135m in float32, keys and values in float32, on cpu", "PyTorch, 1 thread"]
    assert [re.split(r"\s{2,}", line)[0] for line in lines[5:]] == [
        "prefill of 32", "prefill of 128", "decode after 100", "batch of 1", "batch of 2", "batch of 4", "batch of 8",
    ]  # fmt: skip
    assert {tuple(line.split()[-4:]) for line in lines[5:]} == {("-",) * 4}


def test_bench_json(run: Callable[..., str]) -> None:
    lines = run("bench", "decode", "--depths", "5,7", "--rounds", "1", "-n", "2", "--json").splitlines()
    first, second = map(json.loads, lines)
    assert (first["test"], first["num_cached"], second["num_cached"]) == ("decode", 5, 7)
    assert (first["kernels"], first["step_bytes"], first["memory_share"]) == (None, None, None)
    assert first["tokens_per_s"] == pytest.approx(1 / first["seconds"])


@pytest.mark.skipif(native.library() is None, reason="the C kernels are not built")
@pytest.mark.parametrize("llama", ["smollm2"], indirect=True)
def test_bench_of_the_kernels(run: Callable[..., str], llama: Llama) -> None:
    assert isinstance(llama.runner, NativeRunner)
    words = ["bench", "decode", "--depths", "8000", "--rounds", "1", "-n", "2", "--threads", "1"]
    out = run(*words)
    assert table_fits(out)
    assert "keys and values in bfloat16" in out.splitlines()[0]
    assert "1 thread" in out.splitlines()[1] and str(native.kernels()) in out.splitlines()[1]
    assert out.splitlines()[2] == "inputs of packed weights are rounded to 8 bits, outliers to 16"
    assert re.search(r"after 8,000 .* 280\.9 MB +\d+\.\d +\d+\.\d % +\d+\.\d %\n", out)
    assert re.search(r"^memory: \d+\.\d( to \d+\.\d)? GB/s, read by 1 thread$", out, re.MULTILINE)
    found = json.loads(run(*words, "--kv-cache-dtype", "int8", "--json"))
    per_token = {"auto": 2 * 30 * 3 * 64 * 2, "int8": 2 * 30 * 3 * (64 + 4)}  # a scale to 64 codes
    assert found["step_bytes"] == weight_bytes(llama.runner) + 8002 * per_token["int8"]
    assert round(found["step_bytes"] + 8002 * (per_token["auto"] - per_token["int8"]), -5) == 280_900_000


def test_bench_cache(
    asked: dict[str, Any], llama: Llama, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "cache", "--lengths", "3,5"]) == 0
    out, err = capsys.readouterr()
    assert asked["dtype"] == "float32"
    assert table_fits(out)
    assert err == "greedy tokens: the same both ways\n"
    assert main(["bench", "cache", "--lengths", "4", "--json"]) == 0
    kept, anew = map(json.loads, capsys.readouterr().out.splitlines())
    per_token = 2 * 12 * 2 * 16 * 4
    assert (kept["cache"], anew["cache"]) == (True, False)
    assert kept["token_ids"] == anew["token_ids"]
    assert kept["num_prompt_tokens"] == 22
    assert kept["kv_bytes_computed"] == kept["kv_bytes_kept"] == 25 * per_token
    assert anew["kv_bytes_computed"] == (22 + 23 + 24 + 25) * per_token
    assert anew["kv_bytes_kept"] == 0
    assert kept["flops"] == flops(llama.config, 25, num_logits=4)  # everything once
    assert anew["flops"] == sum(flops(llama.config, num_tokens) for num_tokens in (22, 23, 24, 25))

    plain = ModuleRunner.run

    def turned_when_computed_anew(self: ModuleRunner, batch: Batch, *rest: Any) -> Any:
        logits = plain(self, batch, *rest)
        return -logits if len(batch.token_ids) > 22 else logits

    monkeypatch.setattr(ModuleRunner, "run", turned_when_computed_anew)
    assert main(["bench", "cache", "--lengths", "4"]) == 1
    assert "different at lengths [4]" in capsys.readouterr().err
