"""The loop: the same request gives the same tokens alone, batched, cached, chunked or continued; and its ends."""

import copy
import dataclasses
from typing import Any

import pytest
import torch

import llamarium
from closeness import assert_close_to_reference, model_reference
from llamarium.attention import CausalAttend
from llamarium.errors import ContextLengthError, InputError, LlamariumError, OptionError, SamplingError, TokenizerError
from llamarium.generation.loop import DialogEngine, TokenEvent, generate_tokens
from llamarium.inspect.forward import KeptSequence, Memory, advance
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.runtime.batch import BLOCK_SIZE, blocks_for
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.runtime.runner import Runner
from llamarium.sampling.params import SamplingParams

pytestmark = pytest.mark.torch

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Weights spread wide, so that answers differ and ties do not occur."""
    config = dataclasses.replace(preset("tiny"), max_position_embeddings=64, initializer_range=0.15)
    return init_weights(LlamaForCausalLM(config), seed=1).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def runner(model: LlamaForCausalLM) -> Runner:
    return ModuleRunner(model)


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


def answers(events: list[TokenEvent]) -> list[list[int]]:
    rows: dict[int, list[int]] = {}
    for event in events:
        rows.setdefault(event.row, []).append(event.token_id)
    return [rows[i] for i in sorted(rows)]


def run(runner: Runner, prompts: list[list[int]], params: list[SamplingParams], **options) -> list[list[int]]:
    return answers(list(generate_tokens(runner, prompts, params, **options)))


def plain_greedy(model: LlamaForCausalLM, prompt: list[int], count: int) -> list[int]:
    """The shortest program that is right: run everything again for every token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def test_greedy_equals_the_plain_loop(model: LlamaForCausalLM, runner: Runner) -> None:
    for prompt in prompts_of(1, 5, 30):
        assert run(runner, [prompt], [GREEDY]) == [plain_greedy(model, prompt, 12)]


SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.3, max_tokens=10)


