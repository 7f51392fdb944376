"""JSON bodies of strangers: size, depth and types are checked before anything else is done."""

from __future__ import annotations

import re

import msgspec
import numpy as np

from megatron_async.server.fields.limits import Limits
from megatron_async.server.fields.refusal import Refusal

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_FIELD = re.compile(r" - at `\$\.?([A-Za-z_]\w*)")
_DEPTH_OF = np.zeros(256, np.int8)
_DEPTH_OF[list(b"[{")] = 1
_DEPTH_OF[list(b"]}")] = -1


def decode_body[T](body: bytes, kind: type[T], limits: Limits) -> T:
    """A body as a struct; fields that the struct does not have are ignored.

    Raises:
        Refusal: 413, it is too long; 400, it is not JSON, too deep, or not of the right types.
    """
    if len(body) > limits.body_bytes:
        raise Refusal(
            f"the body has {len(body)} bytes, and {limits.body_bytes} are allowed: send less in "
            "one request.", 413, code="request_too_large",
        )  # fmt: skip
    check_depth(body, limits.json_depth)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        found = _FIELD.search(str(error))
        raise Refusal(f"{error}.", param=found and found[1]) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(f"the body is not valid JSON: {error}.", code="invalid_json") from error
    except RecursionError as error:  # of a limit that is set very high
        raise Refusal("the body is nested too deeply: nest it less.") from error


def check_depth(body: bytes, most: int) -> None:
    """Raise Refusal if objects and lists are nested too deeply.

    Few brackets are counted at the speed of memory; many, at some nanoseconds a byte.
    """
    if body.count(b"[") + body.count(b"{") <= most:
        return
    rest = np.frombuffer(_STRING.sub(b"", body), np.uint8)
    steps = _DEPTH_OF[rest]
    deepest = int(np.cumsum(steps[steps != 0], dtype=np.int32).max(initial=0))
    if deepest > most:
        raise Refusal(
            f"the body nests objects and lists {deepest} deep, and {most} are allowed: nest it "
            "less.", code="json_too_deep",
        )  # fmt: skip
