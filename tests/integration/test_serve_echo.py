"""Prompts with their log-probabilities over HTTP, as OpenAI's completions tell them: `echo` with `logprobs`."""

import threading
from itertools import pairwise
from typing import Any

import openai
import pytest

from llamarium.api import Llama
from llamarium.server.openai import logprobs
from serving import Running

pytestmark = pytest.mark.torch

TEXT = "Grüße, the sky is 🦙 blue"
NAMES = {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
PATH = "/v1/completions"


def asked(**more: Any) -> dict[str, Any]:
    return {"prompt": TEXT, "temperature": 0, "max_tokens": 0, "echo": True, "logprobs": 2, **more}


def test_the_scores_are_those_of_the_library_to_the_bit(running: Running, llama: Llama) -> None:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(model="small", **asked())
    (choice,), expected = answer.choices, llama.score(TEXT)
    told, ids = choice.logprobs, llama.tokenizer.encode(TEXT)
    assert told is not None and told.token_logprobs and told.top_logprobs and told.tokens and told.text_offset
    assert (choice.text, choice.finish_reason) == (TEXT, "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 0)
    assert told.token_logprobs == list(expected.logprobs) and told.token_logprobs[0] is None
    assert told.tokens == [llama.tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids]
    assert told.top_logprobs[0] is None
    for token, top, logprob, score in zip(
        told.tokens[1:], told.top_logprobs[1:], told.token_logprobs[1:], expected.tokens[1:], strict=True
    ):
        assert top is not None and logprob is not None
        assert 1 <= len(top) <= 3 and top[token] >= logprob  # several tokens may have one text: a part of a character
        assert (max(top.values()) == logprob) == (score.rank == 1)
    pieces = [TEXT[begin:end] for begin, end in pairwise([*told.text_offset, len(TEXT)])]
    assert "".join(pieces) == TEXT
    assert all(token == piece for token, piece in zip(told.tokens, pieces, strict=True) if "\ufffd" not in token)


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
@pytest.mark.parametrize("more", [{}, {"n": 3, "temperature": 1.0, "seed": 4}, {"prompt": ["one", [5, 6, 2, 7], TEXT]}])
def test_a_stream_joined_is_the_whole_answer(running: Running, max_tokens: int, more: dict[str, Any]) -> None:
    body = asked(max_tokens=max_tokens, ignore_eos=True, **more)
    if isinstance(body["prompt"], list):
        body["prompt"] = [body["prompt"][0], body["prompt"][2]]
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        extra = {"ignore_eos": body.pop("ignore_eos")}
        whole = client.completions.create(model="small", **body, extra_body=extra)
        chunks = list(client.completions.create(model="small", **body, extra_body=extra, stream=True))
    for choice in whole.choices:
        mine = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert "".join(one.text for one in mine) == choice.text
        assert choice.logprobs is not None
        for name in NAMES:
            parts = [getattr(one.logprobs, name) for one in mine if one.logprobs is not None]
            assert [entry for part in parts for entry in part] == getattr(choice.logprobs, name)
        assert [one.finish_reason for one in mine] == [None] * (len(mine) - 1) + ["length"]
        assert choice.logprobs.tokens is not None and choice.logprobs.text_offset is not None
        prompt = body["prompt"] if isinstance(body["prompt"], str) else body["prompt"][choice.index]
        assert sum(offset >= len(prompt) for offset in choice.logprobs.text_offset) == max_tokens
        assert choice.text.startswith(prompt)


def test_ids_are_told_with_their_control_tokens_and_texts_without_those_that_are_added(
    running: Running, llama: Llama
) -> None:
    end = llama.tokenizer.special_tokens["<|im_end|>"]
    ids = [*llama.tokenizer.encode("Hello"), end, *llama.tokenizer.encode(" you")]
    (choice,) = running.post(PATH, **asked(prompt=ids, logprobs=0)).json()["choices"]
    assert choice["text"] == "Hello<|im_end|> you"
    told = choice["logprobs"]
    places = zip(told["text_offset"], told["tokens"], strict=True)
    assert [choice["text"][offset:][: len(token)] for offset, token in places] == told["tokens"]
    assert told["top_logprobs"][1:] == [
        {token: logprob} for token, logprob in zip(told["tokens"][1:], told["token_logprobs"][1:], strict=True)
    ]


def test_echo_without_logprobs_and_without_tokens_is_the_prompt(running: Running) -> None:
    answer = running.post(PATH, **asked(logprobs=None)).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == (TEXT, None, "length")
    assert answer["usage"]["completion_tokens"] == 0


def test_scores_are_computed_whatever_is_cached_and_others_do_not_feel_it(running: Running) -> None:
    plain = {"prompt": TEXT * 4, "temperature": 0, "max_tokens": 8}
    before = running.post(PATH, **plain).json()
    first, second = (running.post(PATH, **asked(prompt=TEXT * 4)).json() for _ in range(2))
    assert first["choices"] == second["choices"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    after = running.post(PATH, **plain).json()
    assert after["choices"] == before["choices"]
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_prompt_of_the_whole_context_is_scored(running: Running, llama: Llama) -> None:
    ids = [7] * llama.config.max_position_embeddings
    (choice,) = running.post(PATH, **asked(prompt=ids)).json()["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(ids)
    for more in ({"max_tokens": 1}, {"prompt": [*ids, 7]}):
        refused = running.post(PATH, **asked(prompt=ids) | more)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("more", "param", "message"),
    [
        ({"echo": False}, "max_tokens", "max_tokens is 0; expected at least 1, or echo set to true"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"max_tokens": -2}, "max_tokens", "max_tokens is -2"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(
    running: Running, more: dict[str, Any], param: str, message: str
) -> None:
    error = running.post(PATH, **asked(**more)).json()["error"]
    assert error["param"] == param and message in error["message"]


def test_how_much_is_told_is_bounded(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "MAX_OF_PROMPTS", 100)
    assert running.post(PATH, **asked(prompt=[7] * 33)).status_code == 200
    for more in ({"prompt": [7] * 34}, {"prompt": [[7] * 17] * 2}, {"prompt": [7] * 17, "n": 2, "temperature": 1}):
        refused = running.post(PATH, **asked(**more))
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "logprobs"
        assert "102 log-probabilities of prompts are requested, and the maximum is 100" in refused.text
    running.wait(running.is_idle)


def test_who_leaves_while_a_prompt_is_scored_frees_everything(
    running: Running, llama: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begun, run = threading.Event(), threading.Event(), llama.runner.run

    def wait(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        gate.wait(10)
        return run(*args, **kwargs)

    monkeypatch.setattr(llama.runner, "run", wait)
    with running.begin(PATH, **asked(prompt=[[7 + i] * 500 for i in range(8)])):
        assert begun.wait(10)
    gate.set()
    running.wait(running.is_idle)
