"""A CPU device that captures steps: their padding, their replay and their addresses, as on a
GPU."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_async.devices import CpuDevice


class CpuGraph:
    """Replays a step as a GPU's graph would: on the KV cache that it was captured on, and on no
    other, though a GPU would use the old addresses without a word; and without a trace in Python's
    objects, where a GPU's replay runs no Python."""

    def __init__(self, work: partial[None]) -> None:
        # The CPU's attention wants a bound of the lengths, which captured shapes leave open.
        dims, mode = work.args
        self._work = partial(work.func, replace(dims, max_decode_kv_length=512), mode)
        self._controller: Any = work.func.__self__  # type: ignore[attr-defined]
        # What a replay leaves is at one place, as a GPU's is.
        view = self._controller.context.gpu_view
        self._left = getattr(view, "hidden_states", None)
        if self._left is not None:
            self._left = view.hidden_states = self._left.new_zeros(
                dims.tokens, *self._left.shape[1:]
            )
        self._captured_on = self._cache()

    def _cache(self) -> Any:
        return self._controller.context.gpu_view.kv_cache._data

    def replay(self) -> None:
        """Run the step again."""
        assert self._cache() is self._captured_on, "the graph's addresses are gone"
        view, controller = self._controller.context.gpu_view, self._controller
        objects = view, *view._attentions, controller.sampler, controller.inference_wrapped_model
        before = [dict(vars(object)) for object in objects]
        self._work()
        if self._left is not None:
            self._left.copy_(view.hidden_states)
        for object, attributes in zip(objects, before, strict=True):
            # Never empty: other streams' work reads the same objects meanwhile.
            vars(object).update(attributes)
            for added in vars(object).keys() - attributes.keys():
                delattr(object, added)


class CapturingCpu(CpuDevice):
    """Captures what the controller captures: whole steps. Sequences of up to 512 tokens."""

    captures_graphs = True

    def capture(self, work: Callable[[], None]) -> CpuGraph:
        assert isinstance(work, partial)
        self.wait()
        return CpuGraph(work)
