"""Traces as files, in the format of the public traces of Mooncake: JSON lines.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}

`timestamp` is in milliseconds; `hash_ids` has an id for each `PIECE_TOKENS` tokens of the prompt,
the last of which may stand for fewer. Answers have no ids there, so what they share with later
prompts is not known. Files of ours have `output_hash_ids` too, ids of the pieces behind the
prompt's last one: read again, they are the same requests. Other fields are not looked at.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megatron_async.lab.fleets.traced_requests import Trace, TracedRequest, pieces_of

MOST_PIECES = 2**20
"""Most pieces of one sequence: more than any model's context."""
MOST_ID = 2**52
"""An id, with a token's place, is to fit 64 bits."""


class TraceError(ValueError):
    """A file that is no trace; the message names file, line and field."""


class TraceFile:
    """A trace in a file, read line by line.

    An answer without ids gets ids that no other request has: nobody finds its tokens.

    Args:
        path: JSON lines, in order of `timestamp`. Lines without anything are skipped.

    Raises:
        TraceError: while it is read; see there.
        OSError: the file cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def __iter__(self) -> Iterator[TracedRequest]:
        before = 0.0
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                request = _Line(f"{self._path}, line {number}", line, number).request()
                if request.arrival_s < before:
                    raise TraceError(
                        f"{self._path}, line {number}: timestamp is {1e3 * request.arrival_s:g} ms "
                        f"and {1e3 * before:g} ms in the line before: sort the file by timestamp."
                    )
                before = request.arrival_s
                yield request


def write_trace(path: str | Path, trace: Trace) -> int:
    """Write a trace, line by line; times are rounded to microseconds.

    Returns:
        the number of requests.
    """
    count = 0
    with Path(path).open("w") as file:
        for request in trace:
            ids, pieces = request.ids.tolist(), request.prompt_pieces
            line = {
                "timestamp": round(1e3 * request.arrival_s, 3),
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "hash_ids": ids[:pieces],
            }
            if min(ids[pieces:], default=-1) >= 0:
                line["output_hash_ids"] = ids[pieces:]
            file.write(json.dumps(line) + "\n")
            count += 1
    return count


class _Line:
    """One line, and where it stands."""

    def __init__(self, where: str, line: bytes, number: int) -> None:
        self._where, self._number = where, number
        try:
            self._fields: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TraceError(
                f"{where} is no JSON object ({error}): a trace has one in each line, with "
                "timestamp, input_length, output_length and hash_ids."
            ) from None

    def request(self) -> TracedRequest:
        """What the line says."""
        inputs, outputs = self._length("input_length"), self._length("output_length")
        pieces, total = pieces_of(inputs), pieces_of(inputs + outputs)
        if total > MOST_PIECES:
            raise self._error("input_length", inputs, f"at most {MOST_PIECES} pieces in all")
        ids = self._ids("hash_ids", pieces, f"{inputs} tokens of input_length")
        if "output_hash_ids" in self._fields:
            what = f"{outputs} tokens of output_length behind {inputs}"
            ids += self._ids("output_hash_ids", total - pieces, what)
        else:
            first = -self._number * MOST_PIECES
            ids += range(first, first + total - pieces)
        return TracedRequest(self._arrival_s(), inputs, outputs, np.array(ids, dtype=np.int64))

    def _arrival_s(self) -> float:
        value = self._field("timestamp")
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise self._error("timestamp", value, "a number of milliseconds of at least 0")
        return float(value) / 1e3

    def _length(self, name: str) -> int:
        value = self._field(name)
        if type(value) is not int or value < 1:
            raise self._error(name, value, "a number of tokens of at least 1")
        return value

    def _ids(self, name: str, count: int, what: str) -> list[int]:
        value = self._field(name)
        if not isinstance(value, list):
            raise self._error(name, value, "a list of integers")
        for each in value:
            if type(each) is not int or not 0 <= each < MOST_ID:
                raise self._error(name, each, f"integers of 0 to {MOST_ID - 1} only")
        if len(value) != count:
            raise TraceError(
                f"{self._where}: {name} has {len(value)} ids, and {what} have {count}: give one "
                "for each 512 tokens, the last of which may stand for fewer."
            )
        return value

    def _field(self, name: str) -> Any:
        if name not in self._fields:
            raise TraceError(
                f"{self._where}: {name} is missing; there is {', '.join(self._fields) or 'none'}."
            )
        return self._fields[name]

    def _error(self, name: str, value: object, expected: str) -> TraceError:
        return TraceError(f"{self._where}: {name} is {str(value)[:80]!r} and must be {expected}.")
