"""The evaluation harness's adapter, against transformers by hand on a small random model."""

import importlib
import logging
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM as TransformersLlama

import llamarium
from llamarium.errors import ContextLengthError, InputError, OptionError
from llamarium.train.data.bpe import train_bpe

TEXT = "".join(random.Random(7).choices("abc d\ne\u00e9", k=150)) + "\n"
MAX_LENGTH = 24


@dataclass
class Request:
    """What the adapter uses of the harness's `Instance`."""

    args: tuple[Any, ...]


@pytest.fixture(scope="module")
def registry() -> Any:
    """The harness's registry, after the adapter is imported."""
    importlib.import_module("llamarium.lm_eval.adapter")
    return importlib.import_module("lm_eval.api.registry")


@pytest.fixture
def folder(model_files: Callable[..., Any]) -> Path:
    tokenizer = train_bpe([TEXT], 264)
    files = model_files(
        vocab_size=tokenizer.vocab_size,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_ids,
        max_position_embeddings=128,
    )
    folder: Path = files.huggingface()
    tokenizer.save(folder)
    return folder


@pytest.fixture
def make(registry: Any, folder: Path) -> Callable[..., Any]:
    llama = llamarium.load(folder, dtype="float32", device="cpu")
    return lambda **options: registry.get_model("llamarium")(llama, **{"max_length": MAX_LENGTH, **options})


@pytest.fixture
def theirs(folder: Path) -> TransformersLlama:
    return TransformersLlama.from_pretrained(folder, dtype=torch.float32)


def by_hand(model: TransformersLlama, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """What HFLM does for one pair: the last tokens that fit, the last of them not read."""
    row = (context + continuation)[-(MAX_LENGTH + 1) :][:-1]
    with torch.inference_mode():
        logprobs = model(torch.tensor([row])).logits[0, -len(continuation) :].log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(continuation).unsqueeze(-1))
    return float(chosen.sum()), logprobs.argmax(-1).tolist() == continuation


PAIRS = [
    ("abc d", " e"),
    ("abc d ", "e"),  # the same: spaces go to the continuation
    ("", "abc"),
    (" ", "abc"),
    ("a", "b"),
    ("a", "c"),  # shares its row with the one before
    (TEXT[:90], TEXT[90:95]),  # longer than the context
    ("abc<|end_of_text|>", "d"),
]


