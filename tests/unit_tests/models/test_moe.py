"""Experts spread over ranks: tokens go there and come back as if all experts were here."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from megatron_async import LLM, SamplingParams
from megatron_async.errors import ConfigurationError
from megatron_async.models import moe
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.hybrid import transformer_config
from megatron_async.models.moe import MoELayer
from megatron_async.models.parallel_state import ParallelSizes, ensure_process_groups
from megatron_async.models.partition import check_partition
from megatron_async.models.step_routing import StepRouting
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.experts.expert_mlp import expert_mlp
from megatron_async.ops.experts.expert_plan import FewTokenPlan, plan_few_tokens
from megatron_async.ops.experts.expert_routing import NO_EXPERT, route
from megatron_async.ops.experts.few_tokens import ExpertLayer
from megatron_async.ops.linear.stream import Stream
from tests.support.ranks import run_ranks

ARCHITECTURE = DUMMY_SHAPES["tiny-moe"]
HIDDEN, EXPERTS, FFN = 64, 8, 64
DUMMY_PLACE = 100


@dataclass
class Step:
    write_index: Tensor


@dataclass
class View:
    """What a MoE layer reads of a `ContextGPUView`."""

    step: Step
    dims: BatchDimensions
    dummy_place: int = DUMMY_PLACE
    routing: StepRouting | None = None


NEMOTRON = dataclasses.replace(
    ARCHITECTURE,
    activation="squared_relu",
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_topk_scaling_factor=2.5,
    moe_shared_expert_intermediate_size=48,
)
GRANITE = dataclasses.replace(ARCHITECTURE, moe_shared_expert_intermediate_size=48)
KINDS = {"mixtral": ARCHITECTURE, "nemotron": NEMOTRON, "granite": GRANITE}


def shared_weights(halves: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    shapes = ((halves * 48, HIDDEN), (HIDDEN, 48))
    fc1, fc2 = (torch.randn(shape, generator=generator) / 8 for shape in shapes)
    return fc1, fc2


def all_weights(kind: str = "mixtral") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    rows = FFN if kind == "nemotron" else 2 * FFN
    shapes = ((EXPERTS, HIDDEN), (EXPERTS, rows, HIDDEN), (EXPERTS, HIDDEN, FFN))
    router, fc1, fc2 = (torch.randn(shape, generator=generator) / 8 for shape in shapes)
    return router, fc1, fc2


def tokens_of(rank: int, count: int) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(rank))


def make_layer(sizes: ParallelSizes, kind: str = "mixtral") -> tuple[MoELayer, nn.Module]:
    """This rank's part of a layer with `all_weights`, and its groups."""
    groups = ensure_process_groups(sizes)
    layer = MoELayer(transformer_config(KINDS[kind], torch.float32, sizes), groups)
    router, fc1, fc2 = all_weights(kind)
    halves = fc1.size(1) // FFN
    local, ffn = EXPERTS // groups.ep.size(), FFN // groups.expt_tp.size()
    experts = slice(groups.ep.rank() * local, (groups.ep.rank() + 1) * local)
    share = slice(groups.expt_tp.rank() * ffn, (groups.expt_tp.rank() + 1) * ffn)
    parts = fc1[experts].chunk(halves, 1)
    with torch.no_grad():
        layer.router.weight.copy_(router)
        layer.experts.linear_fc1.weight.copy_(torch.cat([half[:, share] for half in parts], 1))
        layer.experts.linear_fc2.weight.copy_(fc2[experts][:, :, share])
        if layer.router.expert_bias is not None:
            layer.router.expert_bias.copy_(BIAS)
        if layer.shared_experts is not None:
            rank, size = groups.tp.rank(), groups.tp.size()
            fc1, fc2 = shared_weights(halves)
            mine = [half.chunk(size)[rank] for half in fc1.chunk(halves)]
            layer.shared_experts.linear_fc1.weight.copy_(torch.cat(mine))
            layer.shared_experts.linear_fc2.weight.copy_(fc2.chunk(size, 1)[rank])
    return layer, groups


BIAS = torch.tensor([0.3, -0.2, 0.0, 0.1, -0.4, 0.2, 0.0, -0.1])


