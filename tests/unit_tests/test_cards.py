"""Tests of GPUs run where there are enough of them, each once, on cards of their worker."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cards import SIZES, Cards, lack_of

TESTS_FOLDER = Path(__file__).parents[1]
TESTS = """
import os, pathlib, pytest

def say(number):
    with open(pathlib.Path(__file__).with_name("said"), "a") as file:
        file.write(f"{number}: {os.environ['CUDA_VISIBLE_DEVICES']}\\n")

def test_of_none(): say(0)

@pytest.mark.gpu
def test_of_one(): say(1)

@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.gpus(2)
def test_of_two(turn): say(2)

@pytest.mark.parametrize("number", [pytest.param(n, marks=pytest.mark.gpus(n)) for n in (1, 4)])
def test_of_a_number(number): say(number)
"""


@pytest.mark.parametrize("there", [0, 1, 2, 3, 4, 8])
def test_each_test_runs_once_or_says_why_not(there: int) -> None:
    """In the calls of test.sh: one card, then each size that there is."""
    calls = [Cards(each, there) for each in SIZES if each <= max(there, 1)]
    for needed in SIZES:
        assert sum(call.runs(needed) for call in calls) == 1
        assert bool(lack_of(needed, there)) == (needed > there)
    assert not any(call.runs(0) for call in calls)
    assert lack_of(4, 2) == "needs 4 GPU(s), 2 here"


@pytest.mark.parametrize(
    ("text", "workers", "expected"),
    [
        ("1/4", 4, ["0", "1", "2", "3"]),
        ("1/1", 2, ["0", "0"]),
        ("2/4", 2, ["0,1", "2,3"]),
        ("2/3", 1, ["0,1"]),
        ("4/4", 1, ["0,1,2,3"]),
        ("1/0", 2, ["", ""]),
    ],
)
def test_workers_have_cards_of_their_own(text: str, workers: int, expected: list[str]) -> None:
    cards = Cards.parse(text)
    assert [",".join(cards.of_worker(worker)) for worker in range(workers)] == expected
    if text == "2/4":
        assert cards.of_worker(1, ["5", "3", "GPU-7", "1"]) == ["GPU-7", "1"]


@pytest.mark.parametrize("text", ["3/4", "2", "two/4", "/", "2/-4"])
def test_what_is_no_number_of_cards(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="--cards"):
        Cards.parse(text)


@pytest.mark.parametrize(
    ("options", "expected", "skipped"),
    [
        (("--cards", "2/4", "-n", "2", "--dist", "each"), ["2: 6,4"] * 2 + ["2: 7,5"] * 2, 0),
        (("--cards", "1/2", "-n", "0"), ["1: 6"] * 2, 1),
    ],
)
def test_a_run(tmp_path: Path, options: tuple[str, ...], expected: list[str], skipped: int) -> None:
    """Calls as those of test.sh, of tests that say which cards they see."""
    (tmp_path / "test_them.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n    gpus(number)\n")
    environment = {name: os.environ[name] for name in os.environ if "PYTEST" not in name}
    environment |= {"PYTHONPATH": str(TESTS_FOLDER.parent), "CUDA_VISIBLE_DEVICES": "6,4,7,5"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    plugins = ["-p", "tests.conftest", "-p", "xdist.plugin"]
    command = [sys.executable, "-m", "pytest", *plugins, "-q", "-rs", *options, "."]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted((tmp_path / "said").read_text().splitlines()) == sorted(expected)
    assert done.stdout.count("needs 4 GPU(s), 2 here") == skipped


def test_no_test_asks_by_itself_whether_there_is_a_gpu() -> None:
    """A test that did would be skipped in no run of `--cards`, or run on a card of another test."""
    pattern = re.compile(r"skipif\(\s*(not torch\.cuda|torch\.cuda\.device_count)")
    files = [path for path in TESTS_FOLDER.rglob("test_*.py") if path != Path(__file__)]
    assert len(files) > 100
    assert not [str(path) for path in files if pattern.search(path.read_text("utf-8"))]
