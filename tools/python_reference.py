"""Write docs/reference/python.md from the docstrings of the Python API.

    python tools/python_reference.py

Every public name has its signature, its docstring and an example. `tests/integration/test_docs.py` runs the examples,
and `tests/integration/test_python_reference.py` holds the page to the docstrings.
"""

import inspect
import re
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ForwardRef, Literal, Union, get_args, get_origin

import llamarium
from llamarium.generation.answers import Answers
from llamarium.generation.conversation import Conversation
from llamarium.generation.text_engine import TextEngine

PAGE = Path(__file__).parents[1] / "docs/reference/python.md"

SECTIONS: dict[str, tuple[str, ...]] = {
    "Load a model": ("load", "Llama", "Llama.model", "Llama.runner"),
    "Continue a text": (
        "Llama.generate", "Llama.stream", "Generation", "Completion", "Piece", "SamplingParams",
        "Llama.sampling_params", "Grammar", "Llama.grammars", "PromptLookup",
    ),
    "Dialogs": (
        "Llama.chat", "Llama.stream_chat", "Llama.chat_params", "Llama.conversation", "Conversation",
        "Conversation.say", "Conversation.go_on", "Conversation.fork", "Conversation.close",
    ),
    "Ids and vectors": (
        "Llama.encode", "Llama.decode", "Llama.tokenizer", "Llama.optional_tokenizer", "Tokenizer", "load_tokenizer",
        "Llama.embed",
    ),
    "Measure and look inside": (
        "Llama.score", "Llama.perplexity", "Llama.divergence", "Llama.next_tokens", "Llama.neighbors", "Llama.trace",
        "Llama.trace_steps", "Llama.inspect",
    ),
    "Train": ("pretrain", "finetune", "dpo", "grpo", "merge"),
    "Write files": ("export", "quantize"),
    "Many requests at once": (
        "Llama.engine", "TextEngine.submit", "TextEngine.stream", "TextEngine.stream_chat", "TextEngine.embed",
        "TextEngine.add_adapter", "TextEngine.close", "Answers", "Answers.result", "Answers.close", "DiskCache",
    ),
    "Shapes": ("preset", "PRESETS", "ModelConfig", "RopeScaling", "LlamaForCausalLM"),
    "Errors and version": ("LlamariumError", "__version__"),
}  # fmt: skip

CLASSES = {value.__name__: value for value in (llamarium.Llama, Conversation, TextEngine, Answers)}

CONSTANTS = {
    "PRESETS": "Configs of published models, and of models to train, by name; see `preset`.\n\n"
    '>>> sorted(llamarium.PRESETS)[:3]\n["llama-2-7b", "llama-3-8b", "llama-3.1-70b"]'.replace('"', "'"),
    "__version__": "The version.\n\n>>> llamarium.__version__.count('.')\n2",
}

INTRO = """# The Python API

<!-- Written by tools/python_reference.py from the docstrings; change those. -->

`import llamarium` is fast and does not need PyTorch: names are imported on first use. Without PyTorch, names that need
it raise an error that says how to install it.

The examples on this page run from top to bottom in one Python session that starts with

```python
import llamarium

llama = llamarium.load("shakespeare-char", dtype="float32")
smollm2 = llamarium.load("smollm2-135m", dtype="float32")
```

**Options** are keyword parameters. Defaults of sampling options come from the model's `generation_config.json`, then
from the signature; None means the default. If you pass a `SamplingParams` as `params`, it is complete: only the stop
tokens of the file are added, and options override it. A misspelled option, or an option of another library, raises a
`SamplingError`, `OptionError` or `TrainingError` that names the option to use instead:

```python
>>> try:
...     llama.generate("To be", do_sample=False)
... except llamarium.LlamariumError as error:
...     print(error)
unknown option do_sample: temperature=0 is greedy; above 0, which is the default of most models, tokens are drawn
```

**A logits processor** is your own function in the sampler, for one request. It is called for every token with the ids
of the prompt and the answer so far (int64, shape (T,)) and a copy of the model's logits (float32, shape (V,)), and
returns the logits to sample from:

```python
>>> import numpy as np
>>> e = llama.encode("e")[0]
>>> def without_e(token_ids, logits):
...     logits[e] = -np.inf
...     return logits
>>> "e" in llama.generate("To be", logits_processor=without_e, temperature=0, max_tokens=60).text
False
```

- It runs before all other parameters: bias, penalties, `min_tokens`, the grammar, temperature and filters apply to its
  result, so structured output (`json_schema` and others) and tools keep working.
- Sampling uses the seed as usual. To choose the token yourself, exclude all others with -inf.
- Reported log-probabilities are the model's own.
- Drafts (`prompt_lookup`, `draft_model`) are verified against its result, so they do not change the answer if it
  depends only on its arguments. It may be called again for the same token, and for each of `n` answers.
- Floats other than float32 are rounded. Another shape or type, NaN, +inf, or -inf for every token ends the request with
  a `LogitsProcessorError`, and so does an exception, which becomes its `__cause__`. Other requests are not affected.
- In `llama.engine()` it runs in the engine's thread, between two steps of all requests: make it fast, and do not wait
  for an answer of the same engine in it.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the page."""
    parts = [INTRO]
    for title, names in SECTIONS.items():
        parts += [f"## {title}\n", *map(_entry, names)]
    return "\n".join(parts)


