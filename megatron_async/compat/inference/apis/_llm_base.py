"""What `MegatronLLM` and `MegatronAsyncLLM` share: the engine of a model, and forms of prompts.

Constructor, properties and forms of prompts are those of Megatron-Core 0.19's
`megatron.core.inference.apis`. There, an engine without a coordinator can only generate, and only
synchronously; here it can also be paused and suspended, and both classes work without one.
With `use_coordinator=True` the engine comes behind a coordinator, in a thread of its own.
"""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state

from megatron_async.compat.conversions.coordinated_llm import CoordinatedEngine
from megatron_async.compat.inference.config import InferenceConfig
from megatron_async.compat.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron_async.compat.inference.engines.dynamic_engine import DynamicInferenceEngine
from megatron_async.compat.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron_async.compat.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron_async.errors import ConfigurationError
from megatron_async.names_of_megatron import NamesOfMegatron

Prompts = str | list[int] | list[str] | list[list[int]]
"""One prompt or several, each as text or as token ids."""


class _MegatronLLMBase(NamesOfMegatron):
    """The engine of a model that Megatron built.

    Args:
        model: `GPTModel` or `HybridModel`, in eval mode.
        tokenizer: Megatron's, or any with its methods.
        inference_config: Megatron's; None takes its defaults.
        use_coordinator: True: the engines of all ranks come behind one coordinator, and the first
            rank generates. None (Megatron's default is True) and False: the engine is
            driven by the caller.
        coordinator_host: name or address of this host, for the coordinator; None: 127.0.0.1.
        coordinator_port: of the coordinator; None: any.

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
    ) -> None:
        if not use_coordinator and (coordinator_host is not None or coordinator_port is not None):
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
        self._use_coordinator = bool(use_coordinator)
        self._is_primary_rank = True
        self._coordinated: CoordinatedEngine | None = None
        self._shutdown_called = False
        self._context = DynamicInferenceContext(model.config, inference_config)
        wrapper = GPTInferenceWrapper(model, self._context)
        self._controller = TextGenerationController(wrapper, tokenizer)
        self._engine = DynamicInferenceEngine(self._controller, self._context)
        if use_coordinator:
            self._coordinated = CoordinatedEngine(self._engine, coordinator_host, coordinator_port)
            self._is_primary_rank = self._coordinated.is_primary

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

    def _assert_primary(self) -> None:
        if not self._is_primary_rank:
            raise RuntimeError("generate is for the primary rank alone: call it there")

    def _normalize_prompts(self, prompts: Any) -> tuple[list[str] | list[list[int]], bool]:
        """A list of prompts, and whether several were given.

        Raises:
            TypeError: `prompts` is of another form than `Prompts`. Only its first element is
                looked at; the engine refuses a wrong prompt among others by itself.
        """
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
