"""Write what is made of the options that are declared: keywords for type checkers, and a page of the reference.

    python tools/options.py

Type checkers and editors need a `TypedDict` in source for `**options: Unpack[...]`; no dataclass can be unpacked so.
`tests/unit/test_options.py` holds the files to the declarations.
"""

import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from llamarium.options.declare import Option, declared
from llamarium.options.loading import LoadOptions
from llamarium.options.serving import AccessOptions, DraftOptions, EngineOptions
from llamarium.server.ray_serve.options import RayOptions
from llamarium.server.settings import Settings
from llamarium.train.config import DPOConfig, FinetuneConfig, GRPOConfig, PretrainConfig

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/llamarium"

WIDER = {"data": "Examples", "model": "str | Path", "tokenizer": "str | Path", "adapter": "str | Path"}
"""What functions of training take where the settings of a run hold text."""


def main() -> None:
    """Write the files."""
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")


def files() -> dict[Path, str]:
    """Return the content of each file."""
    loading = declared(LoadOptions)
    of_models = {
        "LoadKeywords": ("Options of `load`; `LoadOptions` declares them.", loading),
        "WeightKeywords": (
            "Options of `load` that `merge` has, too.",
            {name: one for name, one in loading.items() if one.part == "weights"},
        ),
        "EngineKeywords": ("Options of an engine; `EngineOptions` declares them.", declared(EngineOptions)),
    }
    of_training = {
        name: (f"Settings of `{kind.__name__}`, which declares them.", declared(kind))
        for name, kind in (
            ("PretrainKeywords", PretrainConfig),
            ("FinetuneKeywords", FinetuneConfig),
            ("DPOKeywords", DPOConfig),
            ("GRPOKeywords", GRPOConfig),
        )
    }
    own = "from llamarium.train.choices import Examples"
    return {
        SOURCE / "options/keywords.py": _module(of_models, {}),
        SOURCE / "train/keywords.py": _module(of_training, WIDER, own),
        ROOT / "docs/reference/options.md": _page(),
    }


def _module(classes: Mapping[str, tuple[str, Mapping[str, Option]]], wider: Mapping[str, str], *imports: str) -> str:
    body = "\n\n\n".join(
        "\n".join([f"class {name}(TypedDict, total=False):", f'    """{text}"""', "", *_fields(options, wider)])
        for name, (text, options) in classes.items()
    )
    used = [name for name in ("Mapping", "Sequence") if f"{name}[" in body]
    head = [
        '"""Keyword arguments as type checkers read them. Written by tools/options.py."""',
        "",
        *([f"from collections.abc import {', '.join(used)}"] if used else []),
        "from pathlib import Path",
        "from typing import Literal, TypedDict",
        *(["", *imports] if imports else []),
    ]
    return "\n".join(head) + "\n\n\n" + body + "\n"


def _fields(options: Mapping[str, Option], wider: Mapping[str, str]) -> Iterator[str]:
    for name, one in options.items():
        if name in wider:
            yield f"    {name}: {wider[name]}{' | None' * one.is_optional}"
        else:
            yield f"    {name}: {_type(one.hint)}"


def _type(hint: Any) -> str:
    """Return a type as it is written in source."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is types.NoneType:
        return "None"
    if origin in (Union, types.UnionType):
        literals = tuple(value for one in arguments if get_origin(one) is Literal for value in get_args(one))
        others = [one for one in arguments if get_origin(one) is not Literal]
        return " | ".join(map(_type, [*([Literal[literals]] if literals else []), *others]))
    if origin is Literal:
        return f"Literal[{', '.join(map(_quoted, arguments))}]"
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_type, arguments))}]"
    return hint.__name__


def _page() -> str:
    loading, serving = declared(LoadOptions), {**declared(Settings), **declared(AccessOptions)}
    drafts, of_ray = declared(DraftOptions), declared(RayOptions)
    own = {name: one for name, one in of_ray.items() if name not in {*loading, *serving, *drafts}}
    shared = [one for name, one in serving.items() if name in of_ray]
    alone = [one for name, one in serving.items() if name not in of_ray]
    sections = (
        (
            "Loading a model",
            "Keywords of `llamarium.load`, flags of every command that loads a model, and arguments of Ray Serve.\n"
            "`--chat-template` belongs to commands that write dialogs.",
            loading.values(),
        ),
        ("Drafts", "Of `generate`, `chat`, `serve`, `batch` and Ray Serve.", drafts.values()),
        ("A server", "Of `llamarium serve` and, with the same meaning, of Ray Serve.", shared),
        ("A server on one machine", "Of `llamarium serve` alone.", alone),
        (
            "Ray Serve",
            "Of [an application of Ray Serve](../guides/deploy.md#several-machines-ray) alone.",
            own.values(),
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


def _table(options: Iterable[Option]) -> str:
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for one in options:
        value = f"{one.default:g}" if isinstance(one.default, float) else one.default
        default = "required" if value is MISSING else "" if value in (None, "", ()) else f"`{value}`"
        listed = ", ".join(f"`{choice}`" for choice in one.choices)
        text = one.help.replace("|", "\\|") + (f" ({listed})" if listed and len(one.choices) < 5 else "")
        rows.append(f"| `{one.public_name}` | {default} | {text} |")
    return "\n".join(rows) + "\n"


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    main()
