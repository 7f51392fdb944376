"""An expert layer of a few tokens against plain torch."""

import dataclasses

import pytest
import torch

from megatron_async.ops.experts.expert_plan import (
    FEW_TOKENS,
    MOST_FEW_TOKENS,
    MOST_UNITS,
    PROCESSORS,
    UP_PROGRAMS,
    FewTokenPlan,
    LayerShape,
    plan_few_tokens,
)
from megatron_async.ops.experts.expert_routing import NO_EXPERT
from megatron_async.ops.experts.few_tokens import (
    ExpertLayer,
    few_token_experts,
    few_token_experts_gpu,
    find_plan,
)
from megatron_async.ops.linear.rms_norm import add_rms_norm
from megatron_async.ops.linear.stream import Stream
from tests.unit_tests.ops.experts.test_expert_mlp import draw_biases, make_weights
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

pytestmark = pytest.mark.usefixtures("poisoned_memory")
NANO = LayerShape(128, 6, 2688, 1856, 3712, False, 2)
QWEN3 = LayerShape(128, 8, 2048, 768, 0, True, 2)
QWEN3_NEXT = LayerShape(512, 10, 2048, 512, 512, True, 2)
MIXTRAL = LayerShape(8, 2, 4096, 14336, 0, True, 2)
RULES = {
    "softmax": {},
    "pre_softmax": {"pre_softmax": True, "scale": 0.5},
    "sigmoid": {"sigmoid": True, "scale": 2.5},
}
LIMITS = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.06}


def make_layer(shape, dtype, device, gate=False, rule="softmax", has_bias=False):
    def draw(rows, columns):
        return (torch.randn(rows, columns, device=device) / columns**0.5).to(dtype)

    fc1, fc2 = make_weights(
        shape.experts, shape.hidden, shape.ffn, dtype, device, gated=shape.gated
    )
    shared = {}
    if shape.shared_ffn:
        shared["shared_fc1"] = draw((1 + shape.gated) * shape.shared_ffn, shape.hidden)
        shared["shared_fc2"] = draw(shape.hidden, shape.shared_ffn)
    if gate:
        shared["shared_gate"] = draw(1, shape.hidden)
    bias = torch.randn(shape.experts, device=device) / 3 if has_bias else None
    router = 2 * draw(shape.experts, shape.hidden)
    return ExpertLayer(router, fc1, fc2, shape.topk, bias=bias, **RULES[rule], **shared)


def make_tokens(tokens, hidden, dtype, device):
    return torch.randn(tokens, hidden + 16, device=device).to(dtype)[:, :hidden]


def plan_of(tokens, layer):
    plan = plan_few_tokens(tokens, layer.shape, MOST_FEW_TOKENS)
    assert plan is not None
    if INTERPRETED:  # fewer programs: they run one after the other
        wide = {"block_experts": 16, "up_rows": 16, "turns": 2, "down_rows": 8}
        plan = dataclasses.replace(plan, **wide)
    return plan


def check(x, layer, plan=None, places=None, dummy_place=0):
    """Equal to torch, the same again, and what was found."""
    rows = x.value if isinstance(x, Stream) else x
    plan = plan or plan_of(rows.size(-2), layer)
    out, routing = few_token_experts_gpu(x, layer, plan, places, dummy_place)
    expected, truth = few_token_experts.reference(x, layer, None, places, dummy_place)
    assert torch.equal(routing.experts, truth.experts)
    torch.testing.assert_close(routing.weights, truth.weights, rtol=1e-4, atol=1e-5)
    tolerance = LIMITS[layer.fc1.dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    assert INTERPRETED or torch.equal(
        out, few_token_experts_gpu(x, layer, plan, places, dummy_place)[0]
    )
    return out, routing


def sizes(experts=8, topk=2, hidden=64, ffn=48, shared=0, gated=False, dtype=torch.float32):
    return LayerShape(experts, topk, hidden, ffn, shared, gated, dtype.itemsize)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("shared", "gate"), [(0, False), (72, False), (40, True)])
@pytest.mark.parametrize("tokens", [1, 3])
def test_equals_torch(tokens, shared, gate, gated, device):
    shape = sizes(experts=12, topk=3, hidden=136, ffn=40, shared=shared, gated=gated)
    layer = make_layer(shape, torch.float32, device, gate)
    check(make_tokens(tokens, 136, torch.float32, device), layer)


