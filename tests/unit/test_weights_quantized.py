"""AWQ, GPTQ, compressed-tensors and FP8 folders: exact values, exact tiles, the same logits, and bad input."""

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamarium
from llamarium.checkpoints.checkpoint import expected_shapes
from llamarium.checkpoints.export import export
from llamarium.checkpoints.open import open_checkpoint
from llamarium.checkpoints.values import read_array, values
from llamarium.errors import CheckpointError, LlamariumError, ModelNotFoundError, UnsupportedFormatError
from llamarium.kernels import native
from llamarium.quant.codes import unpack_rows
from llamarium.quant.formats import PACKED_FORMATS
from llamarium.runtime.batch import Span, pack
from llamarium.runtime.native.runner import NativeRunner
from quantized_cases import AWQ, CASES, CONFIG, DOWN, GPTQ, NO_TILE, Model, Q, compressed
from quantized_folders import Array, Raw, float8, gptq, packed


@pytest.fixture(params=CASES)
def case(request) -> tuple[Model, str, str | None]:
    maker, quantization, type_name, tiles = CASES[request.param]
    return Model(maker, quantization), type_name, tiles


@pytest.fixture(autouse=True)
def hints() -> Iterator[None]:
    """That activations are not quantized is asserted by a test of its own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*activations were meant")
        yield


def test_values_are_those_of_the_formula(case, tmp_path):
    model, type_name, _ = case
    checkpoint = open_checkpoint(model.write(tmp_path / "model"))
    assert set(checkpoint.entries) == set(expected_shapes(CONFIG))
    for key, made in model.linears.items():
        entry = checkpoint.entries[key]
        assert (entry.dtype, entry.shape) == (type_name, made.values.shape)
        assert entry.num_bytes == sum(raw.array.nbytes for raw in made.components.values())
        found = read_array(checkpoint, key)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, made.values.astype(np.float32))
        np.testing.assert_array_equal(values(checkpoint.stored(key), slice(17, 50)), found[17:50])
    for key, plain in model.plain.items():
        np.testing.assert_array_equal(read_array(checkpoint, key), plain)


@pytest.mark.skipif(native.library() is None, reason="needs the C kernels")
def test_tiles_hold_the_same_values(case, tmp_path):
    model, _, tiles = case
    llama = load(model.write(tmp_path / "model"), tiles is NO_TILE)
    weights = llama.runner.weights
    for key, made in model.linears.items():
        weight = weights[key]
        assert weight.type_name == (tiles or "BF16")
        if tiles is not NO_TILE:
            rows = np.arange(len(made.values))
            found = unpack_rows(weight.data, rows, PACKED_FORMATS[tiles]).values_RC
            np.testing.assert_array_equal(found, made.values.astype(np.float32))


def logits(model: llamarium.Llama, ids: list[int]) -> Array:
    """Return the logits of all of a prompt's tokens."""
    return model.runner.run(pack([Span(ids, 0, [0], num_logits=len(ids))]), model.runner.new_cache(1))


def load(folder: Path, expands: bool, **options: Any) -> llamarium.Llama:
    """Load a model; a warning says so if its weights take more memory than in the file."""
    if not expands:
        return llamarium.load(folder, device="cpu", **options)
    with pytest.warns(UserWarning, match="dequantized once"):
        return llamarium.load(folder, device="cpu", **options)


@pytest.mark.skipif(native.library() is None, reason="needs the C kernels")
def test_logits_in_c_are_those_of_the_dequantized_model(case, tmp_path):
    model, _, _ = case
    ids = list(range(3, 40))
    expected = logits(llamarium.load(model.write_floats(tmp_path / "floats"), device="cpu", dtype="float32"), ids)
    llama = load(model.write(tmp_path / "model"), True, dtype="float32")
    assert isinstance(llama.runner, NativeRunner)
    np.testing.assert_array_equal(logits(llama, ids), expected)


@pytest.mark.parametrize("name", ["awq", "gptq order", "w8a16", "fp8 blocks"])
def test_export_and_quantize(name, tmp_path):
    maker, quantization, _, _ = CASES[name]
    model = Model(maker, quantization)
    folder = model.write(tmp_path / "model")
    exported = open_checkpoint(
        export(folder, tmp_path / "exported", format="hf", type="F32", requantize=True, with_tokenizer=False)
    )
    for key, made in model.linears.items():
        np.testing.assert_array_equal(read_array(exported, key), made.values.astype(np.float32))
    llamarium.quantize(folder, tmp_path / "packed", type="Q8_0", method="nearest", requantize=True)
    packed_again = open_checkpoint(tmp_path / "packed")
    for key, made in model.linears.items():
        largest = np.abs(made.values).max()
        np.testing.assert_allclose(read_array(packed_again, key), made.values, atol=largest / 100)


