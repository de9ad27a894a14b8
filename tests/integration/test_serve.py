"""The server as the official client sees it: the same answers whole, streamed, alone and beside others."""

import asyncio
import dataclasses
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from llamarium.api import Llama
from llamarium.server import answering
from llamarium.server.field_table import GENERATION, TABLE, Hint
from llamarium.server.hints import HEADER
from serving import CHAT, HELLO, Running, serving

pytestmark = pytest.mark.torch

DIALOG: Any = HELLO["messages"]


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_a_chat_completion_is_what_the_library_answers(client: openai.OpenAI, llama: Llama) -> None:
    answer = client.chat.completions.create(model="small", messages=DIALOG, temperature=0, max_tokens=12)
    expected = llama.chat(DIALOG, temperature=0.0, max_tokens=12)
    (choice,) = answer.choices
    assert choice.message.content == expected.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == "small"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens == len(expected.prompt_ids)
    assert answer.usage.total_tokens == 12 + len(expected.prompt_ids)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.5, "seed": 7, "n": 3}])
def test_a_stream_joined_is_the_whole_answer(client: openai.OpenAI, options: dict[str, Any]) -> None:
    asked = {"model": "small", "messages": DIALOG, "max_tokens": 40, **options}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    for choice in whole.choices:
        mine = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(one.delta.content or "" for one in mine) == choice.message.content
        assert [one.finish_reason for one in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 40 * options.get("n", 1)
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_in_a_stream_comes_only_when_asked_for(running: Running) -> None:
    told = running.post(**HELLO, stream=True).text
    assert "usage" not in told
    events = told.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])


def test_the_same_tokens_alone_and_beside_others(running: Running) -> None:
    """Prompts that share beginnings, whole and streamed, with seeds, at once and one by one."""
    asked = [
        {
            "messages": [{"role": "user", "content": f"Tell me {'more ' * (i % 5)}about {i}"}],
            "max_tokens": 5 + i,
            "temperature": 1.2 if i % 2 else 0,
            "seed": i,
        }
        for i in range(24)
    ]

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:

            async def one(i: int, body: dict[str, Any]) -> str:
                if i % 3:
                    answer = await client.chat.completions.create(model="small", **body)
                    return answer.choices[0].message.content or ""
                stream = await client.chat.completions.create(model="small", **body, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one(i, body) for i, body in enumerate(asked)))

    beside = asyncio.run(together())
    alone = [running.post(**body).json()["choices"][0]["message"]["content"] for body in asked]
    assert beside == alone
    assert len(set(beside)) > 12


def test_completions_take_texts_and_ids_one_or_many(client: openai.OpenAI, llama: Llama) -> None:
    texts = ["Once upon a time", "The sky is"]
    ids = [llama.tokenizer.encode(text) for text in texts]
    expected = [llama.generate(text, temperature=0.0, max_tokens=6).text for text in texts]
    asked: dict[str, Any] = {"model": "small", "temperature": 0, "max_tokens": 6}

    def answers(prompt: Any, **more: Any) -> list[str]:
        answer = client.completions.create(prompt=prompt, **asked, **more)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    assert answers(texts[0]) == answers(ids[0]) == expected[:1]
    assert answers(texts) == answers(ids) == expected
    assert answers(texts, echo=True) == [text + made for text, made in zip(texts, expected, strict=True)]
    streamed = {0: "", 1: ""}
    for chunk in client.completions.create(prompt=texts, **asked, stream=True, echo=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert list(streamed.values()) == answers(texts, echo=True)


def test_a_completion_has_16_tokens_unless_told_otherwise(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="small", prompt="x", temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_a_chat_without_max_tokens_runs_to_the_end_of_the_context(running: Running, llama: Llama) -> None:
    answer = running.post(messages=DIALOG, temperature=0).json()
    assert answer["usage"]["total_tokens"] == llama.config.max_position_embeddings
    assert answer["choices"][0]["finish_reason"] == "length"


def test_what_does_not_fit_is_refused_with_both_numbers(client: openai.OpenAI, running: Running) -> None:
    for asked in ({"max_tokens": 500}, {"max_completion_tokens": 500}):
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model="small", messages=DIALOG, **asked)
        assert error.value.code == "context_length_exceeded"
        assert error.value.param == "messages"
        assert "500" in str(error.value) and "512" in str(error.value)
    long = running.post(messages=[{"role": "user", "content": "word " * 600}])
    assert long.status_code == 400
    assert long.json()["error"]["code"] == "context_length_exceeded"
    huge = running.post("/v1/completions", prompt="a b " * 10**6)
    assert huge.json()["error"]["code"] == "context_length_exceeded"


def test_logprobs_are_told_for_each_token(client: openai.OpenAI, llama: Llama) -> None:
    asked: dict[str, Any] = {"model": "small", "messages": DIALOG, "temperature": 0, "max_tokens": 20}
    expected = llama.chat(DIALOG, temperature=0.0, max_tokens=20, logprobs=2).completions[0].logprobs
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2).choices[0].logprobs
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert expected is not None and whole is not None and whole.content is not None
    assert [one.logprob for one in whole.content] == [one.logprob for one in expected]
    assert [bytes(one.bytes or []) for one in whole.content] == [
        llama.tokenizer.token_bytes(one.token_id) for one in expected
    ]
    assert all(len(one.top_logprobs) == 2 and one.top_logprobs[0].logprob == one.logprob for one in whole.content)
    assert streamed == whole.content


