"""`MegatronAsyncLLM`: generate, and control the engine, from an event loop."""

from __future__ import annotations

import asyncio
from typing import Any, Self

from megatron.core.inference.apis.serve_config import ServeConfig
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.sampling_params import SamplingParams

from megatron_async.compat.inference.apis._llm_base import Prompts, _MegatronLLMBase
from megatron_async.errors import ConfigurationError


class MegatronAsyncLLM(_MegatronLLMBase):
    """Generate for prompts while other coroutines run.

    Constructor and methods are those of Megatron-Core 0.19's `MegatronAsyncLLM`; see
    `_MegatronLLMBase` for the arguments. The engine runs as a task of the loop that first calls
    `generate`, until `shutdown`; several `generate` at once share its batches. An `async with`
    block shuts it down at its end.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._task: asyncio.Task[None] | None = None

    async def generate(
        self, prompts: Prompts, sampling_params: SamplingParams | None = None
    ) -> DynamicInferenceRequest | list[DynamicInferenceRequest]:
        """Generate for one prompt or several.

        Args:
            prompts: see `Prompts`.
            sampling_params: for all of them; None takes Megatron's defaults.

        Returns:
            a request for one prompt; a list of them, in order, for a
            list of prompts. A request that could not be served is FAILED.

        Raises:
            TypeError: `prompts` is of no known form.
            EngineSuspendedError: the engine is shut down.
        """
        self._assert_primary()
        batch, is_batch = self._normalize_prompts(prompts)
        if not batch:
            return []
        params = sampling_params or SamplingParams()
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
        self._engine.pause()

    async def unpause(self) -> None:
        """Take `pause` back."""
        self._engine.unpause()

    async def suspend(self) -> None:
        """Stop until `resume`, and give the memory of the KV cache back, if the configuration's
        `kv_cache_management_mode` says so. Requests wait, tokens are kept."""
        self._engine.suspend()

    async def resume(self) -> None:
        """Take `suspend` back. An engine that was paused, too, stays so until `unpause`."""
        self._engine.resume()

    async def serve(self, serve_config: ServeConfig, *, blocking: bool = True) -> None:
        """Refused.

        Raises:
            ConfigurationError: always: no HTTP server stands before this engine.
        """
        raise ConfigurationError(
            f"serve({serve_config!r}): there is no HTTP server here. Call generate, or serve "
            "replicas by `megatron-async coordinator` and `replica` (docs/serving.md)."
        )

    async def shutdown(self) -> None:
        """End the engine for good; unfinished requests fail. Again: nothing happens."""
        if self._shutdown_called:
            return
        self._shutdown_called = True
        self._engine.close()
        if self._task is not None and not self._task.get_loop().is_closed():
            await asyncio.wait({self._task})

    async def wait_for_shutdown(self) -> None:
        """Wait until `shutdown` has ended the engine; return at once if it has not run yet."""
        if self._task is not None and not self._task.done():
            await asyncio.wait({self._task})

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
