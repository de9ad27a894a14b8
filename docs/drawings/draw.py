"""Draws the pictures of docs/architecture.md: `python docs/drawings/draw.py` writes the SVG files beside this one.

The whole is drawn from the layers of pyproject.toml and from the imports of src: a package stands above all that it
imports, an arrow is an import, and the colour says whether importing it brings PyTorch. The three lives name functions
of the source. `tests/unit/test_drawings.py` holds all of it to the code, and the files to this script.
"""

import ast
import functools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
SRC = ROOT / "src"

# --- the whole --------------------------------------------------------------------------------------------------------

COLUMNS = {
    "faces": {
        "cli": "a file per command",
        "api": "load() → Llama",
        "load_test": "a load generator",
        "errors": "the exception tree",
    },
    "look inside": {
        "page": "the glass box: data, routes",
        "inspect": "trace, lens, score, patches",
        "cost": "parameters, FLOPs",
        "config": "shape, RoPE",
        "presets": "known shapes",
    },
    "answer": {
        "server": "HTTP: OpenAI, Anthropic",
        "generation": "options, loop, dialogs: text",
        "engine": "scheduler, prefix: ids",
        "sampling": "one table, sampler, forms",
        "runtime": "Runner, Batch, Cache, Taps",
        "kernels": "the C library, by ctypes",
    },
    "text and files": {
        "ray_data": "a corpus, many machines",
        "datasets": "rows of files and of Python",
        "calibration": "from floats to packed folders",
        "adapters": "LoRA: files and Linears",
        "checkpoints": "Hugging Face, GGUF, Meta",
        "tokenizer": "text ↔ ids",
        "hub": "name → path",
        "options": "what users can set, declared once",
        "quant": "one table of types",
        "io": "atomic writes",
        "strict_json": "JSON from outside",
        "file_names": "of a model folder",
        "keywords": "options of public functions",
        "kv_codes": "KV cache in 8 and 4 bits",
        "extras": "what to install",
        "leftovers": "of killed writers",
        "collector": "garbage, later",
        "system": "locks, memory",
    },
    "learn": {
        "course": "write a Llama, step by step",
        "train": "pretrain, finetune, dpo",
        "model": "the Llama in PyTorch",
        "rope": "RoPE's frequencies",
        "attention": "the attend protocol",
    },
}
"""The packages, in columns of a purpose; their rows are the layers."""

ARROWS = """
cli > api; cli > page; page > inspect; page > server; api > inspect; api > checkpoints; server > generation;
inspect > generation; generation > engine; engine > sampling; engine > runtime; runtime > kernels; runtime > model;
checkpoints > runtime; checkpoints > quant; adapters > checkpoints; calibration > checkpoints; train > model;
model > attention
"""
"""Imports that are drawn; all others go downwards too."""

COLORS = {
    "none": ("#e3f1ec", "#17352b", "needs no PyTorch"),
    "part": ("#f6efda", "#403310", "parts of it need PyTorch"),
    "all": ("#f8e2d8", "#4a2312", "PyTorch"),
}