@pytest.mark.parametrize(("gated", "shared"), [(True, 0), (False, 72)])
def test_biases_equal_torch(gated, shared, device):
    """Biases of the router and of both products, and gpt-oss's unit; a shared expert has none."""
    shape = sizes(experts=12, topk=3, hidden=136, ffn=40, shared=shared, gated=gated)
    layer = make_layer(shape, torch.float32, device)
    bias1, bias2, gating = draw_biases(layer.fc1, layer.fc2, torch.float32)
    logit_bias = 2 * torch.randn(12, device=device)
    layer = dataclasses.replace(
        layer, bias1=bias1, bias2=bias2, gating=gating, logit_bias=logit_bias
    )
    check(make_tokens(2, 136, torch.float32, device), layer)
    assert find_plan(make_tokens(1, 136, torch.float32, device), layer, 9, True) is None
    wrong = dataclasses.replace(layer, bias2=bias1)
    with pytest.raises(ValueError, match="bias2 must be"):
        few_token_experts.reference(make_tokens(2, 136, torch.float32, device), wrong, None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_added_to_the_residual(dtype, device):
    layer = make_layer(sizes(shared=40, dtype=dtype), dtype, device)
    x, stream = make_tokens(2, 64, dtype, device), make_tokens(2, 64, dtype, device)
    out, _routing = few_token_experts_gpu(x, layer, plan_of(2, layer))
    found, _routing = few_token_experts_gpu(x, layer, plan_of(2, layer), added=stream)
    assert torch.equal(found, (out.float() + stream.float()).to(dtype))
    reference, _routing = few_token_experts.reference(x, layer, None, added=stream)
    torch.testing.assert_close(found, reference, rtol=LIMITS[dtype], atol=LIMITS[dtype])
    with pytest.raises(ValueError, match="what is added"):
        few_token_experts_gpu(x, layer, plan_of(2, layer), added=stream[:1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_rules_of_routing(rule, has_bias, dtype, device):
    if has_bias and rule != "sigmoid":
        pytest.skip("a bias is for sigmoid scores")
    shape = sizes(experts=40, topk=4, shared=16, dtype=dtype)
    layer = make_layer(shape, dtype, device, False, rule, has_bias)
    check(make_tokens(2, 64, dtype, device), layer)


@pytest.mark.parametrize(("experts", "topk"), [(1, 1), (300, 5), (200, 1)])
@pytest.mark.parametrize("rule", ["softmax", "sigmoid"])
def test_few_and_many_experts(experts, topk, rule, device):
    """More than 256 are chosen one after the other."""
    shape = sizes(experts, topk, hidden=32, ffn=16)
    check(make_tokens(2, 32, torch.float32, device), make_layer(shape, torch.float32, device))


def test_any_layout(device):
    """Several tiles a row, turns, rows and pairs at once; sizes that fill none of them."""
    shape = sizes(experts=3, topk=2, hidden=280, ffn=296, shared=264, gated=True)
    layer = make_layer(shape, torch.float32, device, gate=True)
    x = make_tokens(2, 280, torch.float32, device)
    found = [
        check(x, layer, FewTokenPlan(*numbers))[0]
        for numbers in (
            (1, 4, 64, 2, 3, 32, 4, 2),
            (4, 4, 32, 5, 1, 8, 8, 3),
            (2, 2, 16, 1, 9, 1, 1, 1),
        )
    ]
    # Only the order of float32 sums may differ.
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-5)


def test_tokens_that_meet_at_their_experts(device):
    layer = make_layer(sizes(shared=24), torch.float32, device)
    x = make_tokens(1, 64, torch.float32, device).expand(4, 64)
    out, _routing = check(x, layer)
    assert torch.equal(out, out[:1].expand(4, 64))


@pytest.mark.parametrize("shared", [0, 24])
def test_dummy_tokens_go_to_no_expert(shared, device):
    layer = make_layer(sizes(shared=shared), torch.float32, device)
    x = make_tokens(4, 64, torch.float32, device)
    places = torch.tensor([5, 80, 90], device=device)  # the last token has none
    out, routing = check(x, layer, None, places, 80)
    assert routing.experts[[1, 3]].unique().tolist() == [NO_EXPERT]
    assert routing.experts[[0, 2]].min() >= 0
    assert routing.weights[[1, 3]].abs().max() == 0
    if not shared:
        assert torch.equal(out[[1, 3]], torch.zeros_like(out[:2]))


def test_weights_of_other_experts_are_not_read(device):
    layer = make_layer(sizes(), torch.float32, device)
    x = make_tokens(2, 64, torch.float32, device)
    hit = check(x, layer)[1].experts.unique().long()
    others = torch.ones(8, dtype=torch.bool, device=device)
    others[hit] = False
    assert others.any()
    for weight in (layer.fc1, layer.fc2):
        weight[others] = torch.nan
    places = torch.full((2,), 9, device=device)
    out, _routing = few_token_experts_gpu(x, layer, plan_of(2, layer))
    assert out.isfinite().all()
    layer.fc1.fill_(torch.nan)
    layer.fc2.fill_(torch.nan)
    out, _routing = few_token_experts_gpu(x, layer, plan_of(2, layer), places, 9)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("experts", [8, 300])
def test_no_numbers_stay_in_their_row(experts, device):
    layer = make_layer(sizes(experts, 3, shared=16), torch.float32, device)
    x = make_tokens(3, 64, torch.float32, device).clone()
    expected = few_token_experts_gpu(x, layer, plan_of(3, layer))[0]
    x[1] = torch.nan
    out, routing = few_token_experts_gpu(x, layer, plan_of(3, layer))
    assert routing.experts[1].tolist() == [0, 1, 2]
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], expected[[0, 2]])


