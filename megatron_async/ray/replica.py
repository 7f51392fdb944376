"""`FleetReplica`: a replica without a coordinator: calls of a fleet's ingresses come to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import numpy as np

from megatron_async.engine.dynamic_engine import DynamicInferenceEngine
from megatron_async.errors import ReplicaLost, RequestError
from megatron_async.ray.channel import FleetChannel
from megatron_async.ray.messages import INGRESS_BITS, ingress_of
from megatron_async.serving.messages import (
    PROTOCOL,
    UNREADABLE,
    Abort,
    Do,
    Done,
    Message,
    ReplicaHello,
    Run,
    StepTokens,
    decode_for_replica,
    encode,
)
from megatron_async.serving.replica import Replica
from megatron_async.serving.replica_status import status_of
from megatron_async.serving.step_arrays import StepArrays

LOOK_EVERY_S = 0.2
"""How often it is looked whether the job has failed."""


class FleetReplica(Replica):
    """Serves the calls of a fleet's ingresses with one engine; `run` steps it. Its name is one that
    no other replica of the fleet ever has. From one batch of an ingress' news to the next there are
    `batch_s` seconds at least: what carries them costs more than the tokens, and with less time
    engine and ingress would wait for it."""

    def __init__(
        self, engine: DynamicInferenceEngine, model: str, name: str, batch_s: float = 0.005
    ) -> None:
        super().__init__(engine, "", model, name)
        self._batch_s = batch_s
        self._channels: dict[int, FleetChannel] = {}
        """By ingress. Kept when it has no call: its batches are numbered on."""
        self._has_ended = False

    @property
    def card(self) -> bytes:
        """The model card, encoded."""
        return self._card.encode()

    @property
    def hello(self) -> bytes:
        """What it says of itself, encoded."""
        return encode(ReplicaHello(PROTOCOL, self.info, self.weights.weights))

    def status(self) -> dict[str, object]:
        """What routers and `/metrics` are told of this replica: `unfinished_tokens`,
        `free_blocks`, `kv_blocks`, `unfinished_requests`, `weights` (`Weights`), and `engine`, its
        `engine.stats()`."""
        status = status_of(self._engine, self._runs_seen, dict(self._engine.stats()))
        return {
            "unfinished_tokens": status.unfinished_tokens,
            "unfinished_requests": len(self._requests),
            "free_blocks": status.free_blocks,
            "kv_blocks": self.info.kv_blocks,
            "engine": status.engine,
            "weights": msgspec.to_builtins(self.weights.weights),
        }

    async def updated(self, data: bytes) -> bytes:
        """Do a command of an update of the weights (`Do`, encoded) and answer it (`Done`)."""
        do = decode_for_replica(data)
        if not isinstance(do, Do) or not do.what.startswith("weights_"):
            raise RequestError("this is no command of an update of the weights.")
        value, failure = await self.update(do.what, do.fields)
        return encode(Done(do.number, value, failure))

    async def serve(self, data: bytes) -> AsyncIterator[bytes]:
        """Serve one call to its end. Takes a `Run`, encoded, whose number is unique in the fleet
        (`ingress_of`); yields batches (`FleetBatch`, encoded), of other requests of its ingress
        too.

        Raises:
            RequestError: it cannot be read.
            ReplicaLost: the engine has failed or ended.
        """
        try:
            run = decode_for_replica(data)
        except UNREADABLE as error:
            raise RequestError(f"a request cannot be read: {error}") from error
        if not isinstance(run, Run):
            raise RequestError(f"{type(run).__name__} is no request.")
        if self._has_ended:
            raise ReplicaLost(f"replica {self.info.name} serves no more.")
        ingress = ingress_of(run.number)
        channel = self._channels.get(ingress)
        if channel is None:
            channel = self._channels[ingress] = FleetChannel(self._batch_s)
        calls = channel.carry(run.number)
        self._take(run)
        try:
            async for batch in calls:
                yield batch
        finally:
            await calls.aclose()  # type: ignore[attr-defined]
            self.abort(run.number)  # what has ended stays as it is

    def abort(self, number: int) -> None:
        """End a request; one that has ended, or was never here, stays as it is."""
        self._take(Abort(number))

    async def _stay_connected(self, runner: asyncio.Task[None]) -> None:
        self._connection = self
        failure: Exception = ReplicaLost(f"replica {self.info.name} has ended.")
        try:
            while True:
                await asyncio.wait([runner], timeout=LOOK_EVERY_S)
                await self._check(runner)
        except Exception as error:
            failure = ReplicaLost(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._connection, self._has_ended = None, True
            for channel in self._channels.values():
                channel.fail(failure)

    def send(self, message: Message) -> None:
        """Tell each ingress its part of the engine's news."""
        if not isinstance(message, StepTokens):
            return
        if len(self._channels) == 1:
            ingress, channel = next(iter(self._channels.items()))
            numbers = np.frombuffer(message.numbers, np.int64)
            if not len(numbers) or bool((numbers >> INGRESS_BITS == ingress).all()):
                channel.tell(message)
                return
        for ingress, channel in self._channels.items():
            part = _part_of(message, ingress)
            if part.numbers or part.texts or part.ends:
                channel.tell(part)


def _part_of(message: StepTokens, ingress: int) -> StepTokens:
    """What one ingress is told: Python for each text and each end, not for a token."""
    step = StepArrays.of(message)
    part = step.message(step.numbers >> INGRESS_BITS == ingress, step.numbers)
    part.texts = [text for text in message.texts if ingress_of(text[0]) == ingress]
    part.ends = [ended for ended in message.ends if ingress_of(ended.number) == ingress]
    return part