def expected_pair(lm: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    def encode(text: str) -> list[int]:
        return lm.llama.tokenizer.encode(text, parse_special=True)

    if not context.strip():
        return encode(context + continuation)[:1], encode(context + continuation)[1:]
    stem = encode(context.rstrip())
    return stem, encode(context + continuation)[len(stem) :]


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_loglikelihoods_are_those_of_transformers(
    make: Callable[..., Any], theirs: TransformersLlama, batch_size: int, caplog: pytest.LogCaptureFixture
):
    lm = make(batch_size=batch_size)
    caplog.set_level(logging.WARNING, "lm_eval.llamarium")
    found = lm.loglikelihood([Request(pair) for pair in PAIRS])
    for pair, (logprob, greedy) in zip(PAIRS, found, strict=True):
        expected = by_hand(theirs, *expected_pair(lm, *pair))
        assert logprob == pytest.approx(expected[0], rel=2e-6), pair
        assert greedy == expected[1]
    assert found[0] == found[1]
    assert "1 of 8 requests exceed the context length of 24" in caplog.text


def test_the_greedy_continuation_is_called_greedy(make: Callable[..., Any]):
    lm, found = make(), 0
    for length in range(1, 20):
        context = TEXT[:length].strip()
        (token,) = lm.llama.generate(lm.tok_encode(context), max_new_tokens=1, temperature=0.0).completions[0].token_ids
        text = lm.llama.tokenizer.decode([token], skip_special_tokens=False)
        if lm.tok_encode(context + text) == [*lm.tok_encode(context), token]:  # not half a character
            found += 1
            answers = lm.loglikelihood([Request((context, text)), Request((context, "ab" if text != "ab" else "c"))])
            assert [greedy for _, greedy in answers] == [True, False]
    assert found > 2


def test_rows_that_are_the_same_are_computed_once(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    lm = make(batch_size=16)
    rows: list[int] = []
    run = lm.llama.runner.run
    monkeypatch.setattr(
        lm.llama.runner, "run", lambda batch, *rest: rows.append(len(batch.block_tables)) or run(batch, *rest)
    )
    lm.loglikelihood([Request(("a", letter)) for letter in "bcde"])
    assert rows == [1]


@pytest.mark.parametrize("text", [TEXT, "ab", "", TEXT[:30]])
def test_rolling_scores_each_token_once(make: Callable[..., Any], theirs: TransformersLlama, text: str):
    lm = make(batch_size=2)
    ids = lm.llama.tokenizer.encode(text, add_special_tokens=False)
    bos, total, start = lm.llama.tokenizer.bos_token_id, 0.0, 0
    stream = [bos, *ids]
    while start < len(ids):  # the docstring of the harness: full windows, the last one with a full context
        end = min(start + MAX_LENGTH, len(ids))
        first = max(0, end - MAX_LENGTH)
        total += by_hand(theirs, stream[first : start + 1], stream[start + 1 : end + 1])[0]
        start = end
    assert lm.loglikelihood_rolling([Request((text,))]) == [pytest.approx(total, rel=2e-6)]


@pytest.mark.parametrize(
    ("length", "cuts"),  # of the context's and the scored tokens' spans, token -1 being the prefix
    [
        (0, []),
        (1, [(-1, 0, 1)]),
        (9, [(-1, 0, 9)]),
        (10, [(-1, 0, 9), (0, 9, 10)]),
        (17, [(-1, 0, 9), (7, 9, 17)]),
        (18, [(-1, 0, 9), (8, 9, 18)]),
        (20, [(-1, 0, 9), (8, 9, 18), (10, 18, 20)]),
    ],
)
def test_windows_are_the_harness_s(registry: Any, length: int, cuts: list[tuple[int, int, int]]):
    """Recorded from lm-eval 0.4.13: `make_disjoint_window` over `get_rolling_token_windows` with 9 tokens."""
    from llamarium.lm_eval.adapter import rolling_pairs

    ids = list(range(100, 100 + length))
    expected = [([7] if first < 0 else ids[first:begin], ids[begin:end]) for first, begin, end in cuts]
    assert list(rolling_pairs(ids, 7, 9)) == expected


def test_a_text_of_one_window_has_the_score_of_score(make: Callable[..., Any]):
    lm = make()
    assert lm.loglikelihood_rolling([Request(("abc d",))]) == [
        pytest.approx(lm.llama.score("abc d").total_logprob, rel=1e-6)
    ]


def test_generation_is_greedy_and_stops(make: Callable[..., Any], caplog: pytest.LogCaptureFixture):
    lm = make(batch_size=2, max_gen_toks=6)
    caplog.set_level(logging.WARNING, "lm_eval.llamarium")
    contexts = ["abc", "d e", TEXT, "a"]
    found = lm.generate_until([Request((c, {"until": ["\n\n"], "do_sample": False})) for c in contexts])
    for context, text in zip(contexts, found, strict=True):
        ids = lm.tok_encode(context)[-(MAX_LENGTH - 6) :]
        options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.0, "stop": ("\n\n",)}
        assert text == lm.llama.generate(ids, **options).text
    assert "1 of 4 requests exceed" in caplog.text
    stop = next(c for c in found[0] if c.strip())
    (cut,) = lm.generate_until([Request(("abc", {"until": stop, "max_gen_toks": 6}))])
    assert cut == found[0].split(stop)[0]


def test_sampled_answers_differ_and_follow_torch_s_seed(make: Callable[..., Any]):
    lm = make(batch_size=4)
    requests = [Request(("abc", {"do_sample": True, "temperature": 1.0, "max_gen_toks": 8}))] * 4
    torch.manual_seed(1)
    found = lm.generate_until(requests)
    assert len(set(found)) > 1
    torch.manual_seed(1)
    assert lm.generate_until(requests) == found


def test_answers_go_to_the_cache_as_they_come(make: Callable[..., Any]):
    lm = make()
    seen: list[tuple[Any, ...]] = []
    lm.cache_hook = SimpleNamespace(add_partial=lambda *args: seen.append(args))
    answers = lm.loglikelihood([Request(("a", "b"))])
    text = lm.generate_until([Request(("a", {"max_gen_toks": 2}))])
    total = lm.loglikelihood_rolling([Request(("ab",))])
    assert seen == [
        ("loglikelihood", ("a", "b"), answers[0]),
        ("generate_until", ("a", {"max_gen_toks": 2}), text[0]),
        ("loglikelihood_rolling", ("ab",), total[0]),
    ]


def test_chat_templates_become_text_that_reads_as_the_dialog(registry: Any, smollm2: llamarium.Llama):
    lm = registry.get_model("llamarium")(smollm2)
    dialog = [{"role": "user", "content": "Hello"}]
    text = lm.apply_chat_template(dialog)
    assert lm.tok_encode(text) == smollm2.tokenizer.chat(dialog)
    begun = lm.apply_chat_template([*dialog, {"role": "assistant", "content": "I am"}], add_generation_prompt=False)
    assert begun == text + "I am"
    assert lm.chat_template() == "" and lm.chat_template(True)
    with pytest.raises(OptionError, match="no chat template 'mine'"):
        lm.chat_template("mine")


def test_it_is_made_from_the_command_line_s_arguments(registry: Any, folder: Path):
    model = registry.get_model("llamarium")
    lm = model.create_from_arg_string(
        f"model={folder},dtype=float32", {"batch_size": "4", "device": "cpu", "max_batch_size": None}
    )
    assert (lm.batch_size, lm.max_length, lm.device) == (4, 128, torch.device("cpu"))
    assert lm.tokenizer_name == str(folder).replace("/", "__")


def test_what_cannot_be_is_refused(make: Callable[..., Any]):
    for options, error, what in [
        ({"batch_size": "auto"}, OptionError, "batch_size is 'auto'; expected a number"),
        ({"batch_size": 0}, InputError, "batch_size is 0"),
        ({"max_length": 129}, InputError, "max_length is 129"),
    ]:
        with pytest.raises(error, match=what):
            make(**options)
    with pytest.raises(ContextLengthError, match="a continuation has"):
        make().loglikelihood([Request(("a", TEXT))])
    with pytest.raises(OptionError, match="unknown generation arguments: num_beams"):
        make().generate_until([Request(("a", {"num_beams": 4}))])
    with pytest.raises(OptionError, match="a task asks for 24 new tokens, and the context holds 24"):
        make().generate_until([Request(("a", {"max_gen_toks": 24}))])


def test_an_empty_continuation_is_certain(make: Callable[..., Any]):
    assert make().loglikelihood([Request(("a", ""))]) == [(0.0, True)]


def test_the_harness_s_own_models_are_known_beside_it():
    code = (
        "import llamarium.lm_eval.adapter; from lm_eval.api.registry import get_model; get_model('local-completions')"
    )
    subprocess.run([sys.executable, "-c", code], timeout=240, check=True)


def test_without_the_harness_one_line_says_what_to_install():
    code = "import sys; sys.modules['lm_eval'] = None; sys.argv = ['x']\n"
    code += "import llamarium.lm_eval.__main__ as m; sys.exit(m.main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert "pip install 'llamarium[eval]'" in done.stderr and done.stderr.count("\n") == 1


def test_nothing_else_imports_it():
    root = Path(llamarium.__file__).parent
    others = [path for path in root.rglob("*.py") if path.parent.name != "lm_eval"]
    assert not [path for path in others if "lm_eval" in path.read_text()]
