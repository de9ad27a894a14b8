"""The kernels as WebAssembly and the page's engine, held to the portable kernels and to Python: bits, ids and tokens.

web/tests/engine/driver.ts runs the engine in Node.js.
"""

import gzip
import json
import platform
import struct
import subprocess
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from llamarium.checkpoints.open import open_model
from llamarium.checkpoints.weights import native_weights
from llamarium.kernels import native, structs
from llamarium.options.loading import LoadOptions
from llamarium.runtime.batch import Batch
from llamarium.runtime.intervention import Edit
from llamarium.runtime.native.runner import NativeRunner
from llamarium.runtime.taps import Key, Taps
from llamarium.tokenizer.backends.characters import CharacterTokenizer
from llamarium.tokenizer.backends.gguf import from_gguf_metadata
from llamarium.tokenizer.backends.gguf_longest import longest_match_metadata
from llamarium.tokenizer.backends.words import make_words, words_pipeline
from wasm_engine import PACKED, ROOT, Engine, Floats, build_engine, byte_level_vocabulary, write_model, zig

LARGEST = 250_000
KINDS = {"packed": PACKED, "BF16": ("BF16", "Q4_1"), "F16": ("F16",), "F32": ("F32",)}
TEXT = (ROOT / "LICENSE").read_text()
LAYER_TAPS = structs.TAPS_OF_A_LAYER

