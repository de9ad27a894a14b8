"""The page's conversation in a browser: what came stays, versions stay, and each token of an answer is chosen again."""

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

import llamarium
from llamarium.api import Llama
from llamarium.page import assets
from llamarium.page.extension import page as page_extension
from page_browser import HOSTILE, KEY, Intercepted, as_shown, check_fits_and_is_open, link, settled, shown
from page_bundle import built_page
from serving import CHAT, Running, serving

pytest_plugins = ["page_browser"]
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

DIALOG = [{"role": "user", "content": "Why is the sky blue?"}]
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}
"""What stands in the page's fields at first, with the seed 0."""


@pytest.fixture(scope="module")
def inspects_requests() -> bool:
    return True


def opened(page: Page, served: Running, **view: Any) -> None:
    page.goto(link(served, **{"stage": "chat", **view}))
    settled(page)


def say(page: Page, text: str, *, most: int = 8, waits: bool = True) -> None:
    page.get_by_text("What is asked with every turn").click()
    page.get_by_label("Most tokens of an answer").fill(str(most))
    page.get_by_text("What is asked with every turn").click()
    page.get_by_label("Your message").fill(text)
    page.get_by_label("Your message").press("Enter")
    if waits:
        ended(page)


def ended(page: Page) -> None:
    expect(page.get_by_role("button", name="Stop")).to_have_count(0)


def turns(page: Page) -> Locator:
    return page.locator("ol.turns > li")


def answer_of(page: Page) -> str:
    return turns(page).last.locator(".said").inner_text()


def expected_text(llama: Llama, messages: list[dict[str, Any]], *, seed: int = 0, most: int = 8) -> str:
    return llama.chat(messages, seed=seed, max_tokens=most, **SAMPLED).text


def seen(text: str) -> str:
    """A text as a browser gives it back: without blanks at its ends."""
    return text.strip()


def test_both_views_fit_and_are_open_to_everybody(page: Page, served: Running) -> None:
    opened(page, served)
    say(page, "Hello")
    page.get_by_text("What is asked with every turn").click()
    page.get_by_role("button", name="Tokens", exact=True).click()
    page.get_by_role("toolbar").get_by_role("button").nth(3).click()
    expect(page.locator("[data-same]")).to_be_visible()
    check_fits_and_is_open(page)
    opened(page, served, stage="requests")
    expect(page.get_by_text("No request is running now")).to_be_visible()
    check_fits_and_is_open(page)


def test_an_answer_is_the_librarys_and_each_of_its_tokens_is_chosen_again(
    page: Page, served: Running, llama: Llama
) -> None:
    opened(page, served)
    say(page, DIALOG[0]["content"])
    expected = llama.chat(DIALOG, seed=0, max_tokens=8, **SAMPLED)
    prompt, answer = list(expected.prompt_ids), list(expected.completions[0].token_ids)
    assert seen(answer_of(page)) == seen(expected.text)
    page.get_by_role("button", name="Tokens", exact=True).click()
    buttons = page.get_by_role("toolbar").get_by_role("button")
    expect(buttons).to_have_count(8)
    for place in (0, 5, 7):
        buttons.nth(place).click()
        expect(page.get_by_role("heading", name=f"Token {place} of the answer")).to_be_visible()
        expect(page.locator("[data-same]")).to_have_attribute("data-same", "true")
        expect(page.locator("[data-chosen]")).to_have_attribute("data-chosen", str(answer[place]))
        steps = llama.inspect.sampler_steps(prompt, answer_ids=answer[:place], seed=0, k=5, **SAMPLED)
        for step in steps.steps:
            if step.name not in ("logit_bias", "grammar"):
                assert shown(page, f"left-{step.name}") == step.num_left
                for one in step.candidates[:5]:
                    assert shown(page, f"p-{step.name}-{one.token_id}") == as_shown(one.probability, 3)
        chosen = next(one for one in steps.draw or () if one.token_id == answer[place])
        assert shown(page, f"total-{chosen.token_id}") == as_shown(chosen.total, 3)
        alone = steps.steps[0].candidates
        assert shown(page, "alone") == next(as_shown(c.probability, 3) for c in alone if c.token_id == answer[place])
    page.get_by_role("link", name="The pass with it").click()
    settled(page)
    ids = page.locator(".strip .id").all_inner_texts()
    assert [int(one) for one in ids] == prompt + answer
    page.reload()
    settled(page)
    layer, head = (re.search(rf"{name}=(\d+)", page.url)[1] for name in ("layer", "head"))  # the most telling one
    trace = llama.trace([*prompt, *answer])[f"layers.{layer}.pattern"][int(head), -1]
    top = trace.argmax().item()
    assert shown(page, f"share-{top}") == as_shown(trace[top].item(), 4)
    expect(page.get_by_text(f"{len(ids)} tokens by their ids")).to_be_visible()
    page.go_back()
    assert seen(answer_of(page)) == seen(expected.text)


