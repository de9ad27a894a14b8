"""Which pinned files have been hashed and found right, so that a start need not hash them again.

Hashing 98 MB takes a tenth of a second. So what was hashed leaves a note beside the cache: the file's SHA-256, size,
inode, and the time of its last change, which no program can set back. A file that is not as its note says is hashed.
"""

import os
from contextlib import suppress
from pathlib import Path

from llamarium.io import atomic_file, file_sha256


def is_verified(path: Path, num_bytes: int, sha256: str, note: Path, *, anew: bool = False) -> bool:
    """Say whether a file is the pinned one.

    Args:
        path: The file; it need not be there.
        num_bytes: Its pinned size.
        sha256: Its pinned SHA-256.
        note: Where it is noted down that it was right.
        anew: Hash it whatever the note says.
    """
    try:
        if not path.is_file() or path.stat().st_size != num_bytes:
            return False
        state = _state(path, sha256)
        if not anew and note.is_file() and note.read_bytes()[: len(state) + 1] == state:
            return True
        if file_sha256(path) != sha256 or _state(path, sha256) != state:
            return False
    except OSError:
        return False
    with suppress(OSError), atomic_file(note) as file:  # a folder that cannot be written costs a hash at each start
        file.write(state)
    return True


def _state(path: Path, sha256: str) -> bytes:
    status = os.stat(path)  # noqa: PTH116 - one call for all of it
    return f"{sha256} {status.st_size} {status.st_ino} {status.st_ctime_ns}\n".encode()
