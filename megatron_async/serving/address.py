"""Addresses of a coordinator: which are valid, and why an address cannot be bound."""

from __future__ import annotations

import errno

import zmq

from megatron_async.errors import ConfigurationError

MOST_PORT = 2**16 - 1


def check_address(address: str) -> None:
    """Check the form of an address, because ZMQ takes a port modulo 65536 and explains few errors.

    Args:
        address: "tcp://HOST:PORT" (PORT "*" or 0: bind a free one), or "ipc://FILE".

    Raises:
        ConfigurationError: the text is no such address; the message says what is wrong with it.
    """
    transport, _, place = address.partition("://")
    if (transport == "ipc" and place) or (transport == "tcp" and _is_host_and_port(place)):
        return
    wrong = "write it as tcp://127.0.0.1:9500 or ipc:///tmp/coordinator."
    if _is_host_and_port(address):
        wrong = f"did you mean tcp://{address}?"
    elif transport == "tcp":
        wrong = (
            f"behind tcp:// stand a host and a port of at most {MOST_PORT}, as in "
            "tcp://127.0.0.1:9500."
        )
    raise ConfigurationError(f"{address!r} is no address of a coordinator: {wrong}")


def why_not_bound(address: str, error: OSError | zmq.ZMQError) -> str:
    """What to say of an address of the right form that cannot be bound."""
    reason = (error.strerror or str(error)).lower()
    remedy = "choose another, as in tcp://127.0.0.1:9500 or ipc:///tmp/coordinator"
    if error.errno == errno.EADDRINUSE:
        reason, remedy = "address already in use", "stop what uses it, or choose another port"
    elif error.errno in (errno.ENODEV, errno.EADDRNOTAVAIL):
        reason = "this host has no such address"
        remedy = "bind one of its own, as in tcp://127.0.0.1:9500 (tcp://0.0.0.0:9500: all of them)"
    return f"the coordinator cannot use the address {address!r} ({reason}): {remedy}."


def _is_host_and_port(place: str) -> bool:
    host, _, port = place.rpartition(":")
    is_number = port.isascii() and port.isdigit() and int(port) <= MOST_PORT
    return bool(host) and (port == "*" or is_number)
