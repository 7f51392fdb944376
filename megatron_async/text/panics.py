"""Errors of libraries written in Rust: a panic is no `Exception`, and would pass the handlers
that let one request fail alone."""

from __future__ import annotations

import asyncio

from megatron_async.errors import RequestError

INTERRUPTS = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)
"""Exceptions that go to the caller, and are nobody's fault."""


def error_of(raised: BaseException, what: str) -> BaseException:
    """The error to raise for what a library has raised: a `RequestError` for a panic (such as
    of a tokenizer's regular expression that tried too often) or a bare `Exception`, else itself.

    Args:
        raised: by the library.
        what: could not be done.
    """
    is_own = isinstance(raised, Exception) and type(raised) is not Exception
    if is_own or isinstance(raised, INTERRUPTS):
        return raised
    return RequestError(f"{what}: {type(raised).__name__}: {raised}.")
