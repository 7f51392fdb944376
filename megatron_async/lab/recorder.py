"""`Recorder`: writes down a run while it goes on, so that it can be replayed without its model."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from megatron_async.engine.dynamic_engine import DynamicInferenceEngine
from megatron_async.engine.listener import EngineListener
from megatron_async.errors import RecordingError
from megatron_async.lab.benchmark_record import commit
from megatron_async.lab.device_times import work_of
from megatron_async.lab.model_shape import ModelShape
from megatron_async.lab.recording import (
    COUNTERS,
    FORMAT,
    TEXT_ENDS,
    VERSION,
    plan_checksums,
)
from megatron_async.lab.simulated_tokens import cached_tokens
from megatron_async.planning.step_plan import StepPlan
from megatron_async.requests.inference_request import DynamicInferenceRequest
from megatron_async.requests.moved_request import MovedRequest
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.requests.weight_versions import Version
from megatron_async.step.text_generation_controller import LaunchedStep

POLL_S = 0.05
"""The recorder's thread looks so often for what has happened: waking it for each step would cost
the engine's thread 20 microseconds."""
COMPRESSION = 1
"""gzip's level: the fastest."""


class Recorder(EngineListener):
    """Records a run of an engine, from its first request until `close`.

    The engine's thread only appends references to a list (plans are immutable; samples are copied,
    because their ring comes round). A thread of the recorder's makes checksums and JSON of them and
    writes the file, so that a crash leaves what came before. See `recording` for the format.

    Args:
        engine: one that has not served anything yet.
        path: the file to write; replaced if it is there.

    Raises:
        RecordingError: the engine has served requests, whose traces in its books a replay would
            lack; or it is recorded already; or it rolls steps back, which a recording cannot tell.
        OSError: the file cannot be written.
    """

    def __init__(self, engine: DynamicInferenceEngine, path: str | Path) -> None:
        if engine.statistics.steps or engine.has_unfinished_requests():
            raise RecordingError(
                "the engine has served requests already: make its Recorder before the first."
            )
        if engine.context.config.invalidation == "rollback":
            raise RecordingError(
                "a run with invalidation='rollback' cannot be recorded, because steps that are "
                "taken back leave no trace: use invalidation='reconcile'."
            )
        if any(isinstance(listener, Recorder) for listener in engine.listeners):
            raise RecordingError("the engine is recorded already: close the other Recorder first.")
        self._engine = engine
        self._path = path
        self._statistics = engine.statistics
        self._file: TextIO = gzip.open(  # noqa: SIM115  # closed by the recorder's thread
            path, "wt", compresslevel=COMPRESSION, encoding="utf-8"
        )
        self._events: deque[tuple[Any, ...]] = deque()
        self._closing = threading.Event()
        self._failure: Exception | None = None
        self._before_ns = (0, 0, 0)
        self._prefill_limit = engine.context.scheduler.prefill_limit
        self._write(_header(engine))
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()
        engine.listeners.append(self)

    # ---- On the engine's thread --------------------------------------------------------------

    def added(self, request: DynamicInferenceRequest) -> None:
        moved = None
        if request.num_moved is not None:
            moved = MovedRequest.of(request, request.generated_tokens).plain()
        self._events.append(("add", request, moved))

    def aborted(self, request_id: int) -> None:
        self._events.append(("abort", request_id))

    def evicted_all(self) -> None:
        self._events.append(("evict_all",))

    def updated(self, step: int, version: Version, policy: str) -> None:
        self._events.append(("update", step, version, policy))

    def mended(self, error: BaseException) -> None:
        self._failure = self._failure or RuntimeError(f"a step was cut short by {error!r}")

    def launched(self, plan: StepPlan | None) -> None:
        times = self._statistics
        now = time.perf_counter_ns()
        context = self._engine.context
        kept, limit = context.blocks.cached, context.scheduler.prefill_limit
        if limit != self._prefill_limit:
            self._prefill_limit = limit
            self._events.append(("prefill_limit", limit))
        self._events.append(("launch", plan, times.prepare_ns, times.launch_ns, now, kept))

    def resolved(self, step: LaunchedStep) -> None:
        now, spent = time.perf_counter_ns(), self._statistics.resolve_ns
        arrays = step.samples.copy(), step.counts.copy(), step.drafts.copy()
        self._events.append(("resolve", step.plan.step, *arrays, step.error, spent, now))

    def ended(self, request: DynamicInferenceRequest, reason: str) -> None:
        if reason in TEXT_ENDS:
            count = len(request.generated_tokens)
            self._events.append(("text_end", request.request_id, reason, count))

    def close(self) -> None:
        """Finish the file. The engine may go on, unrecorded.

        Raises:
            RecordingError: the file could not be written; `__cause__` says why.
        """
        if self not in self._engine.listeners:
            return
        self._engine.listeners.remove(self)
        timeline = self._engine.tracer.timeline
        if timeline is not None:
            self._engine.tracer.collect()
            spans = timeline.select("device", "device_step").items()
            self._events.append(("device", [(n, span.start_us, span.end_us) for n, span in spans]))
        counters = self._engine.stats()
        self._events.append(("end", {name: counters[name] for name in COUNTERS}))
        self._closing.set()
        self._thread.join()
        if self._failure is not None:
            raise RecordingError(
                f"{self._path}: the recording is incomplete ({self._failure}); what there is of it "
                "can be replayed with --allow-truncated."
            ) from self._failure

    # ---- On the recorder's thread ------------------------------------------------------------

    def _run(self) -> None:
        while True:
            # Asked before the queue is looked at: what came until then is in it.
            is_last = self._closing.wait(POLL_S)
            is_news = bool(self._events)
            while self._events:
                self._write_event(self._events.popleft())
                # Python's lock goes to the engine's thread if that waits for it, and not only
                # after the interpreter's 5 ms.
                time.sleep(0)
            if is_last:
                break
            if is_news:
                self._guarded(self._file.flush)
        self._guarded(self._file.close)

    def _write_event(self, event: tuple[Any, ...]) -> None:
        if self._failure is None:
            self._guarded(lambda: self._write(self._as_record(event)))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as failure:  # a full disk, say: the run itself goes on
            self._failure = self._failure or failure

    def _write(self, record: Any) -> None:
        line = json.dumps(record, separators=(",", ":"), default=_plain)
        self._file.write(line + "\n")

    def _as_record(self, event: tuple[Any, ...]) -> list[Any]:
        kind = event[0]
        if kind == "add":
            return _added(*event[1:])
        if kind == "launch":
            return self._launched(*event[1:])
        if kind == "resolve":
            _, step, samples, counts, drafts, error, spent, now = event
            prepare, launch, before = self._before_ns
            self._before_ns = (prepare, launch, spent)
            times = [(spent - before) / 1e3, now / 1e3]
            is_yielded = np.arange(samples.shape[1]) < counts[:, None]
            tokens = samples[is_yielded].tolist()  # sync-ok: NumPy, on the recorder's thread
            each = None if (counts == 1).all() else counts.tolist()  # sync-ok: the same
            found = [drafts.tolist()] if (drafts >= 0).any() else []  # sync-ok: the same
            text = None if error is None else repr(error)
            return [kind, step, tokens, each, text, times, *found]
        return list(event)

    def _launched(
        self, plan: StepPlan | None, prepare_ns: int, launch_ns: int, now_ns: int, kept: int
    ) -> list[Any]:
        before_prepare, before_launch, resolve = self._before_ns
        self._before_ns = (prepare_ns, launch_ns, resolve)
        spent = [(prepare_ns - before_prepare) / 1e3, (launch_ns - before_launch) / 1e3]
        times = [*spent, now_ns / 1e3]
        if plan is None:
            return ["launch", None, [], [0, 0, 0], times]
        record = ["launch", plan.step, plan_checksums(plan), list(work_of(plan)), times]
        cached = [int(cached_tokens(plan).sum()), kept]
        return [*record, cached] if any(cached) else record


