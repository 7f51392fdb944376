"""Routing and the experts' grouped products against plain torch."""

import pytest
import torch
import torch.nn.functional as F

from megatron_async.ops.experts import expert_routing
from megatron_async.ops.experts.expert_mlp import expert_mlp, expert_mlp_by_plan, expert_mlp_gpu
from megatron_async.ops.experts.expert_plan import BY_HEIGHT, ExpertPlan, ProductPlan, plan_experts
from megatron_async.ops.experts.expert_routing import (
    NO_EXPERT,
    Routing,
    route,
    route_gpu,
    route_invariant_gpu,
)
from megatron_async.ops.experts.expert_sort import sort_pairs
from megatron_async.ops.experts.shared_gate import add_shared_expert, add_shared_expert_gpu
from megatron_async.ops.linear.activations import Gating, swiglu, swiglu_gpu

GPT_OSS = Gating("quick_gelu", 7.0, 1.0)
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def random_routing(tokens, topk, experts, device, dummies=0.2):
    """Distinct experts a token, unevenly loaded; some tokens go nowhere."""
    scores = torch.rand(tokens, experts, device=device) + torch.rand(experts, device=device)
    chosen = scores.topk(topk, 1).indices.to(torch.int32)
    weights = torch.rand(tokens, topk, device=device)
    nowhere = torch.rand(tokens, 1, device=device) < dummies
    return Routing(chosen.masked_fill(nowhere, NO_EXPERT), weights.masked_fill(nowhere, 0))


def make_weights(experts, hidden, ffn, dtype, device, gated=True):
    fc1 = torch.randn(experts, (1 + gated) * ffn, hidden, device=device) / hidden**0.5
    fc2 = torch.randn(experts, hidden, ffn, device=device) / ffn**0.5
    return fc1.to(dtype), fc2.to(dtype)


def draw_biases(fc1, fc2, dtype, scale=3.0):
    """Biases of both products and gpt-oss's unit, whose bounds some numbers reach."""
    device = fc1.device
    biases = [torch.randn(weight.shape[:2], device=device) * scale for weight in (fc1, fc2)]
    return *(bias.to(dtype) for bias in biases), GPT_OSS


def plain_expert_mlp(x, routing, fc1, fc2, first, bias1=None, bias2=None, gating=None):
    """Written out: every pair by itself."""
    zeros = (torch.zeros(weight.shape[:2]) for weight in (fc1, fc2))
    b1, b2 = ((z if b is None else b) for z, b in zip(zeros, (bias1, bias2)))
    out = torch.zeros(x.shape)
    for token, (experts, weights) in enumerate(zip(routing.experts, routing.weights)):
        for expert, weight in zip((experts - first).tolist(), weights):
            if 0 <= expert < len(fc1):
                inner = fc1[expert].float() @ x[token].float() + b1[expert]
                if len(inner) > fc2.size(2):
                    gate, up = inner.chunk(2)
                    inner = F.silu(gate) * up
                    if gating is not None:
                        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
                        inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
                else:
                    inner = inner.clamp(min=0) ** 2
                out[token] += weight * (fc2[expert].float() @ inner + b2[expert])
    return out


def check_route(tokens, hidden, experts, topk, pre_softmax, dtype, device, places=False, **rule):
    x = torch.randn(tokens, hidden + 16, device=device).to(dtype)[:, :hidden]
    weight = torch.randn(experts, hidden, device=device).to(dtype) / hidden**0.5
    where, dummy_place = None, 2
    if places:
        where = torch.randint(0, 5, (max(tokens - 1, 0),), device=device)
    found = route_gpu(x, weight, topk, pre_softmax, where, dummy_place, **rule)
    expected = route.reference(x, weight, topk, pre_softmax, where, dummy_place, **rule)
    # Sums in another order may swap two experts that are nearly equal.
    same = found.experts == expected.experts
    assert same.float().mean() > 0.995 or same.numel() - same.sum() <= 2
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-4, atol=1e-5)
    assert found.experts.dtype == torch.int32
    assert found.weights.dtype == torch.float32