def test_edited_and_answered_anew_the_earlier_versions_stay(page: Page, served: Running, llama: Llama) -> None:
    opened(page, served)
    say(page, "One")
    say(page, "Two")
    first, second = ({"role": "user", "content": text} for text in ("One", "Two"))
    one = expected_text(llama, [first])
    two = expected_text(llama, [first, {"role": "assistant", "content": one}, second])
    assert seen(answer_of(page)) == seen(two)
    turns(page).first.get_by_role("button", name="Edit").click()
    page.get_by_label("Another version").fill("Three")
    page.get_by_role("button", name="Ask with this").click()
    expect(turns(page)).to_have_count(2)
    ended(page)
    three = expected_text(llama, [{"role": "user", "content": "Three"}])
    assert seen(answer_of(page)) == seen(three)
    turns(page).last.get_by_role("button", name="Answer anew").click()
    expect(turns(page).last.get_by_text("2 of 2")).to_be_visible()
    ended(page)
    assert (
        seen(answer_of(page))
        == seen(expected_text(llama, [{"role": "user", "content": "Three"}], seed=1))
        != seen(three)
    )
    turns(page).last.get_by_role("button", name="The version before").click()
    assert seen(answer_of(page)) == seen(three)
    page.get_by_label("Your message").fill("not sent yet")
    page.reload()
    settled(page)
    expect(page.get_by_label("Your message")).to_have_value("not sent yet")
    assert seen(answer_of(page)) == seen(three)
    turns(page).first.get_by_role("button", name="The version before").click()
    expect(turns(page)).to_have_count(4)
    assert seen(answer_of(page)) == seen(two)
    page.get_by_role("button", name="New conversation").click()
    expect(turns(page)).to_have_count(4)
    page.get_by_role("button", name="Forget all of it?").click()
    expect(turns(page)).to_have_count(0)


@pytest.mark.usefixtures("slow")
def test_what_came_before_a_stop_stays_and_frees_the_server(page: Page, served: Running) -> None:
    opened(page, served)
    say(page, "Go on and on", most=300, waits=False)
    expect(turns(page).last.locator(".said")).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("alert")).to_contain_text("Unfinished: stopped. What came is kept.")
    came = answer_of(page)
    served.wait(served.is_idle)
    page.reload()
    settled(page)
    assert answer_of(page) == came
    page.get_by_role("button", name="Try again").click()
    expect(turns(page).last.get_by_text("2 of 2")).to_be_visible()
    expect(turns(page).last).to_contain_text(came.split("\n")[0][:40])  # the same seed gives the same answer
    page.goto("about:blank")
    served.wait(served.is_idle)
    opened(page, served)
    expect(page.get_by_role("alert")).to_contain_text("the page was left while it came")


REFUSALS = (
    (401, "invalid_api_key", "missing or invalid API key"),
    (429, "rate_limit_exceeded", "3 answers are under way"),
    (503, "loading", "the model is still loading"),
    (400, "context_length_exceeded", "messages is too long"),
)