def layers() -> list[list[str]]:
    """Return the packages of each layer, the highest first, as import-linter holds them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rows = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [[name.removeprefix("llamarium.") for name in row.split(" : ")] for row in rows]


@functools.cache
def imports(room: str) -> dict[Path, frozenset[str]]:
    """Return what each file of a package imports at once: not for types, not within functions."""
    folder = SRC / "llamarium" / room
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    return {file: frozenset(_imported(ast.parse(file.read_text()))) for file in files}


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_for_types(node):
            yield from _imported(node)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def does_import(room: str, other: str) -> bool:
    """Whether a file of one package imports from the other, be it within a function."""
    folder = SRC / "llamarium" / room
    files = folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]
    found = (
        node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)
    )
    return any(f"{node.module}.".startswith(f"llamarium.{other}.") for node in found)


def torch_of(room: str) -> str:
    """Return how much of a package imports PyTorch: none, part or all."""
    uses = [any(name.split(".")[0] == "torch" for name in names) for names in imports(room).values()]
    share = sum(uses) / len(uses)
    return "none" if share == 0 else "all" if share > 0.5 else "part"


CELL_W, ROW_H, BOX_W, BOX_H, LEFT, TOP = 212, 58, 190, 42, 18, 92


def house() -> str:
    """Return the picture of the whole."""
    row_of = {room: row for row, rooms in enumerate(layers()) for room in rooms}
    boxes = {}
    for column, rooms in enumerate(COLUMNS.values()):
        for row in range(len(layers())):
            here = [room for room in rooms if row_of[room] == row]
            width = (BOX_W - 6 * (len(here) - 1)) / max(1, len(here))
            for place, room in enumerate(here):
                x = LEFT + column * CELL_W + place * (width + 6)
                boxes[room] = (x, TOP + row * ROW_H, width)
    height = TOP + len(layers()) * ROW_H + 62
    parts = [text(LEFT, 30, "The whole: a package stands above all that it imports", "title")]
    parts += [text(LEFT + i * CELL_W, 68, name, "head") for i, name in enumerate(COLUMNS)]
    parts += [_arrow(boxes[a], boxes[b]) for a, b in arrows()]
    for column in COLUMNS.values():
        parts += [_room(room, words, *boxes[room]) for room, words in column.items()]
    kernels = boxes["kernels"]
    below = kernels[1] + ROW_H + BOX_H / 2
    parts += [
        f'<rect class="c" x="{kernels[0]}" y="{below - 21}" width="{BOX_W}" height="{BOX_H}" rx="6"/>',
        text(kernels[0] + 10, below - 4, "native/", "name"),
        text(kernels[0] + 10, below + 12, "C: a whole pass in one call", "words"),
        f'<path class="arrow" d="M{kernels[0] + BOX_W / 2} {kernels[1] + BOX_H} V{below - 23}"/>',
    ]
    for i, (fill, _, words) in enumerate(COLORS.values()):
        x = LEFT + i * 190
        parts += [f'<rect x="{x}" y="{height - 34}" width="14" height="14" rx="3" fill="{fill}" stroke="#8a8a8a"/>',
                  text(x + 20, height - 22, words, "words")]  # fmt: skip
    return svg(LEFT * 2 + len(COLUMNS) * CELL_W - 22, height, parts)


def arrows() -> list[tuple[str, str]]:
    """Return the pairs of rooms between which an arrow is drawn."""
    pairs = (arrow.split(" > ") for arrow in ARROWS.replace("\n", " ").split(";"))
    return [(a.strip(), b.strip()) for a, b in pairs]


def _room(room: str, words: str, x: float, y: float, width: float) -> str:
    fill, ink, _ = COLORS[torch_of(room)]
    box = f'<rect class="room" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BOX_H}" rx="6" fill="{fill}"/>'
    return box + text(x + 8, y + 17, room, "name", ink) + text(x + 8, y + 33, words, "words", ink)


def _arrow(source: tuple[float, float, float], target: tuple[float, float, float]) -> str:
    x1, y1, x2, y2 = source[0] + source[2] / 2, source[1] + BOX_H, target[0] + target[2] / 2, target[1] - 2
    bend = max(14, (y2 - y1) / 2)
    return f'<path class="arrow" d="M{x1:.1f} {y1} C{x1:.1f} {y1 + bend:.1f} {x2:.1f} {y2 - bend:.1f} {x2:.1f} {y2}"/>'


# --- three lives ------------------------------------------------------------------------------------------------------

LIVES = {
    "request": """
The life of a request: one chat completion, streamed
client | server | generation | engine | runtime | C
client > server | POST /v1/chat/completions: size, JSON, key, fields | server.http.body:StrictRoute
server > server | template and tokenizer make ids, in a thread | server.openai.fields:dialog_ids
server > generation | ids, parameters, grammar | server.answering:submit
generation > engine | a request, into the queue of the engine's thread | engine.thread:EngineThread.submit
engine > engine | blocks that hold the beginning of the prompt are shared | engine.prefix:PrefixIndex
engine > engine | each step: decode tokens, and as much of prompts as fits in | engine.scheduler:Scheduler.schedule
engine > runtime | one Batch: ids, positions, tables of blocks | runtime.batch:pack
runtime > C | lm_run: all layers, one call; keys and values stay in the cache | runtime.native.runner:NativeRunner.run
C > engine | logits of each sequence's last token
engine > C | lm_choose: the next token of each sequence | sampling.sampler:Sampler.sample
engine > generation | a token; the sequence stays for the next step | engine.request:TokenEvent
generation > server | whole characters, stop strings, calls of tools | generation.completion:Piece
server > client | an event in the protocol's words; then the next token | server.replying:reply
""",
    "training-step": """
The life of a training step
data | step | model | objective | optimizer | files
data > step | packed rows: ids, labels, positions, segments | train.data.order:Order
step > model | the trunk: hidden states, each token sees its own segment | train.step:causal_trunk
model > model | TrainingAttend: no cache, nothing kept | attention.training:TrainingAttend
model > objective | hidden states, not logits |
objective > objective | head and loss, some rows at a time | train.objectives.cross_entropy:cross_entropy_sum
objective > model | loss / number of learned tokens, backward | train.step:train_step
step > step | gradients: their norm, clipped; not finite: no update | train.step:StepResult
step > optimizer | one step at the schedule's rate | train.optim:set_learning_rate
step > files | an event: loss, norm, tokens/s | train.journal:Journal
step > files | now and then a checkpoint: written aside, hashed, renamed | train.state.checkpoint:save_checkpoint
""",
    "click": """
