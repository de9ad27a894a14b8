"""The protocol between a runner and its worker process: a JSON header, then the raw bytes of arrays. Torch-free.

Headers contain no code. The requesting side computes the size of a reply itself, so the other side cannot make it
allocate memory. The KV cache's file is passed with a request, as a descriptor.
"""

import socket
import time
from collections.abc import Mapping, Sequence
from json import dumps, loads  # bound here, so that a learner's code that replaces json.dumps has no effect
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEADER_BYTES = 1 << 20
"""Maximum size of a header."""


def send(
    channel: socket.socket,
    header: Mapping[str, Any],
    arrays: Sequence[NDArray[Any]] = (),
    descriptor: int | None = None,
) -> None:
    """Send a header with the dtypes and shapes of the arrays, the arrays, and optionally an open file."""
    described = [[array.dtype.str, array.shape] for array in arrays]
    text = dumps({**header, "arrays": described}).encode()
    length = len(text).to_bytes(4, "big")
    num_sent = channel.send(length) if descriptor is None else socket.send_fds(channel, [length], [descriptor])
    channel.sendall(length[num_sent:] + text)
    for array in arrays:
        channel.sendall(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def read_header(channel: socket.socket, deadline: float | None = None, start: bytes = b"") -> dict[str, Any]:
    """Return the next header.

    Args:
        channel: The connection.
        deadline: Time limit, by `time.monotonic`.
        start: Its first bytes, if they have been read already.

    Raises:
        EOFError: If the other side has ended.
        TimeoutError: If the deadline has passed.
        ValueError: If the header is invalid.
    """
    length = int.from_bytes(start + _read(channel, 4 - len(start), deadline), "big")
    if length > HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    header = loads(_read(channel, length, deadline))
    if not isinstance(header, dict):
        raise ValueError("the header is not an object")
    return header  # pyright: ignore[reportUnknownVariableType]


def read_arrays(channel: socket.socket, header: Mapping[str, Any]) -> list[NDArray[Any]]:
    """Return the arrays that follow a trusted header."""
    arrays = [np.empty(shape, dtype) for dtype, shape in header["arrays"]]
    for array in arrays:
        read_into(channel, array)
    return arrays


def read_into(channel: socket.socket, array: NDArray[Any], deadline: float | None = None) -> None:
    """Fill a contiguous array; errors as `read_header`."""
    view = array.reshape(-1).view(np.uint8).data
    while view:
        if deadline is not None:
            channel.settimeout(max(1e-3, deadline - time.monotonic()))
        count = channel.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]


def _read(channel: socket.socket, count: int, deadline: float | None) -> bytes:
    buffer = np.empty(count, np.uint8)
    read_into(channel, buffer, deadline)
    return buffer.tobytes()
