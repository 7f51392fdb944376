"""The benchmark of what HTTP adds to the first token: both ways serve the whole trace, and the
engine's steps take the time that they are told to."""

from pathlib import Path

import pytest

from tests.support.benchmark_scripts import run_script
from tests.support.ranks import quick_context

STEP_MS = 10


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_ways_wait_for_steps_that_take_their_time(tmp_path: Path) -> None:
    """A first token takes the step in which its prompt is, and with lookahead 1 a part of the one
    before, or all of it. Break it: `_SlowTokens` spends nothing."""
    options = ["--step-ms", STEP_MS, "--rate", 40, "--requests", 12, "--rounds", 1]
    options += ["--prompt-mean", 8, "--output-mean", 8, "--rows", 16, "--late-launch"]
    record = run_script("benchmark_first_token", tmp_path, *options, context=quick_context())
    (figures,) = record["figures"]
    assert figures["in_process_ms"] >= STEP_MS
    assert figures["http_ms"] >= STEP_MS
    assert 0 <= figures["late"] < 1
    assert 0 <= figures["http_late"] < 1