def test_completions_tell_logprobs_with_offsets(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "small", "prompt": "Hello", "temperature": 0, "max_tokens": 8, "logprobs": 1}
    whole = client.completions.create(**asked).choices[0]
    told = whole.logprobs
    assert told is not None and told.tokens and told.text_offset and told.token_logprobs and told.top_logprobs
    assert [dict(one) for one in told.top_logprobs] == [
        {token: logprob} for token, logprob in zip(told.tokens, told.token_logprobs, strict=True)
    ]
    assert told.text_offset[0] == 0
    assert len(told.tokens) == 8


def test_a_prompt_that_was_run_before_is_counted_as_cached(running: Running) -> None:
    body = HELLO | {"messages": [{"role": "user", "content": "Count me twice, " * 10}]}
    first, second = (running.post(**body).json()["usage"] for _ in range(2))
    other = running.post(**body, cache_salt="mine").json()["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] < 40
    assert second["prompt_tokens_details"]["cached_tokens"] >= first["prompt_tokens"] - 2
    assert other["prompt_tokens_details"]["cached_tokens"] == 0


def test_stops_bias_and_ignored_ends(client: openai.OpenAI, llama: Llama) -> None:
    asked: dict[str, Any] = {"model": "small", "messages": DIALOG, "temperature": 0, "max_tokens": 30}
    plain = client.chat.completions.create(**asked).choices[0].message.content or ""
    stop = plain[10:14]
    cut = client.chat.completions.create(**asked, stop=[stop]).choices[0]
    assert cut.message.content == plain[: plain.index(stop)]
    assert cut.finish_reason == "stop"
    end = llama.tokenizer.special_tokens["<|im_end|>"]
    ended = client.chat.completions.create(**asked, logit_bias={str(end): 100}).choices[0]
    assert (ended.message.content, ended.finish_reason) == ("", "stop")
    on = client.chat.completions.create(**asked, logit_bias={str(end): 100}, extra_body={"ignore_eos": True})
    assert on.usage is not None and on.usage.completion_tokens == 30


def test_ends_of_the_generation_config_are_ignored_too(llama: Llama) -> None:
    end = llama.tokenizer.special_tokens["<|im_end|>"]
    recommended = {"eos_token_id": [end], "max_new_tokens": 20}
    with serving(Llama("small", llama.loaded, llama.tokenizer, generation_config=recommended)) as running:
        asked: dict[str, Any] = {"messages": DIALOG, "temperature": 0, "logit_bias": {str(end): 100}}
        assert running.post(**asked).json()["usage"]["completion_tokens"] == 1
        assert running.post(**asked, ignore_eos=True).json()["usage"]["completion_tokens"] == 20
        stopped = running.post(**asked, ignore_eos=True, stop_token_ids=[end]).json()
        assert stopped["usage"]["completion_tokens"] == 1


def test_models_are_listed_under_every_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["small", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    for call in (
        lambda: client.models.retrieve("gpt/9"),
        lambda: client.chat.completions.create(model="gpt-9", messages=DIALOG),
    ):
        with pytest.raises(openai.NotFoundError) as error:
            call()
        assert error.value.code == "model_not_found"


def test_texts_become_ids_and_back(running: Running, llama: Llama) -> None:
    text = "Grüße <|im_end|> 🦙"
    told = running.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert told["tokens"] == llama.tokenizer.encode(text)
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert running.post("/detokenize", tokens=told["tokens"]).json() == {"prompt": text}
    dialog = running.post("/tokenize", messages=DIALOG).json()
    assert dialog["tokens"] == llama.tokenizer.chat(DIALOG)
    seen = running.post("/apply-template", messages=DIALOG).json()["prompt"]
    assert seen == llama.tokenizer.decode(dialog["tokens"], skip_special_tokens=False)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"prompt": "Hello", "add_generation_prompt": False}, "add_generation_prompt"),
        ({"prompt": "Hello", "tools": []}, "tools"),
        ({"messages": DIALOG, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": DIALOG, "prompt": "Hello"}, "prompt"),
        ({}, "prompt"),
    ],
)
def test_what_would_have_no_effect_on_the_ids_is_refused(running: Running, asked: dict[str, Any], param: str) -> None:
    told = running.post("/tokenize", **asked)
    assert (told.status_code, told.json()["error"]["param"]) == (400, param)


