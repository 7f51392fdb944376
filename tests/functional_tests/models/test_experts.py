"""Models with experts in the engine: steps padded for graphs, lookahead, pressure; the op of a few
tokens beside the grouped products; on GPUs too."""

import math
import os
from collections import Counter
from typing import Any

import pytest
import torch

from megatron_async import LLM, DynamicInferenceEngine, SamplingParams
from megatron_async.checkpoints.huggingface import save_huggingface
from megatron_async.devices import CpuDevice, CudaDevice, Device
from megatron_async.models import moe
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.moe import TopKRouter
from megatron_async.ops.experts.expert_plan import FEW_TOKENS, FewTokenPlan, plan_few_tokens
from megatron_async.ops.experts.expert_routing import NO_EXPERT, Routing
from megatron_async.ops.experts.few_tokens import ExpertLayer, few_token_experts
from megatron_async.ops.linear.stream import Stream
from tests.support.capturing_cpu import CapturingCpu
from tests.support.cards import on_cards
from tests.support.harness import Job, greedy, make_engine, make_model, random_prompts, run_at
from tests.support.ranks import run_ranks

TINY = ModelArchitecture(
    "mixtral", 2, 32, 4, 2, 8, 64, 128, max_position_embeddings=1024,
    num_moe_experts=5, moe_router_topk=2, moe_ffn_hidden_size=24,
)  # fmt: skip
SMALL = ModelArchitecture(
    "qwen3_moe", 4, 256, 8, 4, 32, 512, 1024, max_position_embeddings=1024, qk_layernorm=True,
    num_moe_experts=16, moe_router_topk=4, moe_ffn_hidden_size=128, pattern="*E*-*E*E",
)  # fmt: skip
PRESSURE = {"block_size_tokens": 16, "num_kv_blocks": 18, "max_tokens": 29, "max_requests": 16}


def jobs(architecture: ModelArchitecture, tokens: int) -> list[Job]:
    prompts = random_prompts(0, (1, 5, 33, 64, 17, 100, 2, 48), architecture.vocab_size)
    return [Job(prompt, greedy(tokens)) for prompt in prompts]


def run(model: torch.nn.Module, device: Device, work: list[Job], **config: Any) -> list[list[int]]:
    engine = make_engine(model, device=device, **config)
    try:
        return run_at(engine, {0: work[:3], 5: work[3:]})
    finally:
        engine.close()


def test_padding_goes_to_no_expert_and_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model, work = make_model(TINY), jobs(TINY, 16)
    expected = run(model, CpuDevice(), work, lookahead=0)
    real: list[int] = []
    forward = TopKRouter.forward

    def watched(self: TopKRouter, *args: Any) -> Routing:
        routing = forward(self, *args)
        real.append(int((routing.experts != NO_EXPERT).all(1).sum()))
        assert len(routing.experts) - real[-1] == int((routing.weights.sum(1) == 0).sum())
        return routing

    monkeypatch.setattr(TopKRouter, "forward", watched)
    assert (
        run(model, CapturingCpu(), work, lookahead=1, max_tokens=128, max_requests=16) == expected
    )
    # All known tokens but each request's last go through each layer once.
    tokens = sum(len(job.prompt) + len(found) - 1 for job, found in zip(work, expected))
    assert sum(real) == TINY.num_layers * tokens


@pytest.fixture(scope="module")
def cpu_tokens() -> list[list[int]]:
    return run(make_model(SMALL), CpuDevice(), jobs(SMALL, 32), lookahead=0, num_kv_blocks=128)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [{"num_cuda_graphs": 0}, {}, PRESSURE], ids=str)
@pytest.mark.parametrize("lookahead", [0, 2])
def test_a_gpu_says_what_the_cpu_says(cpu_tokens, config: dict[str, int], lookahead):
    model = make_model(SMALL, torch.device("cuda"))
    settings = {"num_kv_blocks": 128, "max_requests": 16, **config}
    assert run(model, CudaDevice(), jobs(SMALL, 32), lookahead=lookahead, **settings) == cpu_tokens


LAYOUTS: dict[str, dict[str, int]] = {
    "expert": {"expert_model_parallel_size": 2},
    "tensor": {"tensor_model_parallel_size": 2},
    "expert of 4": {"expert_model_parallel_size": 4},
    "tensor and expert": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
}


