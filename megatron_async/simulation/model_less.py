"""The real engine and context around a device without a model."""

from __future__ import annotations

from megatron_async.config import InferenceConfig
from megatron_async.contexts.dynamic_context import DynamicInferenceContext
from megatron_async.engines.dynamic_engine import DynamicInferenceEngine
from megatron_async.errors import ConfigurationError
from megatron_async.simulation.controller import ModelLessController, TokenSource
from megatron_async.simulation.device_times import Machine
from megatron_async.simulation.model_shape import ModelShape
from megatron_async.simulation.virtual_device import VirtualClock, VirtualDevice
from megatron_async.simulation.virtual_tracer import VirtualTracer


class ModelLessEngine(DynamicInferenceEngine):
    """A `DynamicInferenceEngine` that schedules and books, and computes nothing.

    Args:
        shape: of the model that is not there.
        config: settings of the engine; `device` is not looked at.
        tokens: what steps sample.
        machine: how long steps take, on the virtual clock; None: no time at all.
        clock: the host's time; None: a clock that only moves when told.

    Attributes:
        virtual_device: the device, with the clock.
        model_less_controller: the controller, with its idle time.

    Raises:
        ConfigurationError: neither num_kv_blocks nor buffer_size_gb is set, and there is attention.
    """

    def __init__(
        self,
        shape: ModelShape,
        config: InferenceConfig,
        tokens: TokenSource,
        machine: Machine | None = None,
        clock: VirtualClock | None = None,
    ) -> None:
        sizes_pool = config.num_kv_blocks is not None or config.buffer_size_gb is not None
        if shape.num_layers and not sizes_pool:
            raise ConfigurationError(
                "a device without memory has no free memory to size the KV pool by: give "
                "num_kv_blocks or buffer_size_gb."
            )
        captures = machine is not None and machine.device.captures_graphs
        is_cpu = machine is not None and not captures
        self.virtual_device = VirtualDevice(captures, clock, is_cpu)
        context = DynamicInferenceContext(shape, config, self.virtual_device)
        if machine is not None:
            tracer = VirtualTracer(self.virtual_device, self.virtual_device.clock, machine.cpu)
            context.tracer = tracer
        self.model_less_controller = ModelLessController(context, shape.vocab_size, tokens, machine)
        super().__init__(self.model_less_controller, context)