def test_ids_can_do_without_what_surrounds_them(running: Running) -> None:
    def ids(**asked: Any) -> list[int]:
        return running.post("/tokenize", **asked).json()["tokens"]

    whole, bare = ids(messages=DIALOG), ids(messages=DIALOG, add_generation_prompt=False)
    assert whole[: len(bare)] == bare and len(whole) > len(bare)
    assert whole == ids(messages=DIALOG, add_generation_prompt=True)
    assert ids(prompt="Hello", add_special_tokens=False) == ids(prompt="Hello")  # this tokenizer adds none


def test_parts_of_text_and_developers_are_taken(running: Running) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]
    plain = [{"role": "system", "content": "Be brief."}, *DIALOG]
    other = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    asked = {"temperature": 0, "max_tokens": 8}
    one, two = (running.post(messages=messages, **asked).json()["choices"] for messages in (plain, other))
    assert one == two


def test_metrics_count_what_was_done(llama: Llama) -> None:
    with serving(llama) as running:
        running.post(**HELLO)
        running.post(**HELLO, stream=True)
        told = httpx.get(f"{running.url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in told.splitlines() if not line.startswith("#"))
    label = '{model_name="small"}'
    assert values[f"llamarium:generation_tokens_total{label}"] == "16.0"
    assert values[f"llamarium:time_to_first_token_seconds_count{label}"] == "2.0"
    assert values[f"llamarium:inter_token_latency_seconds_count{label}"] == "14.0"
    assert values[f"llamarium:e2e_request_latency_seconds_count{label}"] == "2.0"
    assert values['llamarium:request_success_total{finished_reason="length",model_name="small"}'] == "2.0"
    assert float(values[f"llamarium:prefix_cache_hits_total{label}"]) > 0
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"):
        assert values[f"llamarium:{name}{label}"] == "0.0"


def test_what_is_not_looked_for_in_the_cache_counts_as_no_miss(llama: Llama) -> None:
    with serving(llama) as running:
        running.post("/v1/embeddings", input="Once upon a time there was a llama")
        told = httpx.get(f"{running.url}/metrics").text
        assert 'prefix_cache_queries_total{model_name="small"} 0.0' in told
        used = running.post(**HELLO).json()["usage"]["prompt_tokens"]
        told = httpx.get(f"{running.url}/metrics").text
        assert f'prefix_cache_queries_total{{model_name="small"}} {used - 1}.0' in told


def test_the_time_to_the_first_token_begins_when_the_request_comes(
    llama: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = answering.check_prompt

    def slowly(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.3)
        check(*args, **kwargs)

    monkeypatch.setattr(answering, "check_prompt", slowly)
    with serving(llama) as running:
        running.post(**HELLO)
        told = httpx.get(f"{running.url}/metrics").text
    sums = {name: float(value) for name, value in re.findall(r"llamarium:(\w+_seconds)_sum\{.*?\} (\S+)", told)}
    assert 0.3 < sums["time_to_first_token_seconds"] < sums["e2e_request_latency_seconds"]


def test_no_character_is_split(running: Running, llama: Llama) -> None:
    """Tokens of a random model are full of halves of characters."""
    asked = {"messages": DIALOG, "max_tokens": 200, "temperature": 2.0, "seed": 3}
    whole = running.post(**asked).json()["choices"][0]["message"]["content"]
    events = running.post(**asked, stream=True).text.split("\n\n")[:-2]
    pieces = [json.loads(event[6:])["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(pieces) == whole
    assert httpx.post(running.url + CHAT, json=asked).headers["content-type"] == "application/json"


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.5, "seed": 7, "n": 3}])
def test_ids_of_prompt_and_answer_are_told_as_vllm_tells_them(
    client: openai.OpenAI, llama: Llama, options: dict[str, Any]
) -> None:
    """Each of them, also where a token shows no text yet; the prompt's once."""
    asked: Any = {"model": "small", "messages": DIALOG, "max_tokens": 40, **options}
    expected = llama.chat(DIALOG, max_tokens=40, **options)
    told: Any = {"extra_body": {"return_token_ids": True}}
    whole = client.chat.completions.create(**asked, **told).to_dict()
    assert whole["prompt_token_ids"] == (prompt_ids := list(expected.prompt_ids))
    ids = [list(one.token_ids) for one in expected.completions]
    assert [choice["token_ids"] for choice in whole["choices"]] == ids
    chunks = [chunk.to_dict() for chunk in client.chat.completions.create(**asked, **told, stream=True)]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [prompt_ids] + [None] * (len(chunks) - 1)
    assert streamed_ids(chunks) == ids
    for without in (client.chat.completions.create(**asked), *client.chat.completions.create(**asked, stream=True)):
        assert "token_ids" not in without.to_json()


def test_the_id_of_a_token_without_a_text_comes_at_once(client: openai.OpenAI, llama: Llama) -> None:
    part = llama.tokenizer.encode("🙂")[0]  # the first bytes of a character
    bias = {str(part): 100}
    asked: Any = {"model": "small", "messages": DIALOG, "max_tokens": 3, "temperature": 0, "logit_bias": bias}
    stream = client.chat.completions.create(**asked, stream=True, extra_body={"return_token_ids": True})
    told = [choice for chunk in stream for choice in chunk.to_dict()["choices"]]
    assert (told[1]["token_ids"], told[1]["delta"]) == ([part], {"content": ""})


def streamed_ids(chunks: list[dict[str, Any]]) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            found.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"echo": True, "logprobs": 1}])
def test_ids_of_several_prompts_stand_with_their_answers(running: Running, llama: Llama, more: dict[str, Any]) -> None:
    prompts = ["Once upon a time", "The sky"]
    body = {"prompt": prompts, "max_tokens": 6, "temperature": 1.0, "seed": 3, "n": 2, "return_token_ids": True, **more}
    expected = [llama.generate(prompt, max_tokens=6, temperature=1.0, seed=3, n=2) for prompt in prompts]
    ids = [list(one.token_ids) for generation in expected for one in generation.completions]
    of_prompts = [given for generation in expected for given in (list(generation.prompt_ids), None)]
    whole = running.post("/v1/completions", **body).json()["choices"]
    assert [choice["token_ids"] for choice in whole] == ids
    assert [choice.get("prompt_token_ids") for choice in whole] == of_prompts
    events = running.post("/v1/completions", **body, stream=True).text.splitlines()
    chunks = [json.loads(line[6:]) for line in events if line.startswith("data: {")]
    assert streamed_ids(chunks) == ids
    first = {chunk["choices"][0]["index"]: chunk["choices"][0] for chunk in reversed(chunks)}
    assert [first[index].get("prompt_token_ids") for index in range(4)] == of_prompts


