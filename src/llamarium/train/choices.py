"""Names that settings of training take."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from llamarium.datasets.sources import Data

Examples = Data | Path | Iterable[Any]
"""Training data: a source by name or path, several and their weights, or rows of Python."""

OptimizerName = Literal["adamw", "muon"]
ScheduleName = Literal["cosine", "linear", "wsd", "constant"]
QuantizeName = Literal["none", "NF4", "Q8_0", "Q4_0", "Q4_1", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K", "Q5_0"]
"""What a frozen base can be kept in: "none", or one of `quant.formats.METHODS`; a test holds them equal."""

ChatFormatName = Literal["auto", "llama3", "chatml", "llama2", "mistral", "vicuna", "alpaca", "zephyr", "none"]
"""How a dialog is written: one of `tokenizer.chat.named.NAMED_FORMATS`, the model's own way, or not at all."""
