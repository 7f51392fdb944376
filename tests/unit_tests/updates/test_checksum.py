"""One checksum for any TP, PP and EP; and it sees a bit, and two rows that change places."""

from dataclasses import replace

import pytest

from megatron_async.checkpoints.mapping import Shard
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.pipeline import EMBEDDING
from megatron_async.updates.checksum import combined, parameters_checksum
from tests.unit_tests.updates.test_weight_round import SHARDS, SHARED, of_stage, parameters


@pytest.mark.parametrize("family", SHARED)
def test_ranks_add_up(family: str) -> None:
    a = replace(DUMMY_SHAPES[family], vocab_size=131)
    whole = parameters_checksum(parameters(a, Shard()), Shard(), a)
    for shards in SHARDS.values():
        if shards[0].expert_size > 1 and not a.num_moe_experts:
            continue
        held = [of_stage(shard, a) for shard in shards]
        ranks = [parameters_checksum(parameters(a, shard), shard, a) for shard in held]
        assert combined(ranks) == combined([whole]), shards


def test_it_sees_a_bit_and_an_order() -> None:
    a = DUMMY_SHAPES["tiny"]
    good = parameters(a, Shard())
    sums = {combined([parameters_checksum(good, Shard(), a)])}
    swapped = {**good, EMBEDDING: good[EMBEDDING].flip(0)}
    other_bit = {**good, "decoder.final_norm.weight": good["decoder.final_norm.weight"].clone()}
    other_bit["decoder.final_norm.weight"][-1].add_(2**-23)
    bfloat16 = {name: each.bfloat16() for name, each in good.items()}
    for other in (swapped, other_bit, bfloat16):
        sums.add(combined([parameters_checksum(other, Shard(), a)]))
    assert len(sums) == 4
    assert {len(each) for each in sums} == {32}