def test_equal_logits_choose_the_lowest(device):
    for experts in (8, 300):
        layer = make_layer(sizes(experts, 3), torch.float32, device)
        layer.router.fill_(1.0)
        x = torch.zeros(2, 64, device=device)
        routing = few_token_experts_gpu(x, layer, plan_of(2, layer))[1]
        assert routing.experts.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("parts", "has_residual"), [(0, False), (0, True), (3, True)])
def test_takes_the_norm_along(parts, has_residual, dtype, device):
    layer = make_layer(sizes(shared=24, dtype=dtype), dtype, device)
    x = make_tokens(2, 64, dtype, device)
    if parts:
        x = torch.randn(parts, 2, 64, device=device)
    residual = make_tokens(2, 64, dtype, device) if has_residual else None
    weight = torch.rand(64, device=device) + 0.5
    given = Stream(x, residual, weight, 1e-5)
    normed, total = add_rms_norm.reference(x, residual, weight, 1e-5)
    out, routing = few_token_experts_gpu(given, layer, plan_of(2, layer))
    assert given.total is not None
    assert torch.equal(given.total, total)
    expected, truth = few_token_experts.reference(normed, layer, None)
    assert torch.equal(routing.experts, truth.experts)
    torch.testing.assert_close(out, expected, rtol=LIMITS[dtype], atol=LIMITS[dtype])
    reference = Stream(x, residual, weight, 1e-5)
    torch.testing.assert_close(few_token_experts.reference(reference, layer, None)[0], expected)
    assert reference.total is not None
    assert torch.equal(reference.total, total)


def test_the_rule():
    for shape in (NANO, QWEN3, QWEN3_NEXT, MIXTRAL):
        for tokens in range(1, FEW_TOKENS + 1):
            plan = plan_few_tokens(tokens, shape)
            assert plan is not None
            rows = plan.up_rows * plan.turns
            programs = shape.topk * -(-shape.ffn // rows) - (-shape.shared_ffn // rows)
            programs *= tokens
            assert programs <= PROCESSORS * UP_PROGRAMS
            assert programs > PROCESSORS * UP_PROGRAMS * 0.75
        assert plan_few_tokens(FEW_TOKENS + 1, shape) is None
        assert plan_few_tokens(0, shape) is None
    nano, mixtral = plan_few_tokens(1, NANO), plan_few_tokens(1, MIXTRAL)
    assert (nano.up_depth, nano.turns, nano.down_depth, nano.down_rows) == (11, 8, 8, 1)
    assert (mixtral.up_depth, mixtral.down_depth, mixtral.down_rows) == (8, 8, 4)
    assert plan_few_tokens(1, QWEN3_NEXT).down_rows == 1
    assert plan_few_tokens(1, dataclasses.replace(QWEN3_NEXT, shared_ffn=4096)) is None
    assert plan_few_tokens(1, dataclasses.replace(NANO, ffn=1858)) is None  # not of 16 bytes
    assert plan_few_tokens(1, dataclasses.replace(NANO, hidden=16384)) is None


def test_bad_input():
    layer = make_layer(sizes(shared=24), torch.float32, "cpu")
    x, plan = torch.randn(2, 64), plan_of(2, layer)

    def refused(message, x=x, **changes):
        changed = dataclasses.replace(layer, **changes)
        for op in (few_token_experts_gpu, few_token_experts.reference):
            with pytest.raises(ValueError, match=message):
                op(x, changed, plan)

    refused(r"x must be \[tokens, 64\]", torch.randn(2, 63))
    refused("9 tokens, but it is for 1 to 8", torch.randn(9, 64))
    refused("x is torch.float16, but the weights are torch.float32", x.half())
    refused("partial sums must be float32", Stream(torch.randn(2, 2, 64), None, x[0], 0.0))
    refused("norm's weight must be", Stream(x, None, x[0, :3], 0.0))
    refused("residual stream must be", Stream(x, x[:1], x[0], 0.0))
    refused(r"router must be \(8, 64\)", router=torch.randn(7, 64))
    refused("shared_fc1 must be", shared_fc1=None)
    refused("shared_gate is for a shared expert", shared_gate=x[:1], shared_fc2=None)
    refused(r"bias must be \(8,\)", bias=torch.zeros(7))
    refused("bias is for sigmoid scores", bias=torch.zeros(8))
    refused("topk=9 must be between 1 and 8", topk=9)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 8])