pytestmark = [
    pytest.mark.torch("it compiles for browsers, with the dev extra"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        platform.machine() not in ("x86_64", "AMD64"), reason="the portable kernels of this processor fuse additions"
    ),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return build_engine(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def vocabulary() -> dict[str, Any]:
    return byte_level_vocabulary(TEXT, 400)


@pytest.fixture(scope="module", params=KINDS)
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, vocabulary: dict[str, Any]) -> Path:
    """A model with a layer of each type."""
    path = tmp_path_factory.mktemp("small") / f"{request.param}.gguf"
    write_model(path, KINDS[request.param], vocabulary, 405, biases=True)
    return path


@pytest.fixture(autouse=True)
def portable() -> Iterator[None]:
    library = native.library()
    assert library is not None
    library.lm_use_kernels(b"portable")
    yield
    library.lm_use_kernels(None)


def load(path: Path) -> NativeRunner:
    opened = open_model(path, with_tokenizer=False)
    weights = native_weights(opened.checkpoint, LoadOptions(device="cpu"))
    assert weights is not None
    return NativeRunner(opened.checkpoint.config, weights)


def same_bits(found: Floats, expected: Any) -> bool:
    return np.array_equal(found.view(np.uint32), np.ravel(np.asarray(expected, np.float32)).view(np.uint32))


class Local:
    """One sequence of a runner, as the engine has one."""

    def __init__(self, runner: NativeRunner) -> None:
        self.runner = runner
        self.cache = runner.new_cache(32)
        self.blocks = np.arange(32, dtype=np.int32)[None]

    def run(self, ids: list[int], start: int, taps: Taps | None = None, edits: tuple[Edit, ...] = ()) -> Floats:
        count = len(ids)
        batch = Batch(
            np.array(ids, np.int64),
            np.arange(start, start + count, dtype=np.int32),
            np.zeros(count, np.int32),
            self.blocks,
            np.arange(count, dtype=np.int32),
            edits=(edits,) if edits else None,
        )
        return np.asarray(self.runner.run(batch, self.cache, taps))


# --- the module -------------------------------------------------------------------------------------------------------


def test_the_modules_are_small_and_the_one_of_one_thread_needs_nothing(engine: Engine) -> None:
    sizes = [len(gzip.compress(path.read_bytes(), 9)) for path in (engine.kernels, engine.shared_kernels)]
    print(*(f"{size:,} bytes" for size in sizes))
    assert sum(sizes) <= LARGEST
    script = "const fs=require('fs');const m=new WebAssembly.Module(fs.readFileSync(process.argv[1]));"
    script += (
        "console.log(JSON.stringify([WebAssembly.Module.imports(m), WebAssembly.Module.exports(m).map((e) => e.name)]))"
    )
    imports, exports = json.loads(subprocess.check_output(["node", "-e", script, str(engine.kernels)]))
    assert imports == []
    assert {"memory", "lm_run", "lm_product", "lm_pack"} <= set(exports)
    assert "lm_attend_rows" not in exports  # of training


def test_structs_lie_where_the_compiler_has_them(engine: Engine, tmp_path: Path) -> None:
    layouts = engine.ask()
    checks = ['#include <stddef.h>\n#include "llamarium.h"\n']
    for name, layout in layouts.items():
        checks.append(f"_Static_assert(sizeof({name}) == {layout['size']}, {json.dumps(name)});")
        for field in layout["fields"]:
            said = f"{name}.{field['name']}"
            checks.append(f'_Static_assert(offsetof({name}, {field["name"]}) == {field["offset"]}, "{said}");')
    assert len(checks) > 60
    (tmp_path / "offsets.c").write_text("\n".join(checks))
    zig("-I", ROOT / "native", "-c", tmp_path / "offsets.c", "-o", tmp_path / "offsets.o")


# --- bits -------------------------------------------------------------------------------------------------------------


def test_products_and_rows_of_every_type_have_the_bits_of_the_portable_kernels(engine: Engine, small: Path) -> None:
    runner = load(small)
    random = np.random.default_rng(3)
    inputs = [random.normal(0, 1, (count, 256)).astype(np.float32) for count in (1, 2, 3, 7, 13)]
    inputs[1][0, 5] = 300  # an outlier
    inputs[2][1, 40] = np.inf
    keys = [key for key, weight in runner.weights.items() if len(weight.shape) == 2]
    calls = [("product", key, x) for key in keys for x in inputs]
    rows = [0, 17, 101]
    found = engine.call(small, *calls, *(("rows", key, rows) for key in keys), ("readStream", inputs[4]))
    for call, y in zip(calls, found, strict=False):
        expected = runner.product(call[1], call[2])
        assert np.array_equal(np.isnan(y), np.isnan(expected.ravel())), call[1]
        assert same_bits(np.nan_to_num(y), np.nan_to_num(expected)), (call[1], len(call[2]))
    for key, values in zip(keys, found[len(calls) : -1], strict=True):
        assert same_bits(values, runner.dequantize(key, rows)), key
    assert same_bits(found[-1], runner.read_stream(inputs[4]))


def test_passes_have_the_bits_of_the_portable_kernels(engine: Engine, small: Path) -> None:
    runner = load(small)
    layers = runner.config.num_hidden_layers
    length = 60 if layers > 2 else 270  # over two KV chunks; K types take long in plain C
    ids = np.random.default_rng(5).integers(0, 400, length).tolist()
    keys: list[Key] = [("embed", None), ("final_norm", None), *((name, layers - 1) for name in LAYER_TAPS)]
    names = {key: key[0] if key[1] is None else f"{key[0]}.{key[1]}" for key in keys}
    add = np.linspace(-1, 1, 256).astype(np.float32)
    edits = (
        Edit("head", 0, 1, factor=0.0),
        Edit("mlp", layers - 1, positions=(3, length + 2), factor=1.5),
        Edit("residual", 0, positions=(length + 2,), add=add),
        Edit("attention", layers - 1, factor=0.5),
        Edit("embed", factor=0.9),
    )
    sent = [
        {
            "part": one.part,
            "layer": one.layer,
            "head": one.head,
            "positions": one.positions,
            "factor": one.factor,
            "add": one.add,
        }
        for one in edits
    ]
    tapped = {"ids": ids[:40], "start": 0, "taps": list(names.values()), "logitRows": "all"}
    prompt, one, edited, cached = engine.call(
        small,
        ("run", tapped),
        ("run", {"ids": ids[40:], "start": 40, "logitRows": "all"}),
        ("run", {"ids": [5, 6, 7, 8], "start": length, "edits": sent, "logitRows": "all"}),
        ("run", {"ids": [9], "start": 50, "taps": ["k_rot.0"]}),
    )

    local, taps = Local(runner), Taps(keys)
    assert same_bits(prompt["logits"], local.run(ids[:40], 0, taps))
    for key in keys:
        assert same_bits(prompt["taps"][names[key]], taps.kept[key][0]), key
    assert same_bits(one["logits"], local.run(ids[40:], 40))
    plain = local.run([5, 6, 7, 8], length)
    assert same_bits(edited["logits"], local.run([5, 6, 7, 8], length, edits=edits))
    assert not same_bits(edited["logits"], plain)
    assert same_bits(cached["logits"], local.run([9], 50))
    assert len(cached["taps"]["k_rot.0"]) == 51 * 2 * 64
    (kept,) = engine.call(small, ("run", {"ids": ids[:3], "start": 0, "taps": ["k_rot.0"]}))
    assert same_bits(kept["taps"]["k_rot.0"][: 2 * 64][:32], _first_key(local, ids[:3]))


def _first_key(local: Local, ids: list[int]) -> Floats:
    """The first half of position 0's first key: a rotation by nothing leaves it as it is."""
    taps = Taps([("k", 0)])
    local.run(ids, 0, taps)
    key = taps.kept["k", 0][0][0].reshape(-1)[:32]
    if local.runner.kv_dtype == "float32":
        return key
    bits = key.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("threads", [2, 3])
def test_several_threads_have_the_bits_of_one(engine: Engine, small: Path, threads: int) -> None:
    ids = np.random.default_rng(3).integers(0, 400, 300).tolist()
    edit = {"part": "head", "layer": 0, "head": 1, "factor": 0.5}
    calls: list[tuple[Any, ...]] = [
        ("run", {"ids": ids[:90], "start": 0, "taps": ["embed", "q_rot.0", "gated.0", "resid.0"], "logitRows": "all"}),
        ("run", {"ids": ids[90:290], "start": 90, "logitRows": "all"}),
        *(("run", {"ids": [ids[place]], "start": place}) for place in range(290, 300)),
        ("run", {"ids": ids[:3], "start": 300, "edits": [edit], "taps": ["k_rot.0"], "logitRows": "all"}),
        ("rows", "lm_head.weight", [0, 17, 404]),
        ("product", "lm_head.weight", np.linspace(-1, 1, 5 * 256).astype(np.float32)),
    ]
    *alone, one = engine.call(small, *calls, ("config",))
    *together, several = engine.call(small, *calls, ("config",), threads=threads)
    assert (one["threads"], several["threads"]) == (1, threads)
    for call, mine, theirs in zip(calls, together, alone, strict=True):
        assert _flat(mine).keys() == _flat(theirs).keys()
        for name, numbers in _flat(theirs).items():
            assert same_bits(_flat(mine)[name], numbers), (call[0], name)


def _flat(answer: Any) -> dict[str, Floats]:
    """The arrays of an answer by their names."""
    return {"logits": answer["logits"], **answer["taps"]} if isinstance(answer, dict) else {"": answer}


def test_threads_that_cannot_be_started_leave_one_and_a_warning(engine: Engine, tiny: Path) -> None:
    files = {"model": str(tiny), "thread": str(tiny.with_name("nothing.mjs")), "threads": 2}
    calls = [{"name": "config", "args": []}, {"name": "run", "args": [{"ids": [1], "start": 0}]}]
    config, run = engine.ask(calls=calls, **files)
    assert config["threads"] == 1
    assert "threads" in config["warnings"][0]
    assert len(run["logits"]) == 405


def test_the_same_seed_draws_the_same_tokens(engine: Engine, small: Path) -> None:
    random = np.random.default_rng(1)
    logits = [(random.normal(0, 3, 405) * scale).astype(np.float32) for scale in (0.3, 1, 3)]
    cases = [
        (row, temperature, top_k, top_p, min_p, seed, step)
        for row in range(3)
        for temperature, top_k, top_p, min_p in (
            (0, 0, 1, 0),
            (1, 0, 1, 0),
            (0.7, 40, 0.9, 0),
            (1.3, 0, 0.5, 0.02),
            (1, 500, 1, 0.1),
        )
        for seed, step in ((0, 0), (7, 3), (2**53 - 1, 1000))
    ]
    calls = [
        ("sample", logits[row], {"temperature": t, "topK": k, "topP": p, "minP": m, "seed": seed, "step": step})
        for row, t, k, p, m, seed, step in cases
    ]
    expected = [
        native.choose(logits[row][None], [structs.CChoice(t, m, k if k < 405 else 0, p, seed, step, None)])[0]
        for row, t, k, p, m, seed, step in cases
    ]
    assert engine.call(small, *calls) == expected
    assert len(set(expected)) >= 8


# --- text -------------------------------------------------------------------------------------------------------------

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "Once upon a time",
    "  two  spaces\n\n\n and\tlines \n",
    "The price was 12,345.67 in 2024!",
    "Zürich, 日本語 😀 Grüße 🦙",
    "def main(argv):\n    return [int(x)]",
    "I'd say it's what they'll've DON'T won'T we'\u017f",
    "<|im_start|>user\n<|im_end|><|endoftext|>",
    "a defined token<think>b</think>",
    "\u00a0non\u2003breaking\u0085next\ufeffmark\u200bzero",
    "١٢٣ ½ Ⅷ x²",
    "e\u0301 \u1100\u1161 ЖЗИ αβγ",
    TEXT[:3000],
    "x" * 3000,
    " " * 3000,
    "\r\n\r\n a\r",
    "ﬁ ǅ ß",
    "`~|^$+=<>",
]