@pytest.mark.parametrize("sigmoid", [False, True])
def test_a_token_is_routed_alike_in_any_company(sigmoid, device, matrix_units, monkeypatch):
    """Whatever the number of tokens, a token's parts of logits are the same, and their order."""
    monkeypatch.setattr(expert_routing, "MOST_TILES", 2)
    monkeypatch.setattr(expert_routing, "PROGRAMS", 8)
    x = torch.randn(50, 400, device=device).half()
    weight = (torch.randn(40, 400, device=device) / 20).half()
    whole = route_invariant_gpu(x, weight, 4, False, sigmoid=sigmoid)
    for tokens in (1, 2, 16, 17, 32, 33):
        found = route_invariant_gpu(x[:tokens], weight, 4, False, sigmoid=sigmoid)
        assert torch.equal(found.experts, whole.experts[:tokens])
        assert torch.equal(found.weights, whole.weights[:tokens])
    split = [route_gpu(x[:tokens], weight, 4, False).weights[:16] for tokens in (16, 50)]
    assert not torch.equal(*split), "without it the parts follow the tokens"


def check_mlp(tokens, hidden, ffn, experts, topk, dtype, device, first=0, total=None, gated=True):
    x = torch.randn(tokens, hidden + 16, device=device).to(dtype)[:, :hidden]
    fc1, fc2 = make_weights(experts, hidden, ffn, dtype, device, gated)
    total = total or experts
    routing = random_routing(tokens, topk, total, device)
    found = expert_mlp_gpu(x, routing, fc1, fc2, first, total)
    expected = expert_mlp.reference(x, routing, fc1, fc2, first, total)
    tolerance = 1e-4 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(found, expert_mlp_gpu(x, routing, fc1, fc2, first, total))
    return found, expected


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("first", [0, 2])
def test_reference_is_the_sum_of_pairs(first, gated):
    x = torch.randn(7, 12)
    fc1, fc2 = make_weights(3, 12, 5, torch.float32, "cpu", gated)
    routing = random_routing(7, 2, 6, "cpu")
    found = expert_mlp.reference(x, routing, fc1, fc2, first, 6)
    torch.testing.assert_close(found, plain_expert_mlp(x, routing, fc1, fc2, first))


@pytest.mark.parametrize("first", [0, 2])
def test_reference_with_biases(first):
    x = torch.randn(7, 12)
    fc1, fc2 = make_weights(3, 12, 5, torch.float32, "cpu")
    routing, more = random_routing(7, 2, 6, "cpu"), draw_biases(fc1, fc2, torch.float32)
    found = expert_mlp.reference(x, routing, fc1, fc2, first, 6, *more)
    torch.testing.assert_close(found, plain_expert_mlp(x, routing, fc1, fc2, first, *more))


@pytest.mark.parametrize("as_trained", [False, True])
@pytest.mark.parametrize(("dtype", "gated"), [(torch.float16, True), (torch.float32, False)])
def test_biases_equal_torch(dtype, gated, as_trained, device):
    """Also of sizes that fill no tile, and of experts elsewhere."""
    x = torch.randn(37, 48, device=device).to(dtype)
    fc1, fc2 = make_weights(3, 48, 40, dtype, device, gated)
    routing, more = random_routing(37, 2, 6, device), draw_biases(fc1, fc2, dtype)
    found = expert_mlp_gpu(x, routing, fc1, fc2, 2, 6, *more, as_trained=as_trained)
    expected = expert_mlp.reference(x, routing, fc1, fc2, 2, 6, *more)
    tolerance = 1e-4 if dtype == torch.float32 else 0.04
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("gating", [GPT_OSS, Gating("fast_gelu")])
def test_other_gated_units_equal_torch(gating, device):
    x = torch.randn(3, 2 * 1100, device=device) * 6
    torch.testing.assert_close(swiglu_gpu(x, gating), swiglu.reference(x, gating))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(swiglu_gpu(x, gating), swiglu.reference(x))


@pytest.mark.parametrize("joins", [False, True])
def test_a_bias_of_the_routers_own(joins, device, monkeypatch):
    if joins:
        monkeypatch.setattr(expert_routing, "MOST_TILES", 1)
    x, weight = torch.randn(20, 400, device=device), torch.randn(12, 400, device=device) / 20
    rule = 3, False, None, 0, False, None, 1.0, 2 * torch.randn(12, device=device)
    for op in (route_gpu, route_invariant_gpu):
        found, expected = op(x, weight, *rule), route.reference(x, weight, *rule)
        assert torch.equal(found.experts, expected.experts)
        torch.testing.assert_close(found.weights, expected.weights, rtol=1e-4, atol=1e-5)
    assert not torch.equal(found.experts, route.reference(x, weight, 3, False).experts)
    with pytest.raises(ValueError, match=r"logit_bias must be \(12,\); found torch.Size\(\[11"):
        route_gpu(x, weight, *rule[:-1], rule[-1][:11])


