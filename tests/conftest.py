"""For all tests: the demo model, loaded once a run, and no reaching for the network."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Generator, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.cards import Cards, lack_of, needed_by
from tests.support.house import house
from tests.support.pairs import ALL_CASES, left_out

if TYPE_CHECKING:
    from megatron_async import LLM

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron compiles its fusions, which takes seconds each

LARGE = frozenset({"smollm2_llm", "smollm2", "demo", "transformers_smollm2", "reference"})
"""Fixtures that take seconds to make."""
LONG_S = 600
"""Tests that may take longer take a minute or two."""
CPU_S = "cpu_s"
"""Property of a test's report: CPU seconds of its process in the test, without its fixtures."""
_spent: Counter[str] = Counter()
"""CPU seconds by test file, of all workers."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option of `scripts/test.sh --gpus`."""
    parser.addoption(
        "--cards",
        metavar="EACH/THERE",
        help="run only the tests that need EACH of the machine's GPUs (1, 2 or 4), each worker on "
        "GPUs of its own; THERE: how many the machine has",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known, and let a worker see no card but its own, before anybody asks CUDA."""
    config.addinivalue_line(
        "markers", f"pairs: of all cases those in which every two values meet ({ALL_CASES}=1: all)"
    )
    cards = _cards(config)
    if cards is not None and not config.getoption("numprocesses", None):  # its workers inherit it
        names = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
        mine = cards.of_worker(int(worker), names.split(",") if names else ())
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)


def _cards(config: pytest.Config) -> Cards | None:
    text = config.getoption("--cards")
    return None if text is None else Cards.parse(text)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Skip what needs more cards than there are; `-m gpu` finds tests of several cards, too."""
    needed = needed_by(item)
    if needed:
        item.add_marker("gpu")
        cards = _cards(item.config)
        if lack := lack_of(needed, _count_cards() if cards is None else cards.there):
            item.add_marker(pytest.mark.skip(reason=lack))


@cache
def _count_cards() -> int:
    import torch

    return torch.cuda.device_count()


@pytest.hookimpl(trylast=True)  # behind -k and -m: a case that is named runs
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what pairs do not need, and what runs on other cards; put the rest in order.

    The longest tests come first, then those of the demo model, then those that start ranks.

    pytest-xdist (worksteal) gives each worker a stretch of the list, and takes tests away from its
    end only: so one worker loads the model, one starts the server that ranks are forked from, and
    at the end no worker has a long test left while the others are done.
    """
    gone, cards = set(left_out(items)), _cards(config)
    if cards is not None:
        gone |= {item for item in items if not cards.runs(needed_by(item))}
    if gone:
        config.hook.pytest_deselected(items=list(gone))
        items[:] = [item for item in items if item not in gone]
    items.sort(key=_place)


def _place(item: pytest.Item) -> tuple[bool, ...]:
    return not _is_long(item), not _wants_demo_model(item), not _starts_ranks(item)


def _is_long(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("timeout")
    return marker is not None and marker.args[0] >= LONG_S


def _wants_demo_model(item: pytest.Item) -> bool:
    return not LARGE.isdisjoint(getattr(item, "fixturenames", ()))


def _starts_ranks(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function) or item.get_closest_marker("gpu"):
        return False
    values = vars(item.module).values()
    return any(getattr(value, "__module__", None) == "tests.support.ranks" for value in values)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from walking all imported modules again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Measure the CPU time of a test; the wall's depends on what else runs."""
    start = time.process_time()
    try:
        yield
    finally:
        if not _is_long(item) and not item.get_closest_marker("gpu"):
            item.user_properties.append((CPU_S, time.process_time() - start))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add a test's CPU time to its file's; with workers, in the process that reports."""
    if report.when == "call":
        _spent[report.location[0]] += dict(report.user_properties).get(CPU_S, 0.0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where a file of tests takes longer than tests/house.toml says."""
    if _slow_files() and not hasattr(session.config, "workerinput"):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the files that take too long."""
    for file, seconds in _slow_files().items():
        terminalreporter.write_line(
            f"{file} takes {seconds:.0f} s of CPU: make it quicker, or edit tests/house.toml",
            red=True,
        )


def _slow_files() -> dict[str, float]:
    most = house()["time"]["cpu_seconds_of_a_test_file"]
    return {file: seconds for file, seconds in _spent.most_common() if seconds > most}


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Give back what a test of a GPU has cached: with `-n` several processes share its memory."""
    if not item.get_closest_marker("gpu"):
        return
    import torch

    if torch.cuda.is_initialized():  # else it was skipped, and a collection would take longer
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(params=[0, 1, 2])
def lookahead(request: pytest.FixtureRequest) -> int:
    """A test that names it runs with each, unless it is parametrized with others."""
    return request.param


@pytest.fixture(params=["reconcile", "rollback"])
def invalidation(request: pytest.FixtureRequest) -> str:
    """Both policies: a test that names it runs with each, unless it is parametrized."""
    return request.param


@pytest.fixture(scope="session")
def smollm2_llm() -> Iterator[LLM]:
    """The demo model in float32 on the CPU, as `transformers` has it, lookahead 1."""
    from megatron_async import LLM

    settings = {"quantization": "none", "lookahead": 1, "check_integrity": True}
    with LLM("smollm2", device="cpu", **settings) as llm:
        yield llm


@pytest.fixture(scope="session")
def transformers_smollm2() -> Any:
    """The demo model as `transformers` reads it, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    from megatron_async.checkpoints.registry import demo_file
    from tests.support.quick_transformers import quick_gguf

    file = demo_file()
    with quick_gguf():
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
    return model.eval()
