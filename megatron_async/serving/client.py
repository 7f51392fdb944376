"""`CoordinatorClient`: send requests to a coordinator's replicas, from plain Python."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import Any

from megatron_async.errors import CoordinatorLost
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.serving.async_client import (
    AsyncCoordinatorClient,
    Completion,
    Prompt,
    TokenChunk,
)


class CoordinatorClient:
    """`AsyncCoordinatorClient` without `await`: an event loop in a thread does the waiting. Use it
    with `with`, from as many threads as you like.

    Args:
        address: of the coordinator, as in "tcp://127.0.0.1:9500".
        connect_timeout_s: how long a call waits for a coordinator.
        replica_timeout_s: how long requests wait for the coordinator's first replica, which may
            still load its model.
        secret: the coordinator's, if it asks for one.

    Raises:
        CoordinatorLost: nobody answers there.
    """

    def __init__(
        self,
        address: str,
        connect_timeout_s: float = 10.0,
        replica_timeout_s: float = 600.0,
        secret: bytes | None = None,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="coordinator-client", daemon=True
        )
        self._thread.start()
        self._client = AsyncCoordinatorClient(address, connect_timeout_s, replica_timeout_s, secret)
        try:
            self._wait_for(self._client.__aenter__())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> CoordinatorClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        raise_on_failure: bool = True,
    ) -> list[Completion]:
        """Generate for one prompt or many, all at once, and raise if one fails; see
        `AsyncCoordinatorClient.generate`. An exception (Ctrl-C) aborts the others.

        Returns:
            a completion for each prompt, in order. With `raise_on_failure=False`, one that failed
            has its `error`.
        """
        return self._wait_for(self._client.generate(prompts, sampling_params, raise_on_failure))

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, priority: int = 0
    ) -> Iterator[TokenChunk]:
        """The tokens and text of one request while they are made; to stop reading aborts it."""
        chunks = self._client.stream(prompt, sampling_params, priority)
        try:
            while (chunk := self._wait_for(_next(chunks))) is not None:
                yield chunk
        finally:
            if not self._loop.is_closed():  # else it is aborted
                self._wait_for(chunks.aclose())  # type: ignore[attr-defined]

    def stats(self) -> dict[str, Any]:
        """The coordinator's counters, and its replicas by name (docs/serving.md lists them)."""
        return self._wait_for(self._client.stats())

    def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """Command the whole service; see `TokenClient.ask`."""
        return self._wait_for(self._client.ask(what, **fields))

    def pause_replica(self, name: str) -> None:
        """Stop a replica's engine until `resume_replica`; its requests wait."""
        self._wait_for(self._client.pause_replica(name))

    def drain_replica(self, name: str) -> None:
        """Send a replica no further requests until `resume_replica`; it finishes its own."""
        self._wait_for(self._client.drain_replica(name))

    def resume_replica(self, name: str) -> None:
        """Let a paused or drained replica go on."""
        self._wait_for(self._client.resume_replica(name))

    def move_replica(self, name: str) -> None:
        """Let others go on with a replica's requests; see `AsyncCoordinatorClient`."""
        self._wait_for(self._client.move_replica(name))

    def remove_replica(self, name: str) -> None:
        """Let a replica finish its requests, then end its process."""
        self._wait_for(self._client.remove_replica(name))

    def close(self) -> None:
        """Disconnect; the coordinator aborts unfinished requests. May be called twice."""
        if self._loop.is_closed():
            return
        self._wait_for(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait_for[Result](self, work: Coroutine[Any, Any, Result]) -> Result:
        if self._loop.is_closed():
            work.close()
            raise CoordinatorLost("this client was closed: make another one.")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


async def _next(chunks: AsyncIterator[TokenChunk]) -> TokenChunk | None:
    return await anext(chunks, None)
