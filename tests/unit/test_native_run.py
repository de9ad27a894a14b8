"""`lm_run` against a plain NumPy forward pass: paged caches, batches, taps and adapters."""

import ctypes
import shutil
import subprocess
import sys
from ctypes import POINTER, c_void_p, cast
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llamarium.errors import InputError
from llamarium.kernels import native, structs

pytestmark = pytest.mark.quick

L, D, F, N, K, H, V = 2, 64, 96, 4, 2, 32, 75
EPS = 1e-5
SHAPES = {
    "q": (N * H, D), "k": (K * H, D), "v": (K * H, D), "o": (D, N * H), "gate": (F, D), "up": (F, D), "down": (D, F),
}  # fmt: skip
WIDTHS = dict(
    zip(
        structs.TAPS_OF_A_LAYER,
        (D, N * H, K * H, K * H, N * H, N * H, D, D, D, F, F, F, F, D, D),
        strict=True,
    )
)
Array = NDArray[np.float32]
Taps = dict[str, Array]


@dataclass
class Correction:
    """One LoRA, or DoRA where it has a gain."""

    scale: float
    a: Array
    b: Array
    gain: Array | None


@dataclass
class Tiny:
    """A model of random float32 weights, with biases and a factor of cosines and sines."""

    seed: int = 0
    factor: float = 1.25
    values: dict[str, Array] = field(default_factory=dict)
    biases: dict[str, Array] = field(default_factory=dict)
    adapters: list[dict[str, Correction]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.frequencies = (10000.0 ** (-2.0 * np.arange(H // 2) / H)).astype(np.float32)
        self.norms = {f"{name}.{i}": self.floats(D) + 1.5 for i in range(L) for name in ("attn_norm", "mlp_norm")}
        self.norms["final"] = self.floats(D) + 1.5
        layers = (structs.CLayer * L)()
        for i in range(L):
            matrices = {name: self.matrix(f"{name}.{i}", *shape, bias=True) for name, shape in SHAPES.items()}
            norms = (self.norms[f"{name}.{i}"].ctypes.data for name in ("attn_norm", "mlp_norm"))
            layers[i] = structs.CLayer(*norms, **matrices)
        self.model = structs.CModel(
            L, D, F, N, K, H, EPS, 0, self.frequencies.ctypes.data, self.factor,
            self.norms["final"].ctypes.data, layers,
            self.matrix("table", V, D), self.matrix("head", V, D), 0, None, 16,
        )  # fmt: skip

    def floats(self, *shape: int) -> Array:
        return self.random.uniform(-1, 1, shape).astype(np.float32)

    def matrix(self, name: str, rows: int, cols: int, *, bias: bool = False) -> structs.CMatrix:
        stored = self.values[name] = self.floats(rows, cols) * np.float32(0.3)
        added = self.biases[name] = self.floats(rows) if bias else np.zeros(rows, np.float32)
        return structs.CMatrix(
            structs.Kind.F32, rows, cols, stored.ctypes.data, None, added.ctypes.data if bias else None
        )

    def correction(self, name: str, rank: int, *, gain: bool) -> Correction:
        rows, cols = self.values[name].shape
        a, b = self.floats(rank, cols) * np.float32(0.3), self.floats(rows, rank)
        return Correction(0.5, a, b, self.floats(rows) + 2 if gain else None)

    def add_adapters(self, *adapters: dict[str, Correction]) -> None:
        self.adapters = list(adapters)
        described = (structs.CAdapter * len(adapters))()
        for adapter, own in zip(adapters, described, strict=True):
            own.layers = (structs.CLoraLayer * L)(
                *(structs.CLoraLayer(*(lora(adapter.get(f"{name}.{i}")) for name in SHAPES)) for i in range(L))
            )
            own.head = lora(adapter.get("head"))
        self.model.num_adapters, self.model.adapters = len(adapters), described

    # --- the reference ---

    def product(self, name: str, x: Array, adapter: int) -> Array:
        y = x @ self.values[name].T
        own = self.adapters[adapter].get(name) if adapter >= 0 else None
        if own is not None:
            y = y + own.scale * ((x @ own.a.T) @ own.b.T)
            y = y if own.gain is None else y * own.gain
        return y + self.biases[name]

    def reference(self, ids: list[int], adapter: int = -1) -> tuple[Array, Taps]:
        """Return the logits of all of a sequence's tokens, and every tap, by "layer.name"."""
        taps: Taps = {}
        x = taps["embed"] = self.values["table"][ids]
        angles = np.arange(len(ids))[:, None] * self.frequencies
        for i in range(L):
            found = self.layer(i, x, angles.astype(np.float32), adapter)
            taps |= {f"{i}.{name}": value for name, value in found.items()}
            x = found["resid"]
        taps["final_norm"] = rms_norm(x, self.norms["final"])
        return self.product("head", taps["final_norm"], adapter), taps

    def layer(self, i: int, x: Array, angles: Array, adapter: int) -> Taps:
        t: Taps = {"attn_norm": rms_norm(x, self.norms[f"attn_norm.{i}"])}
        for name in "qkv":
            t[name] = self.product(f"{name}.{i}", t["attn_norm"], adapter)
        q, k = (self.factor * rotate(t[name].reshape(-1, count, H), angles) for name, count in (("q", N), ("k", K)))
        t["q_rot"] = q.reshape(-1, N * H)
        t["head_out"] = attend(q, k, t["v"].reshape(-1, K, H)).reshape(-1, N * H)
        t["attn_out"] = self.product(f"o.{i}", t["head_out"], adapter)
        t["resid_mid"] = x + t["attn_out"]
        t["mlp_norm"] = rms_norm(t["resid_mid"], self.norms[f"mlp_norm.{i}"])
        t["gate"], t["up"] = (self.product(f"{name}.{i}", t["mlp_norm"], adapter) for name in ("gate", "up"))
        t["act"] = t["gate"] / (1 + np.exp(-t["gate"]))
        t["gated"] = t["act"] * t["up"]
        t["mlp_out"] = self.product(f"down.{i}", t["gated"], adapter)
        t["resid"] = t["resid_mid"] + t["mlp_out"]
        return t


def lora(own: Correction | None) -> structs.CLora:
    if own is None:
        return structs.CLora()
    gain = None if own.gain is None else own.gain.ctypes.data
    return structs.CLora(len(own.a), own.scale, own.a.ctypes.data, own.b.ctypes.data, gain)


def rms_norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(EPS)) * weight


def rotate(heads: Array, angles: Array) -> Array:
    cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = heads[..., : H // 2], heads[..., H // 2 :]
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1)


def attend(q: Array, k: Array, v: Array) -> Array:
    k, v = k.repeat(N // K, 1), v.repeat(N // K, 1)
    scores = np.einsum("tnh,snh->nts", q, k) / np.float32(H**0.5)
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), v)


# --- running ----------------------------------------------------------------------------------------------------------


class Cache:
    """Blocks whose order is random, for sequences of at most 640 tokens."""

    def __init__(self, num_sequences: int, block_size: int = 64, seed: int = 1) -> None:
        per_sequence = 640 // block_size
        count = num_sequences * per_sequence
        self.tables = np.random.default_rng(seed).permutation(count).astype(np.int32).reshape(num_sequences, -1)
        self.arrays = [np.full((count, K, block_size, H), np.nan, np.float32) for _ in range(2 * L)]
        k, v = ((c_void_p * L)(*(array.ctypes.data for array in part)) for part in (self.arrays[:L], self.arrays[L:]))
        self.described = structs.CCache(0, 0, count, block_size, k, v, None, None)


Span = tuple[int, list[int], int]  # a sequence, its tokens and the first one's position


def run(
    tiny: Tiny,
    cache: Cache,
    spans: list[Span],
    adapters: list[int] | None = None,
    taps: structs.CTaps | None = None,
    rows: list[int] | None = None,
) -> Array:
    """Return the logits of some tokens of some spans, of all of them if `rows` is None."""
    ids = np.array([token for _, tokens, _ in spans for token in tokens], np.int64)
    positions = np.array([start + i for _, tokens, start in spans for i in range(len(tokens))], np.int32)
    sequences = np.array([row for row, tokens, _ in spans for _ in tokens], np.int32)
    wanted, tables = np.arange(len(ids), dtype=np.int32), cache.tables
    wanted = wanted if rows is None else np.array(rows, np.int32)
    own = None if adapters is None else np.array(adapters, np.int32)
    batch = structs.CBatch(
        len(ids), len(tables), tables.shape[1], len(wanted), ids.ctypes.data, positions.ctypes.data,
        sequences.ctypes.data, tables.ctypes.data, wanted.ctypes.data, None if own is None else own.ctypes.data,
    )  # fmt: skip
    logits = np.full((len(wanted), V), np.nan, np.float32)
    native.run(tiny.model, cache.described, batch, taps, logits.ctypes.data)
    return logits


def close(found: Array, expected: Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * float(np.abs(expected).max()))


IDS = [int(i) for i in np.random.default_rng(7).integers(0, V, 600)]


@pytest.mark.parametrize("rows", [[], [310], [0, 19, 20, 310], [3, 5, 6, 7, 21, 150, 290, 310]], ids=len)
def test_logits_of_some_tokens_are_what_they_are_among_all(kernels: str, rows: list[int]) -> None:
    """The others leave the last layer early, and so do not change its keys and values."""
    tiny = Tiny()
    tiny.add_adapters({f"{name}.{L - 1}": tiny.correction(f"{name}.{L - 1}", 3, gain=False) for name in SHAPES})
    spans: list[Span] = [(1, IDS[:20], 0), (0, IDS[:291], 0)]
    every, some = Cache(2), Cache(2)
    expected = run(tiny, every, spans, [-1, 0])[rows]
    np.testing.assert_array_equal(run(tiny, some, spans, [-1, 0], rows=rows), expected)
    for own, other in zip(every.arrays, some.arrays, strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_a_run_equals_a_plain_forward_pass_however_it_is_cut(kernels: str, block_size: int) -> None:
    tiny = Tiny()
    expected, _ = tiny.reference(IDS[:300])
    whole = run(tiny, Cache(1), [(0, IDS[:300], 0)])
    close(whole, expected)
    cache, parts = Cache(2, block_size, seed=2), list[Array]()
    for start, end in ((0, 1), (1, 8), (8, 270), (270, 271), (271, 300)):
        beside: list[Span] = [(1, IDS[400 - end : 400 - start], start)]  # another sequence in the same batch
        parts.append(run(tiny, cache, [(0, IDS[start:end], start), *beside])[: end - start])
    assert np.array_equal(np.concatenate(parts), whole)


def test_what_lies_before_the_window_is_not_read(kernels: str) -> None:
    """Its slots may hold anything: NaN here."""
    tiny, window, block_size = Tiny(), 40, 16
    tiny.model.window = window
    whole, part = Cache(1, block_size), Cache(1, block_size)
    expected = run(tiny, whole, [(0, IDS[:600], 0)])[-20:]
    seen = part.tables[0, (580 - window + 1) // block_size : -(-580 // block_size)]
    for own, other in zip(part.arrays, whole.arrays, strict=True):
        own[seen] = other[seen]
    np.testing.assert_array_equal(run(tiny, part, [(0, IDS[580:600], 580)]), expected)
    assert np.isnan(part.arrays[0]).any()


def test_only_the_logits_that_are_wanted_are_written() -> None:
    tiny, cache, table = Tiny(), Cache(1), np.arange(10, dtype=np.int32)
    ids, positions = np.array(IDS[:9], np.int64), np.arange(9, dtype=np.int32)
    zeros, wanted = np.zeros(9, np.int32), np.array([2, 8], np.int32)
    logits = np.full((3, V), 7, np.float32)
    arrays = (ids, positions, zeros, table, wanted)
    batch = structs.CBatch(9, 1, 10, 2, *(array.ctypes.data for array in arrays), None)
    native.run(tiny.model, cache.described, batch, None, logits.ctypes.data)
    expected, _ = tiny.reference(IDS[:9])
    close(logits[:2], expected[[2, 8]])
    assert (logits[2] == 7).all()


def test_what_there_is_not_is_refused() -> None:
    tiny, cache = Tiny(), Cache(1)
    with pytest.raises(IndexError, match=r"expected 0\.\.74"):
        run(tiny, cache, [(0, [V], 0)])
    for spans, adapters in (
        ([(0, [1], 640)], None), ([(1, [1], 0)], None), ([(0, [1], -1)], None),
        ([(0, [1], 5), (0, [2], 5)], None), ([(0, [1], 0)], [0]),
    ):  # fmt: skip
        with pytest.raises(InputError, match="has an invalid"):
            run(tiny, cache, spans, adapters)
    cache.tables[0, 1] = 10
    run(tiny, cache, [(0, [1], 0)])  # a block that is not reached
    with pytest.raises(InputError, match="expected blocks below 10 of 64 slots"):
        run(tiny, cache, [(0, [1], 64)])


# --- taps -------------------------------------------------------------------------------------------------------------


def new_taps(count: int, names: set[str]) -> tuple[structs.CTaps, Taps]:
    """Return the taps of these names, as "layer.name", "embed" and "final_norm", and where they write."""
    arrays: Taps = {}
    for name in names:
        width = WIDTHS[name.split(".")[1]] if "." in name else D
        arrays[name] = np.full((count, width), np.nan, np.float32)
    layers = [arrays.get(f"{i}.{name}") for i in range(L) for name in structs.TAPS_OF_A_LAYER]
    pointers = (c_void_p * len(layers))(*(None if array is None else array.ctypes.data for array in layers))
    ends = (None if name not in arrays else arrays[name].ctypes.data for name in ("embed", "final_norm"))
    return structs.CTaps(*ends, cast(pointers, POINTER(c_void_p))), arrays


ALL_TAPS = {"embed", "final_norm", *(f"{i}.{name}" for i in range(L) for name in structs.TAPS_OF_A_LAYER)}


@pytest.mark.parametrize("count", [1, 3, 290])
def test_every_tap_is_what_a_plain_pass_computes_and_leaves_the_logits_bits(kernels: str, count: int) -> None:
    tiny = Tiny()
    _, expected = tiny.reference(IDS[:count])
    taps, found = new_taps(count, ALL_TAPS)
    logits = run(tiny, Cache(1), [(0, IDS[:count], 0)])
    assert np.array_equal(run(tiny, Cache(1), [(0, IDS[:count], 0)], taps=taps), logits)
    for name in ALL_TAPS:
        close(found[name], expected[name])


# --- adapters ---------------------------------------------------------------------------------------------------------


def with_adapters() -> Tiny:
    """Three adapters: LoRA of everything, DoRA of some with an odd rank, and one of a single matrix."""
    tiny = Tiny()
    names = [*(f"{name}.{i}" for i in range(L) for name in SHAPES), "head"]
    tiny.add_adapters(
        {name: tiny.correction(name, 16, gain=False) for name in names},
        {name: tiny.correction(name, 5, gain=True) for name in names[::3]},
        {"down.1": tiny.correction("down.1", 1, gain=False)},
    )
    return tiny


@pytest.mark.parametrize("adapter", [0, 1, 2])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_an_adapter_adds_what_it_adds_in_a_plain_pass(kernels: str, adapter: int, count: int) -> None:
    tiny = with_adapters()
    expected, taps_expected = tiny.reference(IDS[:count], adapter)
    close(run(tiny, Cache(1), [(0, IDS[:count], 0)], [adapter]), expected)
    taps, found = new_taps(count, ALL_TAPS)
    run(tiny, Cache(1), [(0, IDS[:count], 0)], [adapter], taps)
    for name in ALL_TAPS:
        close(found[name], taps_expected[name])


def test_a_sequence_has_its_bits_whatever_adapters_the_others_have(kernels: str) -> None:
    tiny = with_adapters()
    chosen = [0, -1, 1, 2, 0]
    alone = [run(tiny, Cache(1), [(0, IDS[i : i + 20], 0)], None if own < 0 else [own]) for i, own in enumerate(chosen)]
    together = run(tiny, Cache(5), [(i, IDS[i : i + 20], 0) for i in range(5)], chosen)
    assert np.array_equal(together, np.concatenate(alone))
    cache = Cache(5)
    run(tiny, cache, [(i, IDS[i : i + 19], 0) for i in range(5)], chosen)
    step = run(tiny, cache, [(i, IDS[i + 19 : i + 20], 19) for i in range(5)], chosen)
    assert np.array_equal(step, np.stack([logits[-1] for logits in alone]))


# --- structs and processes --------------------------------------------------------------------------------------------


STRUCTS = {
    "lm_matrix": structs.CMatrix, "lm_layer": structs.CLayer, "lm_lora": structs.CLora,
    "lm_lora_layer": structs.CLoraLayer,
    "lm_adapter": structs.CAdapter, "lm_model": structs.CModel, "lm_cache": structs.CCache, "lm_batch": structs.CBatch,
    "lm_taps": structs.CTaps, "lm_choice": structs.CChoice, "lm_edit": structs.CEdit, "lm_edits": structs.CEdits,
}  # fmt: skip


def test_the_structs_are_those_of_the_header(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler to ask")
    asked = [f'printf("%zu ", sizeof({name}));' for name in STRUCTS]
    asked += [f'printf("%zu ", offsetof({name}, {own[0]}));' for name, kind in STRUCTS.items() for own in kind._fields_]
    source = tmp_path / "sizes.c"
    source.write_text(
        f'#include <stddef.h>\n#include <stdio.h>\n#include "llamarium.h"\nint main(void) {{ {"".join(asked)} '
        f'printf("%d %d", LM_TAPS_OF_A_LAYER, LM_EDITED_PARTS); return 0; }}\n'
    )
    native_folder = Path(__file__).parents[2] / "native"
    subprocess.run([compiler, f"-I{native_folder}", source, "-o", tmp_path / "sizes"], check=True)
    said = subprocess.run([tmp_path / "sizes"], check=True, capture_output=True, text=True).stdout.split()
    sizes = [ctypes.sizeof(kind) for kind in STRUCTS.values()]
    offsets = [getattr(kind, own[0]).offset for kind in STRUCTS.values() for own in kind._fields_]
    assert [int(number) for number in said] == [
        *sizes,
        *offsets,
        len(structs.TAPS_OF_A_LAYER),
        len(structs.PARTS),
    ]


FORK = """
import os, signal, torch
from llamarium.attention import TrainingAttend
from llamarium.kernels import native, threads
torch.set_num_threads(2)
x, q = torch.randn(400, 400), torch.randn(1, 600, 4, 32)
expected, count = (x @ x).exp().sum(), threads.num_threads()  # PyTorch's threads are there
seen = TrainingAttend()(0, q, q, q)
native._ready()
pid = os.fork()
if pid == 0:
    signal.alarm(30)  # a child that waits for a thread is killed
    found = (x @ x).exp().sum()
    native._ready()
    assert torch.equal(TrainingAttend()(0, q, q, q), seen)
    os._exit(0 if torch.allclose(found, expected, rtol=1e-4) and threads.num_threads() == count else 1)
assert os.waitpid(pid, 0)[1] == 0, "the child hangs, or computes something else"
assert torch.get_num_threads() == 2
"""


@pytest.mark.torch
def test_a_forked_child_computes() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=100)
