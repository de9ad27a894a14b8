"""The loop: the same request gives the same tokens alone, batched, cached, chunked or continued; and its ends."""

import copy
import dataclasses

import pytest
import torch

from closeness import assert_close_to_reference, model_reference
from llamarium.attention import CausalAttend
from llamarium.errors import ContextLengthError, InputError
from llamarium.generation.loop import (
    PrefixCache,
    TokenEvent,
    decode_one,
    generate_tokens,
    new_cache,
    prefill,
    recompute,
)
from llamarium.generation.sampler import SamplingParams
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Weights spread wide, so that answers differ and ties do not occur."""
    config = dataclasses.replace(preset("tiny"), max_position_embeddings=64, initializer_range=0.15)
    return init_weights(LlamaForCausalLM(config), seed=1).eval().requires_grad_(False)


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


def answers(events: list[TokenEvent]) -> list[list[int]]:
    rows: dict[int, list[int]] = {}
    for event in events:
        rows.setdefault(event.row, []).append(event.token_id)
    return [rows[i] for i in sorted(rows)]


def run(model: LlamaForCausalLM, prompts: list[list[int]], params: list[SamplingParams], **options) -> list[list[int]]:
    return answers(list(generate_tokens(model, prompts, params, **options)))


def plain_greedy(model: LlamaForCausalLM, prompt: list[int], count: int) -> list[int]:
    """The shortest program that is right: run everything again for every token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def test_greedy_equals_the_plain_loop(model: LlamaForCausalLM) -> None:
    for prompt in prompts_of(1, 5, 30):
        assert run(model, [prompt], [GREEDY]) == [plain_greedy(model, prompt, 12)]


SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.3, max_tokens=10)