def expected_output(x: Tensor, write_index: Tensor, kind: str) -> Tensor:
    router, fc1, fc2 = all_weights(kind)
    rule = {"sigmoid": True, "bias": BIAS, "scale": 2.5} if kind == "nemotron" else {}
    routing = route.reference(x, router, 2, False, write_index, DUMMY_PLACE, **rule)
    output = expert_mlp.reference(x, routing, fc1, fc2, 0, EXPERTS)
    if kind != "mixtral":
        fc1, fc2 = shared_weights(fc1.size(1) // FFN)
        inner = x @ fc1.t()
        if kind == "granite":
            gate, up = inner.chunk(2, 1)
            inner = torch.nn.functional.silu(gate) * up
        else:
            inner = inner.clamp(min=0) ** 2
        output = output + inner @ fc2.t()
    return output


def _layer_on_ranks(tensor_parallel: int, kind: str) -> float:
    """Largest error of this rank's outputs, over several batches that differ between ranks."""
    worst = _layer_error(tensor_parallel, False, kind)
    return max(worst, _layer_error(tensor_parallel, True, kind)) if tensor_parallel > 1 else worst


@torch.no_grad()
def _layer_error(tensor_parallel: int, sequence_parallel: bool, kind: str) -> float:
    sizes = ParallelSizes(
        tensor_model_parallel=tensor_parallel,
        expert_model_parallel=2,
        sequence_parallel=sequence_parallel,
    )
    layer, groups = make_layer(sizes, kind)
    worst = 0.0
    for counts, dispatched in (((4, 4), 0), ((2, 6), 6), ((8, 2), 12), ((0, 2), 2)):
        count = counts[groups.ep.rank()]
        x = tokens_of(groups.ep.rank(), count)
        # Of 8 tokens the last 3 are dummies.
        write_index = (torch.arange(count) * 20).clamp(max=DUMMY_PLACE)
        view = View(Step(write_index), BatchDimensions(count, dispatch_tokens=dispatched))
        expected = expected_output(x, write_index, kind)
        if sequence_parallel:
            rank, size = groups.tp.rank(), groups.tp.size()
            x, expected = x.chunk(size)[rank], expected.chunk(size)[rank]
        output, bias = layer(x[:, None], inference_context=view)
        assert bias is None
        assert output.shape == (len(x), 1, HIDDEN)
        worst = max([worst, *(output[:, 0] - expected).abs().flatten().tolist()])
        if count == 8 and not sequence_parallel and kind == "mixtral":
            assert output[5:].abs().max() == 0
    x = tokens_of(0, 2)
    routing = layer.router(x, None)
    padded = layer.dispatcher.dispatch(x, routing, 3)[1].experts
    assert padded.eq(NO_EXPERT).all(1).tolist() == [False, False, True] * 2
    with pytest.raises(ValueError, match="dispatch_tokens=1, but this rank has 2"):
        layer.dispatcher.dispatch(x, routing, 1)
    return worst


FEW = 4
"""Tokens that count as few here: the op takes more than the rule gives it."""


@torch.no_grad()
def _few_tokens_on_ranks(kind: str) -> float:
    """Largest error of this rank's outputs where experts are split over two ranks, and few tokens
    have an op of their own; -1 if it was not taken."""
    worst, calls = 0.0, 0

    def planned(x: Tensor, layer: ExpertLayer, *_: object) -> FewTokenPlan | None:
        nonlocal calls
        calls += 1
        return plan_few_tokens(x.size(-2), layer.shape, FEW)

    for sequence_parallel in (False, True):
        sizes = ParallelSizes(tensor_model_parallel=2, sequence_parallel=sequence_parallel)
        layer, groups = make_layer(sizes, kind)
        x, write_index = tokens_of(3, 4), torch.tensor([0, 20, DUMMY_PLACE, 60])
        view = View(Step(write_index), BatchDimensions(4))
        expected = expected_output(x, write_index, kind)
        if sequence_parallel:
            x, expected = (whole.chunk(2)[groups.tp.rank()] for whole in (x, expected))
        view.routing = StepRouting()
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(moe, "find_plan", planned)
            monkeypatch.setattr(moe, "FEW_TOKENS", FEW)
            output = layer(x[:, None], inference_context=view)[0]
        worst = max([worst, *(output[:, 0] - expected).abs().flatten().tolist()])
        assert view.routing.experts[0][2].tolist() == [NO_EXPERT] * 2
    return worst if calls == 2 else -1.0


PROMPTS = ([3, 1, 4], list(range(40, 60)), [7] * 5)
WORK = {0: ((0, 1, 2), ()), 1: ((1,), (2, 0))}
"""Prompts of ranks that have requests of their own, in two calls; one rank rests in the second."""


def _generate(sizes: dict[str, int], work: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    params = SamplingParams(num_tokens_to_generate=12, temperature=1.0, seed=3)
    with LLM("dummy:tiny-moe", device="cpu", max_tokens=16, max_requests=8, **sizes) as llm:
        return [
            [request.generated_tokens for request in llm.generate(prompts, params)]
            for prompts in ([PROMPTS[number] for number in call] for call in work)
        ]


def _generate_on_ranks() -> list[list[list[int]]]:
    return _generate({"expert_model_parallel_size": 2}, WORK[int(os.environ["RANK"])])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_experts_on_other_ranks(tensor_parallel, kind):
    assert max(run_ranks(2 * tensor_parallel, _layer_on_ranks, tensor_parallel, kind)) < 2e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_tokens_on_ranks_that_split_experts(kind):
    assert all(0 <= error < 2e-5 for error in run_ranks(2, _few_tokens_on_ranks, kind))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_forced_tokens_go_where_they_have_to(monkeypatch, kind):
    """Also where few tokens would have an op of their own, which chooses for itself."""
    planned = partial(plan_few_tokens, most=FEW)
    monkeypatch.setattr(moe, "find_plan", lambda x, layer, *_: planned(len(x), layer.shape))
    monkeypatch.setattr(moe, "FEW_TOKENS", FEW)
    layer, _groups = make_layer(ParallelSizes(), kind)
    x, write_index = tokens_of(3, 4), torch.tensor([0, 20, DUMMY_PLACE, 60])
    free = layer.router(x, View(Step(write_index), BatchDimensions(4)))
    forced = (free.experts + 3) % EXPERTS
    forced[0] = -1
    view = View(Step(write_index), BatchDimensions(4), routing=StepRouting(forced[None]))
    output = layer(x[:, None], inference_context=view)[0][:, 0]
    (chosen,) = view.routing.experts
    wanted = free.experts.clone()
    wanted[[1, 3]] = forced[[1, 3]]
    assert chosen.tolist() == wanted.tolist()
    scores = x @ layer.router.weight.T
    weights = scores[[1, 3]].gather(1, forced[[1, 3]].long())
    if kind == "nemotron":
        weights = weights.sigmoid()
        weights = 2.5 * weights / weights.sum(1, keepdim=True)
    else:
        weights = weights.softmax(1)
    free.experts, free.weights[[1, 3]] = wanted, weights
    _router, fc1, fc2 = all_weights(kind)
    expected = expert_mlp.reference(x, free, fc1, fc2, 0, EXPERTS)
    if layer.shared_experts is not None:
        expected = expected + layer.shared_experts(x[:, None])[0][:, 0]
    torch.testing.assert_close(output, expected, rtol=2e-5, atol=2e-5)


@torch.no_grad()
def test_experts_elsewhere_have_no_op_of_few_tokens(monkeypatch):
    planned = partial(plan_few_tokens, most=FEW)
    monkeypatch.setattr(moe, "find_plan", lambda x, layer, *_: planned(len(x), layer.shape))
    monkeypatch.setattr(moe, "FEW_TOKENS", FEW)
    layer, _groups = make_layer(ParallelSizes())

    def takes_norm(tokens: int) -> bool:
        """The op does the norm too, so the stream's norm is not done by a kernel of its own."""
        stream = Stream(tokens_of(0, tokens), None, torch.ones(HIDDEN), 1e-5)
        behind = layer.run(stream, None, False)
        assert behind.value.shape == (tokens, HIDDEN)
        return stream.weight is not None

    assert takes_norm(4)
    assert not takes_norm(FEW + 1)
    monkeypatch.setattr(type(layer.dispatcher), "is_alone", False)
    assert not takes_norm(4)


def test_a_model_with_experts_on_two_ranks_says_the_same_tokens():
    alone = _generate({}, WORK[0])[0]
    assert len({tuple(tokens) for tokens in alone}) == 3
    expected = {rank: [[alone[n] for n in call] for call in work] for rank, work in WORK.items()}
    assert run_ranks(2, _generate_on_ranks) == [expected[0], expected[1]]


@pytest.mark.parametrize(
    ("shape", "sizes", "message"),
    [
        ("tiny-moe", {"expert_model_parallel": 3}, "=3 does not divide the model's 8 experts"),
        ("tiny", {"expert_model_parallel": 2}, "this llama model has no experts"),
        ("qwen3-30b-a3b", {"tensor_model_parallel": 5}, "does not divide"),
    ],
)
def test_experts_that_cannot_be_shared_out(shape, sizes, message):
    with pytest.raises(ConfigurationError, match=message):
        check_partition(DUMMY_SHAPES[shape], ParallelSizes(**sizes), "local")


def test_too_many_experts_a_token():
    config = transformer_config(ARCHITECTURE, torch.float32)
    config.moe_router_topk = 9
    with pytest.raises(ConfigurationError, match="moe_router_topk=9 must be between 1 and"):
        MoELayer(config, ensure_process_groups())
