"""`Refusal`: why a request is not served, as HTTP status and OpenAI's error object."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

INVALID = "invalid_request_error"
MAX_MESSAGE = 2000
"""Characters of a message: it may quote what a stranger has sent."""
RETRY_AFTER_S = 1
"""Seconds in `Retry-After` when the service is full."""

_STATUS_OF = {
    "RequestError": (400, INVALID, None),
    "SequenceTooLong": (400, INVALID, "context_length_exceeded"),
    "PromptTooLong": (400, INVALID, "context_length_exceeded"),
    "PoolTooSmall": (400, INVALID, None),
    "NoTokenToChoose": (400, INVALID, None),
    "Overloaded": (503, "overloaded_error", "overloaded"),
    "ReplicaLost": (503, "server_error", "replica_lost"),
    "CoordinatorLost": (503, "server_error", "coordinator_lost"),
    "EngineStopped": (503, "server_error", "engine_stopped"),
    "RequestAborted": (503, "server_error", "aborted"),
}
"""Status, type and code by the name of an exception of `megatron_async.errors`."""

OF_ENGINE = {
    "stop_words": "stop",
    "num_tokens_to_generate": "max_tokens",
    "top_n_logprobs": "top_logprobs",
    "return_log_probs": "logprobs",
    "sampling_params": "fields",
    "structured_output": "response_format",
}
"""Words of the engine's errors -> fields of chats and completions."""


class Refusal(Exception):
    """A request that is answered by an error object.

    Args:
        message: what is wrong and what to do; cut at `MAX_MESSAGE` characters.
        status: of HTTP.
        param: the field that is wrong.
        code: OpenAI's name for the error.
        kind: the `type` of the error object.

    Attributes:
        retry_after_s: seconds for a Retry-After header, or None.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str = INVALID,
    ) -> None:
        super().__init__(message)
        self.message = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "..."
        self.status = status
        self.param = param
        self.code = code
        self.kind = kind
        self.retry_after_s = RETRY_AFTER_S if status == 503 else None

    def at(self, field_names: Mapping[str, str], places: Sequence[str] = ()) -> Refusal:
        """Tell it in the fields of an endpoint whose requests are translated to chats.
        `field_names`: fields of chats -> the endpoint's own; `places`: of the chat's tools in the
        request, where these are others."""
        names = dict(field_names)
        tool = re.match(r"tools\[(\d+)\]", self.param or "")
        if tool is not None and places:
            names = {tool[0]: places[int(tool[1])], **names}
        param = self.param and renamed(self.param, names)
        return Refusal(renamed(self.message, names), self.status, param, self.code, self.kind)

    def body(self) -> bytes:
        """The error object as JSON."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.kind,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    def event(self) -> bytes:
        """The error object as an event of a stream that has begun."""
        return b"data: " + self.body() + b"\n\n"


def not_allowed(name: str, value: Any, allowed: str) -> Refusal:
    """The refusal of a field's value."""
    is_huge = isinstance(value, int) and abs(value) > 2**64
    shown = "a number of more than 64 bits" if is_huge else reprlib.repr(value)
    return Refusal(f"{name}={shown} is not allowed: it must be {allowed}.", param=name)


def renamed(text: str, names: Mapping[str, str]) -> str:
    """A message with other names of fields. A name that is a word of the language counts only where
    the message begins."""
    for name, other in names.items():
        begin = r"(?<![\w.])" if "_" in name else r"\b" if "." in name else r"\A"
        text = re.sub(f"{begin}{re.escape(name)}(?!\\w)", other, text)
    return text


@contextmanager
def told_at(field_names: Mapping[str, str], places: Sequence[str] = ()) -> Iterator[None]:
    """Refusals inside name the caller's fields, as `Refusal.at` does."""
    try:
        yield
    except Refusal as refusal:
        raise refusal.at(field_names, places) from refusal


def refusal_of(kind: str, message: str, format_field: str = "response_format") -> Refusal:
    """The answer to a request that failed in the service. Of other kinds than those of the service
    nothing but the name is sent, because their message may hold what is not the caller's.
    `format_field`: the field that the text's format is of."""
    if kind not in _STATUS_OF:
        return Refusal(
            f"the request failed inside the engine ({kind}): the server's log says why.", 500,
            code="internal_error", kind="server_error",
        )  # fmt: skip
    status, type_, code = _STATUS_OF[kind]
    message = renamed(message, OF_ENGINE | {"structured_output": format_field})
    field = re.match(r"([a-z_]+)(?= has | cannot |=)", message)
    return Refusal(message, status, field and field[0], code, type_)
