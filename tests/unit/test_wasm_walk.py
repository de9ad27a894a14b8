"""A walk through every view of the page without a server, held to a local server on the same file.

The worker's code runs in Node.js. Activations, weights and tokens have the bits of the portable kernels; what is
computed from them in JavaScript equals the server's answer within float32 rounding.
"""

import json
import math
import os
import platform
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamarium
from llamarium.checkpoints.open import open_model
from llamarium.config import ModelConfig
from llamarium.page.probes.table import OF_MODEL, OF_PASS
from llamarium.runtime.taps import ACTIVATIONS
from wasm_engine import ROOT, Engine, build_engine

Question = tuple[str, str, dict[str, Any] | None]

TEXTS = ("To be, or not", "My lord, the king is come.\nWhy so?", "O Romeo, Romeo! wherefore art thou")
NEED_A_SERVER = {
    "inputs", "errors", "lesson", "compare", "bits", "moment", "moment/pattern", "source", "codes", "linear_probe",
    "after_error", "translations", "runs", "runs/{run}/rows", "runs/{run}/history",
}  # fmt: skip
"""Probes for which the page names the command of a local server."""

INTERVENTIONS = {"edited", "patches"}

ROUNDED = {
    "scores", "pattern", "next", "sampler", "score", "heads", "heads/added", "attribution", "lens", "lens/grid",
    "head_kinds", "distances", "picture", "neighbors", "similarity",
}  # fmt: skip
"""Probes and activations that JavaScript computes from others: sums, roots and exponentials in another order."""

OTHER_SET = 0.02
"""How far activations on another kernel set may be from the portable ones, in units of the largest value."""

pytestmark = [
    pytest.mark.torch("it compiles for browsers, with the dev extra"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        platform.machine() not in ("x86_64", "AMD64"), reason="the portable kernels of this processor fuse additions"
    ),
]


