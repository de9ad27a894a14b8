"""Server-sent events from bytes; an event is its data.

Source: the HTML standard, section 9.2.6.
"""


class Events:
    """Splits a stream of bytes into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that end in these bytes, without comments and other fields."""
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