def test_texts_get_the_ids_that_python_gives_them(engine: Engine, vocabulary: dict[str, Any]) -> None:
    names = [
        "smollm",
        "llama-bpe",
        "gpt-2",
        "default",
        "qwen2",
        "deepseek-llm",
        "deepseek-coder",
        "deepseek-v3",
        "falcon",
        "tekken",
        "gpt-4o",
        "minicpm5",
        "smaug-bpe",
    ]
    vocabularies = [{**vocabulary, "tokenizer.ggml.pre": name} for name in names]
    vocabularies[1]["tokenizer.chat_template"] = "{{ '<|im_start|>' }}defined token"
    found = engine.ask(vocabularies=[{"metadata": list(one.items()), "texts": TEXTS} for one in vocabularies])
    for metadata, answers in zip(vocabularies, found, strict=True):
        tokenizer = from_gguf_metadata(metadata, "test")
        for text, answer in zip(TEXTS, answers, strict=True):
            ids = tokenizer.encode(text)
            assert answer["ids"] == ids, (metadata["tokenizer.ggml.pre"], text)
            assert answer["special"] == tokenizer.encode(text, parse_special=True)
            assert answer["text"] == tokenizer.decode(ids, skip_special_tokens=False)
            assert answer["pieces"] == [tokenizer.token_text(i) for i in ids]


