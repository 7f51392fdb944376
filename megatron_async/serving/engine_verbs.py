"""Commands of an administrator, as a replica's engine follows them: between two steps, on the
engine's thread."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_async.errors import JobFailed

if TYPE_CHECKING:
    from megatron_async.engines.dynamic_engine import DynamicInferenceEngine
    from megatron_async.observe.timeline import Timeline

logger = logging.getLogger("megatron_async")

PROFILE_VARIABLE = "MEGATRON_ASYNC_PROFILE_DIR"
"""Environment: the folder for profiles; without it none are written."""
ACTIONS = ("start", "stop")


def do_verb(
    engine: DynamicInferenceEngine, name: str, what: str, fields: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, str] | None]:
    """Follow a command to the service.

    Args:
        engine: of the replica.
        name: of the replica.
        what: "sleep", "wake", "reset_prefix_cache" or "profile".
        fields: of "profile", `action`: "start" or "stop".

    Returns:
        the answer, and the reason why the command failed, or None.
    """
    try:
        match what:
            case "sleep":
                return {"freed_bytes": engine.suspend(free_kv_cache=True)}, None
            case "wake":
                engine.resume()
                return {}, None
            case "reset_prefix_cache":
                engine.reset_prefix_cache()
                return {}, None
            case "profile":
                return _profile(engine, name, fields.get("action")), None
    except JobFailed:
        raise  # the replica's end, as everywhere
    except Exception as error:  # whatever it is, it is this command's alone
        return {}, (type(error).__name__, str(error))
    return {}, ("ValueError", f"a replica has no command {what!r}")


def _profile(engine: DynamicInferenceEngine, name: str, action: object) -> dict[str, Any]:
    from megatron_async.observe.timeline import StepWindow, Timeline

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
