"""EleutherAI's harness asks a server: how probable continuations are, and what comes next, with its own clients."""

import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers import LlamaForCausalLM as TransformersLlama

from llamarium.api import Llama
from llamarium.inspect.score import score
from serving import Running

pytestmark = pytest.mark.torch

CHOICES = [" blue as it is", " green"]
DOCS = [{"question": f"The sky over {place} is", "gold": i % 2} for i, place in enumerate(["Łódź", "Rome", "here"])]
LIKELY = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": CHOICES,
    "doc_to_target": "{{gold}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
NEXT = {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "blue",
    "generation_kwargs": {"until": ["e", "\n\n"], "max_gen_toks": 12, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


@pytest.fixture(scope="module", autouse=True)
def _harness() -> None:
    """Import it before anybody looks at what a test leaves behind: it sets variables of the environment."""
    importlib.import_module("lm_eval.evaluator")


@pytest.fixture(scope="module")
def theirs(llama: Llama) -> TransformersLlama:
    model = TransformersLlama(LlamaConfig(**llama.config.to_hf())).eval()
    model.load_state_dict(llama.model.state_dict())
    return model


@pytest.fixture(scope="module")
def tokenizer(llama: Llama, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    llama.tokenizer.save(folder)
    return str(folder)


def evaluate(model: str, task: dict[str, Any], running: Running, path: str, **options: Any) -> list[dict[str, Any]]:
    """What the harness notes of each document."""
    from lm_eval.api.registry import get_model

    lm = get_model(model)(base_url=running.url + path, model="small", max_length=500, **options)
    return evaluate_by(lm, task, is_chat="chat" in model)


def evaluate_by(lm: Any, task: dict[str, Any], *, is_chat: bool) -> list[dict[str, Any]]:
    import datasets
    import lm_eval
    from lm_eval.api.task import ConfigurableTask

    data = {"test": datasets.Dataset.from_list(DOCS)}
    tiny = ConfigurableTask(config=task | {"task": "tiny", "test_split": "test", "custom_dataset": lambda **_: data})
    found = lm_eval.evaluate(lm=lm, task_dict={"tiny": tiny}, apply_chat_template=is_chat, bootstrap_iters=0)
    assert found is not None
    return found["samples"]["tiny"]


def by_transformers(theirs: TransformersLlama, ids: list[int]) -> list[float]:
    with torch.inference_mode():
        logprobs = theirs(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1).tolist()


@pytest.mark.parametrize("num_at_once", [1, 4])
def test_continuations_are_as_probable_as_they_are(
    running: Running, llama: Llama, theirs: TransformersLlama, tokenizer: str, num_at_once: int
) -> None:
    samples = evaluate(
        "local-completions",
        LIKELY,
        running,
        "/v1/completions",
        tokenizer=tokenizer,
        tokenizer_backend="huggingface",
        batch_size=2,
        num_concurrent=num_at_once,
    )
    assert len(samples) == len(DOCS)
    for sample in samples:
        for choice, ((logprob, is_greedy),) in zip(CHOICES, sample["resps"], strict=True):
            context = llama.tokenizer.encode(sample["doc"]["question"], add_special_tokens=False)
            ids = context + llama.tokenizer.encode(choice, add_special_tokens=False)
            expected = score(llama.runner, ids).tokens[len(context) :]
            assert logprob == sum(token.logprob or 0 for token in expected)
            assert logprob == pytest.approx(sum(by_transformers(theirs, ids)[len(context) - 1 :]), rel=1e-5)
            assert is_greedy == all(token.rank == 1 for token in expected)


def test_the_greedy_continuation_is_called_greedy(running: Running, llama: Llama, tokenizer: str) -> None:
    question = DOCS[0]["question"]
    made = llama.generate(question, temperature=0.0, max_tokens=1).completions[0].token_ids
    ids = [*llama.tokenizer.encode(question), *made]
    body = {"prompt": ids, "model": "small", "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    (choice,) = running.post("/v1/completions", **body).json()["choices"]
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    ((_, is_greedy),) = LocalCompletionsAPI.parse_logprobs({"choices": [choice]}, ctxlens=[len(ids) - 1])
    assert is_greedy


@pytest.mark.parametrize(
    ("model", "path"), [("local-completions", "/v1/completions"), ("local-chat-completions", "/v1/chat/completions")]
)
def test_what_comes_next_is_what_the_library_says(
    running: Running, llama: Llama, tokenizer: str, model: str, path: str
) -> None:
    options = {"eos_string": "<|im_end|>"} if "chat" in model else {"tokenizer": tokenizer}
    samples = evaluate(model, NEXT, running, path, **options)
    assert len(samples) == len(DOCS)
    wanted: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "stop": ["e", "\n\n"]}
    for sample in samples:
        question = sample["doc"]["question"]
        if "chat" in model:
            assert json.loads(sample["arguments"][0][0][0]) == [{"role": "user", "content": question}]
            expected = llama.chat([{"role": "user", "content": question}], **wanted)
        else:
            expected = llama.generate(llama.tokenizer.encode(question, add_special_tokens=False), **wanted)
        assert sample["resps"] == [[expected.text]]


def guides_commands() -> list[str]:
    text = (Path(__file__).parents[2] / "docs/guides/serving.md").read_text(encoding="utf-8")
    return re.findall(r"^\$ (lm_eval (?:.*\\\n)*.*)\n", text, re.M)


@pytest.mark.parametrize(("command", "task"), [*zip(guides_commands(), (LIKELY, NEXT), strict=True)])
def test_the_guides_commands_reach_the_server(
    running: Running, tokenizer: str, monkeypatch: pytest.MonkeyPatch, command: str, task: dict[str, Any]
) -> None:
    """As the harness reads them, but for the task."""
    from lm_eval._cli.harness import HarnessCLI
    from lm_eval.api.registry import get_model

    hub = "HuggingFaceTB/SmolLM2-135M-Instruct"
    for theirs, ours in {"http://127.0.0.1:8123": running.url, "=smollm2-135m": "=small", hub: tokenizer}.items():
        command = command.replace(theirs, ours)
    monkeypatch.setattr("sys.argv", shlex.split(command.replace("\\\n", " ")))
    args = HarnessCLI().parse_args()
    lm = get_model(args.model).create_from_arg_obj(args.model_args, {})
    samples = evaluate_by(lm, task, is_chat=getattr(args, "apply_chat_template", False))
    path = args.model_args["base_url"].removeprefix(running.url)
    options = {"tokenizer": tokenizer} if task is LIKELY else {}
    expected = evaluate(args.model, task, running, path, **options)
    assert [sample["resps"] for sample in samples] == [sample["resps"] for sample in expected]