def test_weights_that_are_not_quantized_are_read_as_they_are(tmp_path):
    model = Model(gptq(), GPTQ)
    plain = [key for key in model.linears if "layers.0.mlp" in key]
    for key in plain:
        model.plain[key] = model.linears.pop(key).values.astype(np.float32)
    checkpoint = open_checkpoint(model.write(tmp_path, modules_to_not_convert=["layers.0.mlp"]))
    for key in plain:
        assert checkpoint.entries[key].dtype == "F32"
        np.testing.assert_array_equal(read_array(checkpoint, key), model.plain[key])


def test_a_quantized_head(tmp_path):
    model = Model(gptq(), GPTQ)
    head = gptq()(np.random.default_rng(3), (CONFIG.vocab_size, CONFIG.hidden_size))
    del model.plain["lm_head.weight"]
    model.linears["lm_head.weight"] = head
    checkpoint = open_checkpoint(model.write(tmp_path, lm_head=True))
    assert checkpoint.entries["lm_head.weight"].dtype == "GPTQ4"
    np.testing.assert_array_equal(read_array(checkpoint, "lm_head.weight"), head.values.astype(np.float32))


def test_bits_that_differ_from_weight_to_weight(tmp_path):
    model = Model(gptq(), GPTQ)
    other = gptq(bits=8, group_size=64)(np.random.default_rng(3), model.linears[f"{Q}.weight"].values.shape)
    model.linears[f"{Q}.weight"] = other
    dynamic = {r"+:.*layers\.0\..*q_proj.*": {"bits": 8, "group_size": 64}}
    checkpoint = open_checkpoint(model.write(tmp_path / "said", dynamic=dynamic))
    assert checkpoint.entries[f"{Q}.weight"].dtype == "GPTQ8"
    np.testing.assert_array_equal(read_array(checkpoint, f"{Q}.weight"), other.values.astype(np.float32))
    with pytest.raises(CheckpointError, match=r"q_proj.*expected"):
        open_checkpoint(model.write(tmp_path / "unsaid"))


def test_several_groups_of_compressed_tensors(tmp_path):
    model = Model(packed(), compressed())
    shape = model.linears[f"{Q}.weight"].values.shape
    model.linears[f"{Q}.weight"] = packed(bits=8, strategy="channel")(np.random.default_rng(3), shape)
    model.linears[f"{DOWN}.weight"] = float8("channel")(np.random.default_rng(4), (128, 256))
    groups = compressed()["config_groups"]
    groups["group_1"] = compressed(8, "channel", None)["config_groups"]["group_0"]
    groups["group_2"] = compressed(8, "channel", None, kind="float")["config_groups"]["group_0"]
    checkpoint = open_checkpoint(model.write(tmp_path, config_groups=groups, format="mixed-precision"))
    for key, type_name in ((f"{Q}.weight", "INT8"), (f"{DOWN}.weight", "FP8")):
        assert checkpoint.entries[key].dtype == type_name
        np.testing.assert_array_equal(read_array(checkpoint, key), model.linears[key].values.astype(np.float32))


@pytest.mark.parametrize(
    ("name", "file", "fields"),
    [
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
    ],
)
def test_the_config_in_a_file_of_its_own(name, file, fields, tmp_path):
    maker, quantization, type_name, _ = CASES[name]
    model = Model(maker, quantization)
    folder = model.write(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / file).write_text(json.dumps(fields))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.entries[f"{Q}.weight"].dtype == type_name
    np.testing.assert_array_equal(
        read_array(checkpoint, f"{Q}.weight"), model.linears[f"{Q}.weight"].values.astype(np.float32)
    )


def test_the_only_file_may_have_another_name(tmp_path):
    model = Model(gptq(), GPTQ)
    folder = model.write(tmp_path)
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-32g.safetensors")
    checkpoint = open_checkpoint(folder)
    made = model.linears[f"{Q}.weight"]
    np.testing.assert_array_equal(read_array(checkpoint, f"{Q}.weight"), made.values.astype(np.float32))
    (folder / "other.safetensors").write_bytes(b"")
    with pytest.raises(ModelNotFoundError):
        open_checkpoint(folder)


