"""What a runner and its process say to each other: a JSON header, then the raw bytes of arrays. Never torch.

Nothing of a header is code. The side that asks computes how many bytes an answer has, so the other side cannot make it
take memory. The cache's file travels beside a request, as a descriptor.
"""

import socket
import time
from collections.abc import Mapping, Sequence
from json import dumps, loads  # a function that assigns json.dumps changes nothing here
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEADER_BYTES = 1 << 20
"""Of a header at most."""


def send(
    channel: socket.socket,
    header: Mapping[str, Any],
    arrays: Sequence[NDArray[Any]] = (),
    descriptor: int | None = None,
) -> None:
    """Send a header, arrays whose dtypes and shapes it then names, and an open file."""
    described = [[array.dtype.str, array.shape] for array in arrays]
    text = dumps({**header, "arrays": described}).encode()
    length = len(text).to_bytes(4, "big")
    sent = channel.send(length) if descriptor is None else socket.send_fds(channel, [length], [descriptor])
    channel.sendall(length[sent:] + text)
    for array in arrays:
        channel.sendall(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def read_header(channel: socket.socket, deadline: float | None = None, begun: bytes = b"") -> dict[str, Any]:
    """Return the next header; `begun` is what has been read of it, `deadline` is of `time.monotonic`.

    EOFError if the other side has ended, TimeoutError if it does not come in time, ValueError if it is none.
    """
    length = int.from_bytes(begun + _read(channel, 4 - len(begun), deadline), "big")
    if length > HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    header = loads(_read(channel, length, deadline))
    if not isinstance(header, dict):
        raise ValueError("a header that is no object")
    return header  # pyright: ignore[reportUnknownVariableType]


def read_arrays(channel: socket.socket, header: Mapping[str, Any]) -> list[NDArray[Any]]:
    """Return the arrays that a header of the library's own names."""
    arrays = [np.empty(shape, dtype) for dtype, shape in header["arrays"]]
    for array in arrays:
        read_into(channel, array)
    return arrays


def read_into(channel: socket.socket, array: NDArray[Any], deadline: float | None = None) -> None:
    """Fill a contiguous array; errors as of `read_header`."""
    view = array.reshape(-1).view(np.uint8).data
    while view:
        if deadline is not None:
            channel.settimeout(max(1e-3, deadline - time.monotonic()))
        count = channel.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]


def _read(channel: socket.socket, count: int, deadline: float | None) -> bytes:
    found = np.empty(count, np.uint8)
    read_into(channel, found, deadline)
    return found.tobytes()
