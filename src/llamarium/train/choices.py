"""Types and allowed names of training settings."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from llamarium.datasets.sources import Data

Examples = Data | Path | Iterable[Any]
"""Training data: a source by name or path, several sources with weights, or Python rows."""

OptimizerName = Literal["adamw", "muon"]
ScheduleName = Literal["cosine", "linear", "wsd", "constant"]
QuantizeName = Literal["none", "NF4", "Q8_0", "Q4_0", "Q4_1", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K", "Q5_0"]
"""Quantization of the frozen base: "none", or one of `quant.formats.METHODS`; a test keeps them in sync."""

ChatFormatName = Literal["auto", "llama3", "chatml", "llama2", "mistral", "vicuna", "alpaca", "zephyr", "none"]
"""Dialog format: one of `tokenizer.chat.named.NAMED_FORMATS`, the model's ("auto"), or "none"."""