def replica_of(rank: int, kind: str) -> tuple[int, bool]:
    """Number of a rank's replica, and whether it follows."""
    replica, place = divmod(rank, LAYOUTS[kind].get("tensor_model_parallel_size", 1))
    return replica, place > 0


def shares(rank: int, kind: str) -> list[int]:
    """Numbers of the jobs that a rank has: of those that share experts, the first has most and the
    last of four none."""
    replicas = LAYOUTS[kind].get("expert_model_parallel_size", 1)
    jobs_of = {1: [8], 2: [6, 2], 4: [5, 2, 1, 0]}[replicas]
    replica, _ = replica_of(rank, kind)
    first = sum(jobs_of[:replica])
    return list(range(first, first + jobs_of[replica]))


def generate(folder: str, kind: str) -> tuple[list[list[int]], bool]:
    work = [jobs(SMALL, 32)[number] for number in shares(int(os.environ["RANK"]), kind)]
    with LLM(
        folder,
        device="cuda",
        dtype="float32",
        max_requests=8,
        num_kv_blocks=128,
        block_size_tokens=16,
        max_sequence_length=256,
        max_tokens=64,
        **LAYOUTS[kind],
    ) as llm:
        found = llm.generate([job.prompt for job in work], [job.params for job in work])
        assert all(request.error is None for request in found)
        engine: DynamicInferenceEngine = llm.engine
        captured = engine.stats()["captured_steps"] > 0
        exchange = engine.controller.inference_wrapped_model.exchange
        ours = {"gather"} if "expert" in kind else set()
        ours |= {"combine with norm"} if kind.startswith("expert") else set()
        assert ours <= set(exchange.calls), (exchange.calls, exchange.fallback)
        return [list(request.generated_tokens) for request in found], captured


@pytest.mark.parametrize(
    ("kind", "world"),
    on_cards((kind, math.prod(sizes.values())) for kind, sizes in LAYOUTS.items()),
)
def test_several_gpus_say_what_the_cpu_says(cpu_tokens, kind: str, world: int, tmp_path):
    save_huggingface(make_model(SMALL), SMALL, None, tmp_path)
    ranks = run_ranks(world, generate, str(tmp_path), kind, timeout_s=300)
    for rank, (tokens, captured) in enumerate(ranks):
        _, follows = replica_of(rank, kind)
        assert tokens == ([] if follows else [cpu_tokens[n] for n in shares(rank, kind)])
        assert captured


MODELS = ["tiny-moe", "tiny-hybrid", "tiny-gated-delta"]
"""Softmax; sigmoids with a bias and a shared expert without a gate; a shared expert behind one."""
PROMPTS = [[3, 1, 4], list(range(40, 60)), [7] * 5]


def generate_on(model: str, device: str) -> list[list[int]]:
    """Prompts of more tokens than `FEW_TOKENS`, then decode steps of 3, 2 and 1 rows;
    random tokens, which depend on all bits of the logits that matter."""
    params = [
        SamplingParams(num_tokens_to_generate=count, temperature=1.0, seed=3)
        for count in (24, 16, 8)
    ]
    room = {"max_requests": 4, "num_kv_blocks": 64}
    with LLM(f"dummy:{model}", device=device, dtype="float32", **room) as llm:
        return [request.generated_tokens for request in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("model", MODELS)
def test_same_tokens(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generate_on(model, "cpu")
    tokens: Counter[int] = Counter()
    normed: Counter[bool] = Counter()
    op = few_token_experts.on("torch")

    def planned(x: torch.Tensor, layer: ExpertLayer, *_: object) -> FewTokenPlan | None:
        return plan_few_tokens(x.size(-2), layer.shape)

    def watched(x: torch.Tensor | Stream, *rest: Any) -> object:
        rows = x.value if isinstance(x, Stream) else x
        tokens[rows.size(-2)] += 1
        normed[isinstance(x, Stream)] += 1
        return op(x, *rest)

    monkeypatch.setattr(moe, "find_plan", planned)
    monkeypatch.setattr(few_token_experts, "on", lambda *_: watched)
    assert generate_on(model, "cpu") == expected
    assert set(tokens) <= set(range(1, FEW_TOKENS + 1))
    assert tokens[1] > 0
    assert set(normed) == {True}, "the norm goes along wherever this op does"


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_same_tokens_on_a_gpu(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = generate_on(model, "cuda")
    monkeypatch.setattr(moe, "find_plan", lambda *_: None)
    assert generate_on(model, "cuda") == found