def test_characters_get_the_ids_that_python_gives_them(engine: Engine) -> None:
    tokenizer = CharacterTokenizer.from_text("To be\n\tor\\not 🦙é")
    metadata = list(longest_match_metadata(tokenizer, 20).items())
    texts = ["To be 🦙\n\\", "xyz"]
    known, unknown = engine.ask(vocabularies=[{"metadata": metadata, "texts": texts}])[0]
    assert known["ids"] == tokenizer.encode(texts[0])
    assert known["text"] == texts[0]
    assert known["pieces"] == [tokenizer.token_text(i) for i in known["ids"]]
    assert unknown["error"] == "input"


def sentencepiece_vocabulary(text: str) -> dict[str, Any]:
    """Pieces of a text with scores, control tokens, bytes, and tokens that are cut out first."""
    words = sorted({word for line in text.split("\n") for word in f"▁{line}".replace(" ", "▁").split("▁") if word})[
        :300
    ]
    runs = {f"▁{word[:size]}" for word in words for size in range(1, len(word) + 1)}
    runs |= {word[:size] for word in words for size in range(2, len(word) + 1)} | {"▁▁", "▁▁▁▁", "▁"}
    characters = {character for character in text if character > " "} | {"😀", "日"}
    pieces = [*sorted(runs), *sorted(characters - runs)]
    scores = np.random.default_rng(2).permutation(len(pieces)) / -7.0
    scores[::5] = -1.5  # equals
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *pieces,
        "<|im_end|>",
        "User:",
        "User",
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + scores.tolist() + [0.0] * 3,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [3, 4, 4],
    }


@pytest.mark.parametrize("has_bytes", [True, False])
@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece_texts_get_the_ids_that_python_gives_them(
    engine: Engine, has_bytes: bool, has_prefix: bool
) -> None:
    metadata = {**sentencepiece_vocabulary(TEXT), "tokenizer.ggml.add_space_prefix": has_prefix}
    if not has_bytes:
        metadata["tokenizer.ggml.tokens"][100] = "<another>"
    tokenizer = from_gguf_metadata(metadata, "test")
    texts = [*TEXTS, "User: User:x User", "<s></s><|im_end|> a", "<0x41>", "   x"]
    (answers,) = engine.ask(vocabularies=[{"metadata": list(metadata.items()), "texts": texts}])
    for text, answer in zip(texts, answers, strict=True):
        ids = tokenizer.encode(text)
        assert answer["ids"] == ids, text
        assert answer["special"] == tokenizer.encode(text, parse_special=True)
        assert answer["text"] == tokenizer.decode(ids, skip_special_tokens=False)
        assert answer["pieces"] == [tokenizer.token_text(i) for i in ids]


