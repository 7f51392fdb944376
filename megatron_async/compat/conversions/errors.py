"""Errors that are Megatron's and ours at once, with our messages.

A script catches Megatron's classes, and code of this project ours: each of these is both. Their
names are Megatron's, because Megatron's events are deserialised by the name of the class.
"""

from __future__ import annotations

from typing import NoReturn

from megatron.core.inference.contexts import dynamic_context as megatron_contexts
from megatron.core.inference.engines import dynamic_engine as megatron_engines

from megatron_async import errors
from megatron_async.errors import ConfigurationError


class _Lasting(megatron_contexts.ContextOverflowError):
    """An overflow that waiting does not end."""

    def __init__(self, request_id: int | None, message: str) -> None:
        super().__init__(request_id, message, is_transient=False)


class ContextOverflowError(_Lasting, errors.RequestError):
    """A request that cannot be served, for a reason that Megatron has no class for."""


class MaxSequenceLengthOverflowError(
    megatron_contexts.MaxSequenceLengthOverflowError, errors.SequenceTooLong
):
    """Prompt and generation are longer than `max_sequence_length`."""


class TokenOverflowError(_Lasting, megatron_contexts.TokenOverflowError, errors.PromptTooLong):
    """The prompt is longer than `max_tokens`, without chunked prefill."""


class BlockOverflowError(_Lasting, megatron_contexts.BlockOverflowError, errors.PoolTooSmall):
    """The KV pool does not hold the request."""


class EngineSuspendedError(megatron_engines.EngineSuspendedError, errors.EngineStopped):
    """The engine is suspended, paused or closed, and was asked for a step."""


OVERFLOWS: dict[type[Exception], type[megatron_contexts.ContextOverflowError]] = {
    errors.SequenceTooLong: MaxSequenceLengthOverflowError,
    errors.PromptTooLong: TokenOverflowError,
    errors.PoolTooSmall: BlockOverflowError,
}


def to_overflow(request_id: int, error: Exception | None) -> megatron_contexts.ContextOverflowError:
    """The error of a failed request as Megatron's events carry it, `error` being its cause."""
    if isinstance(error, megatron_contexts.ContextOverflowError):
        return error
    kind = OVERFLOWS.get(type(error), ContextOverflowError) if error else ContextOverflowError
    message = f"{type(error).__name__}: {error}" if kind is ContextOverflowError else str(error)
    overflow = kind(request_id, message)
    overflow.__cause__ = error
    return overflow


def refuse(name: str, reason: str) -> NoReturn:
    """Raise ConfigurationError: what is called `name` is not served."""
    raise ConfigurationError(f"{name} is not served: {reason}.")
