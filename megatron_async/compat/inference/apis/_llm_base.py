"""What `MegatronLLM` and `MegatronAsyncLLM` share: the engine of a model, and forms of prompts.

Constructor, properties and forms of prompts are those of Megatron-Core 0.19's
`megatron.core.inference.apis`. There, an engine without a coordinator can only generate, and only
synchronously; here it can also be paused and suspended, and both classes work without one.
With `use_coordinator=True` the engine comes behind a coordinator, in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.inference.apis._llm_base import _EventLoopManager
from megatron.core.inference.apis.serve_config import ServeConfig
from megatron.core.inference.engines.dynamic_engine import EngineState
from megatron.core.inference.sampling_params import SamplingParams

from megatron_async.compat.inference.config import InferenceConfig
from megatron_async.compat.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron_async.compat.inference.engines.dynamic_engine import DynamicInferenceEngine
from megatron_async.compat.inference.inference_client import InferenceClient
from megatron_async.compat.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron_async.compat.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron_async.compat.inference.text_generation_server.dynamic_text_gen_server import (
    text_generation_server,
)
from megatron_async.errors import ConfigurationError
from megatron_async.names_of_megatron import NamesOfMegatron

ALL_NETWORKS = "0.0.0.0"


class CoordinatedEngine:
    """The engine, in a thread with an event loop (Megatron's own `_EventLoopManager`), and on the
    first rank (`is_primary`), where requests and signals are given, a client of it."""

    def __init__(self, engine: DynamicInferenceEngine, host: str | None, port: int | None) -> None:
        self._engine = engine
        self._client: InferenceClient | None = None
        is_job = torch.distributed.is_initialized()
        self.is_primary = not is_job or torch.distributed.get_rank() == 0
        self._loop = _EventLoopManager()
        self.submit = self._loop.submit
        self._loop.start()
        try:
            self.coord_addr: str = self.wait(self._begin(host, port))
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
        """Let all engines follow a call of `InferenceClient`, which the first rank makes, and wait
        until this rank's engine is in a state. All ranks make the same calls in the same order."""
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


Prompts = str | list[int] | list[str] | list[list[int]]
"""One prompt or several, each as text or as token ids."""


class _MegatronLLMBase(NamesOfMegatron):
    """The engine of a model that Megatron built.

    Args:
        model: `GPTModel` or `HybridModel`, in eval mode.
        tokenizer: Megatron's, or any with its methods.
        inference_config: Megatron's; None takes its defaults.
        use_coordinator: True: the engines of all ranks come behind one coordinator, and the first
            rank generates. False: the engine is driven by the caller. None (Megatron's default
            is True): False, or True where a host or port of a coordinator is given.
        coordinator_host: name or address of this host, for the coordinator; None: 127.0.0.1.
        coordinator_port: of the coordinator; None: any.
        inference_wrapper_cls: main's: the class of the wrapper, a subclass of `GPTInferenceWrapper`
            of `compat`, which None means.

    Raises:
        ConfigurationError: experts are spread over ranks without a coordinator, or the model or the
            configuration cannot be served; a ValueError, as Megatron's is.
    """

    def __init__(
        self,
        *,
        model: Any,
        tokenizer: Any,
        inference_config: InferenceConfig | None = None,
        use_coordinator: bool | None = None,
        coordinator_host: str | None = None,
        coordinator_port: int | None = None,
        inference_wrapper_cls: type[GPTInferenceWrapper] | None = None,
    ) -> None:
        wrapper_class = inference_wrapper_cls
        if wrapper_class is None:
            wrapper_class = GPTInferenceWrapper
        elif not issubclass(wrapper_class, GPTInferenceWrapper):
            raise ConfigurationError(
                f"inference_wrapper_cls={wrapper_class.__module__}.{wrapper_class.__qualname__} is "
                f"no subclass of {GPTInferenceWrapper.__module__}.GPTInferenceWrapper: leave it "
                "out, or derive it from that."
            )
        is_placed = coordinator_host is not None or coordinator_port is not None
        use_coordinator = is_placed if use_coordinator is None else use_coordinator
        if is_placed and not use_coordinator:
            raise ConfigurationError(
                "coordinator_host/port require use_coordinator=True (they are "
                f"{coordinator_host!r} and {coordinator_port!r}): set it, or leave them out."
            )
        experts = parallel_state.get_expert_model_parallel_world_size()
        if experts > 1 and not use_coordinator:
            raise ConfigurationError(
                f"expert_model_parallel_size > 1 (it is {experts}) needs use_coordinator=True, "
                "since ranks that share experts step together."
            )
        if inference_config is None:
            inference_config = InferenceConfig()
        self._use_coordinator = use_coordinator
        self._is_primary_rank = True
        self._coord_runtime: CoordinatedEngine | None = None
        self._shutdown_called = self._serve_started = False
        self._context = DynamicInferenceContext(model.config, inference_config)
        wrapper = wrapper_class(model, self._context)
        self._controller = TextGenerationController(wrapper, tokenizer)
        self._engine = DynamicInferenceEngine(self._controller, self._context)
        if use_coordinator:
            self._coord_runtime = CoordinatedEngine(
                self._engine, coordinator_host, coordinator_port
            )
            self._is_primary_rank = self._coord_runtime.is_primary

    @property
    def engine(self) -> DynamicInferenceEngine:
        """The engine, for what this class has no method for."""
        return self._engine

    @property
    def context(self) -> DynamicInferenceContext:
        """The engine's context: its limits (`max_tokens`, `max_requests`) and counters."""
        return self._context

    @property
    def controller(self) -> TextGenerationController:
        """The engine's controller."""
        return self._controller

    @property
    def is_primary_rank(self) -> bool:
        """Whether `generate` may be called here: always, or on the first rank."""
        return self._is_primary_rank

    def submit(self, coro: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Main's: run a coroutine on the event loop of the engine, from any thread.

        Raises:
            RuntimeError: there is no coordinator, and so no such loop.
        """
        return self._needed_coordinator("submit").submit(coro)

    def run_sync(self, coro: Coroutine[Any, Any, Any]) -> Any:
        """Main's: `submit`, and wait for the result; a RuntimeError on that loop itself."""
        return self._needed_coordinator("run_sync").wait(coro)

    def _needed_coordinator(self, name: str) -> CoordinatedEngine:
        if self._coord_runtime is None:
            raise RuntimeError(f"{name}() needs use_coordinator=True: no event loop runs without.")
        return self._coord_runtime

    def _start_server(self, serve_config: ServeConfig) -> None:
        """Start the HTTP server on the first rank."""
        if not self._use_coordinator:
            raise ConfigurationError(
                "serve() requires use_coordinator=True: it asks the engines by a coordinator."
            )
        if self._is_primary_rank:
            assert self._coord_runtime is not None
            # Its default is Megatron's word for no host.
            host = None if serve_config.host == ALL_NETWORKS else serve_config.host
            text_generation_server.start_text_gen_server(
                coordinator_addr=self._coord_runtime.coord_addr, tokenizer=None, rank=0,
                server_port=serve_config.port, parsers=serve_config.parsers,
                verbose=serve_config.verbose, num_replicas=serve_config.frontend_replicas,
                hostname=host, sock=getattr(serve_config, "sock", None),
            )  # fmt: skip
            self._serve_started = True

    def _assert_primary(self) -> None:
        if not self._is_primary_rank:
            raise RuntimeError("generate is for the primary rank alone: call it there")

    def _normalize_prompts(self, prompts: Any) -> tuple[list[str] | list[list[int]], bool]:
        """A list of prompts, and whether several were given. Only its first element is looked at;
        the engine refuses a wrong prompt among others by itself."""
        if isinstance(prompts, str):
            return [prompts], False
        if isinstance(prompts, list):
            if prompts and isinstance(prompts[0], int):
                return [prompts], False
            if not prompts or isinstance(prompts[0], str | list):
                return prompts, True
        raise TypeError(
            f"prompts={prompts!r}: give a text, a list of token ids, or a list of texts or of "
            "lists of token ids"
        )
