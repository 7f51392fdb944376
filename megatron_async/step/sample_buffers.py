"""`SampleBuffers`: where a step's samples arrive on the host."""

from __future__ import annotations

from torch import Tensor

from megatron_async.devices import Device
from megatron_async.step.prompt_log_probs import PromptEntry


class SampleBuffers:
    """One ring entry: host memory for samples, and the events of their arrival. The step, or a copy
    behind it, writes the memory and resolve reads it; it is used again only after the host has
    resolved its last step.

    Args:
        source: int32 `[rows, words]`: the samples on the device.
        host: the same, host memory that steps write too.
        max_width: most tokens of a row.
        log_probs: int32, on the device.
        prompt: log probs of prompts.
        device: for memory and events.
    """

    def __init__(
        self,
        source: Tensor,
        host: Tensor,
        max_width: int,
        log_probs: Tensor,
        prompt: PromptEntry,
        device: Device,
    ) -> None:
        self.source = source
        self.max_width = max_width
        self.host = host
        self.array = self.host.numpy()  # sync-ok: host memory
        self.log_probs_source = log_probs
        self.log_probs_host = device.host_buffer(log_probs.numel(), log_probs.dtype)
        self.log_probs_array = self.log_probs_host.view_as(log_probs).numpy()  # sync-ok: host
        self.prompt = prompt
        self.sampled = device.event()
        self.ready = device.event()
