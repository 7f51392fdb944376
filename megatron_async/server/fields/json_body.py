"""JSON bodies of strangers: size, depth and types are checked before anything else is done; and the
`Limits` of one HTTP request."""

from __future__ import annotations

import re

import msgspec
import numpy as np
from numpy.typing import NDArray

from megatron_async.server.fields.refusal import Refusal


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one HTTP request. What is beyond them gets 400 (a body: 413).

    Attributes:
        body_bytes: of the JSON text.
        json_depth: objects and lists inside one another.
        json_parts: objects, lists and members of objects.
        choices: answers, which is n times the prompts.
        prompts: in one request for completions.
        messages: of a chat; and entries of any other list that is looked at one by one.
        tools: that a chat may offer.
        log_prob_values: prompt tokens times log probs at each, of all choices; they make an answer
            of about 50 bytes each.
        priority: most by which a request without the admin key may be served later or earlier.
        template_bytes: JSON of a small chat; a larger one is rendered in a process for such, where
            it may take its time.
        answer_tokens: of an answer whose request gives no limit (`ServedModel.answer_tokens`).
    """

    body_bytes: int = 32 << 20
    json_depth: int = 128
    json_parts: int = 2**18
    choices: int = 128
    prompts: int = 128
    messages: int = 4096
    tools: int = 128
    log_prob_values: int = 2_000_000
    priority: int = 0
    template_bytes: int = 64 << 10
    answer_tokens: int | None = None


_FIELD = re.compile(r" - at `\$\.?([A-Za-z_]\w*)")
_DEPTH_OF = np.zeros(256, np.int8)
_DEPTH_OF[list(b"[{")] = 1
_DEPTH_OF[list(b"]}")] = -1
_QUOTE, _BACKSLASH, _COLON, _PLAIN = b'"\\: '
_BLOCK_BYTES = 256 << 10
_COUNTED = ("messages", "input", "tools", "stop", "stop_sequences", "stop_token_ids", "bad_words")
"""Fields that are lists, and are looked at one by one."""


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
    check_shape(body, limits)
    try:
        found = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        field = _FIELD.search(str(error))
        raise Refusal(f"{error}.", param=field and field[1]) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(f"the body is not valid JSON: {error}.", code="invalid_json") from error
    except RecursionError as error:  # of a limit that is set very high
        raise Refusal("the body is nested too deeply: nest it less.") from error
    for name in _COUNTED:
        given = getattr(found, name, None)
        if isinstance(given, list) and len(given) > limits.messages:
            raise Refusal(
                f"{name} has {len(given)} entries, and {limits.messages} are allowed: send fewer.",
                param=name,
            )
    return found


def check_shape(body: bytes, limits: Limits) -> None:
    """Raise Refusal if objects and lists are nested too deeply, or are too many: making them holds
    Python's lock, so that every stream of the process would wait.

    Few brackets and colons are counted at the speed of memory; many, at some nanoseconds a byte,
    without the lock.
    """
    most, brackets = limits.json_depth, body.count(b"[") + body.count(b"{")
    if brackets <= most and brackets + body.count(b":") <= limits.json_parts:
        return
    depth = deepest = parts = 0
    is_inside = is_escaped = False
    for start in range(0, len(body), _BLOCK_BYTES):
        block = np.array(np.frombuffer(body[start : start + _BLOCK_BYTES], np.uint8))
        is_escaped = _hide_escaped(block, is_escaped)
        inside = np.logical_xor.accumulate(block == _QUOTE) ^ is_inside
        is_inside = bool(inside[-1])
        block[inside] = _PLAIN
        steps = _DEPTH_OF[block]
        parts += int(np.count_nonzero(steps > 0)) + int(np.count_nonzero(block == _COLON))
        depths = np.cumsum(steps[steps != 0], dtype=np.int32) + depth
        if len(depths):
            depth, deepest = int(depths[-1]), max(deepest, int(depths.max()))
        if deepest > most:
            raise Refusal(
                f"the body nests objects and lists {deepest} deep, and {most} are allowed: nest it "
                "less.", code="json_too_deep",
            )  # fmt: skip
        if parts > limits.json_parts:
            raise Refusal(
                f"the body has more than {limits.json_parts} objects, lists and members of "
                "objects: send less in one request.", code="json_too_many_parts",
            )  # fmt: skip


def _hide_escaped(block: NDArray[np.uint8], is_escaped: bool) -> bool:
    """Replace escaped characters in place, so that each quote that is left begins or ends a string.
    `block` is uint8 `[bytes]`, a part of a body, whose first character may be escaped by the part
    before. Returns whether the next part's first one is."""
    if is_escaped:
        block[0] = _PLAIN
    slashes = np.flatnonzero(block == _BACKSLASH)
    if not len(slashes):
        return False
    is_first = np.diff(slashes, prepend=-2) > 1
    places = np.arange(len(slashes))
    in_run = places - places[is_first][np.cumsum(is_first) - 1]
    behind = slashes[in_run % 2 == 0] + 1  # of two backslashes the first escapes the second
    is_last = int(behind[-1]) == len(block)
    block[behind[:-1] if is_last else behind] = _PLAIN
    return is_last
