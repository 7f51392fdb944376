"""`RayFleet`: Ray Serve as the manager of a fleet, and its errors as ours."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)
from ray.serve.handle import DeploymentHandle

from megatron_async.errors import Overloaded, ReplicaLost
from megatron_async.ray.statuses import Statuses, replicas_of

RETRY_EVERY_S = 0.2
LOST = (RayActorError, ActorDiedError, ActorUnavailableError, ReplicaUnavailableError)
"""A replica is gone, or cannot be reached."""


class RayFleet:
    """A deployment of replicas; a `Fleet`."""

    def __init__(self, handle: DeploymentHandle[Any], application: str) -> None:
        self._calls = handle.options(method_name="serve", stream=True)
        self._handle = handle
        self._application = application

    async def serve(self, data: bytes, replica: str) -> AsyncIterator[bytes]:
        """Let a replica serve a request; see `Fleet.serve`."""
        try:
            async for batch in self._calls.remote(data, replica):
                yield batch
        except LOST as error:
            raise ReplicaLost(_first_line(error)) from error
        except (BackPressureError, DeploymentUnavailableError) as error:
            raise Overloaded(_first_line(error)) from error
        except RayError as error:
            if isinstance(error, ReplicaLost):  # Ray makes a class of both of what a replica raises
                raise ReplicaLost(_first_line(getattr(error, "cause", error))) from error
            raise

    async def abort(self, replica: str, number: int) -> None:
        """Let a replica end a request; nothing if the replica is gone."""
        if replica in self.replicas():
            with contextlib.suppress(RayError, *LOST, TimeoutError):
                async with asyncio.timeout(10.0):
                    await self._handle.abort.remote(number, replica)

    async def update(self, replica: str, data: bytes) -> bytes:
        """Let a replica do a command of an update; see `Fleet.update`."""
        found: bytes = await self._handle.update.remote(data, replica)
        return found

    async def hello(self, replica: str) -> bytes:
        """What a replica says of itself, encoded."""
        found: bytes = await self._handle.hello.remote(replica)
        return found

    async def card(self) -> bytes:
        """A replica's model card, encoded; waits for a replica."""
        while True:
            with contextlib.suppress(*LOST):
                found: bytes = await self._handle.card.remote("")
                return found
            await asyncio.sleep(RETRY_EVERY_S)

    def replicas(self) -> Statuses:
        """By name what replicas have told of themselves."""
        return replicas_of(self._application)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
