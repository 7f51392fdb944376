"""`CoordinatedEngine`: an engine behind a coordinator, on an event loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.inference.apis._llm_base import _EventLoopManager
from megatron.core.inference.engines.dynamic_engine import EngineState
from megatron.core.inference.sampling_params import SamplingParams

from megatron_async.compat.inference.inference_client import InferenceClient

if TYPE_CHECKING:
    from megatron_async.compat.inference.engines.dynamic_engine import DynamicInferenceEngine


class CoordinatedEngine:
    """The engine, in a thread with an event loop, and on the first rank a client of it.

    The thread is Megatron's own `_EventLoopManager`.

    Args:
        engine: idle; only this object's thread uses it from now on.
        host: name or address of this host, for the coordinator; None: this host alone reaches it.
        port: of the coordinator; None: any.

    Attributes:
        address: of the coordinator.
        is_primary: whether requests and signals are given here: on the first rank.

    Raises:
        ConfigurationError: the engine cannot come behind a coordinator.
    """

    def __init__(self, engine: DynamicInferenceEngine, host: str | None, port: int | None) -> None:
        self._engine = engine
        self._client: InferenceClient | None = None
        is_job = torch.distributed.is_initialized()
        self.is_primary = not is_job or torch.distributed.get_rank() == 0
        self._loop = _EventLoopManager()
        self._loop.start()
        try:
            self.address: str = self.wait(self._begin(host, port))
        except BaseException:
            self._loop.stop()
            raise

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the engine's event loop, and wait for it."""
        return self._loop.run_sync(work)

    async def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run `work` on the engine's loop, called from another event loop."""
        return await self._loop.run_async(work)

    # ---- On the engine's loop ----------------------------------------------------------------

    async def _begin(self, host: str | None, port: int | None) -> str:
        address = await self._engine.start_listening_to_data_parallel_coordinator(
            port, hostname=host
        )
        if self.is_primary:
            self._client = InferenceClient(address, deserialize=True)
            self._client.start()
        return address

    async def generate(self, prompts: Sequence[Any], params: SamplingParams) -> list[Any]:
        """The requests at their ends, in order; FAILED ones too."""
        assert self._client is not None
        add = self._client.add_request
        return list(await asyncio.gather(*[add(prompt, params) for prompt in prompts]))

    async def tell(self, call: str, state: EngineState) -> None:
        """Let all engines follow a call of `InferenceClient`, and wait until they have. All ranks
        make the same calls in the same order.

        Args:
            call: its name; the first rank makes it.
            state: what this rank's engine is then.
        """
        if self._client is not None:
            getattr(self._client, call)()
            await self._engine.wait_until(state)
        else:
            assert self._engine.coordinated is not None
            await self._engine.coordinated.wait_in_turn(state)

    async def until_stopped(self) -> None:
        """Wait until the engine has left its coordinator; what ended it before is raised."""
        assert self._engine.engine_loop_task is not None
        await self._engine.engine_loop_task

    async def _end(self) -> None:
        task = self._engine.engine_loop_task
        if self._client is not None and task is not None and not task.done():
            if self._engine.state is EngineState.RUNNING:
                await self.tell("pause_engines", EngineState.PAUSED)
            await self.tell("stop_engines", EngineState.STOPPED)
        with contextlib.suppress(asyncio.CancelledError):
            await self.until_stopped()
        if self._client is not None:
            self._client.shutdown_coordinator()
            self._client.stop()
            assert self._client.listener_task is not None
            await asyncio.wait({self._client.listener_task})
        self._engine.close()

    async def end(self) -> None:
        """Stop all engines, and end the coordinator and this rank's engine; from another loop."""
        await self.run(self._end())
        self._loop.stop()

    def end_now(self) -> None:
        """End the service and wait until it has ended."""
        self.wait(self._end())
        self._loop.stop()
