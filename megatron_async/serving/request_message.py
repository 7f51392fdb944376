"""The message of a request, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from megatron_async.errors import RequestError
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.requests.traces import read_traceparent
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

    Whether the prompt can be sent is found out when it is (`check_request` asks before). A replica
    refuses parameters of other types than they should be of, as it refuses those out of range.

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
    return Generate(
        0, prompt if isinstance(prompt, str) else list(prompt), msgspec.Raw(_encoded(params)),
        params.num_tokens_to_generate, priority, label, owner, checked_traceparent(traceparent),
    )  # fmt: skip


def check_request(message: Generate) -> None:
    """Check what `request_message` leaves to others: for callers that report it before they send.

    Raises:
        RequestError: the message cannot be sent, or its parameters cannot be read.
    """
    try:
        msgspec.msgpack.decode(message.params, type=SamplingParams)
    except UNSENDABLE as error:
        raise RequestError(f"sampling_params cannot be sent: {error}") from error
    try:
        check_sendable(message)
    except UNSENDABLE as error:
        raise unsendable_prompt(error) from error


def unsendable_prompt(error: Exception) -> RequestError:
    """What a caller is told whose prompt cannot be encoded."""
    return RequestError(f"the prompt cannot be sent: {error}")


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
        return encode(params)
    except UNSENDABLE as error:
        raise RequestError(f"sampling_params cannot be sent: {error}") from error
