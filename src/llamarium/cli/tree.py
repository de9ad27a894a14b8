"""Print a model's module tree, as `print(model)` would.

The tree follows from the configuration alone: 70B parameters cost nothing, and
no weights are read.

  llamarium tree llama-3.2-1b --quantize nf4
  llamarium tree ./my-model
"""

import argparse
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from textwrap import indent
from types import MappingProxyType
from typing import TYPE_CHECKING

from llamarium.cli.flags import add_type
from llamarium.cli.options import DEFAULT_MODEL, add_name, named
from llamarium.errors import ModelNotFoundError, escape
from llamarium.file_names import ANY_SAFETENSORS, CONFIG
from llamarium.presets import PRESETS
from llamarium.quant.formats import METHODS, PACKED_FORMATS, quantized_type

if TYPE_CHECKING:
    from llamarium.config import ModelConfig

EMBEDDED = "model.embed_tokens"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(?<!\.gguf)", re.ASCII)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_name(parser, "a config.json, or a preset")
    add_type(parser, "--quantize", METHODS, help="show it with its Linears quantized")


def run(args: argparse.Namespace) -> int:
    """Print the tree of what is named."""
    name = named(args) or DEFAULT_MODEL
    if name not in PRESETS and (Path(name) / CONFIG).is_file() and args.quantize is None:
        stored = _of_stored(Path(name))
        if stored is not None:
            print(stored)
            return 0
    config, skip = (PRESETS[name], None) if name in PRESETS else read_config(name)
    if args.quantize is not None:  # from the values of an NF4 file too, as `load` does it
        print(tree(config, args.quantize))
    else:
        print(tree(config) if skip is None else tree(config, "NF4", skip))
    return 0


def _of_stored(folder: Path) -> str | None:
    """Return the tree of a folder whose weights are quantized, as they are loaded; None for NF4 and others."""
    from llamarium.checkpoints.open import open_checkpoint
    from llamarium.checkpoints.packed.folder import is_packed_folder

    if is_packed_folder(folder):
        packed_checkpoint = open_checkpoint(folder)
        packed = {
            key.removesuffix(".weight"): entry.dtype
            for key, entry in packed_checkpoint.entries.items()
            if entry.is_packed
        }
        return tree(packed_checkpoint.config, packed=packed)

    from llamarium.checkpoints.forms import loading_plan
    from llamarium.checkpoints.huggingface.methods import quantization_of, read_scheme
    from llamarium.config import read_json_object
    from llamarium.options.loading import LoadOptions

    config = folder / CONFIG
    quantization, source = quantization_of(read_json_object(config), config)
    is_stored = quantization is not None and read_scheme(quantization, source) is not None
    if not is_stored or not any(folder.glob(ANY_SAFETENSORS)):
        return None
    checkpoint = open_checkpoint(folder)
    forms = loading_plan(checkpoint, LoadOptions(device="cpu")).forms
    packed = {key.removesuffix(".weight"): form.type_name for key, form in forms.items() if form.layout == "tiles"}
    return tree(checkpoint.config, packed=packed)


