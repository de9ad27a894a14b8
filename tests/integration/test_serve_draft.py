"""A draft model from Python, in the shell and over HTTP: the same answers, whatever it says."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

import llamarium
from llamarium.api import Llama
from llamarium.cli.main import main
from llamarium.engine.proposers.draft import DraftModel
from llamarium.engine.proposers.lookup import PromptLookup
from llamarium.errors import InputError, OptionError
from llamarium.generation.options import drafting
from llamarium.tokenizer.compare import check_same_vocabulary
from serving import HELLO, serving, small_llama

pytestmark = pytest.mark.torch

PROMPTS = ["Once upon a time", "The sky over the sea is", "Once upon a hill"]


class Eager(DraftModel):
    """A draft that costs next to nothing, so that much is guessed."""

    def record_pass(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        super().record_pass(num_rows, num_drafted, 1 + num_drafted / 1000)

    def record_draft(self, num_rows: int, length: int, seconds: float) -> None:
        super().record_draft(num_rows, length, length / 1000)


@pytest.fixture(scope="module")
def other(smollm2_path: Path) -> Llama:
    """A model that agrees with the other by chance alone."""
    found = small_llama(smollm2_path)
    with torch.no_grad():
        for weight in found.model.parameters():
            weight.mul_(1.5).add_(0.01)
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("which", ["llama", "other"])
def test_answers_are_the_same(request: pytest.FixtureRequest, llama: Llama, which: str, temperature: float) -> None:
    draft = Eager(request.getfixturevalue(which).runner)
    options: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_tokens": 30, "logprobs": 2}
    options["n"] = 2 if temperature else 1
    assert llama.generate(PROMPTS, draft_model=draft, **options) == llama.generate(PROMPTS, **options)
    assert draft.drafted > 20
    if which == "llama" and not temperature:
        assert draft.accepted > draft.drafted / 2


def test_a_grammar_holds_and_says_the_same(llama: Llama) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a"]}
    options: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 60, "json_schema": schema}
    draft = Eager(llama.runner)
    assert llama.generate(PROMPTS[0], draft_model=draft, **options) == llama.generate(PROMPTS[0], **options)
    assert draft.drafted > 0


def test_a_dialog_goes_on_with_it(llama: Llama) -> None:
    def said(**more: Any) -> list[str]:
        conversation = llama.conversation()
        turns = ("Hello!", "And then?", "Why?")
        return [
            "".join(piece.text for piece in conversation.say(turn, temperature=0, max_tokens=20, **more))
            for turn in turns
        ]

    draft = Eager(llama.runner)
    assert said(draft_model=draft) == said() and draft.accepted > 10


def test_a_model_of_another_vocabulary_is_refused(llama: Llama, smollm2_path: Path) -> None:
    tiny = llamarium.load("shakespeare-char")
    with pytest.raises(InputError, match="different vocabularies and one cannot guess for the other: 49,152 and"):
        llama.generate("a", draft_model=tiny, max_tokens=1)
    with pytest.raises(InputError, match="cannot guess for the other"):
        llama.engine(draft_model=tiny)

    class Renamed:
        """The same number of tokens, one of which is another."""

        def __init__(self, tokenizer: Any) -> None:
            self._tokenizer = tokenizer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tokenizer, name)

        def token_bytes(self, token_id: int) -> bytes:
            return b"!" if token_id == 300 else self._tokenizer.token_bytes(token_id)

    same = small_llama(smollm2_path)
    check_same_vocabulary(llama, same, "why")
    same._tokenizer = Renamed(same.tokenizer)  # type: ignore[assignment]
    with pytest.raises(InputError, match="token 300 is"):
        drafting(llama, same)


def test_options_are_checked(llama: Llama) -> None:
    with pytest.raises(OptionError, match="both guess the next tokens"):
        llama.generate("a", draft_model=llama, prompt_lookup=True)
    for wrong in ("smollm2-135m", 3):
        with pytest.raises(OptionError, match="expected a model as"):
            llama.generate("a", draft_model=wrong)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="expected a model as"):
            llama.engine(draft_model=wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="draft_model needs the KV cache"):
        llama.generate("a", draft_model=llama, use_cache=False)
    modules = Llama("modules", llama.model, llama.tokenizer)
    with pytest.raises(OptionError, match="draft_model could change the tokens here"):
        modules.engine(draft_model=llama)
    with pytest.raises(OptionError, match="draft_model could change the tokens here"):
        modules.generate("a", draft_model=llama, temperature=1.0)


def test_its_cache_is_part_of_the_memory(llama: Llama) -> None:
    with llama.engine(kv_memory=2**22) as alone, llama.engine(kv_memory=2**22, draft_model=llama) as beside:
        assert beside.snapshot.num_blocks == alone.snapshot.num_blocks // 2


@pytest.fixture(scope="module")
def drafts(llama: Llama, other: Llama) -> Iterator[dict[str, Eager]]:
    yield {"good": Eager(llama.runner), "bad": Eager(other.runner)}


@pytest.mark.parametrize("which", ["good", "bad"])
def test_a_server_answers_the_same_and_counts(llama: Llama, drafts: dict[str, Eager], which: str) -> None:
    bodies = [
        {"prompt": prompt, "seed": seed, "temperature": temperature, "max_tokens": 20, "logprobs": 1}
        for seed, (prompt, temperature) in enumerate((p, t) for p in PROMPTS for t in (0, 0.9))
    ]

    async def together(url: str) -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            asked = [client.completions.create(model="small", **body) for body in bodies]
            return [answer.choices[0] for answer in await asyncio.gather(*asked)]

    def left(url: str) -> None:
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=bodies[0] | {"stream": True, "max_tokens": 500}
        ) as answer:
            next(answer.iter_lines())

    with serving(llama) as plain, serving(llama, engine={"draft_model": drafts[which]}) as running:
        left(running.url)
        assert asyncio.run(together(running.url)) == asyncio.run(together(plain.url))
        told = httpx.get(f"{running.url}/metrics").text
        engine: Any = running.service.loaded[1]._thread.engine  # type: ignore[index]
        running.wait(lambda: engine.is_idle)
        assert engine._scheduler.proposer.num_used_blocks == engine.snapshot().used_blocks == 0
    values = dict(line.rsplit(" ", 1) for line in told.splitlines() if not line.startswith("#"))
    drafted, accepted = (
        float(values[f'llamarium:spec_decode_num_{name}_tokens_total{{model_name="small"}}'])
        for name in ("draft", "accepted")
    )
    assert drafted > 20 and (accepted > 20) == (which == "good")


class EagerLookup(PromptLookup):
    """Prompt lookup to which a wider pass costs next to nothing."""

    def record_pass(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        super().record_pass(num_rows, num_drafted, 1 + num_drafted / 1000)


def test_a_server_looks_up_what_was_said_before(llama: Llama) -> None:
    body: dict[str, Any] = {"prompt": "one two three, " * 8, "n": 2, "temperature": 0.3, "seed": 1, "max_tokens": 60}
    lookup = EagerLookup()
    with serving(llama) as plain, serving(llama, engine={"prompt_lookup": lookup}) as running:
        said, expected = (each.post("/v1/completions", **body).json()["choices"] for each in (running, plain))
    assert said == expected
    assert lookup.drafted > 0


def test_texts_are_kept_for_their_key_alone(llama: Llama) -> None:
    """A key's earlier text is drafted from; another key's, a salted and a private one are not, and answers stay."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "one two"}], "temperature": 0, "max_tokens": 60}

    def drafted(running: Any, lookup: PromptLookup, key: str, **more: Any) -> int:
        before = lookup.drafted
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=body | more, headers=headers, timeout=60)
        texts.add(answer.raise_for_status().json()["choices"][0]["message"]["content"])
        return lookup.drafted - before

    texts = set[str]()
    for more in ({"store": False}, {"cache_salt": "x"}):
        lookup = EagerLookup()
        with serving(llama, engine={"prompt_lookup": lookup}, api_keys=("first", "second")) as running:
            alone = [drafted(running, lookup, "first", **more) for _ in range(3)]
            assert lookup.num_pool_tokens == 0
            shared = [drafted(running, lookup, "first") for _ in range(3)]
            kept = lookup.num_pool_tokens
            assert kept > 60 and shared[2] > 40 > max(alone)
            assert drafted(running, lookup, "second", **more) < 40 and lookup.num_pool_tokens == kept
            assert drafted(running, lookup, "second") < 40 and lookup.num_pool_tokens > kept
            headers = {"authorization": "Bearer first"}
            told = httpx.get(f"{running.url}/metrics", headers=headers).text
        assert f'llamarium:spec_decode_ngram_pool_tokens{{model_name="small"}} {lookup.num_pool_tokens}' in told
    assert len(texts) == 1


