"""What every benchmark writes: its figures, and what is needed to read or repeat them."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_async.devices import resolve_device_name

ROOT = Path(__file__).resolve().parents[2]
NOT_SETTINGS = ("json", "trace")
"""Options that say where results go, not what is measured."""


def write_record(
    path: str | Path,
    benchmark: str,
    settings: Mapping[str, Any],
    figures: Sequence[Mapping[str, Any]],
) -> None:
    """Write a record as JSON; see `make_record`. Folders on the way are made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(make_record(benchmark, settings, figures), indent=1) + "\n")


def make_record(
    benchmark: str, settings: Mapping[str, Any], figures: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A benchmark's figures with their date, machine and code.

    Args:
        benchmark: its name, which says how `figures` are to be read.
        settings: the script's options; `device` among them says which machine counts.
        figures: one mapping for each thing measured; units stand in the names (`_ms`, `_us`).

    Returns:
        "benchmark", "date", "gpu" (name, or None for a CPU run), "commit" (see `commit`), "torch",
        "settings", "figures".
    """
    is_gpu = resolve_device_name(settings.get("device")).startswith("cuda")
    return {
        "benchmark": benchmark,
        "date": time.strftime("%F"),
        "gpu": torch.cuda.get_device_name() if is_gpu else None,
        "commit": commit(),
        "torch": torch.__version__,
        "settings": {k: v for k, v in settings.items() if k not in NOT_SETTINGS},
        "figures": [dict(figure) for figure in figures],
    }


def commit() -> str | None:
    """What the environment variable MEGATRON_ASYNC_COMMIT says (for a copy on another machine);
    else the commit of this checkout, short, with "-dirty" where tracked files differ from it; None
    where the package stands in no checkout of its own."""
    given = os.environ.get("MEGATRON_ASYNC_COMMIT")
    if given:
        return given
    top = _git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != ROOT:
        return None
    return _git("describe", "--always", "--dirty", "--exclude=*")


def _git(*arguments: str) -> str | None:
    try:
        run = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def distribution(values: Iterable[float]) -> dict[str, float | None]:
    """Mean and percentiles, linearly interpolated: "mean", "p50", "p90", "p99"; each None where
    there are no values."""
    array = np.fromiter(values, dtype=np.float64)
    if len(array) == 0:
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    p50, p90, p99 = np.percentile(array, (50, 90, 99))
    return {"mean": float(array.mean()), "p50": float(p50), "p90": float(p90), "p99": float(p99)}