def test_nothing_is_lost_when_the_server_refuses_or_is_gone(page: Page, served: Running) -> None:
    def refuse(status: int, code: str, message: str) -> Any:
        body = json.dumps({"error": {"message": message, "type": "x", "param": None, "code": code}})
        headers = {"retry-after": "7", "content-type": "application/json"}
        return lambda route: route.fulfill(status=status, body=body, headers=headers)

    chat = Intercepted(page, f"**{CHAT}")
    opened(page, served)
    say(page, "First")
    kept = answer_of(page)
    for status, code, message in REFUSALS:
        chat.answer = refuse(status, code, message)
        say(page, f"Then {status}")
        expect(turns(page).last.get_by_role("alert")).to_contain_text(message)
        expect(turns(page).nth(-2).locator(".said")).to_have_text(f"Then {status}")
        chat.answer = None
        turns(page).last.get_by_role("button", name="Try again").click()
        expect(turns(page).last.get_by_role("alert")).to_have_count(0)
        ended(page)
        expect(turns(page).last.locator(".said")).to_be_visible()
    assert turns(page).nth(1).locator(".said").inner_text() == kept
    expect(turns(page)).to_have_count(10)


def test_a_stream_that_breaks_is_marked_and_what_came_is_kept(page: Page, served: Running) -> None:
    def chunk(text: str, ids: list[int], **more: Any) -> str:
        logprobs = {"content": [{"token": text, "logprob": -1.0, "bytes": list(text.encode())}]}
        choice = {"index": 0, "delta": {"content": text}, "token_ids": ids, "logprobs": logprobs, "finish_reason": None}
        return f"data: {json.dumps({'choices': [choice], **more})}\n\n"

    said = chunk("Because", [5], prompt_token_ids=[1, 2]) + ": ping\n\n" + chunk(" of", [6])
    error = {
        "error": {
            "message": "memory ran out for all running requests",
            "type": "server_error",
            "param": None,
            "code": "overloaded",
        }
    }
    chat = Intercepted(page, f"**{CHAT}")
    opened(page, served)
    ends = (f"data: {json.dumps(error)}\n\n", "memory ran out"), ("", "the stream ended before the answer did")
    for end, why in ends:
        chat.answer = broken(said + end)
        say(page, "Why?")
        expect(turns(page).last.get_by_role("alert")).to_contain_text(f"Unfinished: {why}")
        assert answer_of(page) == "Because of"
        expect(turns(page).last.locator('[data-number^="tokens-"]')).to_have_text("2")
    chat.answer = None
    turns(page).last.get_by_role("button", name="Try again").click()
    expect(turns(page).last.get_by_text("2 of 2")).to_be_visible()
    ended(page)
    turns(page).last.get_by_role("button", name="The version before").click()
    assert answer_of(page) == "Because of"


def broken(body: str) -> Any:
    return lambda route: route.fulfill(status=200, body=body, headers={"content-type": "text/event-stream"})


def test_text_is_text(page: Page, served: Running) -> None:
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    choice = {"index": 0, "delta": {"content": HOSTILE}, "token_ids": [5], "logprobs": None, "finish_reason": "stop"}
    call = {
        "index": 0,
        "id": "<b>",
        "type": "function",
        "function": {"name": HOSTILE, "arguments": json.dumps({"a": HOSTILE})},
    }
    calls = {"index": 0, "delta": {"tool_calls": [call]}, "logprobs": None, "finish_reason": None}
    body = "".join(f"data: {json.dumps({'choices': [one]})}\n\n" for one in (calls, choice)) + "data: [DONE]\n\n"
    page.route(f"**{CHAT}", broken(body))
    opened(page, served)
    say(page, HOSTILE)
    page.get_by_role("button", name="Tokens", exact=True).click()
    assert page.locator("main img, main script").count() == 0
    expect(turns(page).first.locator(".said")).to_have_text(HOSTILE)


