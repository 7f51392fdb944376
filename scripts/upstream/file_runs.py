"""Run a test file of a checkout, once on Megatron's own code and once on this engine."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from upstream.comparison import Comparison
from upstream.processes import REPOSITORY, environment, run


def compare_file(
    checkout: Path, file: str, listed: dict[str, str], cpu: bool, timeout_s: float
) -> Comparison:
    """Run `file` twice.

    Args:
        checkout: of Megatron-LM.
        file: path in it.
        listed: patterns of its tests that do not count, each with its reason.
        cpu: use the stand-ins for a machine without a GPU.
        timeout_s: for each run; tests that did not end by then are not in the outcome.
    """
    control = _outcomes(checkout, file, False, cpu, timeout_s)
    ours = _outcomes(checkout, file, True, cpu, timeout_s)
    return Comparison(file, control, ours, listed)


def _outcomes(
    checkout: Path, file: str, ours: bool, cpu: bool, timeout_s: float
) -> dict[str, str | None]:
    with tempfile.TemporaryDirectory() as folder:
        written, settings = Path(folder) / "outcomes.json", Path(folder) / "pytest.ini"
        settings.write_text("[pytest]\n")
        env = environment() | {
            "UPSTREAM_CHECKOUT": str(checkout),
            "UPSTREAM_OURS": str(int(ours)),
            "UPSTREAM_CPU": str(int(cpu)),
            "UPSTREAM_OUTCOMES": str(written),
            "PYTHONPATH": os.pathsep.join(
                [str(REPOSITORY / "scripts"), environment()["PYTHONPATH"]]
            ),
        }
        command = [
            sys.executable, "-W", "ignore", "-m", "pytest", "-q",
            "--noconftest", "-p", "no:cacheprovider", "-p", "upstream.pytest_plugin",
            "-c", str(settings), "--rootdir", str(checkout), "--import-mode=append",
            str(checkout / file),
        ]  # fmt: skip
        run(command, env, Path(folder), timeout_s)
        if not written.is_file():
            return {}
        outcomes = json.loads(written.read_text())
    return {test: _why(outcome) for test, outcome in outcomes.items()}


def _why(outcome: dict[str, str]) -> str | None:
    if outcome["outcome"] == "skipped":
        return None
    return "" if outcome["outcome"] == "passed" else outcome["why"] or "failed"
