"""Print a model's module tree, as `print(model)` would.

The model is built from its configuration alone, on a device without memory:
70B parameters cost nothing, and no weights are read.

  llamarium tree llama-3.2-1b --quantize nf4
  llamarium tree ./my-model
"""

import argparse
import difflib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from llamarium.cli.options import DEFAULT_MODEL, QUANTIZATIONS, add_name, add_type, importing_torch, named
from llamarium.errors import ModelNotFoundError, escape
from llamarium.presets import PRESETS

if TYPE_CHECKING:
    from llamarium.config import ModelConfig


_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(?<!\.gguf)", re.ASCII)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_name(parser, "a config.json, or a preset")
    add_type(parser, "--quantize", QUANTIZATIONS, help="show it with its Linears quantized")


def run(args: argparse.Namespace) -> int:
    """Build the model on the meta device and print it."""
    name = named(args) or DEFAULT_MODEL
    with importing_torch():
        import torch

        from llamarium.model import LlamaForCausalLM
        from llamarium.quant.swap import quantize_linears

    config, stored = (PRESETS[name], None) if name in PRESETS else read_config(name)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    if args.quantize is not None:  # from the values of an NF4 file too, as `load` does it
        quantize_linears(model, args.quantize)
    elif stored is not None:
        quantize_linears(model, "NF4", skip=stored)
    print(model)
    return 0


def read_config(name: str) -> "tuple[ModelConfig, tuple[str, ...] | None]":
    """Read the configuration of what lies on disk or the hub, without its weights where that can be.

    Returns:
        The configuration; and the names that its NF4 leaves alone, or None if the weights are not stored as NF4.

    Raises:
        LlamariumError: If there is nothing of that name, or its configuration is refused.
    """
    for path in (Path(name), Path(name) / "config.json"):
        if path.suffix == ".json" and path.is_file():
            return _from_json(path)
    if _HUB_NAME.fullmatch(name) and not Path(name).exists():
        from llamarium.hub.client import download_file

        return _from_json(download_file(name, "config.json"))
    from llamarium.checkpoints.open import open_checkpoint
    from llamarium.hub.resolve import resolve

    try:
        path = resolve(name)
    except ModelNotFoundError:
        if near := difflib.get_close_matches(name, PRESETS, n=1):
            raise ModelNotFoundError(f"no preset, file or folder {escape(name)}; did you mean {near[0]}?") from None
        raise
    return open_checkpoint(path).config, None


def _from_json(path: Path) -> "tuple[ModelConfig, tuple[str, ...] | None]":
    from llamarium.checkpoints.huggingface.bnb import check_method
    from llamarium.config import ModelConfig, read_json_object

    raw = read_json_object(path)
    config = ModelConfig.from_hf(raw, str(path))
    if not check_method(raw.get("quantization_config"), path):
        return config, None
    listed = raw["quantization_config"].get("llm_int8_skip_modules")
    skip = tuple(map(str, listed)) if isinstance(listed, list) else ("lm_head",)
    return config, (*skip, "lm_head") if config.tie_word_embeddings else skip