def test_no_end_comes_before_min_tokens(client: openai.OpenAI, running: Running, llama: Llama) -> None:
    end = llama.tokenizer.special_tokens["<|im_end|>"]
    asked: dict[str, Any] = {"model": "small", "messages": DIALOG, "temperature": 0, "max_tokens": 30}
    bias = {"logit_bias": {str(end): 100}, "extra_body": {"min_tokens": 7, "return_token_ids": True}}
    whole = client.chat.completions.create(**asked, **bias).choices[0]
    ids = whole.token_ids  # pyright: ignore
    assert (len(ids), ids.index(end), whole.finish_reason) == (8, 7, "stop")
    free = client.chat.completions.create(**asked, extra_body={"return_token_ids": True}).choices[0]
    assert ids[:7] == free.token_ids[:7]  # pyright: ignore
    text = free.message.content or ""
    word = llama.tokenizer.decode(free.token_ids[1:3])  # pyright: ignore
    stopped = client.chat.completions.create(**asked, stop=word, extra_body={"min_tokens": 9}).choices[0]
    assert client.chat.completions.create(**asked, stop=word).choices[0].message.content == text[: text.index(word)]
    assert (stopped.message.content or "").startswith(llama.tokenizer.decode(free.token_ids[:9]))  # pyright: ignore
    for more in ({"min_tokens": 31}, {"min_tokens": 2, "response_format": {"type": "json_object"}}, {"min_tokens": -1}):
        assert running.post(**asked | more).json()["error"]["param"] == "min_tokens"