def _plain(value: Any) -> Any:
    """A NumPy number, which sampling parameters may be, as Python's."""
    return value.item()  # sync-ok: NumPy, on the recorder's thread


def _added(request: DynamicInferenceRequest, moved: dict[str, Any] | None) -> list[Any]:
    defaults, params = SamplingParams(), request.sampling_params
    names = [f.name for f in fields(params)]
    changed = {
        name: getattr(params, name)
        for name in names
        if getattr(params, name) != getattr(defaults, name)
    }
    if "logit_bias" in changed:
        changed["logit_bias"] = {int(k): float(v) for k, v in changed["logit_bias"].items()}
    if params.structured_output is not None:
        changed["structured_output"] = asdict(params.structured_output)
    prompt = request.prompt_tokens.tolist()  # sync-ok: NumPy, on the recorder's thread
    record = ["add", request.request_id, request.priority, prompt, changed]
    return record if moved is None else [*record, moved]


def _header(engine: DynamicInferenceEngine) -> dict[str, Any]:
    context = engine.context
    # The pools as they came out, whatever memory was free.
    config = {**asdict(context.config), "num_kv_blocks": context.blocks.total}
    if context.sharing is not None:
        config |= context.sharing.settings(context.config)
    return {
        "format": FORMAT,
        "version": VERSION,
        "commit": commit(),
        "device": str(context.device.torch_device),
        "config": config,
        "choices": context.choices.records(),
        "shape": ModelShape.of_context(context, engine.controller.vocab_size).to_dict(),
    }
