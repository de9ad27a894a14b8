"""Write what is made of the options that are declared: keywords for type checkers, and a page of the reference.

    python tools/options.py

Type checkers and editors need a `TypedDict` in source for `**options: Unpack[...]`; no dataclass can be unpacked so.
`tests/unit/test_options.py` holds the files to the declarations.
"""

import re
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from llamarium.generation.dialog import DialogOptions
from llamarium.generation.options import PassOptions, RequestOptions
from llamarium.options.declare import Option, declared
from llamarium.options.loading import LoadOptions
from llamarium.options.serving import AccessOptions, DraftOptions, EngineOptions
from llamarium.sampling.grammar.description import FormOptions
from llamarium.sampling.params import SamplingParams
from llamarium.server.ray_serve.options import RayOptions
from llamarium.server.settings import Settings
from llamarium.train.config import DPOConfig, FinetuneConfig, GRPOConfig, PretrainConfig

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/llamarium"

WIDER = {"data": "Examples", "model": "str | Path", "tokenizer": "str | Path", "adapter": "str | Path"}
"""What functions of training take where the settings of a run hold text."""

SAMPLING = {
    "logit_bias": "Mapping[int, float]",
    "stop": "str | Sequence[str]",
    "stop_token_ids": "Sequence[int]",
    "logits_processor": "LogitsProcessor",
}
"""What functions take where `SamplingParams` holds a checked copy, and an alias whose type cannot be written."""

_IMPORTS_OF_SAMPLING = (
    "from llamarium.sampling.grammar.description import Grammar",
    "from llamarium.sampling.parameter import LogitsProcessor",
)

_IMPORTS_OF_ANSWERS = (
    "from llamarium.engine.pooling import Places",
    "from llamarium.engine.proposers.draft import DraftModel",
    "from llamarium.engine.proposers.lookup import PromptLookup",
    "from llamarium.generation.text_model import TextModel",
    "from llamarium.runtime.intervention import Edit",
    "from llamarium.sampling.keywords import SamplingKeywords",
    "from llamarium.tokenizer.tools.definition import ToolDefinition",
)


def main() -> None:
    """Write the files."""
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")


def files() -> dict[Path, str]:
    """Return the content of each file."""
    examples = "from llamarium.train.choices import Examples"
    return {
        SOURCE / "options/keywords.py": _module(_of_models(), {}),
        SOURCE / "sampling/keywords.py": _module(_of_sampling(), SAMPLING, *_IMPORTS_OF_SAMPLING, all_optional=True),
        SOURCE / "generation/keywords.py": _module(_of_answers(), {}, *_IMPORTS_OF_ANSWERS),
        SOURCE / "train/keywords.py": _module(_of_training(), WIDER, examples),
        ROOT / "docs/reference/options.md": _page(),
    }


Classes = Mapping[str, tuple[str, Mapping[str, Option]]]
"""Docstring and options of each class of keywords."""


def _of_models() -> Classes:
    loading = declared(LoadOptions)
    weights = {name: one for name, one in loading.items() if one.part == "weights"}
    return {
        "LoadKeywords": ("Options of `load`; `LoadOptions` declares them.", loading),
        "WeightKeywords": ("Options of `load` that `merge` has, too.", weights),
        "EngineKeywords": ("Options of an engine; `EngineOptions` declares them.", declared(EngineOptions)),
    }


def _of_sampling() -> Classes:
    sampling = declared(SamplingParams)
    text = "Options of an answer: fields of `SamplingParams`, and forms that are short for a `grammar`."
    options = {**sampling, "max_new_tokens": sampling["max_tokens"], **declared(FormOptions)}
    return {"SamplingKeywords": (text, options)}


def _of_answers() -> Classes:
    of_pass, of_request, of_dialog = map(declared, (PassOptions, RequestOptions, DialogOptions))
    return {
        "AnswerKeywords(SamplingKeywords)": ("Options of an answer; see also `PassOptions`.", of_pass),
        "RequestKeywords(TypedDict)": ("Options of a request; `RequestOptions` declares them.", of_request),
        "DialogKeywords(TypedDict)": ("Options of a dialog; `DialogOptions` declares them.", of_dialog),
        "ChatKeywords(AnswerKeywords, DialogKeywords)": ("Options of an answer in a dialog.", {}),
        "StreamKeywords(SamplingKeywords, RequestKeywords)": ("Options of `TextEngine.stream`.", {}),
        "StreamChatKeywords(StreamKeywords, DialogKeywords)": ("Options of `TextEngine.stream_chat`.", {}),
    }


def _of_training() -> Classes:
    kinds = {
        "PretrainKeywords": PretrainConfig,
        "FinetuneKeywords": FinetuneConfig,
        "DPOKeywords": DPOConfig,
        "GRPOKeywords": GRPOConfig,
    }
    return {
        name: (f"Settings of `{kind.__name__}`, which declares them.", declared(kind)) for name, kind in kinds.items()
    }


