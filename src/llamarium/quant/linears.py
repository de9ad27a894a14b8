"""Quantization of a single Linear in memory, for variants and experiments.

Loading a model quantizes in `checkpoints/weights.py`, with the same encoders and without PyTorch.
"""

import torch
from torch import Tensor

from llamarium.quant.base import QuantizedLinear
from llamarium.quant.ggml.encode import encode
from llamarium.quant.ggml.linear import LinearGGML
from llamarium.quant.nf4 import Linear4bit


def quantize_linear(weight: Tensor, type_name: str) -> QuantizedLinear:
    """Quantize a weight (out_features, in_features), of any float dtype, to a type in `METHODS`.

    CheckpointError if in_features is not a multiple of the block size.
    """
    if type_name == "NF4":
        return Linear4bit.from_weight(weight)
    blocks = torch.from_numpy(encode(weight.detach().float().cpu().contiguous().numpy(), type_name))
    return LinearGGML(blocks.to(weight.device), type_name)