def test_reference_routing():
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    weight = torch.tensor([[0.0, 3.0], [2.0, 3.0], [1.0, 0.0]])
    routing = route.reference(x, weight, 2, False)
    # Among equals the lower number.
    assert routing.experts.tolist() == [[1, 2], [0, 1], [0, 1]]
    torch.testing.assert_close(routing.weights[0], torch.tensor([2.0, 1.0]).softmax(0))
    pre = route.reference(x, weight, 2, True)
    torch.testing.assert_close(pre.weights[0], torch.tensor([2.0, 1.0, 0.0]).softmax(0)[:2])
    places = torch.tensor([5, 9])
    routing = route.reference(x, weight, 2, False, places, 9)
    assert routing.experts[1:].unique().tolist() == [NO_EXPERT]
    assert routing.weights[1:].abs().sum() == 0
    assert routing.experts[0].tolist() == [1, 2]


def test_reference_routing_by_sigmoids():
    x, weight = torch.eye(3), torch.tensor([[1.0, 0.0, 5.0], [2.0, 0.0, 5.0], [-1.0, 0.0, 5.0]])
    s = torch.sigmoid(torch.tensor([1.0, 2.0, -1.0]))
    plain = route.reference(x, weight, 2, False, sigmoid=True, scale=2.5)
    assert plain.experts.tolist() == [[1, 0], [0, 1], [0, 1]]
    torch.testing.assert_close(plain.weights[0], 2.5 * s[[1, 0]] / (s[0] + s[1]))
    # The bias changes which experts are chosen, and no weight.
    bias = torch.tensor([0.0, -1.0, 0.5])
    biased = route.reference(x, weight, 2, False, sigmoid=True, bias=bias)
    assert biased.experts.tolist() == [[2, 0]] * 3
    torch.testing.assert_close(biased.weights[0], s[[2, 0]] / (s[2] + s[0]))
    alone = route.reference(x, weight, 1, False, sigmoid=True)
    torch.testing.assert_close(alone.weights[0], s[[1]])
    with pytest.raises(ValueError, match="a bias is for sigmoid scores alone"):
        route.reference(x, weight, 2, False, bias=bias)
    with pytest.raises(ValueError, match=r"bias must be float32 \(3,\), contiguous; found \(2,\)"):
        route.reference(x, weight, 2, False, sigmoid=True, bias=bias[:2])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "topk", "places"), [(19, 12, 3, True), (5, 5, 1, False), (3, 32, 6, True)]
)
def test_routing_by_sigmoids_equals_torch(tokens, experts, topk, places, has_bias, device):
    bias = torch.randn(experts, device=device) / 3 if has_bias else None
    rule = {"sigmoid": True, "bias": bias, "scale": 2.5}
    check_route(tokens, 64, experts, topk, False, torch.float32, device, places, **rule)


@pytest.mark.parametrize("places", [False, True])
@pytest.mark.parametrize(
    ("tokens", "hidden", "experts", "topk", "pre"),
    [(1, 64, 8, 2, False), (19, 136, 12, 3, True), (3, 32, 4, 4, False), (0, 32, 4, 1, False)],
)
def test_routing_equals_torch(tokens, hidden, experts, topk, pre, places, device):
    check_route(tokens, hidden, experts, topk, pre, torch.float32, device, places)


def test_equal_logits_choose_the_lowest(device):
    x = torch.zeros(2, 32, device=device)
    weight = torch.ones(6, 32, device=device)
    assert route_gpu(x, weight, 3, False).experts.tolist() == [[0, 1, 2]] * 2


def test_no_numbers_choose_experts_that_exist(device):
    x = torch.full((1, 32), torch.nan, device=device)
    experts = route_gpu(x, torch.ones(5, 32, device=device), 2, False).experts
    assert 0 <= experts.min() <= experts.max() < 5


