"""Prompt lookup: what is guessed, that no guess changes a token, and that guessing stops where it does not pay."""

import dataclasses
import json
import random
from collections.abc import Callable
from itertools import repeat

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import llamarium
from hash_runner import CONFIG, SLOTS, HashRunner
from llamarium.cli.main import main
from llamarium.engine.engine import Engine
from llamarium.engine.proposers.lookup import PromptLookup
from llamarium.engine.proposers.ngrams import MAX_MATCH, SIZES, NgramIndex
from llamarium.engine.request import Request
from llamarium.errors import OptionError
from llamarium.generation.loop import DialogEngine, TokenEvent, generate_tokens
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.quant.packed import LinearPacked
from llamarium.runtime.batch import Batch
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.runtime.runner import Cache, Runner
from llamarium.runtime.taps import Taps
from llamarium.sampling.params import SamplingParams
from native_models import native_runner
from reference_tiles import pack_ggml, quantize
from swapping import swap_linears

pytestmark = pytest.mark.torch

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, logprobs=1)
STRENGTH = 14.0  # of the circles
PROMPT = [5, 6, 7, 8, 9, 10, 11] * 4


def build(dtype: torch.dtype) -> LlamaForCausalLM:
    """A model that mostly goes round in circles of seven tokens, and now and then leaves one."""
    config = dataclasses.replace(
        preset("tiny"), max_position_embeddings=128, initializer_range=0.12, tie_word_embeddings=False
    )
    model = init_weights(LlamaForCausalLM(config), seed=1).eval().requires_grad_(False)
    tokens = torch.arange(config.vocab_size)
    before = tokens // 7 * 7 + (tokens - 1) % 7
    model.model.embed_tokens.weight.mul_(STRENGTH)
    model.lm_head.weight.copy_(model.model.embed_tokens.weight[before.clamp(max=config.vocab_size - 1)])
    return model.to(dtype)


@pytest.fixture(scope="module")
def packed() -> Runner:
    """A model that runs in the C kernels, head included."""
    model = build(torch.float32)
    swap_linears(model, lambda _, linear: pack_ggml(quantize(linear.weight, "Q8_0"), "Q8_0"), skip=())
    model = model.bfloat16()
    assert isinstance(model.lm_head, LinearPacked)
    return native_runner(model)


