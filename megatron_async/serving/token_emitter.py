"""`TokenEmitter`: sends the tokens of an engine's steps, one message for all requests of a step.

Runs on the engine's thread. A step costs the same few array operations for any number of requests:
requests have the coordinator's numbers as their ids, so a step's arrays are sent unchanged. Most of
a message's cost is waking the process that reads it. So steps of many rows within `EVERY_S` of the
last message wake nobody: they share the next one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_async.engine.listener import EngineListener
from megatron_async.ops.sampling.slot_records import MAX_TOP_N
from megatron_async.planning.step_output import StepOutput
from megatron_async.serving.messages import Ended, LogProbRows, StepTokens

EVERY_S = 0.004
"""Seconds between messages, for steps that have many tokens and no request's first token.
API processes write such tokens at most every 5 ms (`server/answer_stream.py`)."""
SLACK_S = 0.001
"""Seconds that a message which is due waits for the next step to send it."""
TRUE = b"\x01"
FEW = 16
"""Up to so many tokens of a step are sent at once, because API processes write them at once."""


class TokenEmitter(EngineListener):
    """Listens to the engine's steps. `send` is given one message at the end of a turn of the event
    loop that had news."""

    def __init__(self, send: Callable[[StepTokens], None]) -> None:
        self._send = send
        self._outputs: list[StepOutput] = []
        self._ends: list[Ended] = []
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._last_s = 0.0
        self._top_n: dict[int, int] = {}
        """Alternatives of requests that ask for log probs, by number."""
        self._ones = np.ones(0, dtype=np.int32).tobytes()

    def wants_log_probs(self, number: int, top_n: int) -> None:
        """A request asks for log probs, with `top_n` alternatives at each token."""
        self._top_n[number] = top_n

    def booked(self, output: StepOutput) -> None:
        """Send the tokens of a booked step, then the requests that ended with it."""
        count = len(output.tokens)
        if not count:
            return
        now = time.monotonic()
        # Bytes: a NumPy call takes several times as long in a step, when caches are cold.
        is_urgent = count <= FEW or TRUE in output.is_first.tobytes()
        may_wait = not is_urgent and now < self._last_s + EVERY_S
        has_ends = TRUE in output.ended.tobytes()
        self._outputs.append(output)
        if may_wait:
            self._watch()
        elif has_ends:
            # The futures of these requests are told first: then their ends are here too.
            self._send_soon()
        else:
            self.flush()

    def end(self, ended: Ended) -> None:
        """A request has ended, whose tokens were booked before."""
        self._ends.append(ended)
        self._send_soon()

    def moved(self, number: int) -> None:
        """A request goes: send what there is of it."""
        self.flush()
        self._top_n.pop(number, None)

    def forget(self) -> None:
        """Drop all unsent tokens and ends."""
        self._outputs.clear()
        self._ends.clear()
        self._top_n.clear()

    def flush(self) -> None:
        """Send now what there is."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if not self._outputs and not self._ends:
            return
        outputs, self._outputs = self._outputs, []
        ends, self._ends = self._ends, []
        message = self._message(outputs, ends)
        for ended in ends:
            self._top_n.pop(ended.number, None)
        self._last_s = time.monotonic()
        self._send(message)

    def _send_soon(self) -> None:
        """Send in the next turn of the event loop."""
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self.flush)

    def _watch(self) -> None:
        """Send what waits if no step does it: each step looks at the clock first, so that the
        loop is not woken for each message."""
        if self._timer is None:
            at_s = self._last_s + EVERY_S + SLACK_S  # asyncio's clock is `time.monotonic`
            self._timer = asyncio.get_running_loop().call_at(at_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._outputs:
            return
        if time.monotonic() < self._last_s + EVERY_S:  # a step was first, and these are new
            self._watch()
        else:
            self.flush()

    def _message(self, outputs: list[StepOutput], ends: list[Ended]) -> StepTokens:
        if len(outputs) == 1:
            (output,) = outputs
            return StepTokens(
                output.request_ids.tobytes(), self._counts(output), output.tokens.tobytes(),
                self._log_probs(outputs), [], ends,
            )  # fmt: skip
        numbers = [output.request_ids.tobytes() for output in outputs]
        tokens = b"".join([output.tokens.tobytes() for output in outputs])
        if outputs and self._are_one_each(outputs) and numbers.count(numbers[0]) == len(numbers):
            # The coordinator makes rows of it: here a step waits for each NumPy call.
            return StepTokens(numbers[0], b"", tokens, None, [], ends, len(outputs))
        return StepTokens(
            b"".join(numbers),
            b"".join(map(self._counts, outputs)),
            tokens,
            self._log_probs(outputs),
            [],
            ends,
        )

    def _are_one_each(self, outputs: list[StepOutput]) -> bool:
        """Whether each row of the steps has one token, and none has log probs."""
        for output in outputs:
            if output.verified is not None or len(output.tokens) != len(output.request_ids):
                return False
        return not self._top_n

    def _counts(self, output: StepOutput) -> bytes:
        rows, tokens = len(output.request_ids), len(output.tokens)
        if rows == tokens and output.verified is None:  # one each
            if len(self._ones) < 4 * rows:
                self._ones = np.ones(2 * rows, dtype=np.int32).tobytes()
            return self._ones[: 4 * rows]
        return np.bincount(output.rows, minlength=rows).astype(np.int32).tobytes()

    def _log_probs(self, outputs: list[StepOutput]) -> LogProbRows | None:
        """The log probs of rows that ask, as many alternatives of each as one of them wants."""
        if not self._top_n or all(output.log_probs is None for output in outputs):
            return None
        numbers = np.concatenate([output.request_ids for output in outputs])
        asks = np.isin(numbers, np.fromiter(self._top_n, np.int64, len(self._top_n)))
        top_n = max(self._top_n.values())
        columns = np.r_[: 1 + top_n, 1 + MAX_TOP_N : 1 + MAX_TOP_N + top_n]
        found: list[NDArray[np.integer[Any]]] = []
        first = 0
        for output in outputs:
            end = first + len(output.request_ids)
            if output.log_probs is None:
                asks[first:end] = False
            else:
                found.append(output.log_probs[asks[first:end][output.rows]][:, columns])
            first = end
        words = np.concatenate(found) if found else np.empty(0, np.int32)
        rows = np.flatnonzero(asks).astype(np.int32)
        return LogProbRows(rows.tobytes(), top_n, words.tobytes()) if len(rows) else None
