"""Server-sent events, out of bytes as they come from the network.

Source: the HTML standard, section 9.2.6. Only what chat and completion streams use is kept: an event is its data.
"""


class Events:
    """Cuts a stream of bytes into the data of its events, wherever the network has cut it."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that end in these bytes; comments and other fields are left out."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        found: list[bytes] = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                found.append(b"\n".join(self._data))
                self._data = []
        return found
