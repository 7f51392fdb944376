"""Experts whose weights are kept in FP8 and 4 bits."""

from dataclasses import replace

import pytest
import torch

from megatron_async.ops.experts.expert_mlp import expert_mlp, expert_mlp_by_plan, expert_mlp_gpu
from megatron_async.ops.experts.expert_plan import (
    KEPT_BY_HEIGHT,
    MOST_FEW_TOKENS,
    LayerShape,
    plan_experts,
    plan_few_tokens,
)
from megatron_async.ops.experts.few_tokens import (
    ExpertLayer,
    few_token_experts,
    few_token_experts_gpu,
    find_plan,
)
from tests.unit_tests.ops.experts.test_expert_mlp import draw_biases, random_routing
from tests.unit_tests.ops.linear.kept_weights import FORMS, kept_weight
from tests.unit_tests.ops.triton_interpreter import EXACT_16_BIT, INTERPRETED

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def arguments(name, tokens, gated, dtype, device, experts=3, hidden=192, ffn=160):
    """Arguments of experts, of which some are on another rank."""
    torch.manual_seed(1)
    fc1 = kept_weight(name, experts, (1 + gated) * ffn, hidden, dtype=dtype, device=device)
    fc2 = kept_weight(name, experts, hidden, ffn, dtype=dtype, device=device)
    x = torch.randn(tokens, hidden + 16, device=device).to(dtype)[:, :hidden]
    return x, random_routing(tokens, 3, 8, device), fc1, fc2


def assert_rows_close(found, expected):
    """Rows differ by roundings between the products and behind them; those of dummies do not."""
    error = (found.double() - expected.double()).norm(dim=1)
    limit = {torch.bfloat16: 0.015, torch.float16: 0.002}[found.dtype]
    assert (error <= limit * expected.double().norm(dim=1)).all(), error


def check(found, x, routing, fc1, fc2, first=0):
    wide = fc1.values(x.dtype), fc2.values(x.dtype)
    expected = expert_mlp.reference(x, routing, *wide, first, 8)
    assert_rows_close(found, expected)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("gated", [True, False])
def test_experts_of_each_form(name, gated, device):
    for dtype in EXACT_16_BIT:
        x, routing, fc1, fc2 = arguments(name, 4, gated, dtype, device)
        found = expert_mlp_gpu(x, routing, fc1, fc2, 2, 8)
        check(found, x, routing, fc1, fc2, 2)
        if name == "INT4 zeros":
            assert torch.equal(found, expert_mlp_gpu(x, routing, fc1, fc2, 2, 8))


def test_biases_and_the_unit_of_gpt_oss(device):
    x, routing, fc1, fc2 = arguments("MXFP4", 4, True, torch.float16, device)
    more = draw_biases(fc1, fc2, torch.float16)
    found = expert_mlp_gpu(x, routing, fc1, fc2, 2, 8, *more)
    wide = fc1.values(x.dtype), fc2.values(x.dtype)
    assert_rows_close(found, expert_mlp.reference(x, routing, *wide, 2, 8, *more))


@pytest.mark.parametrize("height", KEPT_BY_HEIGHT)
@pytest.mark.parametrize("shares", [1, 2])
def test_plans_of_experts(height, shares, device):
    x, routing, fc1, fc2 = arguments("FP8 blocks", 9, True, torch.float16, device)
    plan = plan_experts(height * 8, 8, 2, True, fc1.form)
    assert plan.up.block_m == plan.down.block_m == height
    plan = replace(plan, up=replace(plan.up, shares=shares), down=replace(plan.down, shares=shares))
    check(expert_mlp_by_plan(x, routing, fc1, fc2, 0, plan), x, routing, fc1, fc2)


@pytest.mark.parametrize("as_trained", [False, True])
def test_experts_of_two_forms_are_widened(as_trained, device):
    """Also those whose products round as in training: the same numbers give the same bits."""
    x, routing, fc1, fc2 = arguments("FP8 blocks", 5, True, torch.float16, device)
    other = fc2 if as_trained else kept_weight("FP8 outputs", *fc2.shape, device=device)
    found = expert_mlp_gpu(x, routing, fc1, other, 0, 8, as_trained=as_trained)
    wide = fc1.values(x.dtype), other.values(x.dtype)
    assert torch.equal(found, expert_mlp_gpu(x, routing, *wide, 0, 8, as_trained=as_trained))


def test_rows_that_are_not_whole_words_are_refused():
    x, routing, fc1, fc2 = arguments("INT4", 2, True, torch.float16, "cpu")
    with pytest.raises(ValueError, match="multiples of 8 bytes"):
        expert_mlp_gpu(torch.cat((x, x[:, :1]), 1)[:, : x.size(1)], routing, fc1, fc2, 0, 8)


SHAPE = LayerShape(6, 3, 192, 160, 0, True, 1)
FP8 = [name for name, (form, _) in FORMS.items() if form.numbers == "FP8"]


def kept_layer(name, shape, dtype, device):
    """A layer, and one with the same numbers in their dtype."""
    torch.manual_seed(2)

    def draw(*size):
        return kept_weight(name, *size, dtype=dtype, device=device)

    halves = 1 + shape.gated
    weights = {
        "fc1": draw(shape.experts, halves * shape.ffn, shape.hidden),
        "fc2": draw(shape.experts, shape.hidden, shape.ffn),
    }
    if shape.shared_ffn:
        weights["shared_fc1"] = draw(halves * shape.shared_ffn, shape.hidden)
        weights["shared_fc2"] = draw(shape.hidden, shape.shared_ffn)
    router = torch.randn(shape.experts, shape.hidden, device=device).to(dtype)
    wide = {each: weight.values(dtype) for each, weight in weights.items()}
    return [ExpertLayer(router, topk=shape.topk, **kind) for kind in (weights, wide)]


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, gated=False, shared_ffn=304)])
def test_few_tokens(name, shape, device):
    """Also a shared expert, which is longer than the others."""
    for dtype in EXACT_16_BIT:
        layer, wide = kept_layer(name, shape, dtype, device)
        for tokens in (1, 3):
            x = torch.randn(tokens, shape.hidden, device=device).to(dtype)
            plan = plan_few_tokens(tokens, layer.shape, MOST_FEW_TOKENS)
            if INTERPRETED:  # fewer programs: they run one after the other
                plan = replace(plan, block_experts=8, up_rows=32, turns=2, down_rows=32)
            found, routing = few_token_experts_gpu(x, layer, plan)
            expected, truth = few_token_experts.reference(x, wide, None)
            assert torch.equal(routing.experts, truth.experts)
            assert_rows_close(found, expected)


def test_few_tokens_have_kernels_for_fp8_alone():
    x = torch.zeros(1, SHAPE.hidden, dtype=torch.bfloat16)
    layers = {name: kept_layer(name, SHAPE, x.dtype, "cpu")[0] for name in ("FP8 blocks", "INT4")}
    assert find_plan(x, layers["FP8 blocks"], 9) is not None
    assert find_plan(x, layers["FP8 blocks"], 9, is_invariant=True) is None
    assert find_plan(x, layers["INT4"], 9) is None
    mixed = replace(layers["FP8 blocks"], fc2=layers["FP8 blocks"].fc2.values(x.dtype))
    assert find_plan(x, mixed, 9) is None
    with pytest.raises(ValueError, match="one form"):
        _ = mixed.form