def test_the_last_message_is_continued(running: Running, llama: Llama) -> None:
    text = llama.chat(DIALOG, temperature=0.0, max_tokens=12).text
    ids = [*llama.tokenizer.chat(DIALOG), *llama.tokenizer.encode(text[:9], add_special_tokens=False)]
    begun = {"messages": [*DIALOG, {"role": "assistant", "content": text[:9]}], "temperature": 0, "max_tokens": 6}
    answer = running.post(**begun, continue_final_message=True, return_token_ids=True).json()
    assert answer["choices"][0]["message"]["content"] == llama.generate(ids, temperature=0.0, max_tokens=6).text
    assert answer["prompt_token_ids"] == ids
    plain = running.post(**begun, add_generation_prompt=False, return_token_ids=True).json()
    assert plain["prompt_token_ids"] == llama.tokenizer.chat(begun["messages"], add_generation_prompt=False)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"add_generation_prompt": True}, "continue_final_message"),
        ({"messages": DIALOG}, "continue_final_message"),
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, "messages"),
        ({"messages": [*DIALOG, {"role": "assistant", "tool_calls": [{
            "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}]}, "continue_final_message"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "messages[1]"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 2, "stream": True}, "prompt_logprobs"),
    ],
)  # fmt: skip
def test_what_cannot_be_continued_is_refused_by_name(running: Running, more: dict[str, Any], param: str) -> None:
    begun = {"messages": [*DIALOG, {"role": "assistant", "content": "Hi"}], "continue_final_message": True}
    answer = running.post(**HELLO | begun | more)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_log_probabilities_of_the_prompt_are_told_as_vllm_tells_them(running: Running, llama: Llama) -> None:
    """Those of `llama.generate`, by id; the second of two prompts has its own."""
    dialog = llama.tokenizer.chat(DIALOG)
    chat = running.post(**HELLO, prompt_logprobs=2).json()
    texts = ["Hello there", "Another one"]
    body = {"prompt": texts, "max_tokens": 2, "prompt_logprobs": 2, "temperature": 0}
    choices = running.post("/v1/completions", **body).json()["choices"]
    told = [chat["prompt_logprobs"], *(choice["prompt_logprobs"] for choice in choices)]
    for prompt, found in zip([dialog, *map(llama.tokenizer.encode, texts)], told, strict=True):
        expected = llama.generate(prompt, max_tokens=1, temperature=0.0, prompt_logprobs=2).prompt_logprobs
        assert expected is not None and found[0] is None and len(found) == len(prompt)
        for token_id, entry, one in zip(prompt[1:], found[1:], [*expected][1:], strict=True):
            assert one is not None
            ranks = {str(other.token_id): rank for rank, other in enumerate(one.top, 1)}
            assert {name: known["rank"] for name, known in entry.items()} == {str(token_id): None} | ranks
            assert entry[str(token_id)]["logprob"] == one.logprob
            assert entry[str(token_id)]["decoded_token"] == llama.tokenizer.decode(
                [token_id], skip_special_tokens=False
            )
    assert "prompt_logprobs" not in running.post(**HELLO).json()
    both = running.post("/v1/completions", **body, echo=True).json()["error"]
    assert both["param"] == "prompt_logprobs"
    many = running.post("/v1/completions", **body | {"prompt": ["word " * 300] * 60, "prompt_logprobs": 20}).json()
    assert "log-probabilities of prompts are requested" in many["error"]["message"]


# --- hints ------------------------------------------------------------------------------------------------------------

CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
BREAKPOINT = {"prompt_cache_breakpoint": {"mode": "explicit"}}
OPENAI_HINTS: dict[str, Any] = {
    "metadata": {"run": "7"}, "prompt_cache_key": "k", "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h", "safety_identifier": "s", "service_tier": "priority", "store": False, "user": "u",
}  # fmt: skip
REASONED: dict[str, Any] = {
    "annotations": [{}], "parsed": {}, "reasoning": "r", "reasoning_content": "r", "reasoning_details": [], "id": "m",
    "context": [1],
}  # fmt: skip
OTHERS: dict[str, Any] = {name: 1 for name, known in GENERATION.items() if isinstance(known, Hint)}
"""Names of other servers."""
PLOT: dict[str, Any] = {
    "type": "function",
    "function": {"name": "plot", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "c", "type": "function", "function": {"name": "plot", "arguments": "{}"}}
ITEM: dict[str, Any] = {"id": "i", "status": "completed"}
RESPONSES_TOOL = {"type": "function", **PLOT["function"]}
CLAUDE_TOOL = {"name": "plot", "input_schema": {"type": "object", "properties": {}}}
THOUGHT = [{"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "redacted_thinking", "data": "d"}]
HINTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    CHAT: (
        {
            **OPENAI_HINTS, **OTHERS,
            "max_tokens": 8, "temperature": 0, "prediction": {"type": "content", "content": "x"},
            "reasoning": {"effort": "high"}, "reasoning_effort": "low", "thinking": {"type": "adaptive"},
            "verbosity": "low", "stream": True,
            "stream_options": {"include_obfuscation": True, "continuous_usage_stats": True},
            "tools": [PLOT | CACHED],
            "messages": [
                {"role": "user", "name": "me", "content": [{"type": "text", "text": "Hello!", **CACHED, **BREAKPOINT}]},
                {
                    "role": "assistant", "content": "Look:", **REASONED, "thinking_blocks": THOUGHT, **CACHED,
                    "provider_specific_fields": {"x": [1]},
                    "tool_calls": [
                        CALL | {"index": 0, "provider_specific_fields": {"y": 1}}
                        | {"function": CALL["function"] | {"parsed_arguments": {}}}
                    ],
                },
                {"role": "tool", "content": "done", "tool_call_id": "c"},
            ],
        },
        {
            "max_tokens": 8, "temperature": 0, "stream": True, "tools": [PLOT],
            "messages": [
                {"role": "user", "content": "Hello!"},
                {"role": "assistant", "content": "Look:", "tool_calls": [CALL]},
                {"role": "tool", "content": "done", "tool_call_id": "c"},
            ],
        },
    ),
    "/v1/completions": ({"prompt": "Hello", "temperature": 0, "user": "u"}, {"prompt": "Hello", "temperature": 0}),
    "/v1/embeddings": ({"input": "Hello", "user": "u"}, {"input": "Hello"}),
    "/v1/responses": (
        {
            **OPENAI_HINTS, "max_output_tokens": 8, "temperature": 0, "client_metadata": {"x": "y"},
            "context_management": [{"type": "compaction"}], "truncation": "disabled", "max_tool_calls": 3,
            "include": ["reasoning.encrypted_content", "message.output_text.logprobs"], "text": {"verbosity": "high"},
            "tools": [
                RESPONSES_TOOL | dict.fromkeys(("allowed_callers", "async", "defer_loading", "output_schema"), 1)
            ],
            "reasoning": {
                "effort": "low", "context": "auto", "generate_summary": "auto", "mode": "pro", "summary": "auto",
            },
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hello!"} | BREAKPOINT], "phase": "x"},
                {"type": "reasoning", "summary": [], "content": [], "encrypted_content": "e", **ITEM},
                {
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "Hi", "annotations": [{}], "logprobs": [{}]}],
                },
                {"role": "user", "content": "Again!"},
            ],
        },
        {
            "max_output_tokens": 8, "temperature": 0, "include": ["message.output_text.logprobs"],
            "tools": [RESPONSES_TOOL],
            "input": [
                {"role": "user", "content": "Hello!"},
                {"role": "assistant", "content": "Hi"},
                {"role": "user", "content": "Again!"},
            ],
        },
    ),
    "/v1/messages": (
        {
            **CACHED, "max_tokens": 8, "temperature": 0, "context_management": {"edits": []}, "speed": "fast",
            "user_profile_id": "p", "workspace_id": "w",
            "thinking": {"type": "enabled", "budget_tokens": 2048, "display": "omitted"},
            "metadata": {"user_id": "u"}, "service_tier": "auto", "output_config": {"effort": "max"},
            "container": "c", "mcp_servers": [],
            "tools": [
                CLAUDE_TOOL | CACHED
                | dict.fromkeys(("allowed_callers", "defer_loading", "eager_input_streaming", "input_examples"), 1)
            ],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hello!", "citations": [{}]} | CACHED]},
                {"role": "assistant", "content": THOUGHT},
                {"role": "user", "content": "Again!"},
            ],
        },
        {
            "max_tokens": 8, "temperature": 0, "tools": [CLAUDE_TOOL],
            "messages": [
                {"role": "user", "content": "Hello!"},
                {"role": "assistant", "content": ""},
                {"role": "user", "content": "Again!"},
            ],
        },
    ),
}  # fmt: skip
"""A request with every hint, and the same without any."""
BETAS = {"anthropic-beta": "interleaved-thinking-2025-05-14", "openai-beta": "responses=v1"}


def without_names(text: str) -> str:
    """Leave out what differs between two equal answers: ids, times, what was cached, and what is repeated of hints."""
    echoed = r'"(?:metadata|prompt_cache_key|safety_identifier|user)":(?:null|\{[^}]*\}|"[^"]*")'
    return re.sub(
        rf'{echoed}|"(?:chatcmpl|cmpl|resp|msg|req)[-_]\w*"|"(?:\w*cached?_\w*|input_tokens)":\d+|"\w+(?:_at|ed)":\d+',
        "",
        text,
    )


@pytest.fixture
def hinted(running: Running) -> dict[str, httpx.Response]:
    """The answers to the requests with hints."""
    sent = {path: httpx.post(running.url + path, json=one, headers=BETAS) for path, (one, _) in HINTED.items()}
    assert [answer.status_code for answer in sent.values()] == [200] * 5, [one.text for one in sent.values()]
    return sent


def test_hints_are_taken_and_change_nothing_and_the_answer_names_them(
    running: Running, hinted: dict[str, httpx.Response], capfd: pytest.CaptureFixture[str]
) -> None:
    for path, answer in hinted.items():
        plain = running.post(path, **HINTED[path][1])
        assert plain.status_code == 200 and HEADER not in plain.headers, plain.text
        assert without_names(answer.text) == without_names(plain.text)
    named = {path: answer.headers[HEADER].split(",") for path, answer in hinted.items()}
    assert {"messages[].name", "messages[].content[].cache_control", "store", "openai-beta"} <= {*named[CHAT]}
    told = {name.rpartition(".")[2] for names in named.values() for name in names}
    hints = {name for row in TABLE.values() for name, known in row.items() if isinstance(known, Hint)}
    assert told == hints - {"return"}  # a chat template gets it
    one = running.post(**HELLO, verbosity="low", user="u", service_tier="auto", n=1)
    assert one.headers[HEADER] == "user,verbosity,service_tier"
    running.wait(lambda: " no_effect=user,verbosity,service_tier" in capfd.readouterr().err)  # soon after the answer


def test_strict_fields_refuses_each_hint_by_its_name(
    running: Running, hinted: dict[str, httpx.Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = dataclasses.replace(running.service.settings, strict_fields=True)
    monkeypatch.setattr(running.service, "settings", strict)
    for path, (one, plain) in HINTED.items():
        assert running.post(path, **plain).status_code == 200
        for name in hinted[path].headers[HEADER].split(","):
            if name in one:
                error = running.post(path, **plain | {name: one[name]}).json()["error"]
                param = error["details"]["param"] if path == "/v1/messages" else error["param"]
                assert param == name and f"{name} has no effect here" in error["message"]
    named = [HELLO["messages"][0], HELLO["messages"][0] | {"name": "me"}]
    assert running.post(**HELLO | {"messages": named}).json()["error"]["param"] == "messages[1].name"
