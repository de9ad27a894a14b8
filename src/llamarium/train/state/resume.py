"""Save and load the state to resume a run besides its weights: tensors as safetensors, the rest as JSON."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from llamarium.checkpoints.decode import tensor_in
from llamarium.checkpoints.huggingface.safetensors_file import read_safetensors
from llamarium.checkpoints.huggingface.writer import write_safetensors
from llamarium.checkpoints.save import SAFETENSORS_DTYPES, tensor_weight
from llamarium.checkpoints.storage import TensorFile
from llamarium.config import read_json_object
from llamarium.errors import CheckpointError, LlamariumError, TrainingError, escape, show_value
from llamarium.io import sync, unwritable, write_json

_RESUME = "resume"
_MAX_STATE_BYTES = 64 * 2**20
_MAX_THREADS = 1024  # as settings allow


def save_resume(
    folder: Path,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    full_tensor: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Write `resume/optimizer.safetensors` and `resume/state.json` beside a checkpoint's weights.

    Args:
        folder: The checkpoint's.
        tensors: Optimizer state, of any shape.
        state: Plain JSON: dicts with str keys, lists, finite numbers, str, bool and None.
        full_tensor: Gathers a tensor that is sharded over processes.

    Raises:
        TrainingError: If `state` changes in JSON.
        OutputError: If a file cannot be written.
    """
    try:
        plain = json.loads(json.dumps(state, allow_nan=False)) == state
    except (TypeError, ValueError, RecursionError) as error:
        raise TrainingError(f"{escape(folder)}: the run's state cannot be saved as JSON: {escape(error)}") from None
    if not plain:
        raise TrainingError(f"{escape(folder)}: the run's state changes in JSON; expected lists and str keys")
    try:
        (folder / _RESUME).mkdir(parents=True, exist_ok=True)
        weights = [tensor_weight(k, t, partial(full_tensor or _same, t)) for k, t in tensors.items()]
        write_safetensors(folder / _RESUME / "optimizer.safetensors", weights)
        write_json(folder / _RESUME / "state.json", state)
        sync(folder / _RESUME)
    except OSError as error:
        raise unwritable(folder / _RESUME, error) from error


def _same(tensor: Tensor) -> Tensor:
    return tensor


def load_resume(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the files of `save_resume`; TrainingError if they are missing or malformed."""
    if not (folder / _RESUME).is_dir():
        raise TrainingError(
            f"{escape(folder)}: has no folder {_RESUME}, so no run can go on from it; it can be the model that a new "
            "run begins with"
        )
    path = folder / _RESUME / "optimizer.safetensors"
    try:
        state = read_json_object(folder / _RESUME / "state.json", _MAX_STATE_BYTES)
        table, file = read_safetensors(path), TensorFile(path)
        unknown = [t.dtype for t in table.values() if t.dtype not in SAFETENSORS_DTYPES]
        if unknown:
            raise TrainingError(f"{escape(path)}: dtype {unknown[0]}; expected {', '.join(SAFETENSORS_DTYPES)}")
        tensors = {
            name: tensor_in(file, t.offset, t.shape, SAFETENSORS_DTYPES[t.dtype], copy=True)
            for name, t in table.items()
        }
    except OSError as error:
        raise TrainingError(f"{escape(path)}: cannot be read: {escape(error)}") from None
    except TrainingError:
        raise
    except LlamariumError as error:
        raise TrainingError(str(error)) from None
    return tensors, state


def saved_threads(folder: Path) -> int | None:
    """Return the number of threads in a checkpoint, or None; CheckpointError if the file is malformed."""
    found = read_json_object(folder / _RESUME / "state.json", _MAX_STATE_BYTES).get("threads")
    if found is None or (type(found) is int and 0 < found <= _MAX_THREADS):
        return found
    raise CheckpointError(f"{escape(folder)}: threads is {show_value(found)}; expected 1 to {_MAX_THREADS}")
