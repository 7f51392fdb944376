"""`HostListener`: waits on a Unix socket for one process of this host and user.

It is an abstract socket of Linux: it has no file, so none is left behind, and other hosts and
containers do not find it. All users of the host can list its name, so each end asks the kernel
whose process the other one is.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
from collections.abc import Callable

CREDENTIALS = struct.Struct("3i")
"""Process, user and group at the other end of a socket."""


def address_of(name: str) -> str:
    """The socket of a name."""
    return f"\0megatron-async-{name}"


class HostListener:
    """Made and used on one running event loop.

    Args:
        take: called once, with a connected socket that does not block.

    Attributes:
        name: by which `connect` finds it.

    Raises:
        OSError, AttributeError: this system has no such sockets.
    """

    def __init__(self, take: Callable[[socket.socket], None]) -> None:
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._listener: socket.socket | None = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
        )
        self.name = secrets.token_hex(16)
        try:
            self._listener.bind(address_of(self.name))
            self._listener.listen(1)
        except BaseException:
            self._listener.close()
            raise
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Wait no longer."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return
        if not _is_friend(accepted):
            accepted.close()
            return
        self.close()
        accepted.setblocking(False)
        self._take(accepted)


def connect(name: str) -> socket.socket | None:
    """A socket to the listener of this name, which does not block; None where there is none: it is
    on another host, another user's, or this system has no such sockets."""
    try:
        found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    except (OSError, AttributeError):  # not Linux
        return None
    try:
        found.connect(address_of(name))
        if _is_friend(found):
            return found
    except (OSError, ValueError):  # another host's, or no name at all
        pass
    found.close()
    return None


def _is_friend(end: socket.socket) -> bool:
    """Whether the process at the other end is this user's, or root's."""
    given = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, user, _ = CREDENTIALS.unpack(given)
    return user in (0, os.getuid())