@pytest.mark.parametrize("base", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_batch_gives_each_row_what_it_gets_alone(runner: Runner, base: SamplingParams) -> None:
    """Rows of different lengths that also end at different times."""
    prompts = prompts_of(3, 17, 1, 9, 9)
    params = [dataclasses.replace(base, seed=i, max_tokens=4 + 3 * i) for i in range(5)]
    alone = [run(runner, [prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]
    assert [len(a) for a in alone] == [4, 7, 10, 13, 16]
    assert run(runner, prompts, params) == alone
    assert run(runner, prompts, params, use_cache=False) == alone


def test_chunked_prefill_equals_whole(model: LlamaForCausalLM, runner: Runner) -> None:
    prompts = prompts_of(3, 17, 30)
    longer = [[*prompt, i + 1] for i, prompt in enumerate(prompts)]
    references = [model_reference(model, torch.tensor([ids])) for ids in longer]
    whole, again = logits_of(runner, prompts)[1], logits_of(runner, longer)[1]
    for chunk in (1, 4, 16, 17, 20):
        memory, found, sequences = logits_of(runner, prompts, chunk)
        for i, sequence in enumerate(sequences):
            sequence.ids.append(i + 1)
        decoded = torch.from_numpy(advance(runner, memory.cache, sequences))
        for i, reference in enumerate(references):
            assert_close_to_reference(found[i], whole[i], reference[0, -2])
            assert_close_to_reference(decoded[i], again[i], reference[0, -1])


def logits_of(
    runner: Runner, prompts: list[list[int]], chunk: int = 2048
) -> tuple[Memory, torch.Tensor, list[KeptSequence]]:
    memory = Memory(runner, BLOCK_SIZE * len(prompts))
    sequences = [memory.begin(prompt, 64) for prompt in prompts]
    return memory, torch.from_numpy(advance(runner, memory.cache, sequences, chunk)), sequences


def test_prefill_logits_are_the_forward_pass_s(model: LlamaForCausalLM, runner: Runner) -> None:
    (prompt,) = prompts_of(20)
    logits = logits_of(runner, [prompt])[1]
    torch.testing.assert_close(logits[0], model(torch.tensor([prompt]), attend=CausalAttend())[0, -1])


def test_n_answers_share_a_prefill_and_differ(runner: Runner) -> None:
    first, second = prompts_of(4, 11)
    param = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=8)
    found = run(runner, [first, second], [param, dataclasses.replace(param, n=2)])
    assert len(found) == 5
    assert len({tuple(a) for a in found}) == 5
    expected = [run(runner, [first], [single])[0] for single in param.rows()]
    assert found[:3] == expected


def test_stop_ids_end_a_row_with_their_own_token(model: LlamaForCausalLM, runner: Runner) -> None:
    (prompt,) = prompts_of(5)
    full = plain_greedy(model, prompt, 12)
    stop = full[4]
    cut = full[: full.index(stop) + 1]
    for params, stop_ids in ((GREEDY, [stop, 255]), (dataclasses.replace(GREEDY, stop_token_ids=(stop,)), [])):
        events = list(generate_tokens(runner, [prompt], [params], stop_ids=stop_ids))
        assert [e.token_id for e in events] == cut
        assert [e.finish_reason for e in events] == [None] * (len(cut) - 1) + ["stop"]


def test_length_ends_at_max_tokens_or_the_context(runner: Runner) -> None:
    short, long = prompts_of(5, 60)
    events = list(generate_tokens(runner, [short, long], [GREEDY, GREEDY]))
    assert [len(a) for a in answers(events)] == [12, 4]
    assert [e.row for e in events if e.finish_reason == "length"] == [1, 0]


def test_cancelled_rows_end_and_the_others_go_on(runner: Runner) -> None:
    prompts = prompts_of(3, 8)
    expected = run(runner, prompts, [GREEDY, GREEDY])
    cancelled: set[int] = set()
    events: list[TokenEvent] = []
    for event in generate_tokens(runner, prompts, [GREEDY, GREEDY], cancelled=cancelled):
        events.append(event)
        if event.row == 0 and len(events) >= 5:
            cancelled.add(0)
    assert answers(events) == [expected[0][:3], expected[1]]


def test_logprobs_are_the_model_s_own(model: LlamaForCausalLM, runner: Runner) -> None:
    (prompt,) = prompts_of(6)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=5, logprobs=4)
    ids = list(prompt)
    for event in generate_tokens(runner, [prompt], [params]):
        expected = model(torch.tensor([ids]))[0, -1].log_softmax(-1)
        assert event.logprob == pytest.approx(float(expected[event.token_id]), abs=1e-4)
        assert [i for i, _ in event.top] == expected.topk(4).indices.tolist()
        assert [p for _, p in event.top] == pytest.approx(expected.topk(4).values.tolist(), abs=1e-4)
        ids.append(event.token_id)


def test_a_dialog_continues_from_its_cache(model: LlamaForCausalLM, runner: Runner) -> None:
    """Each turn equals a fresh start, and only new tokens are computed."""
    prefix = DialogEngine(runner)
    computed: list[int] = []
    hook = model.model.embed_tokens.register_forward_hook(lambda _m, args, _o: computed.append(args[0].shape[1]))
    try:
        ids, extra = prompts_of(10, 4)
        first = run(runner, [ids], [GREEDY], prefix=prefix)[0]
        computed.clear()
        second = run(runner, [[*ids, *first, *extra]], [GREEDY], prefix=prefix)[0]
        assert computed[0] == 5, "the answer's last token and the four new ones"
        edited = [*ids[:6], 1, 2]
        computed.clear()
        third = run(runner, [edited], [GREEDY], prefix=prefix)[0]
        assert computed[0] == 2, "what differs from the sequence that is kept"
        again = run(runner, [edited], [GREEDY], prefix=prefix)[0]
    finally:
        hook.remove()
    assert second == plain_greedy(model, [*ids, *first, *extra], 12)
    assert third == again == plain_greedy(model, edited, 12)


def test_what_cannot_be_continued_is_refused(model: LlamaForCausalLM, runner: Runner) -> None:
    cases = [
        ([], InputError, "no prompt"),
        ([[]], InputError, "the prompt has no tokens"),
        ([[1], []], InputError, "prompt 1 has no tokens"),
        ([[1], [256]], InputError, r"prompt 1 has token ids 256..256; expected 0..255"),
        ([[-1]], InputError, "expected 0..255"),
        ([[1] * 64], ContextLengthError, "64 tokens; this model's maximum context length is 64"),
    ]
    for prompts, error, message in cases:
        with pytest.raises(error, match=message):
            generate_tokens(runner, prompts, [GREEDY] * len(prompts))  # no token is asked for


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


def test_a_prefix_serves_one_answer(runner: Runner) -> None:
    ids = prompts_of(4)[0]
    for prompts, options in (([ids, ids], {}), ([ids], {"use_cache": False})):
        with pytest.raises(InputError, match="prefix supports only one prompt"):
            run(runner, prompts, [GREEDY] * len(prompts), prefix=DialogEngine(runner), **options)


def test_a_prefix_of_another_model_begins_anew_unless_the_call_is_refused(
    model: LlamaForCausalLM, runner: Runner
) -> None:
    ids, other = prompts_of(4)[0], ModuleRunner(copy.deepcopy(model))
    prefix = DialogEngine(other)
    run(other, [ids], [GREEDY], prefix=prefix)
    engine = prefix.engine
    refused: list[tuple[list[int], SamplingParams]] = [
        ([], GREEDY),
        (ids, SamplingParams(n=2)),
        (ids, dataclasses.replace(GREEDY, logit_bias={10**6: 1.0})),
    ]
    for prompt, params in refused:
        with pytest.raises(LlamariumError):
            generate_tokens(runner, [prompt], [params], prefix=prefix)
        with pytest.raises(LlamariumError):
            generate_tokens(other, [prompt], [params], prefix=prefix, kv_cache_dtype="int8")
    assert prefix.engine is engine and engine.counts.steps == 12
    assert run(runner, [ids], [GREEDY], prefix=prefix) == run(runner, [ids], [GREEDY])
    assert prefix.engine is not engine and prefix.engine.runner is runner


def test_a_stream_that_was_not_begun_gives_way_to_another_answer_of_its_dialog(runner: Runner) -> None:
    ids = prompts_of(4)[0]
    prefix = DialogEngine(runner)
    first = generate_tokens(runner, [ids], [GREEDY], prefix=prefix)
    prefix.use(runner, "int8")
    with pytest.raises(InputError, match="another answer was started in the same dialog"):
        next(first)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ("", {}, InputError, "the prompt has no tokens"),
        ([65], {}, TokenizerError, "no token has the id 65"),
        ("a" * 256, {}, ContextLengthError, "256 tokens; this model's maximum context length is 256"),
        ("a", {"logit_bias": {65: 1.0}}, SamplingError, "logit_bias"),
        ("a", {"temperature": -1}, SamplingError, "temperature is -1"),
        ("a", {"prompt_lookup": True, "use_cache": False}, OptionError, "needs the KV cache"),
        ("a", {"prompt_lookup": True, "temperature": 1.0}, OptionError, "prompt_lookup could change the tokens"),
    ],
)
def test_a_stream_refuses_when_it_is_called_what_generate_refuses(
    prompt: Any, options: dict[str, Any], error: type[LlamariumError], message: str
) -> None:
    llama = llamarium.load("shakespeare-char", device="cpu")
    llama = llamarium.Llama("modules", llama.model.float(), llama.tokenizer)
    for ask in (llama.generate, llama.stream):
        with pytest.raises(error, match=message):
            ask(prompt, **options)


def test_a_dialogs_cache_never_outgrows_the_context() -> None:
    config = dataclasses.replace(preset("tiny"), max_position_embeddings=300)
    runner = ModuleRunner(init_weights(LlamaForCausalLM(config), seed=1).eval().requires_grad_(False))
    prefix = DialogEngine(runner)
    run(runner, prompts_of(10), [GREEDY], prefix=prefix)
    assert prefix.engine.num_blocks == 1
    prefix.engine.reserve(299)
    assert prefix.engine.num_blocks == blocks_for(300)
    assert run(runner, prompts_of(10), [GREEDY], prefix=prefix) == run(runner, prompts_of(10), [GREEDY])
