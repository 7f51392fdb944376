"""A pytest plugin: Megatron's tests on their own engine or on this one, their outcomes as JSON.

Settings come by the environment: UPSTREAM_CHECKOUT, a folder; UPSTREAM_OURS and UPSTREAM_CPU, "1"
for yes; UPSTREAM_OUTCOMES, the file to write.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

OWN_PACKAGES = ("tests", "examples", "megatron.inference")
outcomes: dict[str, dict[str, str]] = {}


def pytest_configure() -> None:
    """Prepare the process before a test file is imported."""
    import megatron.core  # noqa: F401  (the installed one, before the checkout is on the path)
    import torch

    sys.path.insert(0, os.environ["UPSTREAM_CHECKOUT"])  # its `tests` before this project's
    if os.environ["UPSTREAM_CPU"] == "1":
        from megatron_async.compat.cpu_stand_ins import stand_in

        stand_in()
        torch.cuda.device_count = lambda: 1  # the tests take a device by rank, modulo their count
    if os.environ["UPSTREAM_OURS"] == "1":
        from megatron_async.compat import install

        install(packages=OWN_PACKAGES)


def pytest_addoption(parser: Any) -> None:
    """The option of Megatron's own conftest.py, which is not loaded: it downloads data sets."""
    parser.addoption("--experimental", action="store_true")


def pytest_collectreport(report: Any) -> None:
    """A file that does not import has one outcome, under its own name."""
    if report.failed:
        outcomes[report.nodeid] = {"outcome": "failed", "why": _last_line(report.longreprtext)}
        _write()


def pytest_runtest_logreport(report: Any) -> None:
    """The worst of a test's three phases counts."""
    known = outcomes.get(report.nodeid, {}).get("outcome")
    if known == "failed" or (report.when != "call" and report.passed):
        return
    why = "" if report.passed else _last_line(report.longreprtext)
    outcomes[report.nodeid] = {"outcome": report.outcome, "why": why}
    _write()  # each time: the process may be killed when its time is up


def _write() -> None:
    Path(os.environ["UPSTREAM_OUTCOMES"]).write_text(json.dumps(outcomes))


def _last_line(text: str) -> str:
    said = [line[2:] for line in text.splitlines() if line.startswith("E  ")]
    return (said or text.splitlines() or [""])[0].strip()[:200]


@pytest.fixture
def tmp_path_dist_ckpt(tmp_path: Path) -> Path:
    """A fixture of Megatron's own conftest.py."""
    return tmp_path
