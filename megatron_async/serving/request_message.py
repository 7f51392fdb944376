"""The message of a request, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from megatron_async.errors import RequestError
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.requests.trace_context import read_traceparent
from megatron_async.serving.connection import check_sendable
from megatron_async.serving.messages import UNSENDABLE, Generate, encode

MOST_LABEL = 128
"""Most characters of a label or an owner."""


def request_message(
    prompt: Sequence[int] | str,
    params: SamplingParams,
    priority: int = 0,
    owner: str = "",
    label: str = "",
    traceparent: str = "",
) -> Generate:
    """The message of a request, without a number; the arguments are those of `TokenClient.send`.

    Raises:
        RequestError: a value of the request cannot be sent.
    """
    if type(priority) is not int:
        raise RequestError(f"priority={priority!r} is not allowed: it must be an integer.")
    if len(label) > MOST_LABEL or len(owner) > MOST_LABEL:
        raise RequestError(
            f"a label of {len(label)} and an owner of {len(owner)} characters were given: at "
            f"most {MOST_LABEL} are allowed."
        )
    message = Generate(
        0, prompt if isinstance(prompt, str) else list(prompt), msgspec.Raw(_encoded(params)),
        params.num_tokens_to_generate, priority, label, owner, checked_traceparent(traceparent),
    )  # fmt: skip
    try:
        check_sendable(message)
    except UNSENDABLE as error:
        raise RequestError(f"the prompt cannot be sent: {error}") from error
    return message


def checked_traceparent(given: str) -> str:
    """A caller's `traceparent`, as it is sent.

    Raises:
        RequestError: it is none.
    """
    if not given:
        return ""
    found = read_traceparent(given) if isinstance(given, str) else ""
    if not found:
        raise RequestError(
            f"traceparent={given!r} is not allowed: give W3C's header, as in "
            '"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", or leave it out.'
        )
    return found


def _encoded(params: SamplingParams) -> bytes:
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params={params!r} must be SamplingParams.")
    try:
        data = encode(params)
        msgspec.msgpack.decode(data, type=SamplingParams)
    except UNSENDABLE as error:
        raise RequestError(f"sampling_params cannot be sent: {error}") from error
    return data
