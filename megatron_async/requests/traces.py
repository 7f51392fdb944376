"""Traces of requests: W3C's `traceparent`, which says which distributed trace a request belongs to,
and `TraceLog`, log lines of requests that somebody traces.

A request's trace is text that travels with it, from the HTTP process to the engine. Nothing here
needs OpenTelemetry.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_async.requests.inference_request import DynamicInferenceRequest

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


def read_traceparent(text: str) -> str:
    """A `traceparent` in the form of version 00, 55 characters; "" if it is none.

    Later versions may have more fields, which are left out, as W3C says. A header that is invalid
    counts as if it were not there.

    Args:
        text: of a header, without blanks around it.
    """
    found = _FORM.fullmatch(text)
    if found is None:
        return ""
    version, trace, parent, flags, more = found.groups()
    is_valid = version != "ff" and int(trace, 16) and int(parent, 16)
    if not is_valid or (more is not None and version == "00"):
        return ""
    return f"00-{trace}-{parent}-{flags}"


def trace_id(traceparent: str) -> str:
    """The 32 hexadecimal digits by which a collector knows the trace."""
    return traceparent[3:35]


def is_sampled(traceparent: str) -> bool:
    """Whether the caller records the trace; False of ""."""
    return traceparent != "" and bool(int(traceparent[-2:], 16) & _SAMPLED)


def named(number: int, traceparent: str) -> str:
    """A request with a trace, for a log line: "Request 5 (trace 4bf9...)"."""
    return f"Request {number} (trace {trace_id(traceparent)})"


logger = logging.getLogger("megatron_async")

MOST_NAMED = 8
"""Traces that one line of the step log names."""


class TraceLog:
    """A line at the begin and at the end of each request whose trace is sampled: gateways give a
    trace to every request, and record few of them. A failure is logged if there is any trace."""

    def __init__(self) -> None:
        self._unfinished: dict[int, str] = {}
        """Trace ids of sampled requests, by request."""

    def added(self, request: DynamicInferenceRequest) -> None:
        """A request with a trace came."""
        if is_sampled(request.traceparent):
            self._unfinished[request.request_id] = trace_id(request.traceparent)
            logger.info(
                "%s came, with %d prompt tokens.", _name(request), len(request.prompt_tokens)
            )

    def ended(self, request: DynamicInferenceRequest) -> None:
        """A request with a trace has ended."""
        is_known = self._unfinished.pop(request.request_id, None) is not None
        reason = request.finish_reason
        if request.error is not None:
            level = logging.INFO if reason == "aborted" else logging.WARNING
            logger.log(level, "%s ended (%s): %s", _name(request), reason, request.error)
        elif is_known and request.latency is not None:
            first = "no token" if request.ttft is None else f"first token {request.ttft:.4f} s"
            logger.info(
                "%s ended (%s): %d tokens, %s, all %.4f s.",
                _name(request), reason, len(request.generated_tokens), first,
                request.latency,
            )  # fmt: skip

    def withdrawn(self, request_id: int) -> None:
        """A request was not added after all; it may have had no trace."""
        self._unfinished.pop(request_id, None)

    def names(self) -> str:
        """Trace ids of unfinished requests, for a line of the step log; "" if there are none."""
        if not self._unfinished:
            return ""
        found = list(dict.fromkeys(self._unfinished.values()))
        more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        return f"; traces {', '.join(found[:MOST_NAMED])}{more}"


def _name(request: DynamicInferenceRequest) -> str:
    return named(request.request_id, request.traceparent)
