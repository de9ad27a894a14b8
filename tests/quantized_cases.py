"""The kinds of quantized folders that tests read: a maker of weights, a quantization_config, and what is expected."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from llamarium.checkpoints.checkpoint import expected_shapes
from llamarium.config import ModelConfig
from quantized_folders import Array, Made, Maker, Raw, awq, float8, gptq, packed, save, write_folder

CONFIG = ModelConfig(
    vocab_size=128,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=(2,),
)
Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"
NO_TILE = None


def compressed(
    bits: int = 4,
    strategy: str = "group",
    size: int | None = 32,
    *,
    symmetric: bool = True,
    kind: str = "int",
    **more: Any,
) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group."""
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "group_size": size, "symmetric": symmetric, **more}
    layout = "pack-quantized" if kind == "int" else "float-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


BLOCKS = {"strategy": "block", "size": None, "kind": "float"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

CASES: dict[str, tuple[Maker, dict[str, Any], str, str | None]] = {
    "awq": (awq(), AWQ, "AWQ4", "Q5_0"),
    "awq 64": (awq(group_size=64), AWQ | {"group_size": 64}, "AWQ4", "Q5_0"),
    "awq 128": (awq(group_size=128), AWQ | {"group_size": 128, "version": "GEMM"}, "AWQ4", "Q5_0"),
    "awq rows": (awq(group_size=-1), AWQ | {"group_size": -1}, "AWQ4", "Q5_0"),
    "awq symmetric": (awq(zero_point=False), AWQ | {"zero_point": False}, "AWQ4", "Q4_0"),
    "awq gemv": (awq(version="gemv"), AWQ | {"version": "gemv"}, "AWQ4_GEMV", "Q5_0"),
    "awq gemv 64": (
        awq(version="gemv", group_size=64), AWQ | {"version": "gemv", "group_size": 64}, "AWQ4_GEMV", "Q5_0"
    ),
    "gptq": (gptq(), GPTQ, "GPTQ4", "Q4_0"),
    "gptq zeros": (gptq(sym=False), GPTQ | {"sym": False}, "GPTQ4", "Q5_0"),
    "gptq v2": (gptq(sym=False, version=2), GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, "GPTQ4", "Q5_0"),
    "gptq order": (gptq(act_order=True), GPTQ | {"desc_act": True}, "GPTQ4", NO_TILE),
    "gptq rows": (gptq(group_size=-1, act_order=True), GPTQ | {"group_size": -1, "desc_act": True}, "GPTQ4", "Q4_0"),
    "gptq no g_idx": (gptq(with_g_idx=False), GPTQ, "GPTQ4", "Q4_0"),
    "gptq bfloat16": (gptq(scale_dtype="BF16"), GPTQ, "GPTQ4", "Q4_0"),
    "gptq float32": (gptq(scale_dtype="F32"), GPTQ, "GPTQ4", NO_TILE),
    "gptq 2": (gptq(bits=2, sym=False), GPTQ | {"bits": 2, "sym": False}, "GPTQ2", "Q4_0"),
    "gptq 3": (gptq(bits=3, sym=False), GPTQ | {"bits": 3, "sym": False}, "GPTQ3", "Q4_0"),
    "gptq 8": (gptq(bits=8), GPTQ | {"bits": 8}, "GPTQ8", "Q8_0"),
    "gptq 8 zeros": (gptq(bits=8, sym=False), GPTQ | {"bits": 8, "sym": False}, "GPTQ8", NO_TILE),
    "w4a16": (packed(), compressed(), "INT4", "Q4_0"),
    "w4a16 zeros": (packed(symmetric=False), compressed(symmetric=False), "INT4", "Q5_0"),
    "w4a16 int8 zeros": (packed(symmetric=False, packed_zeros=False), compressed(symmetric=False), "INT4", "Q5_0"),
    "w4a16 rows": (packed(strategy="channel"), compressed(strategy="channel", size=None), "INT4", "Q4_0"),
    "w4a16 tensor": (packed(strategy="tensor"), compressed(strategy="tensor", size=None), "INT4", "Q4_0"),
    "w4a16 order": (packed(act_order=True), compressed(actorder="group"), "INT4", NO_TILE),
    "w8a16": (packed(bits=8, strategy="channel"), compressed(8, "channel", None), "INT8", "Q8_0"),
    "w8a16 tensor": (
        packed(bits=8, strategy="tensor", symmetric=False), compressed(8, "tensor", None), "INT8", NO_TILE
    ),
    "float8 tensor": (float8("tensor"), compressed(8, "tensor", None, kind="float"), "FP8", NO_TILE),
    "float8 rows": (
        float8("channel", scale_dtype="BF16"), compressed(8, "channel", None, kind="float"), "FP8", NO_TILE
    ),
    "float8 blocks": (
        float8("block", block=(64, 96)), compressed(8, **BLOCKS, block_structure=[64, 96]), "FP8", NO_TILE
    ),
    "float8 blocks as text": (
        float8("block", block=(64, 96)), compressed(8, **BLOCKS, block_structure="64x96"), "FP8", NO_TILE
    ),
    "fp8 blocks": (float8("block", part="weight_scale_inv"), FP8, "FP8", NO_TILE),
    "fp8 tensor": (float8("scalar"), {"quant_method": "fp8", "activation_scheme": "static"}, "FP8", NO_TILE),
    "fbgemm": (float8("channel"), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "FP8", NO_TILE),
}  # fmt: skip


class Model:
    """A random model whose layers' Linears a maker quantizes."""

    def __init__(self, maker: Maker, quantization: dict[str, Any], config: ModelConfig = CONFIG) -> None:
        random = np.random.default_rng(7)
        self.quantization, self.config = quantization, config
        self.plain: dict[str, Array] = {}
        self.linears: dict[str, Made] = {}
        for key, shape in expected_shapes(config).items():
            if "_proj" in key:
                self.linears[key] = maker(random, (shape[0], shape[1]))
            else:
                size = 1.0 if len(shape) == 1 else 0.5
                self.plain[key] = (size * random.standard_normal(shape)).astype(np.float32)

    def write(self, folder: Path, extra: dict[str, Raw] | None = None, **fields: Any) -> Path:
        """Write it as the format has it; `fields` change the quantization_config."""
        config = self.config.to_hf()
        return write_folder(folder, config, {**self.quantization, **fields}, self.plain, self.linears, extra)

    def write_floats(self, folder: Path) -> Path:
        """Write the weights that the formula gives, in float32."""
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config.to_hf()))
        dequantized = {key: made.values.astype(np.float32) for key, made in self.linears.items()}
        save(folder / "model.safetensors", {k: Raw("F32", v) for k, v in {**self.plain, **dequantized}.items()})
        return folder