def test_not_to_store_is_a_hint_only_where_no_text_is_kept(llama: Llama) -> None:
    for lookup, hints in ((PromptLookup(), None), (PromptLookup(pool_bytes=0), "store"), (False, "store")):
        with serving(llama, engine={"prompt_lookup": lookup}) as running:
            answer = running.post("/v1/chat/completions", **HELLO, store=False)
            assert answer.headers.get("x-llamarium-no-effect") == hints


def test_an_engine_has_one_way_to_guess(llama: Llama) -> None:
    with pytest.raises(OptionError, match="both guess the next tokens"):
        llama.engine(prompt_lookup=True, draft_model=llama)
    modules = Llama("modules", llama.model, llama.tokenizer)
    with pytest.raises(OptionError, match="prompt_lookup could change the tokens here"):
        modules.engine(prompt_lookup=True)


def test_the_commands_take_one(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["Once upon a time", "-n", "12", "--temperature", "0", "--json", "--threads", "1"]
    for command in ("generate", "chat"):
        found = []
        for more in ([], ["--draft-model", "smollm2-135m"]):
            assert main([command, *words, "-m", "smollm2-135m", *more]) == 0
            found.append(json.loads(capsys.readouterr().out))
        counts = found[1].pop("draft_model")
        assert found[0]["token_ids"] == found[1]["token_ids"] and counts["passes"] > 0
    assert main(["generate", *words, "-m", "smollm2-135m", "--draft-model", "shakespeare-char"]) == 1
    told = capsys.readouterr().err
    assert "smollm2-135m and shakespeare-char have different vocabularies" in told and told.count("\n") == 1
    assert main(["generate", *words, "--draft-model", "smollm2-135m", "--prompt-lookup"]) == 2


def test_chat_drafts_if_it_is_told_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "corpus.txt").write_text("The answer is forty-two. " * 20)
    words = ["Say it again: one two three four five.", "-n", "12", "--temperature", "0", "--json", "--threads", "1"]
    found = []
    for more in (["--prompt-lookup"], [], ["--ngram-pool", "0", "--ngram-corpus", str(tmp_path / "corpus.txt")]):
        assert main(["chat", *words, "-m", "smollm2-135m", *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert ["prompt_lookup" in one for one in found] == [True, False, True]
    assert found[0]["token_ids"] == found[1]["token_ids"] == found[2]["token_ids"]
    assert main(["chat", *words, "-m", "smollm2-135m", "--dtype", "float32", "--deterministic"]) == 0


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_options_of_n_grams_are_checked_before_a_model_is_loaded(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [command, *([] if command == "serve" else ["a"]), "-m", "smollm2-135m"]
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for more in (
        ["--draft-model", "smollm2-135m", "--ngram-pool", "1MiB"],
        ["--no-prompt-lookup", "--ngram-corpus", "x"],
        ["--ngram-pool", "-1"],
        ["--prompt-lookup", "--draft-model", "smollm2-135m"],
    ):
        with suppress(SystemExit):
            assert main([*words, *more]) == 2
        assert "error" in capsys.readouterr().err
    for name in ("nowhere", "binary"):
        assert main([*words, "--ngram-corpus", str(tmp_path / name)]) == 1
        assert f"{name}: " in capsys.readouterr().err


def test_a_server_with_a_draft_of_another_vocabulary_does_not_begin(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--port", "0", "--threads", "1", "-m", "shakespeare-char", "--draft-model", "smollm2-135m"]
    assert main(["serve", *words]) == 1
    assert "one cannot guess for the other" in capsys.readouterr().err