def test_zero_points_of_zero_in_both_ways_of_saving_them(tmp_path):
    """AutoGPTQ wraps each stored z - 1 around; GPTQModel subtracts from whole words, which borrows from a neighbour."""
    model = Model(gptq(sym=False), GPTQ | {"sym": False})
    made = model.linears[f"{Q}.weight"]
    zeros = np.random.default_rng(5).integers(0, 16, (128, 4))
    qweight, scales = made.components["qweight"].array, made.components["scales"].array
    codes = (qweight.view(np.uint32)[:, None, :] >> (4 * np.arange(8))[None, :, None] & 15).reshape(128, 128).T
    expected = ((codes - zeros.repeat(32, 1).astype(np.int64)) * scales.T.astype(np.float64).repeat(32, 1)).astype(
        np.float32
    )
    words = (zeros.T.reshape(4, 16, 8).astype(np.int64) << (4 * np.arange(8))).sum(-1).astype(np.uint32)
    wrapped = (((zeros.T - 1) & 15).reshape(4, 16, 8).astype(np.int64) << (4 * np.arange(8))).sum(-1).astype(np.uint32)
    for meta, stored in (({}, wrapped), ({"quantizer": ["gptqmodel:5.0.0"]}, words - np.uint32(0x11111111))):
        made.components["qzeros"] = Raw("I32", stored.view(np.int32))
        checkpoint = open_checkpoint(model.write(tmp_path / str(len(meta)), meta=meta))
        np.testing.assert_array_equal(read_array(checkpoint, f"{Q}.weight"), expected)


def test_activations_are_not_quantized_and_a_warning_says_so(tmp_path):
    model = Model(float8("tensor"), {"quant_method": "fp8", "activation_scheme": "static"})
    scale = Raw("F32", np.array([0.5], np.float32))
    hints = {f"{Q}.input_scale": scale, "model.layers.0.self_attn.k_scale": scale}
    with pytest.warns(UserWarning, match="activations were meant to be quantized") as caught:
        checkpoint = open_checkpoint(model.write(tmp_path, hints))
    assert len(caught) == 1 and set(checkpoint.entries) == set(expected_shapes(CONFIG))


def test_biases_of_zeros_are_left_out_and_others_refused(tmp_path):
    model = Model(gptq(), GPTQ)
    zeros = Raw("F16", np.zeros(128, np.float16))
    checkpoint = open_checkpoint_warned(model.write(tmp_path / "zeros", {f"{Q}.bias": zeros}))
    assert set(checkpoint.entries) == set(expected_shapes(CONFIG))
    with pytest.raises(CheckpointError, match=r"q_proj\.bias"):
        open_checkpoint(model.write(tmp_path / "ones", {f"{Q}.bias": Raw("F16", np.ones(128, np.float16))}))


