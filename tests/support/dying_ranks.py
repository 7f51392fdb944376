"""Ranks that work until one of them is sent a signal, and what becomes of the others."""

import math
import os
import time
from pathlib import Path
from typing import Any

from tests.support.patience import PATIENCE_S, eventually
from tests.support.ranks import RankOutcome, Ranks

SETTINGS = {"device": "cpu", "num_kv_blocks": 32, "block_size_tokens": 16}
TENSORS, STAGES = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
EXPERTS = {"model": "dummy:tiny-moe", "expert_model_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": TENSORS,
    "pp": STAGES,
    "ep": EXPERTS,
    "tp and pp": TENSORS | STAGES,
    "tp and ep": TENSORS | EXPERTS,
    "ep of 4": EXPERTS | {"expert_model_parallel_size": 4},
}


def world_of(layout: str) -> int:
    """Ranks of a layout."""
    return math.prod(size for name, size in LAYOUTS[layout].items() if name.endswith("_size"))


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
    tmp_path: Path, layout: str, is_idle: bool, rank: int, how: int, device: str = "cpu"
) -> list[RankOutcome]:
    """Let ranks work, send one of them a signal; returns how the others ended, by themselves."""
    settings = {"MEGATRON_ASYNC_SILENCE_S": "1", "MEGATRON_ASYNC_LOSS_GRACE_S": "3"}
    world, options = world_of(layout), {**LAYOUTS[layout], "device": device}
    ranks = Ranks(world, work, str(tmp_path), options, is_idle, environment=settings)
    while not all((tmp_path / str(number)).exists() for number in range(world)):
        assert all(process.is_alive() for process in ranks.processes)
        time.sleep(0.02)
    time.sleep(0.3)
    os.kill(ranks.processes[rank].pid, how)
    others = [number for number in range(world) if number != rank]
    eventually(lambda: not any(ranks.processes[other].is_alive() for other in others))
    ranks.kill(rank)
    outcomes = ranks.join(2 * PATIENCE_S)  # from the start, which is slow on GPUs
    return [outcomes[other] for other in others]


def fail_alone(options: dict[str, Any], rank: int) -> None:
    """Generate; a step fails on this rank of two, and the other waits in its collectives."""
    from megatron_async import LLM, SamplingParams
    from tests.support.harness import fail_call

    options = {"model": "dummy:tiny", "max_sequence_length": 256, **SETTINGS, **options}
    params = SamplingParams(num_tokens_to_generate=50, termination_id=-1)
    with LLM(**options) as llm:
        if int(os.environ["RANK"]) == rank:
            fail_call(llm.engine.controller, "enqueue_step", 7, ValueError("told to fail"))
        llm.generate([[1, 2, 3], [4]], params)
