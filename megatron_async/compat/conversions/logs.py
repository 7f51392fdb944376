"""Numbers of the engine to wandb every few steps, under Megatron's names; and what a suspend or a
resume took."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psutil
import torch

from megatron_async.device_state.kv_cache import GIB
from megatron_async.engine.listener import EngineListener
from megatron_async.errors import ConfigurationError
from megatron_async.observe.statistics import EngineStatistics
from megatron_async.planning.step_plan import StepPlan
from megatron_async.requests.request_registry import RequestRegistry

if TYPE_CHECKING:
    from megatron_async.compat.inference.contexts.dynamic_context import DynamicInferenceContext


class MetricsLog(EngineListener):
    """Writes what `InferenceConfig.metrics_writer` asks for. It reads counters of the host: nothing
    waits for the device. So the step's time is not the device's but the mean wall time of a step
    since the line before.

    Args:
        writer: wandb's module or a run of it: anything with `log(metrics, commit=True)`, else
            ConfigurationError.
        interval: steps between two lines, at least 1.
        context, statistics, requests: of the engine.
    """

    def __init__(
        self,
        writer: Any,
        interval: int,
        context: DynamicInferenceContext,
        statistics: EngineStatistics,
        requests: RequestRegistry,
    ) -> None:
        if not callable(getattr(writer, "log", None)):
            raise ConfigurationError(
                f"metrics_writer={writer!r} has no method `log`: give the wandb module, or an "
                "object with log(metrics, commit=True)."
            )
        self._writer = writer
        self._interval = interval
        self._context = context
        self._statistics = statistics
        self._requests = requests
        self._before = 0, 0.0
        if callable(define := getattr(writer, "define_metric", None)):
            define("inference/*", step_metric="inference/inference_step")

    def launched(self, plan: StepPlan | None) -> None:
        """Write a line if one is due."""
        if plan is not None and self._statistics.steps % self._interval == 0:
            self._writer.log(self.metrics(), commit=True)

    def metrics(self) -> dict[str, float | int]:
        """The present numbers; shares of memory in percent."""
        counts = self._statistics
        steps, seconds = counts.steps - self._before[0], counts.busy_s - self._before[1]
        self._before = counts.steps, counts.busy_s
        found: dict[str, float | int] = {
            "inference/inference_step": counts.steps,
            "inference/step_time_s": seconds / max(steps, 1),
            "inference/waiting_queue_len": len(self._context.waiting),
            "inference/total_requests_dict_size": len(self._requests),
        }
        for name, value in self._context.get_kvcache_utilization_stats().items():
            found[f"inference/{name}"] = value * 100.0 if "utilization" in name else value
        return found | self._drafts() | self._prefix_cache()

    def _drafts(self) -> dict[str, float | int]:
        drafts = self._statistics.drafts.as_dict()
        proposed, accepted = drafts.get("drafted_tokens", 0), drafts.get("accepted_tokens", 0)
        if not proposed:
            return {}
        return {
            "inference/spec_decode_acceptance_rate": 100.0 * accepted / proposed,
            "inference/spec_decode_tokens_proposed": int(proposed),
            "inference/spec_decode_tokens_accepted": int(accepted),
        }

    def _prefix_cache(self) -> dict[str, float | int]:
        cache = self._context.prefix_cache
        if cache is None or not cache.hits:
            return {}
        blocks = cache.hits // self._context.block_size_tokens
        return {"inference/prefix_cache_blocks_matched": blocks}


logger = logging.getLogger("megatron_async")


@contextmanager
def suspension_log(key: str, *, unified_memory_level: int = 0) -> Iterator[None]:
    """Log what the body of a `with` changes; Megatron's `suspend_resume_ctx`."""
    has_gpu = torch.cuda.is_available()
    start, before = time.perf_counter(), torch.cuda.memory_allocated() if has_gpu else 0
    try:
        yield
    finally:
        after = torch.cuda.memory_allocated() if has_gpu else 0
        logger.info(
            "dynamic engine %s, unified %d: GPU %+.1f GiB in %.3f s; now %.1f GiB of the GPU, "
            "%.1f GiB of the host",
            key,
            unified_memory_level,
            (after - before) / GIB,
            time.perf_counter() - start,
            after / GIB,
            psutil.Process().memory_info().rss / GIB,
        )
