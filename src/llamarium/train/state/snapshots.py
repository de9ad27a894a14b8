"""Small pictures of the embedding table while it learns: its first rows, in half precision.

`run/embeddings/step-00000250.safetensors` holds the rows of one moment. The journal names the moments that belong to
the run, so a run that is set back needs to delete nothing: what it passes again it writes again.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from llamarium.checkpoints.decode import tensor_in
from llamarium.checkpoints.huggingface.safetensors_file import read_safetensors
from llamarium.checkpoints.huggingface.writer import write_safetensors
from llamarium.checkpoints.save import SAFETENSORS_DTYPES, tensor_weight
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
    """Write the first rows of the embedding table, unless it is frozen; say whether it was written.

    Args:
        model: Its `embed_tokens` is kept.
        run: The run's folder.
        step: The moment.
        full_tensor: Makes one tensor of a table that is spread over processes; None where it is whole.

    Raises:
        OutputError: If the file cannot be written.
    """
    if not any(p.requires_grad for p in model.model.embed_tokens.parameters()):
        return False
    weight_VD = model.model.embed_tokens.weight
    rows_RD = (
        (weight_VD if full_tensor is None else full_tensor(weight_VD))
        .detach()[:MAX_ROWS]
        .clamp(-_LARGEST, _LARGEST)
        .half()
    )
    path = snapshot_path(run, step)
    try:
        path.parent.mkdir(exist_ok=True)
        write_safetensors(path, [tensor_weight(_KEY, rows_RD)])
    except OSError as error:
        raise unwritable(path, error) from error
    return True


def read_snapshot(run: Path, step: int) -> Tensor:
    """Return the rows of a moment, (R, D) float32.

    Raises:
        LlamariumError: If the file is missing or malformed.
    """
    path = snapshot_path(run, step)
    found = read_safetensors(path).get(_KEY)
    if found is None or len(found.shape) != 2 or found.dtype != "F16":
        raise CheckpointError(f"{path}: expected {_KEY}, a matrix of F16, and nothing else")
    return tensor_in(TensorFile(path), found.offset, found.shape, SAFETENSORS_DTYPES[found.dtype], copy=True).float()


def snapshot_path(run: Path, step: int) -> Path:
    """Return where the rows of a moment lie, or would lie."""
    return run / "embeddings" / f"step-{step:08d}.safetensors"


def token_texts(tokenizer: Tokenizer) -> list[str]:
    """Return the text of each row that a snapshot holds; an id that the vocabulary skips is written `<17>`."""

    def text(token_id: int) -> str:
        try:
            return tokenizer.token_text(token_id)
        except TokenizerError:
            return f"<{token_id}>"

    return [text(i) for i in range(min(MAX_ROWS, tokenizer.vocab_size))]
