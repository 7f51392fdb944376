"""Addresses of a coordinator: which are valid, and why an address cannot be bound."""

from __future__ import annotations

import errno
import os
import socket
import stat

import psutil

from megatron_async.errors import ConfigurationError
from megatron_async.serving.link import BACKLOG

MOST_PORT = 2**16 - 1
MOST_FILE_BYTES = 107
"""Bytes of the name of a Unix socket, on Linux."""
EXAMPLES = "tcp://127.0.0.1:9500 or ipc:///tmp/coordinator"


def check_address(address: str) -> None:
    """Check the form of an address, so that each mistake has its own remedy. It is
    "tcp://HOST:PORT" (PORT "*" or 0: bind a free one), or "ipc://FILE".

    Raises:
        ConfigurationError: the text is no such address; the message says what is wrong with it.
    """
    transport, _, place = address.partition("://")
    if (transport == "ipc" and place) or (transport == "tcp" and _is_host_and_port(place)):
        return
    wrong = f"write it as {EXAMPLES}."
    if _is_host_and_port(address):
        wrong = f"did you mean tcp://{address}?"
    elif transport == "tcp":
        wrong = (
            f"behind tcp:// stand a host and a port of at most {MOST_PORT}, as in "
            "tcp://127.0.0.1:9500."
        )
    raise ConfigurationError(f"{address!r} is no address of a coordinator: {wrong}")


def target_of(address: str) -> str | tuple[str, int]:
    """Where to connect for an address that `check_address` has accepted: a Unix socket's name, or
    host and port.

    Raises:
        ConfigurationError: one can only bind it.
    """
    transport, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    wrong = ""
    if transport == "ipc":
        wrong = "its file's name is too long" if len(place.encode()) > MOST_FILE_BYTES else ""
    elif "*" in (host, port):
        wrong = "`*` is for its binding end"
    if wrong:
        raise ConfigurationError(
            f"{address!r} is no address of a coordinator ({wrong}): write it as {EXAMPLES}."
        )
    return _file(place) if transport == "ipc" else (host, int(port))


def listen(address: str) -> tuple[socket.socket, str]:
    """A socket that waits at an address, and the address with the port that it got.

    Raises:
        ConfigurationError: the address cannot be bound; the message says why.
    """
    check_address(address)
    transport, _, place = address.partition("://")
    listener = socket.socket(socket.AF_UNIX if transport == "ipc" else socket.AF_INET)
    try:
        if transport == "ipc":
            _make_free(place)
            listener.bind(_file(place))
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            host, _, port = place.rpartition(":")
            listener.bind((_own_host(host), 0 if port == "*" else int(port)))
            address = "tcp://{}:{}".format(*listener.getsockname())
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigurationError(why_not_bound(address, error)) from error
    listener.setblocking(False)
    return listener, address


def forget(address: str) -> None:
    """Take away the file of an address that is bound no more."""
    place = address.removeprefix("ipc://")
    if place != address and not place.startswith("@") and os.path.exists(place):
        os.unlink(place)


def why_not_bound(address: str, error: OSError) -> str:
    """What to say of an address of the right form that cannot be bound."""
    reason = (error.strerror or str(error)).lower()
    remedy = f"choose another, as in {EXAMPLES}"
    if error.errno == errno.EADDRINUSE:
        reason, remedy = "address already in use", "stop what uses it, or choose another port"
    elif isinstance(error, socket.gaierror) or error.errno in (errno.ENODEV, errno.EADDRNOTAVAIL):
        reason = "this host has no such address"
        remedy = "bind one of its own, as in tcp://127.0.0.1:9500 (tcp://0.0.0.0:9500: all of them)"
    return f"the coordinator cannot use the address {address!r} ({reason}): {remedy}."


def _is_host_and_port(place: str) -> bool:
    host, _, port = place.rpartition(":")
    is_number = port.isascii() and port.isdigit() and int(port) <= MOST_PORT
    return bool(host) and (port == "*" or is_number)


def _own_host(host: str) -> str:
    """A host's name or IP address to bind; `*` is all, and a network interface has a name, too."""
    if host == "*":
        return "0.0.0.0"
    for each in psutil.net_if_addrs().get(host, []):
        if each.family == socket.AF_INET:
            return each.address
    return host


def _file(place: str) -> str:
    """The name of a Unix socket; "@" begins the name of an abstract one, as of old."""
    return "\0" + place[1:] if place.startswith("@") else place


def _make_free(file: str) -> None:
    """Take away a socket's file that nobody listens at; refuse a path that anything else has."""
    if file.startswith("@") or not os.path.exists(file):
        return
    if not stat.S_ISSOCK(os.stat(file).st_mode):
        raise OSError("the file there is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(file)
        except ConnectionRefusedError:
            os.unlink(file)
            return
    raise OSError(errno.EADDRINUSE, "address already in use")