class Priced(PromptLookup):
    """A pass of t tokens takes `price(t)` seconds."""

    def __init__(self, price: Callable[[int], float] = lambda t: 1 + t / 100, num_tokens: int = 15) -> None:
        super().__init__(num_tokens)
        self.price = price
        self.widths: list[int] = []
        self.spent_s = 0.0

    def record_pass(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        assert seconds > 0
        self.widths.append(1 + num_drafted)
        self.spent_s += self.price(1 + num_drafted)
        super().record_pass(num_rows, num_drafted, self.price(1 + num_drafted))


def run(runner: Runner, prompts: list[list[int]], params: list[SamplingParams], **options) -> list[TokenEvent]:
    """The events, row by row: guesses let one row be ahead of another."""
    events = generate_tokens(runner, prompts, params, **options)
    return sorted(events, key=lambda event: event.row)


# --- what is guessed --------------------------------------------------------------------------------------------------


def plain_place(ids: list[int]) -> tuple[int, int]:
    """The same by looking through the whole sequence."""
    for size in SIZES:
        for place in range(len(ids) - 1, size - 1, -1):
            if ids[place - size : place] == ids[-size:]:
                return place, agreeing(ids, place, ids)
    return 0, 0


def agreeing(text: list[int], place: int, ids: list[int]) -> int:
    length = 0
    while length < min(place, len(ids), MAX_MATCH) and text[place - 1 - length] == ids[-1 - length]:
        length += 1
    return length


def test_the_index_finds_the_last_occurrence_of_the_longest_n_gram() -> None:
    chance = random.Random(3)
    for num_words in (1, 2, 4, 30):
        ids: list[int] = []
        index = NgramIndex(ids, 2**17)  # so that hardly any two n-grams have a slot in common
        for _ in range(100):
            ids.extend(chance.randrange(num_words) for _ in range(chance.choice((1, 1, 1, 5, 60))))
            found = index.find(ids, len(ids))
            assert found == plain_place(ids)
            if found[0]:
                repeated = list(ids)
                for i in range(9):
                    repeated.append(repeated[found[0] + i])
                assert index.following(found[0], 9) == repeated[len(ids) :]


def test_a_sequence_longer_than_expected_is_looked_up_too() -> None:
    chance, ids = random.Random(4), list[int]()
    index = NgramIndex(ids, 10)
    for _ in range(40):
        ids.extend(chance.randrange(1000) for _ in range(50))
        place, length = index.find(ids, len(ids))
        assert ids[place - length : place] == ids[len(ids) - length :]
    ids.extend(ids[-50:-40])
    assert index.find(ids, len(ids)) == (len(ids) - 50, 10)


# --- no guess changes a token -----------------------------------------------------------------------------------------

BIAS = dict.fromkeys(range(5, 12), 9.0)  # so that answers repeat themselves, even drawn ones
REQUESTS = {
    "greedy": [GREEDY],
    "drawn": [SamplingParams(temperature=1.5, seed=1, max_tokens=40, logit_bias=BIAS, logprobs=3)],
    "penalties": [
        SamplingParams(
            temperature=0.7, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1, logit_bias=BIAS,
            top_p=0.9, seed=2, max_tokens=40, logprobs=0,
        )
    ],
    "a stop id": [dataclasses.replace(GREEDY, stop_token_ids=tuple(range(200, 256)))],
    "n": [SamplingParams(temperature=0.01, seed=1, n=3, max_tokens=30, logprobs=0)],
    "rows that end apart": [dataclasses.replace(GREEDY, max_tokens=m) for m in (7, 60, 33)],
    "the context's end": [dataclasses.replace(GREEDY, max_tokens=500)],
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_events_are_the_same_to_the_bit(packed: Runner, name: str) -> None:
    params = REQUESTS[name]
    prompts = [PROMPT[i:] for i in range(len(params))]
    lookup = Priced()
    assert run(packed, prompts, params, proposer=lookup) == run(packed, prompts, params)
    assert lookup.drafted >= lookup.accepted > 0


def test_keys_and_values_in_8_bits_are_served_where_they_are_exact(packed: Runner) -> None:
    lookup = Priced()
    expected = run(packed, [PROMPT], [GREEDY], kv_cache_dtype="int8")
    found = run(packed, [PROMPT], [GREEDY], kv_cache_dtype="int8", proposer=lookup)
    assert found == expected and lookup.accepted > 0
    with pytest.raises(OptionError, match="PyTorch rounds"):
        run(ModuleRunner(build(torch.float32)), [PROMPT], [GREEDY], kv_cache_dtype="int8", proposer=lookup)


def test_every_accepted_guess_saves_a_pass(packed: Runner) -> None:
    lookup = Priced()
    events = run(packed, [PROMPT], [GREEDY], proposer=lookup)
    assert len(events) == 1 + lookup.passes + lookup.accepted
    assert lookup.counts() == {"passes": lookup.passes, "drafted": lookup.drafted, "accepted": lookup.accepted}
    assert lookup.passes == len(lookup.widths) and lookup.drafted == sum(lookup.widths) - lookup.passes
    assert max(lookup.widths) > 4 and lookup.passes < 30


def test_cancelled_rows_end_and_the_others_go_on(packed: Runner) -> None:
    def cut(**options) -> list[TokenEvent]:
        cancelled: set[int] = set()
        events = []
        for event in generate_tokens(packed, [PROMPT, PROMPT[2:]], [GREEDY] * 2, cancelled=cancelled, **options):
            events.append(event)
            if event.row == 0 and sum(event.row == 0 for event in events) == 15:
                cancelled.add(0)
        return sorted(events, key=lambda event: event.row)

    lookup = Priced()
    assert cut(proposer=lookup) == cut() and lookup.accepted > 0


def test_a_dialog_goes_on_over_what_was_guessed(packed: Runner) -> None:
    """Whatever a turn left in the cache beyond its answer, the next one is not misled."""

    def talk(lookup: PromptLookup | None) -> list[TokenEvent]:
        prefix, ids, events = DialogEngine(packed), list(PROMPT), []
        for turn in range(3):
            said = run(packed, [ids], [dataclasses.replace(GREEDY, max_tokens=17)], prefix=prefix, proposer=lookup)
            events += said
            ids += [event.token_id for event in said[: 9 + turn]] + [6, 7]
        return events

    lookup = Priced()
    assert talk(lookup) == talk(None) and lookup.accepted > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_plain_weights_take_any_number_of_tokens_a_pass(dtype: torch.dtype, temperature: float) -> None:
    runner = native_runner(build(dtype))
    base = SamplingParams(temperature=temperature, seed=3, max_tokens=40, logit_bias=BIAS, logprobs=1)
    for count in (1, 2, 3):
        prompts, lookup = [PROMPT[i:] for i in range(count)], Priced()
        assert run(runner, prompts, [base] * count, proposer=lookup) == run(runner, prompts, [base] * count)
        assert max(lookup.widths) > 4 and lookup.accepted > 0


def test_float32_gives_the_same_greedy_tokens() -> None:
    runner, lookup = ModuleRunner(build(torch.float32)), Priced()
    params = dataclasses.replace(GREEDY, logprobs=None)
    found = [event.token_id for event in run(runner, [PROMPT], [params], proposer=lookup)]
    assert found == [event.token_id for event in run(runner, [PROMPT], [params])] and lookup.accepted > 0


@pytest.mark.parametrize(
    ("dtype", "temperature", "kept"), [(torch.bfloat16, 0.0, "bfloat16"), (torch.float32, 0.5, "float32")]
)
def test_what_could_change_tokens_is_refused(dtype: torch.dtype, temperature: float, kept: str) -> None:
    params = SamplingParams(temperature=temperature, seed=1)
    with pytest.raises(OptionError, match=f"PyTorch rounds .*in {kept}, at this temperature.* use float32"):
        run(ModuleRunner(build(dtype)), [PROMPT], [params], proposer=PromptLookup())


def test_without_a_cache_and_with_senseless_lengths_it_is_refused() -> None:
    with pytest.raises(OptionError, match="needs the KV cache"):
        run(ModuleRunner(build(torch.float32)), [PROMPT], [GREEDY], proposer=PromptLookup(), use_cache=False)
    for num_tokens in (0, 65, True, 2.0, "9"):
        with pytest.raises(OptionError, match=r"num_tokens is .*; expected .*1 to 64"):
            PromptLookup(num_tokens)  # type: ignore[arg-type]


# --- guessing stops where it does not pay -----------------------------------------------------------------------------


def test_it_turns_off_where_wider_passes_are_dear(packed: Runner) -> None:
    lookup = Priced(lambda t: 1 + 2.0 * (t - 1))
    params = dataclasses.replace(GREEDY, max_tokens=99)
    assert run(packed, [PROMPT], [params], proposer=lookup) == run(packed, [PROMPT], [params])
    assert 1 <= sum(width > 1 for width in lookup.widths) <= 4
    assert set(lookup.widths[20:]) == {1}


def test_it_turns_on_again_when_they_become_cheap() -> None:
    lookup, extra_s = PromptLookup(15), 2.0

    def lengths(count: int) -> list[int]:
        found = []
        for _ in range(count):
            is_measured = lookup.single_s(1) is not None
            found.append(lookup.best_length(repeat(0.9, 15), 1, 15.0) if is_measured else 0)
            lookup.record_pass(1, found[-1], 1 + extra_s * found[-1])
        return found

    assert lengths(20)[-1] == 0, "off"
    assert set(lengths(2000)) == {0, 2} and lookup.drafted < 60, "tried now and then"
    extra_s = 0.01
    assert lengths(4000)[-1] == 15, "on"
    extra_s = 2.0
    assert lengths(20)[-1] == 0, "off again"


def test_a_draft_is_as_long_as_pays() -> None:
    """The rates are of one token after another: a draft goes over a doubtful one if enough comes after it."""
    lookup = PromptLookup()
    lookup.record_pass(1, 0, 1.0)
    lookup.record_pass(1, 1, 1.1)
    assert lookup.best_draft([0.05] * 9, 1) == (0, 0.0)
    assert lookup.best_draft([0.5] * 9, 1)[0] == 2  # 1.75 tokens in 1.2 passes; 1.875 in 1.3 and 1.5 in 1.1 are fewer
    assert lookup.best_draft([0.3, *[1.0] * 8], 1)[0] == 9
    assert lookup.best_draft([1.0] * 9, 1) == (9, pytest.approx(1 - 1.9 / 10))


class Paid(HashRunner):
    """A pass takes a second, and each token beyond one a share of it."""

    def __init__(self, extra_s: float, **options) -> None:
        super().__init__(**options)
        self.now_s, self.extra_s = 0.0, extra_s

    def run(self, batch: Batch, cache: Cache, taps: Taps | None = None) -> NDArray[np.float32]:
        self.now_s += 1 + self.extra_s * (len(batch.token_ids) - 1)
        return super().run(batch, cache, taps)


def spent(extra_s: float, circle: float, vocab_size: int = 50, **options) -> tuple[float, int]:
    """The seconds of some answers' tokens, and their number; texts of few words, which often occur in others."""
    config = dataclasses.replace(CONFIG, vocab_size=vocab_size)
    runner = Paid(extra_s, config=config, circle=circle)
    engine = Engine(runner, 400, block_size=SLOTS, proposer=PromptLookup(**options), clock=lambda: runner.now_s)
    seconds, num_tokens = 0.0, 0
    for seed in range(8):
        rng = random.Random(seed)
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=200)
        engine.add(Request([rng.randrange(3, vocab_size) for _ in range(40)], params))
        before = engine.counts.generated_tokens
        while engine.counts.generated_tokens == before:
            engine.step()
        begin_s, before = runner.now_s, engine.counts.generated_tokens
        list(engine.run())
        seconds += runner.now_s - begin_s
        num_tokens += engine.counts.generated_tokens - before
    return seconds, num_tokens


@pytest.mark.parametrize("extra_s", [0.05, 0.3, 2.0])
@pytest.mark.parametrize("circle", [0.0, 1.0])
def test_what_does_not_pay_costs_a_hundredth(extra_s: float, circle: float) -> None:
    """Besides that it costs some passes once. Few words, so that n-grams come again by chance."""
    seconds, num_tokens = spent(extra_s, circle, 12)
    assert num_tokens == 8 * 199 and seconds < 1.01 * num_tokens + 4


def test_what_pays_is_faster() -> None:
    seconds, num_tokens = spent(0.05, 8.0)
    assert seconds < num_tokens / 3


# --- the way to it ----------------------------------------------------------------------------------------------------


def test_the_option_is_taken_everywhere() -> None:
    llama = llamarium.load("shakespeare-char", dtype="float32", device="cpu")
    options = {"temperature": 0.0, "max_new_tokens": 60}
    expected = llama.generate("ROMEO:", **options).text
    lookup = llamarium.PromptLookup()
    assert llama.generate("ROMEO:", prompt_lookup=lookup, **options).text == expected
    assert lookup.passes > 0
    assert "".join(p.text for p in llama.stream("ROMEO:", prompt_lookup=True, **options)) == expected
    assert llama.generate("ROMEO:", prompt_lookup=False, use_cache=False, **options).text == expected
    with pytest.raises(OptionError, match="prompt_lookup is 10; expected True, False"):
        llama.generate("ROMEO:", prompt_lookup=10, **options)


def test_the_command_counts(capsys: pytest.CaptureFixture[str]) -> None:
    words = "generate ROMEO: -m shakespeare-char --dtype float32 --device cpu --temperature 0 -n 60 --stats"
    assert main([*words.split(), "--prompt-lookup", "--json"]) == 0
    shown = capsys.readouterr()
    counts = json.loads(shown.out)["prompt_lookup"]
    assert 1 + counts["passes"] + counts["accepted"] == 60
    assert f"{counts['accepted']} of {counts['drafted']} guesses right in {counts['passes']} passes" in shown.err
    assert main([*words.split(), "--json"]) == 0
    assert "prompt_lookup" not in json.loads(capsys.readouterr().out)
