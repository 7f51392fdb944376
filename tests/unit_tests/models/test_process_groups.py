"""Process groups of several ranks, and the layers of pipeline stages among them."""

import itertools
import os
import random
import re
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_async.device_state.device_memory import agree_on_least
from megatron_async.errors import ConfigurationError
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.hybrid import transformer_config
from megatron_async.models.parallel_state import (
    ParallelSizes,
    ensure_process_groups,
)
from megatron_async.models.pipeline import split_pattern, stage_of
from tests.support.ranks import RankError, Ranks, run_ranks


def _sum_over_tensor_parallel_ranks() -> float:
    groups = ensure_process_groups(ParallelSizes(tensor_model_parallel=2))
    mine = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(mine, group=groups.tp)
    return mine.item()


def _least(of_rank: list[int], sizes: ParallelSizes) -> int:
    ensure_process_groups(sizes)
    return agree_on_least(of_rank[dist.get_rank()])


def _raise_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("not here")


def _sleep() -> None:
    time.sleep(30)


def test_tensor_parallel_ranks_are_neighbours():
    assert run_ranks(4, _sum_over_tensor_parallel_ranks) == [1.0, 1.0, 5.0, 5.0]


def test_ranks_that_step_together_agree_on_the_least():
    numbers = [7, 3, 5, 4]
    tensor = run_ranks(4, _least, numbers, ParallelSizes(tensor_model_parallel=2))
    assert tensor == [3, 3, 4, 4]
    both = ParallelSizes(tensor_model_parallel=2, expert_model_parallel=2)
    assert run_ranks(4, _least, numbers, both) == [3, 3, 3, 3]


def test_an_error_of_a_rank_is_told():
    with pytest.raises(RankError, match=r"(?s)rank 1:.*not here"):
        run_ranks(2, _raise_on_rank_1)


def test_a_killed_rank_is_told():
    ranks = Ranks(2, _sleep)
    ranks.kill(1)
    outcomes = ranks.join(2.0)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert "did not end" in outcomes[0].error


@pytest.mark.parametrize(
    ("sizes", "world", "message"),
    [
        ({"tensor_model_parallel": 3}, 4, "multiple of 3 processes, but this job has 4"),
        ({"tensor_model_parallel": 2}, 1, "nproc-per-node=2"),
        ({"expert_model_parallel": 2}, 3, "does not divide the 3 data-parallel replicas"),
    ],
)
def test_sizes_that_do_not_fit_the_job(sizes, world, message):
    with pytest.raises(ConfigurationError, match=message):
        ParallelSizes(**sizes).data_parallel(world)


@pytest.mark.parametrize("value", [0, -1, True, "2", 1.0])
def test_sizes_that_are_none(value):
    with pytest.raises(ConfigurationError, match="tensor_model_parallel_size="):
        ParallelSizes(tensor_model_parallel=value)


@pytest.mark.parametrize(
    ("pattern", "stages", "expected"),
    [
        ("*-*-", 1, "*-*-"),
        ("*-*-*-", 2, "*-*-|*-"),
        ("*-" * 30, 4, "|".join(["*-" * 8, "*-" * 8, "*-" * 7, "*-" * 7])),
        ("*E*E*-", 3, "*E|*E|*-"),
        ("MM-*-M", 2, "MM-|*-M"),
        ("MEM*-", 3, "ME|M|*-"),
        ("EMEM*E", 2, "EME|M*E"),
    ],
)
def test_split(pattern, stages, expected):
    assert split_pattern(pattern, stages) == expected


@pytest.mark.parametrize(
    ("layers", "stages", "output_cost", "expected"),
    [
        (32, 2, 1.6, [17, 15]),
        (32, 2, 0.4, [16, 16]),
        (32, 4, 1.6, [9, 8, 8, 7]),
        (30, 3, 50.0, [15, 14, 1]),
        (2, 2, 9.0, [1, 1]),
    ],
)
def test_the_last_stage_has_the_output_layer_besides(layers, stages, output_cost, expected):
    parts = split_pattern("*-" * layers, stages, output_cost).split("|")
    assert [len(part) // 2 for part in parts] == expected


def test_layers_weigh_what_their_kinds_take():
    costs = {"M": 1.0, "E": 5.0, "*": 2.0, "-": 4.0}
    assert split_pattern("MMMMMM*E", 2, 0.0, costs) == "MMMMMM|*E"
    assert split_pattern("MEMMMM*-", 2, 0.0, costs) == "MEMM|MM*-"
    assert split_pattern("MEMMMM*-", 2, 3.0, costs) == "MEMMMM|*-"


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_has_a_faster_slowest_stage(seed):
    draw = random.Random(seed)
    pattern = "".join(draw.choice("M*-E") for _ in range(12))
    costs = {kind: draw.random() + 0.1 for kind in "M*-E"}
    output = draw.random()

    def slowest(parts):
        return max(sum(costs[k] for k in p) + output * (p is parts[-1]) for p in parts)

    units = re.findall(r"^[E-]+|[^E-][E-]*", pattern)
    stages = min(3, len(units))
    ways = []
    for cut in itertools.combinations(range(1, len(units)), stages - 1):
        ends = [0, *cut, len(units)]
        ways.append(slowest(["".join(units[a:b]) for a, b in itertools.pairwise(ends)]))
    found = split_pattern(pattern, stages, output, costs)
    assert found.replace("|", "") == pattern
    assert slowest(found.split("|")) == pytest.approx(min(ways))


@pytest.mark.parametrize(
    ("model", "sizes", "expected"),
    [
        ("llama-3.1-8b", ParallelSizes(1, 2), [17, 15]),
        ("llama-3.1-8b", ParallelSizes(2, 2), [17, 15]),
        ("qwen3-30b-a3b", ParallelSizes(1, 2, 4), [25, 23]),
    ],
)
def test_stages_of_models(model, sizes, expected):
    config = transformer_config(DUMMY_SHAPES[model], torch.bfloat16, sizes)
    assert [len(part) // 2 for part in config.hybrid_layer_pattern.split("|")] == expected


def test_more_stages_than_layers():
    with pytest.raises(ConfigurationError, match=r"size=3, but this model has 2 layers.*at most 2"):
        split_pattern("*-*-", 3)


def test_names():
    config = SimpleNamespace(hybrid_layer_pattern="*-*-|*-|*-", pipeline_stage=1)
    stage = stage_of(config)
    assert (stage.first_layer, stage.is_first, stage.is_last) == (4, False, False)
    local = "decoder.layers.1.mlp.linear_fc1.weight"
    assert stage.local_name("decoder.layers.5.mlp.linear_fc1.weight") == local
    assert stage.global_name(local) == "decoder.layers.5.mlp.linear_fc1.weight"
    elsewhere = [3, 6]
    assert [stage.local_name(f"decoder.layers.{layer}.x") for layer in elsewhere] == [None, None]
    ends = ["embedding.word_embeddings.weight", "decoder.final_norm.weight", "output_layer.weight"]
    held = []
    for index in range(3):
        config.pipeline_stage = index
        held.append([stage_of(config).local_name(name) for name in ends])
    assert held == [[ends[0], None, None], [None] * 3, [None, *ends[1:]]]


def test_a_model_without_stages_holds_everything():
    stage = stage_of(SimpleNamespace())
    names = ["embedding.x", "decoder.layers.7.x", "output_layer.weight"]
    assert [stage.local_name(name) for name in names] == names