def documented(name: str) -> tuple[object, str]:
    """Return what a name of `SECTIONS` stands for, and its docstring."""
    owner, _, member = name.rpartition(".")
    if name in CONSTANTS:
        return getattr(llamarium, name), CONSTANTS[name]
    value: Any = CLASSES.get(name) or (inspect.getattr_static(CLASSES[owner], member) if owner else None)
    value = getattr(llamarium, name) if value is None else value
    return value, inspect.getdoc(value) or ""


def _entry(name: str) -> str:
    value, doc = documented(name)
    title = name.replace("Llama.", "llama.", 1) if name.startswith("Llama.") else name
    title = re.sub("^(TextEngine|Answers|Conversation)\\.", lambda match: match[0].lower(), title)
    title = title.replace("textengine.", "engine.").replace("conversation.", "dialog.")
    heading = f"### `{title}`\n"
    is_called = callable(value) and name not in (*CLASSES, "LlamariumError")  # others are made by methods
    signature = f"```text\n{_signature(title, value)}\n```\n" if is_called else ""
    return "\n".join(part for part in (heading, signature, _markdown(doc)) if part)


def _signature(name: str, value: Callable[..., Any]) -> str:
    signature = inspect.signature(value)
    parts: list[str] = []
    is_keyword = False
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            is_keyword = True
            parts.append("*")
        default = "" if parameter.default is parameter.empty else f" = {_default(parameter.default)}"
        parts.append(f"{parameter.name}: {_type(parameter.annotation)}{default}")
    returns = "" if inspect.isclass(value) else f" -> {_type(signature.return_annotation)}"
    line = f"{name}({', '.join(parts)}){returns}"
    if len(line) <= 100:
        return line
    lines = [""]
    for part in parts:  # as many on a line as it has room for
        if len(lines[-1]) + len(part) > 95:
            lines.append("")
        lines[-1] += f" {part}," if lines[-1] else f"{part},"
    return f"{name}(\n{textwrap.indent(chr(10).join(lines), '    ')}\n){returns}"


def _default(value: object) -> str:
    return repr(value).replace("PosixPath", "Path")


def _type(hint: Any) -> str:
    """Return a type as it is written in source, without the modules of names."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Ellipsis:
        return "..."
    if hint is None or hint is type(None):
        return "None"
    if isinstance(hint, list):
        return f"[{', '.join(map(_type, hint))}]"
    if isinstance(hint, ForwardRef):
        return hint.__forward_arg__
    if isinstance(hint, str):
        return hint
    if origin in (Union, types.UnionType):
        return " | ".join(map(_type, arguments))
    if origin is Literal:
        return " | ".join(map(repr, arguments))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_type, arguments))}]"
    return getattr(hint, "__name__", str(hint))


# --- docstrings -------------------------------------------------------------------------------------------------------

_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields|Warns):$")
_ITEM = re.compile(r"^ {4}(\*{0,2}[\w.]+): (.*)$")


def _markdown(doc: str) -> str:
    """Return a docstring of Google's style as Markdown, its examples as sessions of Python."""
    lines: list[str] = []
    for block in re.split(r"\n\n", doc):
        if block.startswith(">>> "):
            lines += ["```python", block, "```", ""]
        elif _SECTION.match(block.split("\n")[0]):
            lines += [*_items(block.split("\n")), ""]
        else:
            lines += [block, ""]
    return "\n".join(lines)


def _items(lines: list[str]) -> Iterator[str]:
    yield f"**{lines[0][:-1]}**\n"
    for line in lines[1:]:
        if match := _ITEM.match(line):
            yield f"- `{match[1].lstrip('*')}`: {match[2]}"
        else:
            yield f"  {line.strip()}" if line.startswith(" " * 8) else line.strip()


if __name__ == "__main__":
    main()
