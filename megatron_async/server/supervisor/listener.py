"""The one listening socket that all API processes share."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

from megatron_async.errors import ConfigurationError

BACKLOG = 2048
"""Connections that the kernel keeps until a process takes them (at most net.core.somaxconn)."""


def resolve(host: str, port: int) -> tuple[int, tuple[str, int]]:
    """The first address of a host's name: its family, and the address with its port.

    Raises:
        ConfigurationError: this host does not know the name.
    """
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f"--host {host!r} is no address of this host ({error}): give 127.0.0.1 for this host "
            "alone, or the address of one of its networks."
        ) from error
    family, _, _, _, address = found[0]
    return int(family), (str(address[0]), port)


def listen(
    host: str, port: int, *, is_shared: bool = False, fd: int | None = None
) -> socket.socket:
    """A socket that listens; children inherit it. Port 0 takes a free one. `is_shared`: other
    processes of this user may listen there too: the kernel gives each connection to one of them.
    `fd`: a bound socket's, which listens then, wherever it is.

    Raises:
        ConfigurationError: the address is in use, or not one of this host; no socket has this `fd`.
    """
    if fd is not None:
        address_of(fd)
        listener = socket.socket(fileno=fd)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        return listener
    family, address = resolve(host, port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # ports of connections that have just ended are free
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigurationError(_why_not(host, port, error)) from error
    listener.setblocking(False)
    return listener


def address_of(fd: int) -> str:
    """The address that an inherited socket is bound to.

    Raises:
        ConfigurationError: it is no bound TCP socket.
    """
    try:
        with socket.socket(fileno=os.dup(fd)) as found:
            is_tcp = found.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and found.type == socket.SOCK_STREAM and found.getsockname()[1]:
                return str(found.getsockname()[0])
        why = "it is of another kind, or has no port"
    except OSError as error:
        why = str(error)
    raise ConfigurationError(
        f"--fd {fd} is no bound TCP socket of this process ({why}): let it inherit one."
    )


def url_of(listener: socket.socket, has_tls: bool) -> str:
    """URL of a listener on this host, as in "http://127.0.0.1:8000"."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        host = "127.0.0.1" if listener.family == socket.AF_INET else "::1"
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if has_tls else 'http'}://{shown}:{port}"


def _why_not(host: str, port: int, error: OSError) -> str:
    place = f"--host {host} --port {port}"
    match error.errno:
        case errno.EADDRINUSE:
            return f"{place}: the port is in use: give another one, or 0 for any that is free."
        case errno.EADDRNOTAVAIL:
            return f"{place}: this host has no such address: give one of its own, as ::1."
        case errno.EACCES | errno.EPERM:
            return f"{place}: this user may not use the port: give one above 1023."
    return f"{place}: cannot listen there ({error})."
