"""What is learned of a dialog is what transformers' `return_assistant_tokens_mask` marks, calls of tools included."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Fast
from transformers import PreTrainedTokenizerFast

from llamarium.checkpoints.tokenizers import load_tokenizer
from llamarium.tokenizer.base import Tokenizer
from llamarium.train.data.dialogs import read_dialogs

pytestmark = pytest.mark.torch

WORDS = "the cat sat on a mat and said that it was fine 42 Zürich café 猫 😀 { } \" ' \\ 3.14".split()

CHATML = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|im_start|>assistant
{% generation %}{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>{% endgeneration %}

{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

HEADERS = """{{ bos_token }}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '<|im_start|>\\n\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}
{{- '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m.content | trim }}{% if loop.first and tools %}{{ tools | tojson }}{% endif %}<|im_end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_start|>\\n\\n' }}{% endif %}"""


@pytest.fixture(scope="module", params=[CHATML, HEADERS], ids=["chatml", "headers"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BPE of bytes with control tokens and a chat template, as a folder that both sides read."""
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    fast.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)  # pyright: ignore
    fast.train_from_iterator([" ".join(random.Random(i).choices(WORDS, k=40)) for i in range(50)], trainer)
    fast.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "<|im_start|>", "<|im_end|>")])
    made = PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>", eos_token="<|im_end|>", chat_template=request.param
    )
    path = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(path)
    return path


def text(source: random.Random) -> str:
    said = source.choice([" ", "\n", " \n "]).join(source.choices(WORDS, k=source.randint(1, 12)))
    return source.choice(["", " "]) + said + source.choice(["", " ", "\n"])


def dialog(source: random.Random) -> dict[str, Any]:
    """A dialog of one to four turns, some with a system message, with tools, calls and their results."""
    messages = [{"role": "system", "content": text(source)}] if source.random() < 0.4 else []
    names = source.sample(["weather", "add", "find_all"], source.randint(0, 3))
    for _ in range(source.randint(1, 4)):
        messages.append({"role": "user", "content": text(source)})
        if names and source.random() < 0.5:
            chosen = source.choices(names, k=source.randint(1, 2))
            calls = [{"type": "function", "function": {"name": name, "arguments": {"q": text(source), "n": None}}}
                     for name in chosen]  # fmt: skip
            messages.append({"role": "assistant", "content": source.choice(["", text(source)]), "tool_calls": calls})
            messages += [{"role": "tool", "content": text(source)} for _ in chosen]
        messages.append({"role": "assistant", "content": text(source)})
    described = {"type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": name, "description": text(source), "parameters": described}}
             for name in names]  # fmt: skip
    return {"messages": messages, **({"tools": tools} if tools else {})}


def test_300_dialogs(folder: Path, tmp_path: Path) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours: Tokenizer = load_tokenizer(str(folder))
    source = random.Random(37)
    rows = [dialog(source) for _ in range(300)]
    path = tmp_path / "dialogs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sum("tool_calls" in message for row in rows for message in row["messages"]) > 100
    for row, example in zip(rows, read_dialogs(path, ours), strict=True):
        expected: Any = theirs.apply_chat_template(
            row["messages"], tools=row.get("tools"), return_dict=True, return_assistant_tokens_mask=True
        )
        assert example.ids.tolist() == expected["input_ids"]
        assert example.learned.tolist() == [bool(mask) for mask in expected["assistant_masks"]]


def test_what_a_template_marks_is_believed(folder: Path, tmp_path: Path) -> None:
    """Also where it marks no end, and where it writes earlier answers anew once there are later ones."""
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    theirs.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content if loop.last else m.content | upper }}{% endgeneration %}<|im_end|>"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    theirs.save_pretrained(tmp_path / "other")
    ours: Tokenizer = load_tokenizer(str(tmp_path / "other"))
    messages = [
        {"role": "user", "content": "q <|im_end|>"}, {"role": "assistant", "content": "the cat"},
        {"role": "user", "content": "why"}, {"role": "assistant", "content": "it sat"},
    ]  # fmt: skip
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    (example,) = read_dialogs(path, ours)
    runs = ours.decode(example.ids[example.learned].tolist(), skip_special_tokens=False)
    assert runs == "THE CATit sat"
    messages[0]["content"] = "q"
    path.write_text(json.dumps({"messages": messages}))
    (example,) = read_dialogs(path, ours)
    expected: Any = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert example.ids.tolist() == expected["input_ids"]
    assert example.learned.tolist() == [bool(mask) for mask in expected["assistant_masks"]]