def test_words_get_the_ids_that_python_gives_them(engine: Engine) -> None:
    words = [" I", " love", " dogs", "'", " don\u2019t", "\n", ",", " 42", " Ünï", "\x85", " (", ")"]
    tokenizer = make_words(words_pipeline(words), "test")
    metadata = list(longest_match_metadata(tokenizer, 20).items())
    texts = ["I love dogs, I don\u2019t\n 42 Ünï\x85 I", " I", "", "I love cats"]
    *known, unknown = engine.ask(vocabularies=[{"metadata": metadata, "texts": texts}])[0]
    for text, answer in zip(texts, known, strict=False):
        assert answer["ids"] == tokenizer.encode(text), text
        assert answer["text"] == text
        assert answer["pieces"] == [tokenizer.token_text(i) for i in answer["ids"]]
    assert unknown["error"] == "input"


def test_the_pages_cutters_are_those_of_python() -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("make_cutters", ROOT / "tools/make_cutters.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.FILE.read_text("utf-8") == tool.cutters_json(), "run python tools/make_cutters.py"


# --- addresses --------------------------------------------------------------------------------------------------------


class Files(SimpleHTTPRequestHandler):
    """Serves a folder, with or without ranges; `asked` are the ranges of all requests."""

    has_ranges, tells_size, asked, missing = True, True, list[str | None](), 0

    def do_GET(self) -> None:
        data = Path(self.translate_path(self.path)).read_bytes() if "none" not in self.path else None
        self.asked.append(self.headers["Range"])
        if data is None:
            self.send_error(404)
            return
        has_part = self.has_ranges and self.headers["Range"] is not None
        first, last = map(int, (self.headers["Range"] or "bytes=0-0").removeprefix("bytes=").split("-"))
        part = data[first : last + 1] if has_part else data
        self.send_response(206 if has_part else 200)
        if has_part and self.tells_size:
            self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part[: len(part) - self.missing])
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize(
    ("server", "name", "code", "requests"),
    [
        ({}, "packed.gguf", None, 2),
        ({"has_ranges": False}, "packed.gguf", None, 1),
        ({"tells_size": False}, "packed.gguf", None, 2),  # as to pages of other sites; the second is for the whole file
        ({}, "none.gguf", "network", 1),
        ({"has_ranges": False, "missing": 5000}, "packed.gguf", "network", 1),
    ],
)
def test_a_model_is_read_from_an_address(
    engine: Engine,
    tmp_path: Path,
    vocabulary: dict[str, Any],
    server: dict[str, Any],
    name: str,
    code: str | None,
    requests: int,
) -> None:
    path = tmp_path / "packed.gguf"
    write_model(path, ("Q8_0",) * 24, vocabulary, 405)  # more than one range
    handler = type("Handler", (Files,), {**server, "asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(tmp_path))) as host:
        Thread(target=host.serve_forever, daemon=True).start()
        call = [{"name": "run", "args": [{"ids": [1, 2, 3], "start": 0}]}]
        found = engine.ask(url=f"http://127.0.0.1:{host.server_port}/{name}", calls=call)
        host.shutdown()
    assert len(handler.asked) == requests
    if code is not None:
        assert found["error"] == code
        assert name in found["message"]
        return
    assert same_bits(found[0]["logits"], Local(load(path)).run([1, 2, 3], 0)[-1])


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, vocabulary: dict[str, Any]) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_model(path, ("Q8_0",), vocabulary, 405)
    return path


def test_damaged_files_are_refused_at_once(engine: Engine, tiny: Path) -> None:
    size = tiny.stat().st_size
    header = tiny.read_bytes().index(b"token_embd.weight") + 1500
    random = np.random.default_rng(11)
    cut = [
        {"length": int(length)}
        for length in (0, 3, 23, 24, 100, header // 2, header, size - 1, *random.integers(0, size, 20))
    ]
    changed = [
        {"bytes": [[int(random.integers(0, header)), int(random.integers(0, 256))] for _ in range(count)]}
        for count in (1, 1, 2, 8)
        for _ in range(40)
    ]
    huge = [{"bytes": [[place + i, 255] for i in range(7)]} for place in (8, 16, 24)]  # counts and lengths
    outcomes = engine.ask(model=str(tiny), mutations=[*cut, *huge, *changed])
    codes = [one["result"]["error"] if one["result"] else None for one in outcomes]
    assert set(codes) <= {None, "damaged", "unsupported", "input", "no-memory"}
    assert set(codes[: len(cut)]) == {"damaged"}
    assert None not in codes[len(cut) : len(cut) + len(huge)]
    assert max(one["ms"] for one in outcomes) < 2000
    assert all(one["result"]["message"].count("\n") == 0 for one in outcomes if one["result"])


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("general.architecture", "qwen2", "unsupported"),
        ("llama.expert_count", 4, "unsupported"),
        ("llama.block_count", 2**30, "damaged"),
        ("llama.embedding_length", 128, "damaged"),
        ("llama.attention.head_count", 0, "damaged"),
        ("llama.context_length", -1, "damaged"),
        ("llama.rope.scaling.type", "longrope", "unsupported"),
    ],
)
def test_other_models_are_refused(
    engine: Engine, tmp_path: Path, vocabulary: dict[str, Any], key: str, value: Any, code: str
) -> None:
    path = tmp_path / "other.gguf"
    write_model(path, ("Q8_0",), {**vocabulary, key: value}, 405)
    refused = engine.ask(model=str(path))
    assert refused["error"] == code
    assert "other.gguf" in refused["message"]


