"""W3C's `traceparent`: which distributed trace a request belongs to, and how logs name it.

A request's trace is text that travels with it, from the HTTP process to the engine. Nothing here
needs OpenTelemetry.
"""

from __future__ import annotations

import re

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
