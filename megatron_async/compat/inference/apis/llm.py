"""`MegatronLLM`: generate, and control the engine, by ordinary calls."""

from __future__ import annotations

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


class MegatronLLM(_MegatronLLMBase):
    """Generate for prompts with a model that Megatron built.

    Constructor and methods are those of Megatron-Core 0.19's `MegatronLLM`; see
    `_MegatronLLMBase` for the arguments. A `with` block shuts it down at its end.
    """

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | None = None,
        multi_modal_data: Any = None,
    ) -> list[DynamicInferenceRequest]:
        """Generate for one prompt or several, all at once.

        Args:
            prompts: see `Prompts`.
            sampling_params: for all of them; None takes Megatron's defaults.
            multi_modal_data: main's; refused, unless None or empty.

        Returns:
            the request of each, in order; a list for a single prompt too.
            A request that could not be served is FAILED, and the others are not affected.

        Raises:
            TypeError: `prompts` is of no known form.
            EngineSuspendedError: the engine is paused, suspended or shut down.
        """
        self._assert_primary()
        refuse_media(multi_modal_data)
        batch, _ = self._normalize_prompts(prompts)
        if not batch:
            return []
        params = sampling_params or SamplingParams()
        if self._coord_runtime is not None:
            return list(self._coord_runtime.wait(self._coord_runtime.generate(batch, params)))
        records = self._engine.generate(batch, params)
        return [record.merge() for record in records]

    def pause(self) -> None:
        """Launch no further step until `unpause`; tokens of steps in flight are kept."""
        self._do("pause", EngineState.PAUSED)

    def unpause(self) -> None:
        """Take `pause` back."""
        self._do("unpause", EngineState.RUNNING)

    def suspend(self) -> None:
        """Stop until `resume`, and give the memory of the KV cache back, if the configuration's
        `kv_cache_management_mode` says so."""
        self._do("suspend", EngineState.SUSPENDED)

    def resume(self) -> None:
        """Take `suspend` back. An engine that was paused, too, stays so until `unpause`."""
        self._do("resume", EngineState.RESUMED)

    def serve(self, serve_config: ServeConfig, *, blocking: bool = True) -> None:
        """Main's: what `MegatronAsyncLLM.serve` does, for threads."""
        self._start_server(serve_config)
        if blocking:
            self.wait_for_shutdown()

    def shutdown(self) -> None:
        """End the engine for good; unfinished requests fail. Again: nothing happens."""
        if not self._shutdown_called:
            self._shutdown_called = True
            if self._serve_started:
                stop_text_gen_server()
            if self._coord_runtime is not None:
                self._coord_runtime.end_now()
            else:
                self._engine.close()

    def wait_for_shutdown(self) -> None:
        """Behind a coordinator: wait until the first rank has stopped the engines. Without one:
        return at once, as nothing runs in the background."""
        if self._coord_runtime is not None and not self._shutdown_called:
            self._coord_runtime.wait(self._coord_runtime.until_stopped())

    def _do(self, call: str, state: EngineState) -> None:
        """Stop the engine, or let it go on."""
        if self._coord_runtime is not None:
            self._coord_runtime.wait(self._coord_runtime.tell(f"{call}_engines", state))
        else:
            getattr(self._engine, call)()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