@dataclass(frozen=True)
class Walk:
    """Questions about one model, and what the engine and a local server answer."""

    path: Path
    questions: list[Question]
    answers: list[Any]
    portable: list[Any]

    def pairs(self) -> Iterator[tuple[Question, Any, Any]]:
        return zip(self.questions, self.answers, self.portable, strict=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return build_engine(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module", params=[("shakespeare-char", None), ("letters", "Q8_0")], ids=lambda one: one[0])
def walk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> Walk:
    """A walk through a model whose weights are bfloat16, and through one whose weights are packed."""
    name, kind = request.param
    folder = tmp_path_factory.mktemp("walk")
    path = llamarium.export(name, folder / f"{name}.gguf", format="gguf", type=kind)
    questions = questions_of(open_model(path).checkpoint.config)
    return Walk(path, questions, ask_engine(engine, path, questions), ask_server(path, questions, "portable"))


def ask_engine(engine: Engine, path: Path, questions: list[Question]) -> list[Any]:
    asked = [{"method": method, "path": place, "body": body} for method, place, body in questions]
    return engine.ask(model=str(path), questions=asked)


def ask_server(path: Path, questions: list[Question], kernels: str | None) -> list[Any]:
    """Ask a local server in a process of its own: kernels are chosen once."""
    asked = path.with_suffix(".json")
    asked.write_text(json.dumps(questions))
    environment = {name: value for name, value in os.environ.items() if name != "LLAMARIUM_KERNELS"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/portable_answers.py"), str(path), str(asked)],
        env={**environment, **({"LLAMARIUM_KERNELS": kernels} if kernels else {})},
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def questions_of(config: ModelConfig) -> list[Question]:
    """Return the walk: every view that the page offers, at places that differ from text to text."""
    places = random.Random(39)
    questions = list[Question]()
    for text in TEXTS:
        questions.append(("POST", "/inspect/passes", {"text": text}))
        for method, path, body in _of_pass(config, len(text), places):
            questions.append((method, f"/inspect/passes/{{id}}/{path}", body))
        questions += [(method, f"/inspect/{path}", body) for method, path, body in _of_model(config, text, places)]
    return questions


def _of_pass(config: ModelConfig, length: int, places: random.Random) -> Iterator[Question]:
    layers, heads, vocab = config.num_hidden_layers, config.num_attention_heads, config.vocab_size
    for name, activation in ACTIVATIONS.items():
        position, layer = places.randrange(length), places.randrange(layers)
        yield "GET", f"activations/{name}?position={position}", None
        if activation.in_layer:
            head = f"&head={places.randrange(2)}" if {"N", "K"} & set(activation.axes) else ""
            yield "GET", f"activations/{name}?layer={layer}{head}&stride=3", None
    for _ in range(3):
        layer, head, position = places.randrange(layers), places.randrange(heads), places.randrange(1, length)
        token, against = places.sample(range(vocab), 2)
        at = f"position={position}"
        yield "GET", f"next?{at}&k={vocab}", None
        yield "GET", f"heads?layer={layer}&{at}", None
        yield "GET", f"heads/added?layer={layer}&{at}", None
        yield "GET", f"neurons?layer={layer}&{at}&k=12&stride=2", None
        yield "GET", f"attribution?{at}&token_id={token}&against_id={against}", None
        yield "GET", f"lens?{at}&token_id={token}&k=5", None
        yield "GET", f"distances?layer={layer}&head={head}&{at}&key={places.randrange(position)}&stop=40", None
        yield "GET", f"matrix?layer={layer}&linear=down_proj&start={places.randrange(20)}&count=3", None
        sampling = {"temperature": places.choice((0, 0.7, 1.5)), "top_k": 9, "top_p": 0.95, "min_p": 0.01}
        penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "start": 1}
        yield "POST", "sampler", {"position": position, "k": vocab, "seed": token, **sampling, **penalties}
    yield "GET", "lens/grid?after=attention&start=2&stop=9&stride=3", None
    yield "GET", f"picture?start=0&stop={length}&stride=1", None
    yield "GET", f"picture?start=2&stop={length}&stride=3&blocks=true", None
    yield from (("GET", path, None) for path in ("head_kinds", "score?start=1", "cost"))


def _of_model(config: ModelConfig, text: str, places: random.Random) -> Iterator[Question]:
    ids = places.sample(range(config.vocab_size), 2)
    layer = places.randrange(config.num_hidden_layers)
    yield "GET", f"rows?ids={ids[0]},{ids[1]}", None
    yield "GET", f"weights?key=model.layers.{layer}.input_layernorm.weight", None
    yield "GET", f"rope?position={places.randrange(100)}", None
    yield "POST", "tokens", {"text": text[:6], "add_special_tokens": False, "tokenizer": "model"}
    yield "POST", "word", {"word": text[0]}
    yield "POST", "neighbors", {"word": ids[0], "k": 5}
    yield "POST", "similarity", {"word": text[0], "other": text[3]}


# --- the same numbers -------------------------------------------------------------------------------------------------


def test_activations_weights_and_tokens_have_the_bits_of_the_portable_kernels(walk: Walk) -> None:
    num_values = 0
    for (_, path, body), answer, expected in walk.pairs():
        if probe_of(path) == "passes":
            assert answer["tokens"] == expected["tokens"]
        elif probe_of(path) not in ROUNDED:
            assert differences(answer, expected, 0) == [], (path, body)
            num_values += number_count(expected)
    assert num_values > 300


def test_what_is_computed_from_them_equals_the_servers_within_rounding(walk: Walk) -> None:
    for (_, path, body), answer, expected in walk.pairs():
        if probe_of(path) in ROUNDED:
            assert differences(answer, expected, 1e-5) == [], (path, body)


def test_the_walk_visits_every_view_that_the_page_offers(walk: Walk) -> None:
    visited = {probe_of(path) for _, path, _ in walk.questions}
    offered = {*OF_PASS, *OF_MODEL} - NEED_A_SERVER - INTERVENTIONS - {"model"}  # which names what computes
    assert {name.split("/{")[0] for name in offered} <= visited
    assert set(ACTIVATIONS) & ROUNDED == {"scores", "pattern"} <= visited


def test_activations_on_another_kernel_set_are_near(walk: Walk) -> None:
    others = ask_server(walk.path, walk.questions, None)
    for (_, path, _), answer, other in zip(walk.questions, walk.answers, others, strict=True):
        if probe_of(path) == "activations":
            mine, theirs = (np.asarray(one["values"], np.float64) for one in (answer, other))
            size = np.abs(theirs[np.isfinite(theirs)]).max(initial=0)
            assert np.allclose(mine, theirs, rtol=0, atol=OTHER_SET * size), path


def probe_of(path: str) -> str:
    """Return which probe a question is for; of activations, those that JavaScript computes have their own names."""
    name = path.removeprefix("/inspect/").removeprefix("passes/{id}/").partition("?")[0]
    kind, _, activation = name.partition("/")
    return activation if activation in ("scores", "pattern") else kind if kind == "activations" else name


def differences(answer: Any, expected: Any, tolerance: float, place: str = "") -> list[str]:
    """Return where two answers differ: floats by more than a tolerance, relative or absolute; all else at all."""
    if isinstance(expected, dict) and isinstance(answer, dict) and answer.keys() == expected.keys():
        return [one for key in expected for one in differences(answer[key], expected[key], tolerance, f"{place}.{key}")]
    if isinstance(answer, np.ndarray):
        answer = answer.tolist()
    if isinstance(expected, list) and isinstance(answer, list) and len(answer) == len(expected):
        pairs = enumerate(zip(answer, expected, strict=True))
        return [one for i, pair in pairs for one in differences(*pair, tolerance, f"{place}[{i}]")]
    if isinstance(expected, float) and isinstance(answer, int | float):
        is_near = answer == expected or math.isclose(answer, expected, rel_tol=tolerance, abs_tol=tolerance)
        return [] if is_near else [f"{place}: {answer} is not {expected}"]
    return [] if answer == expected else [f"{place}: {answer!r} is not {expected!r}"]


def number_count(answer: Any) -> int:
    if isinstance(answer, dict | list):
        return sum(map(number_count, answer.values() if isinstance(answer, dict) else answer))
    return isinstance(answer, int | float)


# --- interventions ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["shakespeare-char", "letters"])
def interventions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> Walk:
    """Edits, steering and patches in float32, in which the local server computes them."""
    path = tmp_path_factory.mktemp("edits") / f"{request.param}.gguf"
    llamarium.export(request.param, path, format="gguf", type="F32")
    opened = open_model(path)
    questions = intervention_questions(opened.checkpoint.config, opened.tokenizer.encode(TEXTS[0].swapcase()))
    return Walk(path, questions, ask_engine(engine, path, questions), ask_server(path, questions, "portable"))


def intervention_questions(config: ModelConfig, source_ids: list[int]) -> list[Question]:
    """Return each kind of edit at one place or all, steering, and patches of each part."""
    layer = config.num_hidden_layers - 1
    edits: list[list[dict[str, Any]]] = [
        [{"part": "head", "layer": 0, "head": 1}],
        [{"part": "attention", "layer": layer, "factor": 0.5}],
        [{"part": "mlp", "layer": 0, "positions": [2, 5]}, {"part": "mlp", "layer": layer, "factor": -1.5}],
        [{"part": "residual", "layer": 0, "positions": [3], "factor": 2}],
        [{"part": "embed", "positions": [1, 4]}],
    ]
    steering = {"toward": "love", "away": "hate", "layer": 0}
    bodies: list[dict[str, Any]] = [
        *({"edits": one, "k": 12, "max_tokens": 8} for one in edits),
        {"edits": edits[0], "position": 6, "token_id": 11},
        {"steering": {**steering, "strength": 2.5}, "max_tokens": 8},
        {"steering": {**steering, "positions": [4, 5], "strength": -1}},
        {"edits": edits[1], "steering": steering},
    ]
    path = "/inspect/passes/{id}/"
    patch = {"source_ids": source_ids, "token_id": 11}
    patches: list[dict[str, Any]] = [
        patch,
        {**patch, "part": "attention", "against_id": 5},
        {**patch, "part": "mlp", "layers": [layer], "positions": [2, 7]},
    ]
    return [
        ("POST", "/inspect/passes", {"text": TEXTS[0]}),
        *(("POST", f"{path}edited", body) for body in bodies),
        *(("POST", f"{path}patches", body) for body in patches),
    ]


def test_edits_and_steering_change_what_they_change_on_a_local_server(interventions: Walk) -> None:
    for (_, path, body), answer, expected in interventions.pairs():
        if path.endswith("edited"):
            for view in (answer, expected):
                del view["runner"], view["floor"]  # the server computes these in PyTorch
            assert differences(answer, expected, 1e-4) == [], body
            assert answer["divergence"] > 0


def test_patches_recover_what_they_recover_on_a_local_server(interventions: Walk) -> None:
    for (_, path, body), answer, expected in interventions.pairs():
        if path.endswith("patches"):
            *events, end = expected
            for begin in (answer[0], events[0]):
                del begin["floor"]
            assert differences(answer, events, 1e-4) == [], body
            assert end == {"type": "end"}  # the worker's stream adds it


def test_all_other_probes_name_the_command(engine: Engine, interventions: Walk) -> None:
    names = sorted(NEED_A_SERVER)
    places = [f"passes/{{id}}/{name}" if name in OF_PASS else name.replace("{run}", "0") for name in names]
    asked = [interventions.questions[0], *(("GET", f"/inspect/{place}", None) for place in places)]
    for name, answer in zip(names, ask_engine(engine, interventions.path, asked)[1:], strict=True):
        assert (answer["status"], answer["error"]) == (404, "not_offered"), name
        assert "llamarium inspect" in answer["message"]