@pytest.mark.parametrize(
    ("tokens", "hidden", "ffn", "experts", "topk", "first", "total"),
    [
        (1, 64, 32, 4, 2, 0, 4),
        (37, 48, 40, 3, 2, 2, 6),  # experts elsewhere, and sizes that fill no tile
        (20, 32, 16, 1, 1, 0, 1),
        (5, 32, 16, 2, 1, 4, 6),
        (0, 32, 16, 2, 1, 0, 2),
    ],
)
def test_experts_equal_torch(tokens, hidden, ffn, experts, topk, first, total, device):
    check_mlp(tokens, hidden, ffn, experts, topk, torch.float32, device, first, total)


def test_experts_without_a_gate_equal_torch(device):
    check_mlp(37, 48, 40, 3, 2, torch.float32, device, 2, 6, gated=False)
    check_mlp(3, 32, 16, 4, 2, torch.float16, device, gated=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_any_height_of_tiles(dtype, device):
    x = torch.randn(40, 48, device=device).to(dtype)
    fc1, fc2 = make_weights(3, 48, 24, dtype, device)
    routing = random_routing(40, 2, 3, device)
    expected = expert_mlp.reference(x, routing, fc1, fc2, 0, 3)
    for height in (16, 32):
        plan = ExpertPlan(ProductPlan(height, 32, 32, 4, 2), ProductPlan(height, 16, 16, 4, 2))
        found = expert_mlp_by_plan(x, routing, fc1, fc2, 0, plan)
        torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("ffn", [48, 32, 56])  # the last columns are a half, all, or need all
def test_trimmed_tiles_and_their_order_change_no_bit(ffn, gated, device):
    x = torch.randn(75, 48, device=device).half()
    fc1, fc2 = make_weights(3, 48, ffn, torch.float16, device, gated)
    routing = random_routing(75, 2, 3, device)

    def found(**options):
        part = ProductPlan(32, 32, 16, 4, 2, **options)
        return expert_mlp_by_plan(x, routing, fc1, fc2, 0, ExpertPlan(part, part))

    whole = found()
    torch.testing.assert_close(
        whole, expert_mlp.reference(x, routing, fc1, fc2, 0, 3), rtol=0.01, atol=0.01
    )
    # A GPU's products round alike at all widths; those of the interpreter are NumPy's, whose BLAS
    # does not on every processor.
    least = 0.0 if device == "cuda" else 1e-3
    for options in ({"trimmed": True}, {"by_rows": True}, {"trimmed": True, "by_rows": True}):
        torch.testing.assert_close(found(**options), whole, rtol=least, atol=least)


def test_last_columns():
    part = ProductPlan(128, 256, 64, 8, 4)
    assert part.last_n(1856) == 256
    trimmed = ProductPlan(128, 256, 64, 8, 4, trimmed=True)
    assert [trimmed.last_n(n) for n in (1856, 2688, 512, 257, 500)] == [64, 128, 256, 16, 256]


@pytest.mark.parametrize(
    ("tokens", "topk", "total", "first", "local"),
    [(700, 3, 6, 2, 3), (1100, 1, 1, 0, 1), (513, 2, 40, 0, 40), (300, 2, 9, 8, 1)],
)
def test_two_kernels_sort_as_one(tokens, topk, total, first, local, device):
    routing = random_routing(tokens, topk, total, device, dummies=0.1)
    one, two = (sort_pairs(routing, first, local, 16, most) for most in (10**6, 0))
    tiles = int(one.num_tiles)
    assert int(two.num_tiles) == tiles
    assert torch.equal(one.tile_experts[:tiles], two.tile_experts[:tiles])
    assert torch.equal(one.pairs[: tiles * 16], two.pairs[: tiles * 16])
    real = two.pairs[: tiles * 16][two.pairs[: tiles * 16] < tokens * topk].long()
    experts = routing.experts.flatten() - first
    here = ((experts >= 0) & (experts < local)).nonzero()[:, 0]
    assert torch.equal(real, here[experts[here].argsort(stable=True)])


def test_tokens_that_go_nowhere_get_zeros(device):
    x = torch.full((3, 32), torch.nan, device=device)
    fc1, fc2 = make_weights(2, 32, 16, torch.float32, device)
    routing = random_routing(3, 2, 2, device, dummies=2.0)
    assert torch.equal(expert_mlp_gpu(x, routing, fc1, fc2, 0, 2), torch.zeros_like(x))


def test_bad_input():
    fc1, fc2 = make_weights(2, 32, 16, torch.float32, "cpu")
    x, routing = torch.randn(3, 32), random_routing(3, 2, 2, "cpu")
    with pytest.raises(ValueError, match="must have one dtype"):
        expert_mlp_gpu(x.half(), routing, fc1, fc2, 0, 2)
    with pytest.raises(ValueError, match=r"fc1 \[experts, 2 \* ffn, hidden\]"):
        expert_mlp_gpu(x, routing, fc2, fc2, 0, 2)
    with pytest.raises(ValueError, match=r"weight \(2, 32, 16\) must be \(2, 32\), contiguous; "):
        expert_mlp_gpu(x, routing, fc1, fc2, 0, 2, None, torch.zeros(2, 16))
    with pytest.raises(ValueError, match="2 tokens, but experts"):
        expert_mlp_gpu(x[:2], routing, fc1, fc2, 0, 2)
    plan = ExpertPlan(ProductPlan(16, 32, 32, 4, 2), ProductPlan(32, 16, 16, 4, 2))
    with pytest.raises(ValueError, match="walk over the same tiles"):
        expert_mlp_by_plan(x, routing, fc1, fc2, 0, plan)
    with pytest.raises(ValueError, match="topk=3 must be between 1 and 2"):
        route_gpu(x, torch.randn(2, 32), 3, False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_random_shapes(dtype):
    generator = torch.Generator().manual_seed(11)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    for _ in range(25):
        experts, ranks = draw(1, 16), draw(1, 3)
        total = experts * ranks
        topk = draw(1, min(total, 8))
        tokens, hidden, ffn = draw(1, 400), 16 * draw(1, 24), 8 * draw(1, 40)
        first = experts * (draw(1, ranks) - 1)
        check_mlp(tokens, hidden, ffn, experts, topk, dtype, "cuda", first, total)
        check_route(tokens, hidden, total, topk, draw(0, 1) == 1, dtype, "cuda", True)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 200, 600, 1500, 4096])
