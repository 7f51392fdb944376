"""Two ranks that work until one of them is sent a signal, and what becomes of the other."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from patience import PATIENCE_S
from ranks import RankOutcome, Ranks

SETTINGS = {"device": "cpu", "num_kv_blocks": 32, "block_size_tokens": 16}
LAYOUTS = {
    "tp": {"tensor_model_parallel_size": 2},
    "pp": {"pipeline_model_parallel_size": 2},
    "ep": {"model": "dummy:tiny-moe", "expert_model_parallel_size": 2},
}


def work(folder: str, options: dict[str, Any], is_idle: bool) -> None:
    """Generate for ever, or sit there; says when it has begun."""
    from megatron_async import LLM, SamplingParams

    options = {"model": "dummy:tiny", "max_sequence_length": 256, **SETTINGS, **options}
    params = SamplingParams(num_tokens_to_generate=50, termination_id=-1)
    with LLM(**options) as llm:
        llm.generate([[1, 2, 3], [4]], params)
        Path(folder, os.environ["RANK"]).touch()
        if is_idle and llm.is_primary_rank:
            time.sleep(120)
        while True:
            llm.generate([[1, 2, 3], [4]], params)


def end_one(
    tmp_path: Path, options: dict[str, Any], is_idle: bool, rank: int, how: int
) -> RankOutcome:
    """Let two ranks work, send one of them a signal; returns how the other ended, by itself."""
    settings = {"MEGATRON_ASYNC_SILENCE_S": "1", "MEGATRON_ASYNC_LOSS_GRACE_S": "3"}
    ranks = Ranks(2, work, str(tmp_path), options, is_idle, environment=settings)
    while not all((tmp_path / str(number)).exists() for number in range(2)):
        assert ranks.processes[0].is_alive()
        time.sleep(0.02)
    time.sleep(0.3)
    os.kill(ranks.processes[rank].pid, how)
    other = ranks.processes[1 - rank]
    other.join(PATIENCE_S)
    assert not other.is_alive()
    ranks.processes[rank].kill()
    return ranks.join()[1 - rank]
