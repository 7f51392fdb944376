"""`FleetChannel`: a replica's news for one ingress, on whichever of its calls is open.

A fleet's manager carries one stream of bytes for each request. A stream's item costs the replica
and the ingress a good part of a millisecond (docs/records/ray.md), a token far less. So
of all open calls of an ingress one is the *carrier*: it yields the news of all of them. When its
own request has ended, another call carries. A call that never carried yields nothing, and ends with
its request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from itertools import count

from megatron_async.ray.messages import FleetBatch, encode_batch
from megatron_async.serving.messages import StepTokens

BEGUN_S = 0.2
"""Seconds for which a begun request waits, to be told with its first tokens: before they come the
engine is busy with its prompt, and on a CPU a batch of its own takes time from that. An ingress
that aborts the request before it has begun waits as long."""


class _Call:
    """An open call: whether its request has ended, and what wakes it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.has_ended = False
        self.wake = asyncio.Event()


class FleetChannel:
    """The calls of one ingress; on one event loop. From one batch to the next there are at least
    `batch_s` seconds."""

    def __init__(self, batch_s: float) -> None:
        self._batch_s = batch_s
        self._sequence = count()
        self._last_s = self._begun_s = 0.0
        self._begun: list[int] = []
        self._steps: list[StepTokens] = []
        self._calls: dict[int, _Call] = {}
        self._carrier: _Call | None = None
        self._failure: Exception | None = None

    def tell(self, message: StepTokens) -> None:
        """News of the engine; what ends with it ends its call too. Without a call nobody wants to
        hear them: an ingress never gives up a call before its request has ended."""
        if not self._calls:
            return
        self._steps.append(message)
        for ended in message.ends:
            if (call := self._calls.get(ended.number)) is not None:
                call.has_ended = True
                call.wake.set()
        if self._carrier is not None:
            self._carrier.wake.set()

    def fail(self, error: Exception) -> None:
        """The replica can serve nothing any more: all calls raise this."""
        self._failure = error
        for call in self._calls.values():
            call.wake.set()

    async def carry(self, number: int) -> AsyncIterator[bytes]:
        """What one call yields: batches while it carries, nothing otherwise. Raises the error that
        `fail` was given."""
        call = self._calls[number] = _Call(number)
        if not self._begun:
            self._begun_s = asyncio.get_running_loop().time()
        self._begun.append(number)
        if self._carrier is None:
            self._carrier = call
        else:
            self._carrier.wake.set()
        try:
            while True:
                if self._failure is not None:
                    raise self._failure
                has_news = self._steps or (self._begun and not call.has_ended)
                if self._carrier is call and has_news:
                    wait_s = self._due_s() - asyncio.get_running_loop().time()
                    if wait_s <= 0:
                        yield self._take()
                        continue
                    call.wake.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(wait_s):
                            await call.wake.wait()
                elif call.has_ended:
                    return
                else:
                    call.wake.clear()
                    await call.wake.wait()
        finally:
            del self._calls[number]
            if self._carrier is call:
                self._hand_over()

    def _due_s(self) -> float:
        """The earliest time of the next batch, on the loop's clock."""
        due_s = self._last_s + self._batch_s
        return due_s if self._steps else max(due_s, self._begun_s + BEGUN_S)

    def _take(self) -> bytes:
        """All that is new."""
        self._last_s = asyncio.get_running_loop().time()
        begun, self._begun = self._begun, []
        steps, self._steps = self._steps, []
        return encode_batch(FleetBatch(next(self._sequence), begun, steps))

    def _hand_over(self) -> None:
        # One that has ended is about to go, unless there is news that nobody else would tell.
        waiting = [call for call in self._calls.values() if not call.has_ended]
        calls = waiting or list(self._calls.values())
        self._carrier = calls[0] if calls else None
        if self._carrier is not None:
            self._carrier.wake.set()
