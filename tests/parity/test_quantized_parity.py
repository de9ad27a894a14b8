"""Quantized folders against transformers and compressed-tensors, which dequantize them on the CPU.

Scales are float32: in bfloat16 compressed-tensors rounds the weights to bfloat16, and here they are exact.
"""

import warnings

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import llamarium
from quantized_cases import BLOCKS, FP8, Model, compressed
from quantized_folders import float8, packed

pytestmark = pytest.mark.torch

IDS = torch.arange(3, 60)[None]
CASES = {
    "groups": (packed(scale_dtype="F32"), compressed()),
    "zero points": (packed(scale_dtype="F32", symmetric=False), compressed(symmetric=False)),
    "rows": (packed(scale_dtype="F32", strategy="channel"), compressed(4, "channel", None)),
    "tensor": (packed(scale_dtype="F32", strategy="tensor"), compressed(4, "tensor", None)),
    "8 bits": (
        packed(scale_dtype="F32", bits=8, strategy="channel", symmetric=False),
        compressed(8, "channel", None, symmetric=False),
    ),
    "float8 tensor": (float8("tensor"), compressed(8, "tensor", None, kind="float")),
    "float8 rows": (float8("channel"), compressed(8, "channel", None, kind="float")),
    "float8 blocks": (float8("block"), compressed(8, **BLOCKS, block_structure=[128, 128])),
    "fp8": (float8("block", part="weight_scale_inv"), FP8),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name, tmp_path):
    maker, quantization = CASES[name]
    folder = Model(maker, quantization).write(tmp_path)
    kind = transformers.FineGrainedFP8Config if name == "fp8" else transformers.CompressedTensorsConfig
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, quantization_config=kind(dequantize=True)
        )
        ours = llamarium.load(folder, device="cpu", dtype="float32")
        with torch.no_grad():
            torch.testing.assert_close(ours.model(IDS), theirs(IDS).logits, rtol=0, atol=1e-4)
