"""Errors in messages: a kind and a text on the wire, an exception at both ends."""

from __future__ import annotations

from megatron_async import errors


class RemoteError(RuntimeError):
    """A request failed on a replica with an exception that has no class here; the message begins
    with its name."""


def exception_of(kind: str, message: str) -> Exception:
    """The exception of a failure.

    Args:
        kind: name of its class.
        message: its text.
    """
    known = ValueError if kind == "ValueError" else getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, Exception):
        return known(message)
    return RemoteError(f"{kind}: {message}")
