"""Commands of an administrator, as a replica's engine follows them: between two steps, on the
engine's thread. `StepWatch` is the one that looks.

A watch keeps no counters. Spans are recorded only for a few steps after each look, and for at most
`LEASE_S`: without looks there is no cost.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_async.config import MEMORY_TAGS
from megatron_async.errors import ConfigurationError, JobFailed
from megatron_async.observe.timeline import NO_OVERLAP, Span, StepWindow, Timeline

if TYPE_CHECKING:
    from megatron_async.engine.dynamic_engine import DynamicInferenceEngine

logger = logging.getLogger("megatron_async")

PROFILE_VARIABLE = "MEGATRON_ASYNC_PROFILE_DIR"
"""Environment: the folder for profiles; without it none are written."""
ACTIONS = ("start", "stop")


def do_verb(
    engine: DynamicInferenceEngine, name: str, what: str, fields: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, str] | None]:
    """Follow a command to the service. `what` is "sleep", "wake", "reset_prefix_cache" or "profile"
    (whose field `action` is "start" or "stop"). "sleep" may have fields `tags` and `copies`, "wake"
    `tags`: of `suspend` and `resume`; a replica stays "suspended" while a tag is missing.

    Returns:
        the answer, and the reason why the command failed, or None.
    """
    try:
        match what:
            case "sleep":
                tags, copies = fields.get("tags", MEMORY_TAGS[:1]), fields.get("copies", [])
                check_tags("tags", tags)
                check_tags("copies", copies)
                return {"freed_bytes": engine.suspend(free=tags, copies=copies)}, None
            case "wake":
                if "tags" in fields:
                    check_tags("tags", fields["tags"])
                engine.resume(fields.get("tags"))
                return {"state": engine.state.name.lower()}, None
            case "reset_prefix_cache":
                engine.reset_prefix_cache()
                return {}, None
            case "profile":
                return _profile(engine, name, fields.get("action")), None
    except JobFailed:
        raise  # the replica's end, as everywhere
    except Exception as error:  # whatever it is, it is this command's alone
        kind = ValueError if type(error) is ConfigurationError else type(error)
        return {}, (kind.__name__, str(error))
    return {}, ("ValueError", f"a replica has no command {what!r}")


def check_tags(name: str, tags: Any) -> None:
    """Raise ValueError unless `tags`, the field `name`, is a list of tags of memory."""
    if not isinstance(tags, list | tuple) or any(tag not in MEMORY_TAGS for tag in tags):
        raise ValueError(f"{name}={tags!r:.200} must be a list of {' and '.join(MEMORY_TAGS)}.")


def _profile(engine: DynamicInferenceEngine, name: str, action: object) -> dict[str, Any]:
    if action not in ACTIONS:
        raise ValueError(f"action={action!r} must be one of {', '.join(ACTIONS)}.")
    folder = os.environ.get(PROFILE_VARIABLE)
    if folder is None:
        raise ValueError(
            "profiles are not written here: start the service with --profile-dir FOLDER."
        )
    tracer = engine.tracer
    timeline = None if isinstance(tracer.timeline, StepWindow) else tracer.timeline
    if action == "start":
        if timeline is not None:
            raise ValueError("a profile is being made already: stop it first.")
        tracer.timeline = Timeline()
        return {}
    if timeline is None:
        raise ValueError("no profile is being made: start one first.")
    tracer.timeline = None
    path = Path(folder) / f"{_file_name(name)}-{time.strftime('%Y%m%d-%H%M%S')}.timeline.json"
    # A long profile takes a second to write, and steps go on meanwhile.
    threading.Thread(target=_save, args=(timeline, path), name="save-profile").start()
    return {"file": str(path), "spans": len(timeline.spans), "dropped": timeline.dropped}


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name)


def _save(timeline: Timeline, path: Path) -> None:
    try:
        timeline.save(path)
    except OSError as error:
        logger.warning("The profile %s cannot be written: %s", path, error)


LEASE_S = 2.0
"""Seconds after which a window ends, however many steps it has."""
OF_CPU = frozenset(
    {
        "prepare_step", "transfer_bookkeeping_to_gpu", "launch_step", "resolve", "update_requests",
        "emit", "step",
    }
)  # fmt: skip
"""Spans of the CPU that are reported: those of `profiling.step_gaps.STAGES`, and the whole call."""
OF_DEVICE = "device_step"
NEWEST = 512
"""Spans of a profile under way that are looked through."""


class StepWatch:
    """Looks at one engine; on its thread, between two steps."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self._engine = engine
        self._window: StepWindow | None = None
        self._lease: asyncio.TimerHandle | None = None
        if engine.context.device.torch_device.type == "cuda":
            # A GPU's first timed event sets its clock, which waits for it: better before any step.
            engine.context.device.event(timing=True)

    def look(self) -> dict[str, Any]:
        """Counters of the engine, and `spans`: [lane, name, step, start, length] of the steps
        since the last look, lane 0 the CPU and 1 the device, microseconds from the first of them.
        `reasons` are steps that did not overlap, `[step, reason]`.

        A new window begins. While a profile is made, its newest spans are told instead.
        """
        tracer = self._engine.tracer
        seen: Timeline | None = self._window
        if tracer.timeline is not None and not isinstance(tracer.timeline, StepWindow):
            seen = tracer.timeline
        else:
            self._end()
            self._window = tracer.timeline = StepWindow(self._end)
            self._lease = asyncio.get_running_loop().call_later(LEASE_S, self._end)
        newest = [] if seen is None else seen.spans[-NEWEST:]
        return {**self._counters(), **told_spans(newest)}

    def _end(self) -> None:
        """Record no more spans for a window; a profile continues."""
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None
        tracer = self._engine.tracer
        if isinstance(tracer.timeline, StepWindow):
            tracer.timeline = None

    def _counters(self) -> dict[str, Any]:
        engine = self._engine
        context, counts = engine.context, engine.statistics
        return {
            "steps": counts.steps,
            "first_steps": counts.first_steps,
            "overlapped_steps": counts.overlapped_steps,
            "no_overlap": {str(reason): n for reason, n in counts.no_overlap.items() if n},
            "rows": counts.rows,
            "generated_tokens": counts.generated_tokens,
            "prefill_tokens": counts.prefill_tokens,
            "lookahead": engine.lookahead,
            "in_flight": len(engine.in_flight),
            "waiting_requests": len(context.waiting),
            "slots": context.max_requests,
            "slots_in_use": context.max_requests - context.slots.num_free,
            "kv_blocks": context.blocks.total,
            "kv_blocks_in_use": context.blocks.total - context.blocks.allocatable,
        }


def told_spans(spans: list[Span]) -> dict[str, Any]:
    """The spans that a picture of steps needs, as `StepWatch.look` tells them."""
    kept = [
        span
        for span in spans
        if (span.lane == "cpu" and span.name in OF_CPU)
        or (span.lane == "device" and span.name == OF_DEVICE)
    ]
    origin = min((span.start_us for span in kept), default=0.0)
    return {
        "spans": [
            [
                int(span.lane == "device"),
                span.name,
                span.step,
                round(span.start_us - origin, 1),
                round(span.end_us - span.start_us, 1),
            ]
            for span in kept
        ],
        "reasons": [
            [span.step, span.name.removeprefix(NO_OVERLAP)]
            for span in spans
            if span.name.startswith(NO_OVERLAP)
        ],
    }