def test_bad_arguments_are_refused_and_the_model_goes_on(engine: Engine, tiny: Path) -> None:
    runs: list[dict[str, Any]] = [
        {"ids": [], "start": 0},
        {"ids": [405], "start": 0},
        {"ids": [-1], "start": 0},
        {"ids": [1.5], "start": 0},
        {"ids": [1], "start": 1},
        {"ids": [1], "start": -1},
        {"ids": [1] * 513, "start": 0},
        {"ids": [1], "start": 0, "taps": ["resid.1"]},
        {"ids": [1], "start": 0, "taps": ["resid"]},
        {"ids": [1], "start": 0, "taps": ["nothing.0"]},
        {"ids": [1], "start": 0, "edits": [{"part": "mlp", "layer": 1}]},
        {"ids": [1], "start": 0, "edits": [{"part": "head", "layer": 0, "head": 4}]},
        {"ids": [1], "start": 0, "edits": [{"part": "other"}]},
        {"ids": [1], "start": 0, "edits": [{"part": "embed", "add": [1.0]}]},
        {"ids": [1], "start": 0, "edits": [{"part": "embed", "positions": [-1]}]},
    ]
    others = [
        ("rows", "model.norm", [0]),
        ("rows", "lm_head.weight", [405]),
        ("product", "lm_head.weight", np.ones(255)),
        ("decode", [405]),
        ("sample", np.ones(405), {"temperature": -1, "seed": 0, "step": 0}),
        ("sample", np.ones(4), {"temperature": 0, "seed": 0, "step": 0}),
        ("sample", np.full(405, np.nan), {"temperature": 0, "seed": 0, "step": 0}),
        ("encode", "\ud800"),
        ("reset", 1000),
    ]
    *refused, good, length = engine.call(
        tiny, *(("run", run) for run in runs), *others, ("run", {"ids": [1, 2], "start": 0}), ("length",)
    )
    assert [one["error"] for one in refused] == ["input"] * (len(runs) + len(others))
    assert len(good["logits"]) == 405
    assert length == 2


def test_a_vocabulary_that_is_not_read_leaves_ids(engine: Engine, tmp_path: Path, vocabulary: dict[str, Any]) -> None:
    path = tmp_path / "llama.gguf"
    write_model(path, ("Q8_0",), {**vocabulary, "tokenizer.ggml.model": "t5"}, 405)
    config, refused, run = engine.call(path, ("config",), ("encode", "a"), ("run", {"ids": [1], "start": 0}))
    assert config["tokens"] is None
    assert "tokenizer.ggml.model" in config["warnings"][0]
    assert refused["error"] == "unsupported"
    assert len(run["logits"]) == 405


def test_too_little_memory_and_a_browser_without_simd_are_said(
    engine: Engine, tmp_path: Path, vocabulary: dict[str, Any]
) -> None:
    path = tmp_path / "deep.gguf"
    write_model(path, ("Q8_0",), {**vocabulary, "llama.context_length": 2**31 - 1}, 405)
    refused = engine.ask(model=str(path), context=2**31 - 1)
    assert refused["error"] == "no-memory"
    assert "the KV cache" in refused["message"]
    assert engine.ask(model=str(path), hasNoSimd=True)["error"] == "no-simd"


def test_a_table_that_the_file_does_not_hold_is_refused(engine: Engine, tiny: Path, tmp_path: Path) -> None:
    data = bytearray(tiny.read_bytes())
    place = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4
    data[place + 8 : place + 16] = struct.pack("<Q", 2**25)  # rows: 9 GB
    path = tmp_path / "large.gguf"
    path.write_bytes(data)
    refused = engine.ask(model=str(path))
    assert refused["error"] == "damaged"  # the file does not hold them