def test_random_shapes(tokens, dtype):
    generator = torch.Generator().manual_seed(tokens)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    for _ in range(8):
        experts, ffn = draw(1, 600), 8 * draw(1, 200)
        shared = min(8 * draw(0, 300), (MOST_UNITS - 10) * ffn)
        shape = LayerShape(
            experts, draw(1, min(experts, 10)), 8 * draw(2, 400), ffn, shared, bool(draw(0, 1)),
            dtype.itemsize,
        )  # fmt: skip
        layer = make_layer(shape, dtype, "cuda", bool(shape.shared_ffn) and bool(draw(0, 1)))
        x = make_tokens(tokens, shape.hidden, dtype, "cuda")
        places = torch.randint(0, 4, (tokens,), device="cuda")
        out, routing = few_token_experts_gpu(x, layer, plan_of(tokens, layer), places, 3)
        expected, truth = few_token_experts.reference(x, layer, None, places, 3)
        # Sums in another order may swap two experts that are nearly equal.
        same = (routing.experts == truth.experts).all(1)
        assert same.float().mean() >= 0.75 or tokens < 4
        tolerance = LIMITS[dtype]
        torch.testing.assert_close(out[same], expected[same], rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("shape", [NANO, QWEN3, QWEN3_NEXT, MIXTRAL])
def test_published_shapes(shape, tokens):
    shape = dataclasses.replace(shape, experts=min(shape.experts, 128))  # memory
    gate = shape.shared_ffn == 512
    rule = "sigmoid" if shape.shared_ffn == 3712 else "softmax"
    layer = make_layer(shape, torch.bfloat16, "cuda", gate, rule, rule == "sigmoid")
    x = make_tokens(tokens, shape.hidden, torch.bfloat16, "cuda")
    check(x, layer)
    residual = make_tokens(tokens, shape.hidden, torch.bfloat16, "cuda")
    weight = torch.rand(shape.hidden, device="cuda") + 0.5
    check(Stream(x, residual, weight, 1e-5), layer)


@pytest.mark.gpu
def test_replays_in_a_graph_with_other_routings():
    """The kernels of one replay after the other, each launched before the one before it ends."""
    shape = LayerShape(64, 4, 512, 256, 512, False, 2)
    layers = [
        make_layer(shape, torch.bfloat16, "cuda", rule="sigmoid", has_bias=True) for _ in range(3)
    ]
    weight = torch.ones(512, device="cuda")
    x = torch.randn(2, 512, device="cuda").to(torch.bfloat16)
    places = torch.zeros(2, dtype=torch.int64, device="cuda")

    def step(op, value):
        residual, routings = torch.zeros_like(value), []
        for layer in layers:
            given = Stream(value, residual, weight, 1e-5)
            value, routing = op(given, layer, plan_of(2, layer), places, 1)
            residual = given.total
            routings.append(routing.experts)
        return value, torch.stack(routings)

    step(few_token_experts_gpu, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, experts = step(few_token_experts_gpu, x)
    seen = set()
    for turn in range(6):
        x.normal_()
        places[1] = turn % 2
        graph.replay()
        expected, truth = step(few_token_experts.reference, x)
        again, chosen = step(few_token_experts_gpu, x)
        assert torch.equal(again, out)
        assert torch.equal(chosen, experts)
        if torch.equal(truth, experts):
            torch.testing.assert_close(out, expected, rtol=0.1, atol=0.1)  # three layers
            seen.add(tuple(experts.flatten().tolist()))
    assert len(seen) >= 3