def open_checkpoint_warned(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return open_checkpoint(folder)


# --- what is refused ----------------------------------------------------------------------------------------------

REFUSED = {
    "bitsandbytes INT8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "bitsandbytes fp4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "W8A8": compressed(8, "channel", None) | {"format": "int-quantized"},
    "NVFP4": compressed() | {"format": "nvfp4-pack-quantized"},
    "sparse": compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}},
    "transform_config": compressed() | {"transform_config": {"config_groups": {"u": {}}}},
    "4-bit floating": compressed(4, "group", 32, kind="float"),
    "HQQ": {"quant_method": "hqq", "quant_config": {}},
    "AQLM": {"quant_method": "aqlm"},
    "EETQ": {"quant_method": "eetq"},
    "Quanto": {"quant_method": "quanto", "weights": "int8"},
    "TorchAO": {"quant_method": "torchao"},
    "MXFP4": {"quant_method": "mxfp4"},
    "AutoRound": {"quant_method": "auto-round", "bits": 4},
    "MLX": {"group_size": 64, "bits": 4},
    "marlin": GPTQ | {"checkpoint_format": "marlin"},
    "gemv_fast": AWQ | {"version": "gemv_fast"},
    r"\\x1b\[2J": {"quant_method": "\x1b[2J"},
    "nothing": "nothing",
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_quantizations_are_refused_by_name(name, tmp_path):
    model = Model(gptq(), {})
    folder = model.write(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": REFUSED[name]}))
    refused(folder, UnsupportedFormatError, name)


def test_mlx_by_its_own_field(tmp_path):
    folder = Model(gptq(), {}).write(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": 64, "bits": 4}}))
    refused(folder, UnsupportedFormatError, "MLX")


def refused(folder: Path, error: type[LlamariumError], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        open_checkpoint_warned(folder)
    message = str(caught.value)
    assert len(message) < 1500 and message.isprintable() and str(folder) in message


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gptq", {"bits": 5}),
        ("gptq", {"bits": 8}),
        ("gptq", {"bits": True}),
        ("gptq", {"bits": "4"}),
        ("gptq", {"group_size": 0}),
        ("gptq", {"group_size": 64}),
        ("gptq", {"group_size": -2}),
        ("gptq", {"group_size": 2**40}),
        ("gptq", {"checkpoint_format": 7}),
        ("gptq", {"meta": "x"}),
        ("gptq", {"dynamic": [1]}),
        ("awq", {"bits": 8}),
        ("awq", {"group_size": 64}),
        ("awq", {"group_size": None}),
        ("awq", {"zero_point": "yes"}),
        ("awq", {"version": "gemv"}),
        ("awq gemv", {"version": "gemm"}),
        ("w4a16", {"config_groups": {}}),
        ("w4a16", {"config_groups": None}),
        ("w4a16", {"config_groups": {"a": 1}}),
        ("w4a16", {"config_groups": {"a": {"weights": 1}}}),
        ("w4a16", {"config_groups": {"a": {"weights": None}}}),
        ("w4a16", {"config_groups": {"a": {"weights": {"num_bits": 9, "type": "int"}}}}),
        ("w4a16", compressed(8)),
        ("w4a16", compressed(4, "group", 64)),
        ("w4a16", compressed(4, "channel", None)),
        ("w4a16", compressed(4, "sideways", 32)),
        ("float8 tensor", compressed(8, "block", None, kind="float", block_structure=[0, 128])),
        ("float8 tensor", compressed(8, "block", None, kind="float", block_structure=None)),
        ("float8 tensor", compressed()),
        ("float8 blocks", compressed(8, "block", None, kind="float", block_structure=[64, 64])),
        ("fp8 blocks", {"weight_block_size": [64, 64]}),
        ("fp8 blocks", {"weight_block_size": [128]}),
        ("fp8 blocks", {"weight_block_size": [128, True]}),
        ("fp8 blocks", {"weight_block_size": None}),
    ],
)
def test_configs_that_do_not_fit_the_weights(name, fields, tmp_path):
    maker, quantization, _, _ = CASES[name]
    refused(Model(maker, quantization).write(tmp_path, **fields), LlamariumError, "expected|no group")


def _wider(raw: Raw) -> Raw:
    return Raw(raw.dtype, np.concatenate((raw.array, raw.array), -1))


def _taller(raw: Raw) -> Raw:
    return Raw(raw.dtype, np.concatenate((raw.array, raw.array[:1]), 0))


def _as_bytes(raw: Raw) -> Raw:
    return Raw("U8", raw.array.view(np.uint8))


CHANGES: dict[str, Callable[[Raw], Raw]] = {
    "wider": _wider,
    "taller": _taller,
    "bytes": _as_bytes,
    "flat": lambda raw: Raw(raw.dtype, raw.array.reshape(-1)),
    "empty": lambda raw: Raw(raw.dtype, raw.array[:0]),
}


@pytest.mark.parametrize(
    "name", ["awq", "awq gemv", "gptq order", "gptq 3", "w4a16 zeros", "w4a16 order", "fp8 blocks", "fbgemm"]
)
def test_components_that_do_not_fit(name, tmp_path):
    maker, quantization, _, _ = CASES[name]
    key = f"{DOWN}.weight"
    parts = Model(maker, quantization).linears[key].components
    for part in parts:
        for what, change in CHANGES.items():
            model = Model(maker, quantization)
            changed = change(parts[part])
            if changed.dtype == parts[part].dtype and changed.array.shape == parts[part].array.shape:
                continue  # a vector is flat
            if (name, part, what) == ("fbgemm", "weight_scale", "flat"):
                continue  # as good as a column
            model.linears[key].components[part] = changed
            refused(model.write(tmp_path / f"{part}-{what}"), LlamariumError, "down_proj")
        model = Model(maker, quantization)
        del model.linears[key].components[part]
        if part not in ("g_idx", "weight_g_idx", "weight_shape", "weight_zero_point", "weight"):
            refused(model.write(tmp_path / f"no-{part}"), LlamariumError, "down_proj")


@pytest.mark.parametrize(("name", "part"), [("gptq order", "g_idx"), ("w4a16 order", "weight_g_idx")])
@pytest.mark.parametrize("value", [-7, 8, 2**31 - 1])
def test_groups_out_of_range(name, part, value, tmp_path):
    maker, quantization, _, _ = CASES[name]
    model = Model(maker, quantization)
    order = model.linears[f"{DOWN}.weight"].components[part].array
    order[100] = value
    refused(model.write(tmp_path), CheckpointError, "groups from")


def test_a_shape_beside_the_codes_that_disagrees(tmp_path):
    model = Model(packed(), compressed())
    model.linears[f"{DOWN}.weight"].components["weight_shape"] = Raw("I64", np.array([2**62, 2**62]))
    refused(model.write(tmp_path), CheckpointError, "weight_shape")


def test_scales_that_are_not_finite_are_reported(tmp_path):
    model = Model(gptq(), GPTQ)
    model.linears[f"{Q}.weight"].components["scales"].array[0, 3] = np.nan
    with pytest.warns(UserWarning, match="32 weights that are NaN or infinite"):
        llamarium.load(model.write(tmp_path), device="cpu")
    with pytest.raises(CheckpointError, match="32 weights"):
        llamarium.load(tmp_path, device="cpu", strict=True)


def test_a_float8_nan_is_reported(tmp_path):
    model = Model(float8("channel"), {"quant_method": "fbgemm_fp8"})
    model.linears[f"{Q}.weight"].components["weight"].array[0, 3] = 0x7F
    with pytest.warns(UserWarning, match="1 weights that are NaN or infinite"):
        load(model.write(tmp_path), expands=True)


def test_group_sizes_that_no_tile_has(tmp_path):
    config = replace(CONFIG, hidden_size=96, num_attention_heads=3, num_key_value_heads=3, intermediate_size=192)
    for size in (24, 48):
        model = Model(gptq(group_size=size, sym=False), GPTQ | {"group_size": size, "sym": False}, config)
        checkpoint = open_checkpoint(model.write(tmp_path / str(size)))
        made = model.linears[f"{Q}.weight"]
        np.testing.assert_array_equal(read_array(checkpoint, f"{Q}.weight"), made.values.astype(np.float32))


def test_a_last_group_that_is_short(tmp_path):
    config = replace(CONFIG, hidden_size=96, num_attention_heads=3, num_key_value_heads=3, intermediate_size=192)
    model = Model(gptq(group_size=64, sym=False), GPTQ | {"group_size": 64, "sym": False}, config)
    checkpoint = open_checkpoint(model.write(tmp_path))
    made = model.linears[f"{Q}.weight"]
    np.testing.assert_array_equal(read_array(checkpoint, f"{Q}.weight"), made.values.astype(np.float32))


NASTY: list[Any] = [
    None, True, 0, -1, 3, 2**63, 1e300, float("nan"), "", "x", "\x1b", "gemm", [], [1], [[]], {}, {"a": {}},
    [None, 2**40],
]  # fmt: skip


def _with_nasty_values(fields: Any) -> Iterator[Any]:
    """Yield a config with each of its values, at any depth, replaced by each nasty one, or left out."""
    for name, value in fields.items():
        yield {key: other for key, other in fields.items() if key != name}
        for nasty in NASTY:
            yield {**fields, name: nasty}
        if isinstance(value, dict):
            for inner in _with_nasty_values(value):
                yield {**fields, name: inner}


@pytest.mark.parametrize("name", ["awq", "gptq", "w4a16 zeros", "float8 blocks", "fp8 blocks"])
def test_any_config_is_read_or_refused(name, tmp_path):
    maker, quantization, _, _ = CASES[name]
    model = Model(maker, quantization)
    folder = model.write(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    full = quantization | {"meta": {"quantizer": "x"}, "dynamic": {}, "sparsity_config": {}, "transform_config": {}}
    made = model.linears[f"{Q}.weight"].values.astype(np.float32)
    for fields in _with_nasty_values(full):
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": fields}))
        try:
            checkpoint = open_checkpoint_warned(folder)
        except LlamariumError as error:
            assert str(error).isprintable() and len(str(error)) < 1500
        else:
            np.testing.assert_array_equal(read_array(checkpoint, f"{Q}.weight"), made)
