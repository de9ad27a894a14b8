"""Detection of the quantization of a Hugging Face folder, by its `quantization_config`.

AWQ, GPTQ, compressed-tensors, FP8 and bitsandbytes' NF4 are supported; other methods are errors that name them. Older
folders have the config of AWQ and GPTQ in a separate file, `quant_config.json` or `quantize_config.json`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from llamarium.checkpoints.checkpoint import CONFIG_LIMIT_BYTES, expected_shape
from llamarium.checkpoints.huggingface import bnb
from llamarium.checkpoints.huggingface.components import Components, ConfigFields, Scheme, WeightGroup
from llamarium.checkpoints.huggingface.safetensors_file import Located
from llamarium.config import ModelConfig, read_json_object
from llamarium.errors import UnsupportedFormatError, escape, warn_caller
from llamarium.file_names import AWQ_CONFIG, GPTQ_CONFIG

_OWN_FILES = {GPTQ_CONFIG: "gptq", AWQ_CONFIG: "awq"}
"""Where AutoGPTQ and AutoAWQ put their config, and the method where it is not named there."""

_NAMES = {
    "aqlm": "AQLM", "auto-round": "AutoRound", "intel/auto-round": "AutoRound", "bitnet": "BitNet", "eetq": "EETQ",
    "fp_quant": "FP-Quant", "higgs": "HIGGS", "hqq": "HQQ", "modelopt": "NVIDIA ModelOpt", "mxfp4": "MXFP4",
    "nvfp4": "NVFP4", "quanto": "Quanto", "quark": "AMD Quark", "sinq": "SINQ", "spqr": "SpQR", "torchao": "TorchAO",
    "vptq": "VPTQ", "metal": "MLX", "mlx": "MLX",
}  # fmt: skip
"""Display names of unsupported methods."""


def quantization_of(raw: Mapping[str, Any], source: Path) -> tuple[Mapping[str, Any] | None, Path]:
    """Return a folder's `quantization_config`, None if it has none, and the file that holds it.

    Args:
        raw: The content of `config.json`.
        source: Its path.
    """
    folder = source.parent
    config = raw.get("quantization_config", raw.get("compression_config"))
    if config is None and isinstance(raw.get("quantization"), dict):
        config = raw["quantization"]
    if config is not None:
        if isinstance(config, dict):
            return _named(cast(Mapping[str, Any], config)), source
        return {"quant_method": config}, source
    for name, method in _OWN_FILES.items():
        if (folder / name).exists():
            fields = read_json_object(folder / name, CONFIG_LIMIT_BYTES)
            return {"quant_method": method} | fields, folder / name
    return None, source


def read_scheme(fields: Mapping[str, Any], source: Path) -> Scheme | None:
    """Return the quantization scheme, or None for NF4; UnsupportedFormatError for an unsupported method."""
    # Imported here: most folders are not quantized.
    from llamarium.checkpoints.huggingface.awq import AWQ
    from llamarium.checkpoints.huggingface.compressed import CompressedTensors
    from llamarium.checkpoints.huggingface.fp8 import FP8
    from llamarium.checkpoints.huggingface.gptq import GPTQ

    config, method = ConfigFields(fields, source), fields.get("quant_method")
    if method == "awq":
        return AWQ.from_config(config)
    if method == "gptq":
        return GPTQ.from_config(config)
    if method == "compressed-tensors":
        return CompressedTensors.from_config(config)
    if method in ("fp8", "fbgemm_fp8"):
        return FP8.from_config(config)
    if bnb.is_nf4(fields):
        return None
    raise UnsupportedFormatError(
        f"{escape(source)}: weights are quantized with {_right_name(fields)}; read are AWQ, GPTQ, compressed-tensors, "
        "FP8, bitsandbytes NF4 and GGUF. Take the model's unquantized weights and quantize on load"
    )


def read_groups(
    fields: Mapping[str, Any], source: Path, tensors: dict[str, Located], config: ModelConfig
) -> dict[str, WeightGroup]:
    """Find and validate a checkpoint's quantized weights, and return them by key.

    Tensors about activations are removed from `tensors`. A UserWarning is issued if the config asks to quantize
    activations.
    """
    scheme = read_scheme(fields, source)
    if scheme is None:
        return dict(bnb.group_components(tensors))
    for name in [name for name in tensors if name.rpartition(".")[2] in scheme.hints]:
        del tensors[name]
    groups: dict[str, WeightGroup] = {}
    for name, (_, tensor) in tensors.items():
        prefix, _, part = name.rpartition(".")
        key = f"{prefix}.weight"
        shape = expected_shape(config, key) if scheme.marks(part, tensor.dtype) else None
        if shape is not None and len(shape) == 2:
            parts = {part: tensors[f"{prefix}.{part}"] for part in scheme.parts if f"{prefix}.{part}" in tensors}
            groups[key] = scheme.group(Components(key, parts), (shape[0], shape[1]))
    if groups and scheme.rounds_inputs:
        warn_caller(
            f"{escape(source)}: activations were meant to be quantized too; here they are not, and weights are read "
            "exactly"
        )
    return groups


def _named(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Name MLX's config, which alone has bits and a group size without a method."""
    if "quant_method" not in fields and {"bits", "group_size"} <= fields.keys():
        return {"quant_method": "mlx", **fields}
    return fields


def _right_name(fields: Mapping[str, Any]) -> str:
    """Return the display name of an unsupported method."""
    method = fields.get("quant_method")
    if method == "bitsandbytes" or fields.get("load_in_8bit") is True:
        is_8bit = fields.get("load_in_8bit") is True
        kind = "INT8 (load_in_8bit)" if is_8bit else escape(fields.get("bnb_4bit_quant_type"), 40)
        return f"bitsandbytes {kind}"
    return _NAMES[method] if isinstance(method, str) and method in _NAMES else escape(method, 80)
