"""The server's socket, address and accepted host names. Imports nothing heavy."""

import errno
import ipaddress
import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

from llamarium.errors import OptionError
from llamarium.server.settings import Settings

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

# Lets a server take the port of one that has just ended. On Windows it always can, and SO_REUSEADDR would let two
# servers share a port.
_ADDRESS_OPTION: int = socket.SO_EXCLUSIVEADDRUSE if sys.platform == "win32" else socket.SO_REUSEADDR

_UNREAD_BYTES = 2**18  # size of the system's send buffer, which limits what is buffered for a client that does not read


def own_names(host: str, allowed: Iterable[str]) -> frozenset[str]:
    """Return the host names that a server accepts: local names, its address, and `allowed`."""
    own_host = (socket.gethostname(),) if is_everywhere(host) else ()
    return LOCAL_NAMES | {name.strip("[]").lower() for name in (host, *allowed, *own_host)}


def is_everywhere(host: str) -> bool:
    """Whether a host is the unspecified address, i.e. every address of the machine."""
    return is_address(host) and ipaddress.ip_address(host).is_unspecified


def is_address(name: str) -> bool:
    """Whether a name is an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def listen(settings: Settings) -> socket.socket:
    """Return a listening socket; connections queue in it until the server accepts them.

    Raises:
        OptionError: If the address cannot be used.
    """
    if settings.uds is not None:
        return _listen_here(settings.uds)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, _ADDRESS_OPTION, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)  # inherited by connections
        listener.bind((settings.host, settings.port))
        listener.listen()
    except OSError as error:
        listener.close()
        place = f"{settings.host}, port {settings.port}"
        reason = error.strerror or error
        raise OptionError(f"cannot listen at {place}: {reason}; choose another address or port") from None
    return listener


def _listen_here(path: str) -> socket.socket:
    """Return a Unix socket that only its owner can use; a stale socket is replaced."""
    if sys.platform == "win32":
        raise OptionError("--uds: Python has no Unix sockets on Windows; use --host and --port")
    listener = socket.socket(socket.AF_UNIX)
    try:
        if Path(path).is_socket() and listener.connect_ex(path) == errno.ECONNREFUSED:
            Path(path).unlink()
            listener.close()
            listener = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)
        try:
            listener.bind(path)
            listener.listen()
        finally:
            os.umask(before)
    except OSError as error:
        listener.close()
        raise OptionError(f"cannot listen at {path}: {error.strerror or error}; choose another path") from None
    return listener


def address(settings: Settings, listener: socket.socket) -> str:
    """Return the server's URL, or `unix:` and the path of its socket."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listener.getsockname()[1]}"