The life of a click: a head's pattern in the glass box
browser | page | inspect | runtime | C
browser > page | GET /inspect/passes/ID/activations/pattern?layer=&head= | page.probes.layers:activations
page > page | kept numbers of this pass, if they are there | page.passes:Passes.numbers
page > inspect | else the tokens in question, once more, over kept keys | inspect.trace:KeptPass.trace
inspect > runtime | a Batch and the names that are wanted | runtime.taps:Taps
runtime > C | lm_run, as for an answer; hands out what it computed | runtime.native.runner:NativeRunner.run
C > inspect | rotated queries; keys from the cache |
inspect > inspect | scores and pattern of these, in float32 | inspect.trace:trace
inspect > page | arrays by (name, layer) |
page > browser | the head's numbers, as float32 | page.binary:respond
""",
}
"""Title, lanes, and steps: from > to | what goes there | where, below llamarium."""


@dataclass(frozen=True)
class Step:
    """What goes from one lane to another, or is done in one; `code` is `module:name`, or empty."""

    source: str
    target: str
    words: str
    code: str


def parse(life: str) -> tuple[str, list[str], list[Step]]:
    """Return a life's title, lanes and steps."""
    title, lanes, *lines = life.strip().splitlines()
    steps = list[Step]()
    for line in lines:
        way, words, *code = (part.strip() for part in line.split("|"))
        source, target = (lane.strip() for lane in way.split(">"))
        steps.append(Step(source, target, words, code[0] if code else ""))
    return title, [lane.strip() for lane in lanes.split("|")], steps


def drawing(life: str) -> str:
    """Return a life as lanes, with time going down."""
    title, lanes, steps = parse(life)
    width, step_h, top = 1060, 46, 108
    gap = (width - 160) / (len(lanes) - 1)
    x_of = {lane: 80 + i * gap for i, lane in enumerate(lanes)}
    height = top + len(steps) * step_h + 16
    parts = [text(LEFT, 30, title, "title")]
    for lane, x in x_of.items():
        parts.append(f'<path class="lane" d="M{x:.1f} {top - 26} V{height - 14}"/>')
        parts.append(f'<rect class="head-box" x="{x - 58:.1f}" y="{top - 54}" width="116" height="28" rx="6"/>')
        parts.append(text(x, top - 35, lane, "name middle"))
    for i, step in enumerate(steps):
        parts += _step(step, x_of[step.source], x_of[step.target], top + i * step_h + 14, i + 1, width)
    return svg(width, height, parts)


def _step(step: Step, x1: float, x2: float, y: float, number: int, width: float) -> list[str]:
    if x1 == x2:
        line = f'<circle class="own" cx="{x1:.1f}" cy="{y}" r="4"/>'
    else:
        line = f'<path class="arrow" d="M{x1:.1f} {y} H{x2 - 5 if x2 > x1 else x2 + 5:.1f}"/>'
    is_right = min(x1, x2) > width * 0.55
    x, anchor = (max(x1, x2) - 10, " end") if is_right else (min(x1, x2) + 10, "")
    words = [(y - 5, f"{number}  {step.words}", "words"), (y + 12, step.code, "code")]
    return [
        line,
        *(text(x, at, said, kind + anchor + more) for at, said, kind in words if said for more in (" halo", "")),
    ]


# --- SVG --------------------------------------------------------------------------------------------------------------

STYLE = """
text { font-family: system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #222 }
.title { font-size: 19px; font-weight: 600 } .head { font-size: 13px; fill: #666 }
.name { font-size: 14px; font-weight: 600 }
.words { font-size: 11.5px } .code { font: 10.5px ui-monospace, "DejaVu Sans Mono", monospace; fill: #666 }
.middle { text-anchor: middle } .end { text-anchor: end }
.halo { stroke: #fff; stroke-width: 4px; stroke-linejoin: round }
.room { stroke: #8a8a8a } .c, .head-box { fill: #e6eaf4; stroke: #8a8a8a }
.lane { stroke: #bbb; stroke-dasharray: 3 4; fill: none }
.arrow { stroke: #5b6b8c; stroke-width: 1.3; fill: none; marker-end: url(#tip) } .own { fill: #5b6b8c }
"""
TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0 L8 4 L0 8 z" fill="#5b6b8c"/></marker></defs>'
)


def text(x: float, y: float, words: str, kind: str, ink: str = "") -> str:
    """Return a line of text; `kind` is classes of the style."""
    style = f' style="fill:{ink}"' if ink else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{style}>{escape(words)}</text>'


def svg(width: float, height: float, parts: list[str]) -> str:
    """Return a picture on white paper."""
    paper = f'<rect width="{width}" height="{height}" fill="#fff"/>'
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join([begin, f"<style>{STYLE}</style>", TIP, paper, *parts, "</svg>\n"])


def pictures() -> dict[str, str]:
    """Return each picture by the name of its file."""
    return {"house.svg": house()} | {f"{name}.svg": drawing(life) for name, life in LIVES.items()}


if __name__ == "__main__":
    for name, content in pictures().items():
        (FOLDER / name).write_text(content)