def _module(
    classes: Classes,
    wider: Mapping[str, str],
    *imports: str,
    all_optional: bool = False,
) -> str:
    """Return the source of a module; a class' name may have bases: `ChatKeywords(AnswerKeywords)`."""
    body = "\n\n\n".join(
        "\n".join([_head(name), f'    """{text}"""', *_fields(options, wider, all_optional)])
        for name, (text, options) in classes.items()
    )
    used = [name for name in ("Callable", "Mapping", "Sequence") if f"{name}[" in body]
    types_used = [name for name in ("Any", "Literal", "TypedDict") if re.search(rf"\b{name}\b", body)]
    head = [
        '"""Keyword arguments as type checkers read them. Written by tools/options.py."""',
        "",
        *([f"from collections.abc import {', '.join(used)}"] if used else []),
        *(["from pathlib import Path"] if "Path" in body else []),
        f"from typing import {', '.join(types_used)}",
        *(["", *imports] if imports else []),
    ]
    return "\n".join(head) + "\n\n\n" + body + "\n"


def _head(name: str) -> str:
    return f"class {name.removesuffix(')')}{'' if '(' in name else '(TypedDict'}, total=False):"


def _fields(options: Mapping[str, Option], wider: Mapping[str, str], all_optional: bool) -> Iterator[str]:
    if options:
        yield ""
    for name, option in options.items():
        hint = wider.get(name) or _type(option.hint)
        is_optional = (all_optional or option.is_optional) and not hint.endswith("None")
        yield f"    {name}: {hint}{' | None' * is_optional}"


def _type(hint: Any) -> str:
    """Return a type as it is written in source."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is types.NoneType or hint is ...:
        return "None" if hint is types.NoneType else "..."
    if origin in (Union, types.UnionType):
        literals = tuple(
            value for argument in arguments if get_origin(argument) is Literal for value in get_args(argument)
        )
        other_types = [argument for argument in arguments if get_origin(argument) is not Literal]
        return " | ".join(map(_type, [*([Literal[literals]] if literals else []), *other_types]))
    if origin is Literal:
        return f"Literal[{', '.join(map(_quoted, arguments))}]"
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_type, arguments))}]"
    return hint.__name__


def _page() -> str:
    loading, serving = declared(LoadOptions), {**declared(Settings), **declared(AccessOptions)}
    drafts, of_ray = declared(DraftOptions), declared(RayOptions)
    ray_options = {name: option for name, option in of_ray.items() if name not in {*loading, *serving, *drafts}}
    shared = [option for name, option in serving.items() if name in of_ray]
    alone = [option for name, option in serving.items() if name not in of_ray]
    sampling = {**declared(SamplingParams), **declared(FormOptions)}
    sections = (
        (
            "Sampling",
            "Keywords of `SamplingParams`, `generate`, `chat` and the like, and flags of `generate`, `chat` and\n"
            "`next`; [a server's requests](server.md) have most of them as fields. The flag of `stop_token_ids` is\n"
            "`--stop-id`, that of `n` is `--num-answers`.",
            sampling.items(),
        ),
        (
            "An answer",
            "Keywords of `generate`, `chat`, `stream` and `stream_chat`, besides those of sampling.",
            declared(PassOptions).items(),
        ),
        (
            "A dialog",
            "Keywords of `chat` and `stream_chat`, besides those of an answer.",
            declared(DialogOptions).items(),
        ),
        (
            "A request to an engine",
            "Keywords of `TextEngine.submit`, `stream` and `stream_chat`, besides those of sampling.",
            declared(RequestOptions).items(),
        ),
        (
            "Loading a model",
            "Keywords of `llamarium.load`, flags of every command that loads a model, and arguments of Ray Serve.\n"
            "`--chat-template` belongs to commands that write dialogs.",
            _named(loading.values()),
        ),
        ("Drafts", "Of `generate`, `chat`, `serve`, `batch` and Ray Serve.", _named(drafts.values())),
        ("A server", "Of `llamarium serve` and, with the same meaning, of Ray Serve.", _named(shared)),
        ("A server on one machine", "Of `llamarium serve` alone.", _named(alone)),
        (
            "Ray Serve",
            "Of [an application of Ray Serve](../guides/deploy.md#several-machines-ray) alone.",
            _named(ray_options.values()),
        ),
    )
    parts = [_INTRO, *(f"## {title}\n\n{text}\n\n{_table(options)}" for title, text, options in sections)]
    return "\n".join(parts)


_INTRO = """# Options

<!-- Written by tools/options.py from the declarations; change those. -->

Each option has one name: `max_queue` in Python and in Ray Serve is `--max-queue` on the command line. Sizes are in
bytes in Python; the command line also accepts 512MiB or 2GiB. The settings of training are in
[the Python API](python.md#train).
"""


def _named(options: Iterable[Option]) -> list[tuple[str, Option]]:
    return [(option.public_name, option) for option in options]


def _table(options: Iterable[tuple[str, Option]]) -> str:
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for name, option in options:
        value = f"{option.default:g}" if isinstance(option.default, float) else option.default
        default = "required" if value is MISSING else "" if value is None or value in ("", (), {}) else f"`{value}`"
        listed = ", ".join(f"`{choice}`" for choice in option.choices)
        text = option.help.replace("|", "\\|") + (f" ({listed})" if listed and len(option.choices) < 5 else "")
        rows.append(f"| `{name}` | {default} | {text} |")
    return "\n".join(rows) + "\n"


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    main()
