"""Snapshots of the embedding table during training: its first rows in half precision.

`run/embeddings/step-00000250.safetensors` contains the rows at a step. The journal lists the steps that belong to the
run; a run that is reset to an earlier step deletes no snapshots, but overwrites them as it reaches their steps again.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llamarium.checkpoints.huggingface.safetensors_file import read_safetensors
from llamarium.checkpoints.huggingface.writer import write_safetensors
from llamarium.checkpoints.save import tensor_weight
from llamarium.checkpoints.storage import TensorFile
from llamarium.errors import CheckpointError, TokenizerError
from llamarium.io import unwritable
from llamarium.model import LlamaForCausalLM
from llamarium.tokenizer.base import Tokenizer

MAX_ROWS = 256
_KEY = "embed_tokens"
_LARGEST = torch.finfo(torch.float16).max


def save_snapshot(
    model: LlamaForCausalLM, run: Path, step: int, full_tensor: Callable[[Tensor], Tensor] | None = None
) -> bool:
    """Write the first rows of the embedding table unless it is frozen or adapted; return whether they were written.

    `full_tensor` gathers a table that is sharded over processes. OutputError if the file cannot be written.
    """
    weight_VD: Tensor | None = getattr(model.model.embed_tokens, "weight", None)  # an adapted embedding has none
    if weight_VD is None or not weight_VD.requires_grad:
        return False
    weight_VD = weight_VD if full_tensor is None else full_tensor(weight_VD)
    rows_RD = weight_VD.detach()[:MAX_ROWS].clamp(-_LARGEST, _LARGEST).half()
    path = snapshot_path(run, step)
    try:
        path.parent.mkdir(exist_ok=True)
        write_safetensors(path, [tensor_weight(_KEY, rows_RD)])
    except OSError as error:
        raise unwritable(path, error) from error
    return True


def read_snapshot(run: Path, step: int) -> NDArray[np.float32]:
    """Return the rows at a step, (R, D) float32; LlamariumError if the file is missing or malformed."""
    path = snapshot_path(run, step)
    values = read_safetensors(path).get(_KEY)
    if values is None or len(values.shape) != 2 or values.dtype != "F16":
        raise CheckpointError(f"{path}: expected {_KEY}, a matrix of F16, and nothing else")
    return TensorFile(path).array(values.offset, values.shape, np.float16, copy=True).astype(np.float32)


def snapshot_path(run: Path, step: int) -> Path:
    """Return the path of a step's snapshot."""
    return run / "embeddings" / f"step-{step:08d}.safetensors"


def token_texts(tokenizer: Tokenizer) -> list[str]:
    """Return the token text of each row of a snapshot; an id without text is written as `<17>`."""

    def text(token_id: int) -> str:
        try:
            return tokenizer.token_text(token_id)
        except TokenizerError:
            return f"<{token_id}>"

    return [text(i) for i in range(min(MAX_ROWS, tokenizer.vocab_size))]