@pytest.mark.parametrize("base", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_batch_gives_each_row_what_it_gets_alone(model: LlamaForCausalLM, base: SamplingParams) -> None:
    """Rows of different lengths that also end at different times."""
    prompts = prompts_of(3, 17, 1, 9, 9)
    params = [dataclasses.replace(base, seed=i, max_tokens=4 + 3 * i) for i in range(5)]
    alone = [run(model, [prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]
    assert [len(a) for a in alone] == [4, 7, 10, 13, 16]
    assert run(model, prompts, params) == alone
    assert run(model, prompts, params, use_cache=False) == alone


def test_chunked_prefill_equals_whole(model: LlamaForCausalLM) -> None:
    prompts = prompts_of(3, 17, 30)
    longer = [[*prompt, i + 1] for i, prompt in enumerate(prompts)]
    references = [model_reference(model, torch.tensor([ids])) for ids in longer]
    whole, again = prefill(model, new_cache(model, 3, 40), prompts), recompute(model, longer)
    for chunk in (1, 4, 16, 17):
        cache = new_cache(model, 3, 40)
        found = prefill(model, cache, prompts, chunk=chunk)
        decoded = decode_one(model, cache, [1, 2, 3], [3, 17, 30])
        for i, reference in enumerate(references):
            assert_close_to_reference(found[i], whole[i], reference[0, -2])
            assert_close_to_reference(decoded[i], again[i], reference[0, -1])


def test_prefill_logits_are_the_forward_pass_s(model: LlamaForCausalLM) -> None:
    (prompt,) = prompts_of(20)
    logits = prefill(model, new_cache(model, 1, 20), [prompt])
    torch.testing.assert_close(logits[0], model(torch.tensor([prompt]), attend=CausalAttend())[0, -1])


def test_n_answers_share_a_prefill_and_differ(model: LlamaForCausalLM) -> None:
    first, second = prompts_of(4, 11)
    param = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=8)
    found = run(model, [first, second], [param, dataclasses.replace(param, n=2)])
    assert len(found) == 5
    assert len({tuple(a) for a in found}) == 5
    expected = [run(model, [first], [single])[0] for single in param.rows()]
    assert found[:3] == expected


def test_stop_ids_end_a_row_with_their_own_token(model: LlamaForCausalLM) -> None:
    (prompt,) = prompts_of(5)
    full = plain_greedy(model, prompt, 12)
    stop = full[4]
    cut = full[: full.index(stop) + 1]
    for params, stop_ids in ((GREEDY, [stop, 255]), (dataclasses.replace(GREEDY, stop_token_ids=(stop,)), [])):
        events = list(generate_tokens(model, [prompt], [params], stop_ids=stop_ids))
        assert [e.token_id for e in events] == cut
        assert [e.finish_reason for e in events] == [None] * (len(cut) - 1) + ["stop"]


def test_length_ends_at_max_tokens_or_the_context(model: LlamaForCausalLM) -> None:
    short, long = prompts_of(5, 60)
    events = list(generate_tokens(model, [short, long], [GREEDY, GREEDY]))
    assert [len(a) for a in answers(events)] == [12, 4]
    assert [e.row for e in events if e.finish_reason == "length"] == [1, 0]


def test_cancelled_rows_end_and_the_others_go_on(model: LlamaForCausalLM) -> None:
    prompts = prompts_of(3, 8)
    expected = run(model, prompts, [GREEDY, GREEDY])
    cancelled: set[int] = set()
    events: list[TokenEvent] = []
    for event in generate_tokens(model, prompts, [GREEDY, GREEDY], cancelled=cancelled):
        events.append(event)
        if event.row == 0 and len(events) >= 5:
            cancelled.add(0)
    assert answers(events) == [expected[0][:3], expected[1]]


def test_logprobs_are_the_model_s_own(model: LlamaForCausalLM) -> None:
    (prompt,) = prompts_of(6)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=5, logprobs=4)
    ids = list(prompt)
    for event in generate_tokens(model, [prompt], [params]):
        expected = model(torch.tensor([ids]))[0, -1].log_softmax(-1)
        assert event.logprob == pytest.approx(float(expected[event.token_id]), abs=1e-4)
        assert [i for i, _ in event.top] == expected.topk(4).indices.tolist()
        assert [p for _, p in event.top] == pytest.approx(expected.topk(4).values.tolist(), abs=1e-4)
        ids.append(event.token_id)


def test_a_dialog_continues_from_its_cache(model: LlamaForCausalLM) -> None:
    """Each turn equals a fresh start, and only new tokens are computed."""
    prefix = PrefixCache(model)
    computed: list[int] = []
    hook = model.model.embed_tokens.register_forward_hook(lambda _m, args, _o: computed.append(args[0].shape[1]))
    try:
        ids, extra = prompts_of(10, 4)
        first = run(model, [ids], [GREEDY], prefix=prefix)[0]
        computed.clear()
        second = run(model, [[*ids, *first, *extra]], [GREEDY], prefix=prefix)[0]
        assert computed[0] == 5, "the answer's last token and the four new ones"
        edited = [*ids[:6], 1, 2]
        computed.clear()
        third = run(model, [edited], [GREEDY], prefix=prefix)[0]
        assert computed[0] == 2, "what differs from the sequence that is kept"
        again = run(model, [edited], [GREEDY], prefix=prefix)[0]
    finally:
        hook.remove()
    assert second == plain_greedy(model, [*ids, *first, *extra], 12)
    assert third == again == plain_greedy(model, edited, 12)


def test_what_cannot_be_continued_is_refused(model: LlamaForCausalLM) -> None:
    cases = [
        ([], InputError, "no prompt"),
        ([[]], InputError, "the prompt has no tokens"),
        ([[1], []], InputError, "prompt 1 has no tokens"),
        ([[1], [256]], InputError, r"prompt 1 has token ids 256..256; expected 0..255"),
        ([[-1]], InputError, "expected 0..255"),
        ([[1] * 64], ContextLengthError, "64 tokens and the model's context holds 64"),
    ]
    for prompts, error, message in cases:
        with pytest.raises(error, match=message):
            list(generate_tokens(model, prompts, [GREEDY] * len(prompts)))


def test_the_model_refuses_what_it_cannot_take(model: LlamaForCausalLM) -> None:
    cases = [
        (torch.zeros(3, dtype=torch.long), None, InputError, "expected a non-empty"),
        (torch.zeros(1, 0, dtype=torch.long), None, InputError, "expected a non-empty"),
        (torch.zeros(1, 3), None, InputError, "int64 or int32"),
        (torch.tensor([[256]]), None, InputError, r"256..256; expected 0..255"),
        (torch.tensor([[1, 2]]), torch.tensor([[0]]), InputError, "positions are"),
        (torch.ones(1, 65, dtype=torch.long), None, ContextLengthError, "65 tokens; the model's context holds 64"),
    ]
    for ids, positions, error, message in cases:
        with pytest.raises(error, match=message):
            model(ids, positions)


def test_a_prefix_serves_one_answer(model: LlamaForCausalLM) -> None:
    ids = prompts_of(4)[0]
    for prompts, options in (([ids, ids], {}), ([ids], {"use_cache": False})):
        with pytest.raises(InputError, match="a prefix serves one prompt"):
            run(model, prompts, [GREEDY] * len(prompts), prefix=PrefixCache(model), **options)
    with pytest.raises(InputError, match="the prefix is of another model"):
        run(model, [ids], [GREEDY], prefix=PrefixCache(copy.deepcopy(model)))


def test_a_dialogs_cache_never_outgrows_the_context(model: LlamaForCausalLM) -> None:
    prefix = PrefixCache(model)
    run(model, prompts_of(10), [GREEDY], prefix=prefix)
    assert 22 <= prefix.cache.num_slots <= model.config.max_position_embeddings
    prefix.prefill(prompts_of(10)[0], model.config.max_position_embeddings - 1)
    assert prefix.cache.num_slots == model.config.max_position_embeddings
