"""Loops of a CPU for layers with experts: the router, and experts that are kept as blocks."""

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from megatron_async.ops.cpu import compiler
from megatron_async.ops.experts.cpu.grouped_experts import expert_mlp_cpu
from megatron_async.ops.experts.cpu.host_routing import route_cpu
from megatron_async.ops.experts.expert_mlp import expert_mlp
from megatron_async.ops.experts.expert_routing import NO_EXPERT, Routing, route
from megatron_async.ops.linear.cpu.group_form import StoredGroups
from megatron_async.ops.linear.cpu.grouped_weight import GroupedExperts, GroupedWeight
from megatron_async.ops.linear.gguf_blocks import BLOCKS, groups_of
from tests.support.gguf_blocks import blocks_of

pytestmark = pytest.mark.skipif(not compiler.multiplies_integers(), reason="no Numba or no AVX2")


@pytest.mark.parametrize("pre_softmax", [False, True])
@pytest.mark.parametrize(("sigmoid", "has_bias"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("experts", "topk"), [(8, 3), (5, 1), (4, 4)])
def test_router(pre_softmax: bool, sigmoid: bool, has_bias: bool, experts: int, topk: int) -> None:
    """Dummies, tokens without a place, and equal scores, of which the lower number is chosen."""
    generator = torch.Generator().manual_seed(experts)
    x = torch.randn(7, 24, generator=generator)
    weight = torch.randn(experts, 24, generator=generator)
    weight[-1] = weight[0]
    bias = torch.randn(experts, generator=generator) if has_bias else None
    logit_bias = torch.randn(experts, generator=generator) if topk == 1 else None
    places = torch.tensor([3, 0, 5, 9, 2]) if topk < 4 else None
    arguments = x, weight, topk, pre_softmax, places, 9, sigmoid, bias, 2.5, logit_bias
    found, expected = route_cpu(*arguments), route.reference(*arguments)
    assert torch.equal(found.experts, expected.experts)
    torch.testing.assert_close(found.weights, expected.weights, rtol=2e-6, atol=1e-6)
    with pytest.raises(ValueError, match="topk=9"):
        route_cpu(x, weight, 9, pre_softmax)


def kept(kind: Kind, experts: int, outputs: int, k: int) -> tuple[GroupedExperts, torch.Tensor]:
    """Random experts, and their numbers."""
    data = torch.from_numpy(blocks_of(kind, experts * outputs, k, seed=outputs))
    stored = StoredGroups(
        experts * outputs, k, BLOCKS[kind].form,
        lambda first, last: groups_of(data[first:last], kind),
    )  # fmt: skip
    whole = groups_of(data, kind).values().view(experts, outputs, k)
    return GroupedExperts(GroupedWeight(stored, is_fine=True), experts), whole


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("up", "down"), [(Kind.Q4_0, Kind.Q8_0), (Kind.Q4_K, Kind.Q6_K)])
def test_experts(gated: bool, up: Kind, down: Kind) -> None:
    """Experts elsewhere, experts without tokens, tokens that go nowhere; a row's bits do not depend
    on other rows."""
    experts, hidden, ffn, tokens = 5, 256, 256, 11
    fc1, first = kept(up, experts, (1 + gated) * ffn, hidden)
    fc2, second = kept(down, experts, hidden, ffn)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, hidden, generator=generator)
    chosen = torch.randint(2, 9, (tokens, 3), generator=generator, dtype=torch.int32)
    chosen[chosen == 4], chosen[6] = 3, NO_EXPERT
    routing = Routing(chosen, torch.rand(tokens, 3, generator=generator))
    found = expert_mlp_cpu(x, routing, fc1, fc2, 2, 9)
    expected = expert_mlp.reference(x, routing, first, second, 2, 9)
    assert not found[6].any()
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4 * float(expected.abs().max()))
    for row in range(tokens):
        alone = Routing(*(each[row : row + 1] for each in (chosen, routing.weights)))
        assert torch.equal(expert_mlp_cpu(x[row : row + 1], alone, fc1, fc2, 2, 9)[0], found[row])
