"""On GPUs, where a step that waits for a dead rank never ends, its job ends all the same."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from dying_ranks import LAYOUTS, end_one

from megatron_async.communication.death_watch import EXIT_CODE_RANK_LOST

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize("rank", [0, 1], ids=["leader", "follower"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_is_killed_in_a_step(tmp_path: Path, layout: str, rank: int) -> None:
    options = {**LAYOUTS[layout], "device": "cuda"}
    outcome = end_one(tmp_path, options, False, rank, signal.SIGKILL)
    # NCCL may wait for the rank that is dead, and the death watch then ends the process.
    said = "RankLost" in outcome.error and f"ank {rank} " in outcome.error.splitlines()[-1]
    assert said or outcome.exit_code == EXIT_CODE_RANK_LOST, outcome
