"""Processes that run code of a checkout: their environment, their time, their output. A test file
runs once on Megatron's own code and once on this engine; what both pass stands side by side, with
the verdict."""

import fnmatch
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """A port of this host that nobody listens at now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def environment() -> dict[str, str]:
    """For a process of a job of one rank, which writes nothing into the checkout."""
    given = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *([given] if given else [])]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }


TIME_IS_UP = 124
"""The exit status of what was killed after its time."""
TIMEOUT = "timeout: "
"""Begins what is said of it."""


def run(command: list[str], env: dict[str, str], folder: Path, timeout_s: float) -> tuple[int, str]:
    """Run a command to its end, or kill it after `timeout_s`: its exit status or `TIME_IS_UP`, and
    what it wrote to both streams. `env` is its whole environment."""
    try:
        done = subprocess.run(
            command, env=env, cwd=folder, timeout=timeout_s, check=False, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
        return TIME_IS_UP, said.decode(errors="replace") if isinstance(said, bytes) else said
    return done.returncode, done.stdout


@dataclass
class Comparison:
    """Two runs of a test file. By test, why it failed with Megatron's own code (`control`; "" if it
    passed; skipped tests are left out) and with this engine's modules; `listed` are patterns of
    tests that do not count, each with its reason; `missing` says why others of ours have no
    outcome."""

    file: str
    control: Mapping[str, str | None] = field(default_factory=dict)
    ours: Mapping[str, str | None] = field(default_factory=dict)
    listed: Mapping[str, str] = field(default_factory=dict)
    missing: str = "not run: the file does not import"

    def reason(self, test: str) -> str | None:
        """Why a test does not count; None if it does."""
        name = test.removeprefix(self.file).removeprefix("::")
        for pattern, reason in self.listed.items():
            if fnmatch.fnmatchcase(name, pattern):
                return reason
        return None

    @property
    def counted(self) -> list[str]:
        """Tests that pass with Megatron's own code, and are not on the list."""
        return [t for t, why in self.control.items() if why == "" and self.reason(t) is None]

    @property
    def left_out(self) -> list[str]:
        """Tests that pass with Megatron's own code, and are on the list."""
        return [t for t, why in self.control.items() if why == "" and self.reason(t) is not None]

    @property
    def lost(self) -> dict[str, str]:
        """Counted tests that do not pass with ours, and why."""
        return {test: why for test in self.counted if (why := self.ours.get(test, self.missing))}

    @property
    def row(self) -> str:
        """A row of the table."""
        passed = len(self.counted) - len(self.lost)
        total = len([why for why in self.control.values() if why is not None])
        kept = len([why for why in self.control.values() if why == ""])
        cells = (self.file, f"{kept}/{total}", f"{passed}/{len(self.counted)}", len(self.left_out))
        return f"| {' | '.join(map(str, cells))} |"


HEAD = """\
| file | Megatron's own: passed/total | ours: passed/counted | on the list |
|---|---|---|---|"""


def table(comparisons: Iterable[Comparison]) -> str:
    """Rows of all files, and their sums."""
    every = list(comparisons)
    counted = sum(len(c.counted) for c in every)
    lost = sum(len(c.lost) for c in every)
    left_out = sum(len(c.left_out) for c in every)
    kept = sum(why == "" for c in every for why in c.control.values())
    total = sum(why is not None for c in every for why in c.control.values())
    last = f"| all | {kept}/{total} | {counted - lost}/{counted} | {left_out} |"
    return "\n".join([HEAD, *(c.row for c in every), last])


def lost_tests(comparisons: Iterable[Comparison]) -> list[str]:
    """A line for each test that Megatron's own code passes and ours should and does not."""
    return [f"{test}: {why}" for c in comparisons for test, why in c.lost.items()]


def compare_file(
    checkout: Path, file: str, listed: dict[str, str], cpu: bool, timeout_s: float
) -> Comparison:
    """Run `file` of the checkout twice, each for `timeout_s` at most; tests that did not end by
    then are not in the outcome."""
    control, _ = _outcomes(checkout, file, False, cpu, timeout_s)
    ours, missing = _outcomes(checkout, file, True, cpu, timeout_s)
    return Comparison(file, control, ours, listed, missing)


def _outcomes(
    checkout: Path, file: str, ours: bool, cpu: bool, timeout_s: float
) -> tuple[dict[str, str | None], str]:
    """By test why it failed, and why others have no outcome."""
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
        status, said = run(command, env, Path(folder), timeout_s)
        missing = f"not run: {' '.join(said.splitlines()[-1:])}"
        if status == TIME_IS_UP:
            missing = f"{TIMEOUT}{timeout_s:g} s were not enough"
        outcomes = json.loads(written.read_text()) if written.is_file() else {}
    return {test: _why(outcome) for test, outcome in outcomes.items()}, missing


def _why(outcome: dict[str, str]) -> str | None:
    if outcome["outcome"] == "skipped":
        return None
    return "" if outcome["outcome"] == "passed" else outcome["why"] or "failed"
