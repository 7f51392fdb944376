"""The message of a request, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from megatron_async.errors import RequestError
from megatron_async.requests.sampling_params import SamplingParams
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
        params.num_tokens_to_generate, priority, label, owner,
    )  # fmt: skip
    try:
        check_sendable(message)
    except UNSENDABLE as error:
        raise RequestError(f"the prompt cannot be sent: {error}") from error
    return message


def _encoded(params: SamplingParams) -> bytes:
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params={params!r} must be SamplingParams.")
    try:
        data = encode(params)
        msgspec.msgpack.decode(data, type=SamplingParams)
    except UNSENDABLE as error:
        raise RequestError(f"sampling_params cannot be sent: {error}") from error
    return data
