"""Meta's `consolidated.NN.pth`: a file of `torch.save`, read without torch (`checkpoints/pytorch`)."""

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from llamarium.checkpoints.pytorch.tensors import read_torch_file
from llamarium.checkpoints.storage import FLOATS
from llamarium.errors import UnsupportedFormatError, escape


def read_meta_shard(path: Path) -> dict[str, NDArray[Any]]:
    """Return the tensors of one shard by name, as views of a private mapping of the file; bfloat16 as its bits.

    Raises:
        ModelNotFoundError: If there is no such file.
        CheckpointError: If it holds anything but plain tensors by name, or is malformed.
        UnsupportedFormatError: For a tensor that is no float, or a layout that is not read.
    """
    arrays: dict[str, NDArray[Any]] = {}
    for name, (file, tensor) in read_torch_file(path).items():
        if tensor.dtype not in FLOATS:
            raise UnsupportedFormatError(
                f"{escape(path)}: tensor {escape(name, 80)} is {tensor.dtype}; expected {', '.join(FLOATS)}"
            )
        arrays[name] = file.array(tensor.offset, tensor.shape, FLOATS[tensor.dtype])
    return arrays