def test_real_sizes(tokens):
    check_mlp(tokens, 2048, 768, 128, 8, torch.bfloat16, "cuda")
    check_mlp(tokens, 2048, 768, 32, 8, torch.bfloat16, "cuda", first=64, total=128)
    check_route(tokens, 2048, 128, 8, False, torch.bfloat16, "cuda", True)
    pairs = {plan_experts(tokens * 8, 128, 2, True).up.block_m for tokens in (1, 500, 1000, 4096)}
    assert pairs == set(BY_HEIGHT)


@pytest.mark.gpu
def test_replays_in_a_graph_without_reading_back():
    fc1, fc2 = make_weights(16, 256, 128, torch.bfloat16, "cuda")
    router = torch.randn(16, 256, device="cuda").to(torch.bfloat16) / 16
    x = torch.randn(24, 256, device="cuda").to(torch.bfloat16)

    def layer():
        return expert_mlp_gpu(x, route_gpu(x, router, 4, False), fc1, fc2, 0, 16)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for _ in range(3):
        x.normal_()
        graph.replay()
        routing = route.reference(x, router, 4, False)
        expected = expert_mlp.reference(x, routing, fc1, fc2, 0, 16)
        torch.testing.assert_close(out, expected, rtol=0.03, atol=0.03)


def test_reference_is_the_formula():
    sums, shared, x = torch.randn(3, 5, 72)
    weight = torch.randn(1, 72) / 72**0.5
    expected = sums.double() + (x.double() @ weight.double().t()).sigmoid() * shared.double()
    found = add_shared_expert.reference(sums, shared, x, weight)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_bad_gate():
    sums, weight = torch.ones(2, 8), torch.ones(1, 8)
    for op in (add_shared_expert_gpu, add_shared_expert.reference):
        with pytest.raises(ValueError, match=r"weight \(1, 8\); found"):
            op(sums, sums, sums, weight[0])
        with pytest.raises(ValueError, match="sums, shared and x must be alike"):
            op(sums, sums[:1], sums, weight)
        with pytest.raises(ValueError, match="must be contiguous"):
            op(sums, torch.ones(8, 2).t(), sums, weight)