def test_a_call_is_shown_and_its_result_goes_on(page: Page, served: Running) -> None:
    function = {"name": "get_weather", "arguments": ""}
    pieces = [
        {"index": 0, "id": "call_1", "type": "function", "function": function},
        {"index": 0, "function": {"arguments": '{"city": '}},
        {"index": 0, "function": {"arguments": '"Oslo"}'}},
    ]
    choices = [
        {"index": 0, "delta": {"tool_calls": [piece]}, "logprobs": None, "finish_reason": None} for piece in pieces
    ]
    choices.append({"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"})
    body = "".join(f"data: {json.dumps({'choices': [one]})}\n\n" for one in choices) + "data: [DONE]\n\n"
    asked: list[Any] = []

    def answer(route: Route) -> None:
        asked.append(json.loads(route.request.post_data or ""))
        if len(asked) == 1:
            broken(body)(route)
        else:
            route.continue_()

    page.route(f"**{CHAT}", answer)
    opened(page, served)
    page.get_by_text("What is asked with every turn").click()
    page.get_by_label("System prompt").fill("Be brief")
    page.get_by_label("Tools").fill("[nonsense")
    page.get_by_label("Your message").fill("How is the weather in Oslo?")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert")).to_contain_text("Tools: this is no JSON")
    expect(page.get_by_label("Your message")).to_have_value("How is the weather in Oslo?")
    page.get_by_role("button", name="an example").first.click()
    page.get_by_text("What is asked with every turn").click()
    say(page, "How is the weather in Oslo?")
    expect(turns(page).last.locator("pre")).to_have_text('{ "city": "Oslo" }')
    page.get_by_label("What get_weather gives").fill("4 degrees, rain")
    page.get_by_role("button", name="Give the result and go on").click()
    expect(turns(page)).to_have_count(4)
    ended(page)
    expect(turns(page).last.get_by_role("alert")).to_have_count(0)
    first, second = asked
    assert first["tools"][0]["function"]["name"] == "get_weather" and first["messages"][0]["content"] == "Be brief"
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "tool"]
    assert second["messages"][-1] == {"role": "tool", "tool_call_id": "call_1", "content": "4 degrees, rain"}


def test_a_schema_holds_the_answer(page: Page, served: Running) -> None:
    opened(page, served)
    page.get_by_text("What is asked with every turn").click()
    page.get_by_label("JSON schema").fill('{"enum": ["yes", "no"]}')
    page.get_by_text("What is asked with every turn").click()
    say(page, "Is it?")
    assert json.loads(answer_of(page)) in ("yes", "no")
    page.get_by_role("button", name="Tokens", exact=True).click()
    page.get_by_role("toolbar").get_by_role("button").first.click()
    expect(page.locator("[data-same]")).to_have_attribute("data-same", "true")
    expect(page.get_by_role("columnheader", name="grammar", exact=True)).to_be_visible()


