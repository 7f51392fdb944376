"""An expert layer of a few tokens has the bits that it has among many: of the mode's kernels."""

import dataclasses
from functools import partial

import pytest
import torch

from megatron_async.ops.experts.expert_mlp import expert_mlp
from megatron_async.ops.experts.expert_plan import (
    FEW_CHAINS,
    MOST_FEW_TOKENS,
    ChainPlan,
    ChainTiles,
    LayerShape,
    plan_few_chains,
)
from megatron_async.ops.experts.expert_routing import NO_EXPERT, route
from megatron_async.ops.experts.few_tokens import few_token_experts, find_plan
from megatron_async.ops.experts.shared_gate import add_shared_expert
from megatron_async.ops.linear.activations import squared_relu_gpu, swiglu_gpu
from megatron_async.ops.linear.products import choose_for, product
from megatron_async.ops.linear.rms_norm import add_rms_norm
from megatron_async.ops.linear.stream import Stream
from tests.unit_tests.ops.experts.test_few_tokens import (
    NANO,
    QWEN3,
    QWEN3_NEXT,
    make_layer,
    make_tokens,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory", "matrix_units")
INVARIANT = frozenset({"invariant"})
few = few_token_experts.on("gpu", INVARIANT)
HALF, BRAIN = torch.float16, torch.bfloat16


def among_many(stream, layer, places, dummy_place):
    """By the mode's kernels for any number of tokens: normed rows, routing, outputs."""
    if stream.weight is None:
        normed = stream.value
    else:
        normed, stream.total = add_rms_norm.on("gpu", INVARIANT)(*stream.norm_arguments)
    rule = layer.pre_softmax, places, dummy_place, layer.sigmoid, layer.bias, layer.scale
    routing = route.on("gpu", INVARIANT)(normed, layer.router, layer.topk, *rule)
    experts = len(layer.router)
    out = expert_mlp.on("gpu", INVARIANT)(normed, routing, layer.fc1, layer.fc2, 0, experts)
    if layer.shared_fc1 is None:
        return routing, out
    multiply = product.on("gpu", INVARIANT)
    chosen = partial(choose_for, major=9, invariant=True)
    activation = swiglu_gpu if layer.shape.gated else squared_relu_gpu
    fc1, fc2 = layer.shared_fc1, layer.shared_fc2
    inner = activation(multiply(normed, fc1, None, chosen(normed, fc1)))
    shared = multiply(inner, fc2, None, chosen(inner, fc2))
    if layer.shared_gate is None:
        return routing, out + shared
    add = add_shared_expert.on("gpu", INVARIANT)
    return routing, add(out, shared, normed, layer.shared_gate)


def check(tokens, layer, has_norm=True, has_residual=True, plans=(), company=24, wild=False):
    """Equal to the bit, for each plan; what was found."""
    device, dtype, hidden = layer.fc1.device, layer.fc1.dtype, layer.shape.hidden
    draw = partial(make_tokens, tokens + company, hidden, dtype, device)
    value, residual = draw(), draw() if has_residual else None
    weight = (torch.rand(hidden, device=device) + 0.5).to(dtype) if has_norm else None
    value = value if has_norm else value.contiguous()
    places = torch.arange(tokens + company, device=device)
    if wild and tokens > 1:
        places[1] = 999
    many = Stream(value, residual, weight, 1e-5)
    truth, expected = among_many(many, layer, places, 999)
    plans = plans or [plan_few_chains(tokens, layer.shape, MOST_FEW_TOKENS)]
    for plan in plans:
        own = None if residual is None else residual[:tokens]
        alone = Stream(value[:tokens], own, weight, 1e-5)
        given = alone if has_norm else value[:tokens]
        out, routing = few(given, layer, plan, places[:tokens], 999)
        assert torch.equal(routing.experts, truth.experts[:tokens])
        assert torch.equal(routing.weights, truth.weights[:tokens])
        assert torch.equal(out, expected[:tokens]), plan
        if has_norm:
            assert torch.equal(alone.total, many.total[:tokens])
        again = few(given, layer, plan, places[:tokens], 999, residual[:tokens])[0]
        assert torch.equal(again, expected[:tokens] + residual[:tokens])
    if wild and tokens > 1:
        assert routing.experts[1].unique().tolist() == [NO_EXPERT]
    return out, routing


def sizes(experts=12, topk=3, hidden=200, ffn=40, shared=0, gated=True):
    return LayerShape(experts, topk, hidden, ffn, shared, gated, 2)


SMALL = ChainPlan(ChainTiles(16, 32, 1, 2), ChainTiles(16, 16, 4, 2))
OTHER = ChainPlan(ChainTiles(32, 64, 4, 3), ChainTiles(8, 64, 2, 3))


@pytest.mark.parametrize(
    ("tokens", "shared", "gate", "gated", "rule"),
    [
        (1, 0, False, True, "softmax"),
        (3, 72, False, False, "sigmoid"),
        (2, 40, True, True, "softmax"),
        (1, 136, True, False, "sigmoid"),
    ],
)
def test_bits_are_those_among_many(tokens, shared, gate, gated, rule, device):
    shape = sizes(shared=shared, gated=gated)
    layer = make_layer(shape, HALF, device, gate, rule, rule == "sigmoid")
    check(tokens, layer, plans=(SMALL, OTHER), wild=True)


def test_without_a_norm(device):
    layer = make_layer(sizes(experts=40, topk=9, shared=24), HALF, device, gate=True)
    check(2, layer, has_norm=False, plans=(OTHER,), company=4)


def test_one_expert_a_token(device):
    layer = make_layer(sizes(experts=3, topk=1), HALF, device, rule="sigmoid")
    check(1, layer, plans=(SMALL,), company=2)


def test_experts_are_added_in_the_order_of_their_numbers(device):
    """Two that cancel, and what is left of a small one before them; the best is the last one."""
    layer = make_layer(sizes(experts=3), HALF, device, rule="sigmoid", has_bias=True)
    layer.router.zero_()
    layer.bias.copy_(torch.arange(3))
    layer.fc1[2], layer.fc2[2], layer.fc2[0] = layer.fc1[1], -layer.fc2[1], layer.fc2[0] / 2**12
    assert check(2, layer, plans=(SMALL,), company=0)[1].experts.tolist() == [[2, 1, 0]] * 2


def test_weights_of_other_experts_are_not_read(device):
    layer = make_layer(sizes(), HALF, device)
    x = make_tokens(1, 200, HALF, device)
    hit = few(x, layer, SMALL)[1].experts.unique().long()
    others = torch.ones(12, dtype=torch.bool, device=device)
    others[hit] = False
    for weight in (layer.fc1, layer.fc2):
        weight[others] = torch.nan
    assert few(x, layer, SMALL)[0].isfinite().all()


def test_no_numbers_stay_in_their_row(device):
    layer = make_layer(sizes(shared=16), HALF, device)
    x = make_tokens(3, 200, HALF, device).clone()
    expected = few(x, layer, SMALL)[0]
    x[1] = torch.nan
    out, routing = few(x, layer, SMALL)
    assert 0 <= routing.experts.min() <= routing.experts.max() < 12
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], expected[[0, 2]])