def tree(
    config: "ModelConfig",
    method: str | None = None,
    skip: Sequence[str] = ("lm_head",),
    packed: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return what `print` shows of a `LlamaForCausalLM`, without PyTorch.

    `method` is what its Linears are quantized to, but for those that `skip` names: `lm_head`, `mlp`, `layers.0`.
    `packed` names the types of packed weights, by their modules' paths.
    """
    if config.tie_word_embeddings and EMBEDDED in packed:
        packed = {**packed, "lm_head": packed[EMBEDDED]}

    def linear(path: str, num_in: int, num_out: int) -> str:
        shape = f"(in_features={num_in}, out_features={num_out}, bias=False"
        if path in packed:
            return f"LinearPacked{shape}, type={packed[path]})"
        is_left = method is None or any(f".{part}." in f".{path}." for part in skip)
        type_name = None if method is None or is_left else quantized_type(method, num_in)
        if type_name in PACKED_FORMATS:
            return f"LinearPacked{shape}, type={type_name})"
        return f"{'Linear' if type_name is None else 'Linear4bit'}{shape})"

    width = config.hidden_size
    rows = f"{config.vocab_size}, {width}"
    embedding = f"EmbeddingPacked({rows}, type={packed[EMBEDDED]})" if EMBEDDED in packed else f"Embedding({rows})"
    norm = f"LlamaRMSNorm(({width},), eps={config.rms_norm_eps})"
    layers = [_layer(config, f"model.layers.{i}", norm, linear) for i in range(config.num_hidden_layers)]
    trunk = {
        "embed_tokens": embedding,
        "layers": _block("ModuleList", _numbered(layers)),
        "norm": norm,
        "rotary_emb": "LlamaRotaryEmbedding()",
    }
    head = linear("lm_head", width, config.vocab_size)
    return _block("LlamaForCausalLM", {"model": _block("LlamaModel", trunk), "lm_head": head})


def _layer(config: "ModelConfig", path: str, norm: str, linear: Callable[[str, int, int], str]) -> str:
    from llamarium.checkpoints.checkpoint import expected_shapes
    from llamarium.runtime.adapter import LAYER_LINEARS

    shapes = expected_shapes(replace(config, num_hidden_layers=1))
    linears: dict[str, dict[str, str]] = {"self_attn": {}, "mlp": {}}
    for place in LAYER_LINEARS.values():
        num_out, num_in = shapes[f"model.layers.0.{place}.weight"]
        block, _, name = place.partition(".")
        linears[block][name] = linear(f"{path}.{place}", num_in, num_out)
    parts = {
        "self_attn": _block("LlamaAttention", linears["self_attn"]),
        "mlp": _block("LlamaMLP", linears["mlp"] | {"act_fn": "SiLUActivation()"}),
        "input_layernorm": norm,
        "post_attention_layernorm": norm,
    }
    return _block("LlamaDecoderLayer", parts)


def _numbered(layers: list[str]) -> dict[str, str]:
    """Join equal layers that follow each other, as PyTorch's `ModuleList` prints them."""
    numbered: dict[str, str] = {}
    start = 0
    for layer, run in groupby(layers):
        count = len(list(run))
        numbered |= {f"{start}": layer} if count == 1 else {f"{start}-{start + count - 1}": f"{count} x {layer}"}
        start += count
    return numbered


def _block(kind: str, parts: dict[str, str]) -> str:
    return f"{kind}(\n" + indent("\n".join(f"({name}): {text}" for name, text in parts.items()), "  ") + "\n)"


def read_config(name: str) -> "tuple[ModelConfig, tuple[str, ...] | None]":
    """Read the configuration of what lies on disk or the hub, without its weights where that can be.

    Also return the names that its NF4 leaves alone, or None if the weights are not stored as NF4.
    """
    for path in (Path(name), Path(name) / CONFIG):
        if path.suffix == ".json" and path.is_file():
            return _from_json(path)
    if _HUB_NAME.fullmatch(name) and not Path(name).exists():
        from llamarium.hub.client import download_file

        return _from_json(download_file(name, CONFIG))
    from llamarium.checkpoints.open import open_checkpoint
    from llamarium.hub.resolve import resolve

    try:
        path = resolve(name)
    except ModelNotFoundError:
        if similar := difflib.get_close_matches(name, PRESETS, n=1):
            raise ModelNotFoundError(f"no preset, file or folder {escape(name)}; did you mean {similar[0]}?") from None
        raise
    return open_checkpoint(path).config, None


def _from_json(path: Path) -> "tuple[ModelConfig, tuple[str, ...] | None]":
    from llamarium.checkpoints.huggingface.methods import quantization_of, read_scheme
    from llamarium.config import ModelConfig, read_json_object

    raw = read_json_object(path)
    config = ModelConfig.from_hf(raw, str(path))
    quantization, source = quantization_of(raw, path)
    if quantization is None or read_scheme(quantization, source) is not None:
        return config, None
    listed = quantization.get("llm_int8_skip_modules")
    skip = tuple(map(str, listed)) if isinstance(listed, list) else ("lm_head",)
    return config, (*skip, "lm_head") if config.tie_word_embeddings else skip