def test_requests_of_other_clients_are_shown_live_and_opened(
    page: Page, served: Running, slow: threading.Event
) -> None:
    body = {
        "messages": DIALOG,
        "max_tokens": 400,
        "stream": True,
        "return_token_ids": True,
        "temperature": 1.2,
        "seed": 2**60 + 3,
    }
    headers = {"authorization": f"Bearer {KEY}"}
    opened(page, served, stage="requests")
    expect(page.get_by_text("No request is running now")).to_be_visible()
    with httpx.stream("POST", served.url + CHAT, json=body, headers=headers, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        expect(page.locator('[data-number="running"]')).to_have_text("1")
        prompt = page.locator('[data-number^="prompt-"]')
        expect(prompt).to_be_visible()
        page.get_by_role("button", name=re.compile("^Open request")).click()
        expect(page.locator("[data-chosen]")).to_be_visible()
        chosen = int(page.locator("[data-chosen]").get_attribute("data-chosen") or "")
        place = int((page.get_by_role("heading", level=4).inner_text()).rpartition(" ")[2])
        slow.set()
        told = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    ids = [token_id for chunk in told for token_id in chunk["choices"][0].get("token_ids", [])]
    assert ids[place] == chosen
    expect(page.get_by_text("No request is running now")).to_be_visible()
    page.get_by_role("link", name="The whole pass").click()
    settled(page)
    assert [int(one) for one in page.locator(".strip .id").all_inner_texts()][-place:] == ids[:place]


def test_the_live_view_says_where_a_prompt_parts_from_an_earlier_one(page: Page, served: Running) -> None:
    """In text, whatever the prompts hold; it fits and is open to everybody."""
    headers = {"authorization": f"Bearer {KEY}"}
    for day in ("third", "fourth"):
        content = f"{HOSTILE} What was on the {day} of May? {HOSTILE}"
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        assert httpx.post(served.url + CHAT, json=body, headers=headers, timeout=60).status_code == 200
    opened(page, served, stage="requests")
    newest = page.locator("[data-prefix]").first
    expect(newest).to_contain_text("messages[0].content")
    expect(newest).to_contain_text("fourth of May? <img src=x onerror=alert(1)>")
    expect(newest).to_contain_text("third of May? <img src=x onerror=alert(1)>")
    place = newest.locator("dd").first.inner_text()
    assert int(place) > 64
    expect(newest.locator("p").first).to_contain_text(f"{place} of")
    assert page.locator("main img, main script").count() == 0
    check_fits_and_is_open(page)


@pytest.fixture(scope="module")
def base_model() -> Iterator[Running]:
    """A model that has no form for dialogs, on a server that shows no requests."""
    before = assets.read_assets.__defaults__
    assets.read_assets.__defaults__ = (built_page(),)
    try:
        llama = llamarium.load("shakespeare-char", device="cpu")
        with serving(llama, extensions=[page_extension()], api_keys=(KEY,)) as found:
            yield found
    finally:
        assets.read_assets.__defaults__ = before


def test_a_model_without_dialogs_continues_a_text(browser: Browser, base_model: Running) -> None:
    model = base_model.service.loaded
    assert model is not None
    page = browser.new_page()
    opened(page, base_model)
    expect(page.get_by_text("This model has no form for dialogs")).to_be_visible()
    page.get_by_label("A text to continue").fill("ROMEO:")
    page.get_by_text("What is asked with every turn").click()
    page.get_by_label("Most tokens of an answer").fill("12")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator('[data-number="tokens-2"]')).to_have_text("12")
    ended(page)
    llama: Any = model[0]
    text = llama.generate("ROMEO:", seed=0, max_tokens=12, **SAMPLED).text
    assert seen(answer_of(page)) == seen(text)
    page.get_by_label("Put this behind it").fill("JULIET:")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator('[data-number="tokens-4"]')).to_have_text("12")
    ended(page)
    again = llama.generate(f"ROMEO:{text}JULIET:", seed=0, max_tokens=12, **SAMPLED).text
    assert seen(answer_of(page)) == seen(again)
    page.get_by_role("button", name="Tokens", exact=True).last.click()
    page.get_by_role("toolbar").get_by_role("button").nth(4).click()
    expect(page.locator("[data-same]")).to_have_attribute("data-same", "true")
    opened(page, base_model, stage="requests")
    expect(page.get_by_text("This server does not show its clients' requests")).to_be_visible()
    page.close()


def test_a_server_that_is_gone_is_said_and_asked_again(browser: Browser, served: Running) -> None:
    page = browser.new_page()
    chat = Intercepted(page, f"**{CHAT}")
    opened(page, served)
    chat.answer = lambda route: route.abort()
    say(page, "Are you there?")
    expect(turns(page).last.get_by_role("alert")).to_contain_text("the server does not answer")
    chat.answer = None
    turns(page).last.get_by_role("button", name="Try again").click()
    expect(turns(page).last.locator(".said")).to_be_visible()
    expect(turns(page).last.get_by_role("alert")).to_have_count(0)
    page.close()
