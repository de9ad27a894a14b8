"""Stored responses, which later requests can continue, in memory or in an SQLite file."""

import hashlib
import json
import os
import sqlite3
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from llamarium.errors import OptionError, escape

_TABLE = "create table if not exists responses (name text primary key, used integer, size integer, content blob)"
_EVICT = """delete from responses where name in (
    select name from (select name, sum(size) over (order by used desc) as total from responses) where total > ?)"""
_PAGE = 4096  # bytes per page of the file; an entry takes full pages, and one for its name
_DIGEST_BYTES = 32


class ResponseStore:
    """Stored responses, each accessible only with the API key of its owner.

    The least recently used responses are evicted first. A damaged entry counts as missing. Several processes can share
    a file.

    Args:
        most_bytes: Maximum total size.
        file: The SQLite file; None stores responses in memory.

    Raises:
        OptionError: If the file cannot be written or is not an SQLite file.
    """

    def __init__(self, most_bytes: int, file: Path | None = None) -> None:
        self._most_bytes, self._lock = most_bytes, threading.Lock()
        try:
            if file is not None:
                os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
            self._file = sqlite3.connect(file or ":memory:", check_same_thread=False)
            weakref.finalize(self, self._file.close)
            with self._file:
                self._file.execute("pragma secure_delete = on")
                self._file.execute(_TABLE)
                self._file.execute(_EVICT, (most_bytes,))
        except (OSError, sqlite3.Error) as error:
            raise OptionError(f"{escape(file)}: cannot store responses: {escape(error)}; name another file") from None

    def put(self, response_id: str, owner: str, value: dict[str, Any]) -> bool:
        """Store a response; return False if it is too large or cannot be written."""
        content = json.dumps(value).encode()
        size = (len(content) // _PAGE + 2) * _PAGE
        row = _name(response_id, owner), time.time_ns(), size, hashlib.sha256(content).digest() + content
        with self._lock, suppress(sqlite3.Error), self._file:
            if size <= self._most_bytes:
                self._file.execute("insert or replace into responses values (?, ?, ?, ?)", row)
                self._file.execute(_EVICT, (self._most_bytes,))
                return True
        return False

    def get(self, response_id: str, owner: str) -> dict[str, Any] | None:
        """Return a response, or None if it is missing, damaged, or another owner's."""
        name = _name(response_id, owner)
        with self._lock, suppress(sqlite3.Error), self._file:
            self._file.execute("update responses set used = ? where name = ?", (time.time_ns(), name))
            for (content,) in self._file.execute("select content from responses where name = ?", (name,)):
                stored = content if isinstance(content, bytes) else b""
                if hashlib.sha256(stored[_DIGEST_BYTES:]).digest() == stored[:_DIGEST_BYTES]:
                    return json.loads(stored[_DIGEST_BYTES:])
        return None

    def delete(self, response_id: str, owner: str) -> bool:
        """Delete a response; return whether it existed."""
        with self._lock, suppress(sqlite3.Error), self._file:
            name = _name(response_id, owner)
            return self._file.execute("delete from responses where name = ?", (name,)).rowcount > 0
        return False


def _name(response_id: str, owner: str) -> str:
    return hashlib.sha256(json.dumps([response_id, owner]).encode()).hexdigest()
