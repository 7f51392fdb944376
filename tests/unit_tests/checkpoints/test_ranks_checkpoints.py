"""A checkpoint that several ranks of a training run wrote, read by one rank and by two."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)

from megatron_async.checkpoints.torch_dist_strategy import SynchronousSaveStrategy
from megatron_async.models.parallel_state import ParallelSizes, ensure_process_groups
from tests.support.ranks import run_ranks
from tests.unit_tests.checkpoints.test_sharded_loading import load, part_of
from tests.unit_tests.checkpoints.test_training_checkpoints import check_served
from tests.unit_tests.checkpoints.training_checkpoints import parsed_args, save_run, trained_model

WORLD = 4
EXPERTS = {"num_experts": 4, "moe_shared_expert_intermediate_size": 40}
CASES: dict[str, tuple[ParallelSizes, bool, dict[str, Any]]] = {
    "tp2-pp2": (ParallelSizes(2, 2), False, {}),
    "tp2-dp2-fully-parallel": (ParallelSizes(2), True, {"add_qkv_bias": True}),
    "pp2-ep2-fully-parallel": (ParallelSizes(1, 2, 2), True, EXPERTS),
}
"""Sizes of groups, whether data-parallel ranks share the writing, and changed arguments."""


def write(folder: str, sizes: ParallelSizes, is_shared: bool, changes: dict[str, Any]) -> None:
    """Every rank writes its part of a model; weights differ from rank to rank."""
    ensure_process_groups(sizes)
    args = parsed_args(**changes)
    model = trained_model(
        args,
        tensor_model_parallel_size=sizes.tensor_model_parallel,
        pipeline_model_parallel_size=sizes.pipeline_model_parallel,
        expert_model_parallel_size=sizes.expert_model_parallel,
        pipeline_dtype=torch.float32,
        sequence_parallel=False,
    )
    strategy: Any = SynchronousSaveStrategy()
    if is_shared:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        strategy = FullyParallelSaveStrategyWrapper(strategy, group)
    save_run(model, Path(folder), args, strategy=strategy)


def load_half(folder: str) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in load(folder, 2).items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(case: str) -> Path:
        folder = tmp_path_factory.mktemp(case)
        run_ranks(WORLD, write, str(folder), *CASES[case])
        return folder

    return make


@pytest.mark.parametrize("case", CASES)
def test_shards_of_ranks_are_one_model(case: str, written: Callable[[str], Path]) -> None:
    """The reference is Megatron's own reader: a model of one rank that has loaded the folder."""
    folder = written(case)
    assert len({path.name.split("_")[2] for path in folder.glob("*.distcp")}) > 1
    whole = trained_model(parsed_args(**CASES[case][2]))
    wanted = {"model": whole.sharded_state_dict(metadata={"dp_cp_group": _data_parallel()})}
    state = dist_checkpointing.load(wanted, str(folder))
    whole.load_state_dict(state["model"])
    check_served(folder, whole)


def test_two_ranks_read_what_four_wrote(written: Callable[[str], Path]) -> None:
    folder = str(written("tp2-pp2"))
    whole = load(folder, 1)
    halves = run_ranks(2, load_half, folder)
    for rank, half in enumerate(halves):
        assert half.keys() == whole.keys()
        for name, values in half.items():
            assert torch.equal(torch.tensor(values), part_of(name, whole[name], rank)), name


def _data_parallel() -> Any:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)