def test_equal_logits_choose_the_lowest(device):
    layer = make_layer(sizes(), HALF, device)
    layer.router.fill_(1.0)
    x = torch.zeros(2, 200, device=device, dtype=HALF)
    assert few(x, layer, SMALL)[1].experts.tolist() == [[0, 1, 2]] * 2


def test_the_rule():
    layer = make_layer(sizes(), BRAIN, "cpu")
    x = torch.zeros(FEW_CHAINS, 200)
    assert isinstance(find_plan(x, layer, 9, True), ChainPlan)
    assert find_plan(x, layer, 8, True) is None
    assert find_plan(x, dataclasses.replace(layer, pre_softmax=True), 9, True) is None
    assert plan_few_chains(FEW_CHAINS + 1, NANO) is None
    downs = [plan_few_chains(1, shape).down for shape in (NANO, QWEN3, QWEN3_NEXT)]
    assert downs == [ChainTiles(8, 64, 4, 6), ChainTiles(16, 128, 4, 3), ChainTiles(8, 64, 4, 4)]
    for changes in ({"itemsize": 4}, {"topk": 17}, {"shared_ffn": 8000}, {"ffn": 1858}):
        assert plan_few_chains(1, dataclasses.replace(NANO, **changes)) is None
    with pytest.raises(ValueError, match="a softmax over all"):
        few(x.to(BRAIN), dataclasses.replace(layer, pre_softmax=True), SMALL)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "dtype"), [(1, BRAIN), (2, HALF), (3, BRAIN), (8, BRAIN)])
@pytest.mark.parametrize("shape", [NANO, QWEN3, QWEN3_NEXT], ids=["nano", "qwen3", "next"])
def test_published_shapes(shape, tokens, dtype):
    gate = shape.shared_ffn == 512
    rule = "sigmoid" if shape.shared_ffn == 3712 else "softmax"
    layer = make_layer(shape, dtype, "cuda", gate, rule, rule == "sigmoid")
    wide = ChainPlan(ChainTiles(32, 64, 4, 4), ChainTiles(8, 128, 8, 3))
    for company in (0, 100):
        plans = plan_few_chains(tokens, shape, MOST_FEW_TOKENS), wide
        check(tokens, layer, company=company, wild=True, plans=plans[: 1 + (company > 0)])
    check(tokens, layer, has_norm=False, company=0)


@pytest.mark.gpu
def test_many_tokens_of_random_rows():
    """Each of 400 rows alone."""
    layer = make_layer(QWEN3_NEXT, BRAIN, "cuda", gate=True)
    x, residual = (make_tokens(400, 2048, BRAIN, "cuda") for _ in range(2))
    weight = torch.ones(2048, device="cuda", dtype=BRAIN)
    truth, expected = among_many(Stream(x, residual, weight, 1e-6), layer, None, 0)
    plan = plan_few_chains(1, layer.shape)
    for row in range(400):
        own = slice(row, row + 1)
        out, routing = few(Stream(x[own], residual[own], weight, 1e-6), layer, plan)
        assert torch.equal(routing.weights, truth.weights[own])
        assert torch.equal(out, expected[own])
