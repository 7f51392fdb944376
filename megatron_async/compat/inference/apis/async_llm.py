"""`MegatronAsyncLLM`: generate, and control the engine, from an event loop."""

from __future__ import annotations

import asyncio
from typing import Any, Self

from megatron.core.inference.apis.serve_config import ServeConfig
from megatron.core.inference.engines.dynamic_engine import EngineState
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.sampling_params import SamplingParams

from megatron_async.compat.inference.apis._llm_base import Prompts, _MegatronLLMBase
from megatron_async.compat.inference.inference_client import refuse_media
from megatron_async.compat.inference.text_generation_server.dynamic_text_gen_server import (
    stop_text_gen_server,
)


class MegatronAsyncLLM(_MegatronLLMBase):
    """Generate for prompts while other coroutines run.

    Constructor and methods are those of Megatron-Core 0.19's `MegatronAsyncLLM`; see
    `_MegatronLLMBase` for the arguments. The engine runs as a task of the loop that first calls
    `generate`, until `shutdown`; several `generate` at once share its batches. An `async with`
    block shuts it down at its end.
    """

    _task: asyncio.Task[None] | None = None

    async def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | None = None,
        multi_modal_data: Any = None,
    ) -> DynamicInferenceRequest | list[DynamicInferenceRequest]:
        """Generate for one prompt or several.

        Args:
            prompts: see `Prompts`.
            sampling_params: for all of them; None takes Megatron's defaults.
            multi_modal_data: main's; refused, unless None or empty.

        Returns:
            a request for one prompt; a list of them, in order, for a
            list of prompts. A request that could not be served is FAILED.

        Raises:
            TypeError: `prompts` is of no known form.
            EngineSuspendedError: the engine is shut down.
        """
        self._assert_primary()
        refuse_media(multi_modal_data)
        batch, is_batch = self._normalize_prompts(prompts)
        if not batch:
            return []
        params = sampling_params or SamplingParams()
        if self._coord_runtime is not None:
            found = await self._coord_runtime.run(self._coord_runtime.generate(batch, params))
            return list(found) if is_batch else found[0]
        answers = [
            self._engine.add_request(self._engine.requests.free_id(), prompt, params)
            for prompt in batch
        ]
        together = asyncio.gather(*answers)
        task = self._running()
        ends: set[asyncio.Future[Any]] = {together, task}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not together.done():
            together.cancel()
            task.result()  # why the engine ended
            raise RuntimeError("the engine ended while requests were unfinished")
        requests = [record.merge() for record in together.result()]
        return requests if is_batch else requests[0]

    async def pause(self) -> None:
        """Launch no further step until `unpause`; requests wait, tokens are kept."""
        await self._do("pause", EngineState.PAUSED)

    async def unpause(self) -> None:
        """Take `pause` back."""
        await self._do("unpause", EngineState.RUNNING)

    async def suspend(self) -> None:
        """Stop until `resume`, and give the memory of the KV cache back, if the configuration's
        `kv_cache_management_mode` says so. Requests wait, tokens are kept."""
        await self._do("suspend", EngineState.SUSPENDED)

    async def resume(self) -> None:
        """Take `suspend` back. An engine that was paused, too, stays so until `unpause`."""
        await self._do("resume", EngineState.RESUMED)

    async def serve(self, serve_config: ServeConfig, *, blocking: bool = True) -> None:
        """Start the HTTP server (docs/server.md), on the first rank; on others nothing happens.

        Args:
            serve_config: where it listens, and how; see `start_text_gen_server`. Its default host,
                0.0.0.0, needs an API key.
            blocking: wait until the engines are stopped; False: return at once, the server is there
                some seconds later (`/ready`). `shutdown` ends it.

        Raises:
            ConfigurationError: without `use_coordinator=True`, or something of `serve_config` is
                not served.
        """
        self._start_server(serve_config)
        if blocking:
            await self.wait_for_shutdown()

    async def shutdown(self) -> None:
        """End the engine for good; unfinished requests fail. Again: nothing happens."""
        if self._shutdown_called:
            return
        self._shutdown_called = True
        if self._serve_started:
            await asyncio.to_thread(stop_text_gen_server)
        if self._coord_runtime is not None:
            await self._coord_runtime.end()
            return
        self._engine.close()
        if self._task is not None and not self._task.get_loop().is_closed():
            await asyncio.wait({self._task})

    async def wait_for_shutdown(self) -> None:
        """Wait until `shutdown` has ended the engine; return at once if it has not run yet.
        Behind a coordinator: wait until the first rank has stopped the engines."""
        if self._coord_runtime is not None:
            if not self._shutdown_called:
                await self._coord_runtime.run(self._coord_runtime.until_stopped())
            return
        if self._task is not None and not self._task.done():
            await asyncio.wait({self._task})

    async def _do(self, call: str, state: EngineState) -> None:
        """Stop the engine, or let it go on."""
        if self._coord_runtime is not None:
            await self._coord_runtime.run(self._coord_runtime.tell(f"{call}_engines", state))
        else:
            getattr(self._engine, call)()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    def _running(self) -> asyncio.Task[None]:
        """The task that runs the engine; one of another loop has ended with that loop."""
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = loop.create_task(self._engine.run_engine())
        return self._task
