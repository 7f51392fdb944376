"""A rank that is killed or stopped ends its job within seconds, with an error that names it."""

import os
import signal
from typing import Any
from unittest.mock import patch

import pytest

from megatron_async.communication.death_watch import EXIT_CODE_RANK_LOST
from tests.support.dying_ranks import LAYOUTS, SETTINGS, end_one, fail_alone
from tests.support.patience import PATIENCE_S
from tests.support.ranks import RankOutcome, Ranks, run_ranks

PAIRS = [
    pytest.param(layout, rank, id=f"{layout}-{role}")
    for layout in ("tp", "pp", "ep")
    for rank, role in enumerate(("leader", "follower"))
]
FOURS = [
    pytest.param(layout, rank, id=f"{layout}-{role}")
    for layout, rank, role in (
        ("tp and pp", 0, "leader"),
        ("tp and pp", 3, "last stage"),
        ("tp and ep", 0, "leader"),
        ("tp and ep", 3, "another's follower"),
        ("ep of 4", 2, "leader"),
    )
]
GPUS = [pytest.param("cuda", marks=pytest.mark.gpus(2))]


def assert_lost(outcomes: list[RankOutcome], rank: int) -> None:
    """All others named the lost rank and ended. A device that waits for that rank never ends, and
    the death watch then ends the process."""
    for outcome in outcomes:
        if outcome.exit_code == EXIT_CODE_RANK_LOST and not outcome.error:
            continue
        last = outcome.error.splitlines()[-1]
        assert "RankLost" in last, outcome
        assert f"ank {rank} " in last


@pytest.mark.parametrize(("layout", "rank"), PAIRS)
@pytest.mark.parametrize("device", ["cpu", *GPUS])
def test_a_rank_is_killed_in_a_step(tmp_path, layout, rank, device):
    outcomes = end_one(tmp_path, layout, False, rank, signal.SIGKILL, device)
    assert_lost(outcomes, rank)
    assert device == "cuda" or outcomes[0].error


@pytest.mark.parametrize(("layout", "rank"), FOURS)
@pytest.mark.gpus(4)
def test_one_rank_of_four_is_killed_in_a_step(tmp_path, layout, rank):
    assert_lost(end_one(tmp_path, layout, False, rank, signal.SIGKILL, "cuda"), rank)


@pytest.mark.parametrize("device", ["cpu", *GPUS])
def test_a_rank_is_stopped_in_a_step(tmp_path, device):
    outcomes = end_one(tmp_path, "tp", False, 1, signal.SIGSTOP, device)
    # Its step never ends, since the other's connections stay open: nothing may wait for it.
    assert_lost(outcomes, 1)
    assert device == "cuda" or (outcomes[0].error and outcomes[0].exit_code == 0)


@pytest.mark.parametrize("rank", [0, 1], ids=["leader", "follower"])
@pytest.mark.parametrize("device", ["cpu", *GPUS])
def test_a_rank_is_killed_while_the_job_is_idle(tmp_path, rank, device):
    """The leader's caller does something else, and the follower waits for the leader."""
    outcomes = end_one(tmp_path, "tp", True, rank, signal.SIGKILL, device)
    assert_lost(outcomes, rank)
    assert bool(outcomes[0].error) == (rank == 0)


@pytest.mark.parametrize(
    ("device", "layout", "rank"),
    [
        ("cpu", "tp", 1),
        *(
            pytest.param("cuda", layout, rank, marks=pytest.mark.gpus(2))
            for layout in ("tp", "ep")
            for rank in range(2)
        ),
    ],
)
def test_a_step_fails_on_one_rank_alone(device, layout, rank):
    """Nobody is lost, so no watch ends a rank that waits for a GPU in vain."""
    options = {**LAYOUTS[layout], "device": device}
    short = {"MEGATRON_ASYNC_LOSS_GRACE_S": "3"}
    for outcome in Ranks(2, fail_alone, options, rank, environment=short).join(PATIENCE_S):
        assert outcome.exit_code is not None, outcome
        assert outcome.exit_code == EXIT_CODE_RANK_LOST or "told to fail" in outcome.error


def _with_other_settings(options: dict[str, dict[str, Any]]) -> str:
    from megatron_async import LLM, llm

    mine = options[os.environ["RANK"]]
    # A collective of ranks that differ may never end: it is said before the first of them.
    with patch.object(llm, "build_model"), pytest.raises(Exception) as raised:
        LLM(**{"model": "dummy:tiny", **SETTINGS, "tensor_model_parallel_size": 2, **mine})
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({}, {"lookahead": 2}, "lookahead is 1 on rank 0, 2 on rank 1"),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}, "dtype"),
        ({}, {"num_kv_blocks": 48}, "num_kv_blocks"),
    ],
    ids=["lookahead", "dtype", "blocks"],
)
def test_ranks_with_other_settings(first, second, message):
    found = run_ranks(2, _with_other_settings, {"0": first, "1": second})
    for text in found:
        assert text.startswith("ConfigurationError"), text
        assert message in text


def test_sizes_that_do_not_divide_the_heads():
    found = run_ranks(3, _three_ranks)
    for text in found:
        assert "num_attention_heads" in text or "heads" in text
        assert "tensor_model_parallel_size=3" in text


def _three_ranks() -> str:
    from megatron_async import LLM

    with pytest.raises(Exception) as raised:
        LLM(**{"model": "dummy:tiny", **SETTINGS, "tensor_model_parallel_size": 3})
    return str(raised.value)
