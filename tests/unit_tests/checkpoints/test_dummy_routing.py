"""`dummy:SHAPE:uniform` spreads tokens over experts as even draws do; `dummy:SHAPE` does not."""

import dataclasses

import pytest
import torch
from engine_loads.options import routed

from megatron_async import LLM
from megatron_async.checkpoints import open_model
from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.registry import UNIFORM_EMBEDDING, load_model
from megatron_async.errors import ConfigurationError
from megatron_async.lab.workloads import start_steady_decode
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.moe import MoELayer
from megatron_async.models.pipeline import EMBEDDING
from megatron_async.ops.experts.expert_routing import NO_EXPERT

CPU = torch.device("cpu")
NANO = DUMMY_SHAPES["nemotron-3-nano-30b"]
CUT = dataclasses.replace(
    # As deep as Nemotron 3 Nano, with as many experts, and thinner.
    NANO, hidden_size=256, num_attention_heads=4, kv_channels=32, vocab_size=8192,
    moe_ffn_hidden_size=16, moe_shared_expert_intermediate_size=64, mamba_num_heads=16,
    mamba_head_dim=16, mamba_state_dim=16,
)  # fmt: skip
# Wide MLPs, whose outputs have as much in common as those of large models.
WIDE = dataclasses.replace(
    CUT, hidden_size=512, num_layers=14, pattern="-E--ME-*--E--E", ffn_hidden_size=4096
)
QWEN = dataclasses.replace(
    # Softmax scores, experts with gates, tied embeddings.
    DUMMY_SHAPES["tiny-moe"], num_layers=6, pattern="*E*E*E", hidden_size=128, num_moe_experts=128,
    moe_router_topk=6, vocab_size=8192,
)  # fmt: skip


class ExpertSpread:
    """Watches which experts a model's layers choose: int32 `[tokens, topk]` of each step, a list a
    layer. Tokens that choose k of E experts evenly hit E (1 - (1 - k/E)^n) of them with n tokens.
    """

    def __init__(self, model):
        self.layers = []
        for module in model.modules():
            if isinstance(module, MoELayer):
                self.layers.append([])
                module.on_routing = self._note(self.layers[-1])

    def _note(self, seen):
        return lambda routing: seen.append(routing.experts.clone())

    def take(self, experts):
        """Means over the steps since the last call and over layers; "least" is the layer with the
        fewest hit, "busiest" the largest load of an expert over its layer's mean load."""
        rows = []
        for seen in self.layers:
            real = [each[each[:, 0] != NO_EXPERT] for each in seen]
            real = [each for each in real if len(each)]
            seen.clear()
            loads = sum(each.flatten().long().bincount(minlength=experts) for each in real)
            even = [experts * (1 - (1 - each.size(1) / experts) ** len(each)) for each in real]
            hit = [each.unique().numel() for each in real]
            busiest = (loads.max() / loads.float().mean()).item()
            sums = sum(map(len, real)), sum(even), sum(hit)
            rows.append([*(each / len(real) for each in sums), busiest])
        tokens, expected, hits, busiest = zip(*rows)
        means = [sum(each) / len(rows) for each in (tokens, expected, hits)]
        return dict(zip(("tokens", "expected", "hit"), means)) | {
            "least": min(hits),
            "busiest": max(busiest),
        }


def spread(monkeypatch, architecture, batch, name):
    """Of prefill (4 tokens for each of `batch` requests) and decode."""
    monkeypatch.setitem(DUMMY_SHAPES, "spread", architecture)
    with LLM(
        name, device="cpu", max_requests=batch, max_sequence_length=64, block_size_tokens=64,
        num_kv_blocks=batch,
    ) as llm:  # fmt: skip
        seen = ExpertSpread(llm.engine.controller.inference_wrapped_model.model)
        start_steady_decode(llm.engine, batch, prompt_tokens=4, steps=8)
        experts = architecture.num_moe_experts
        figures = [seen.take(experts)]
        for _ in range(8):
            llm.engine.step_modern()
        return [*figures, seen.take(experts)]


@pytest.mark.parametrize("architecture", [CUT, WIDE, QWEN], ids=["deep", "wide", "softmax"])
def test_uniform_routing_hits_as_many_experts_as_even_draws(monkeypatch, architecture):
    for figures in spread(monkeypatch, architecture, 64, "dummy:spread:uniform"):
        assert figures["hit"] == pytest.approx(figures["expected"], rel=0.025)
        assert figures["least"] == pytest.approx(figures["expected"], rel=0.05)
    assert figures["tokens"] == 64
    assert figures["expected"] == pytest.approx(128 * (1 - (1 - 6 / 128) ** 64))


def test_uniform_routing_loads_experts_evenly(monkeypatch):
    """256 tokens hit all experts however they are spread: what counts is the busiest one."""
    for figures in spread(monkeypatch, WIDE, 256, "dummy:spread:uniform"):
        assert figures["hit"] == pytest.approx(figures["expected"], rel=0.01)
        assert figures["busiest"] < 2.5


def test_random_weights_alone_do_not_spread(monkeypatch):
    """The test can fail: this is what it is there for."""
    _prefill, decode = spread(monkeypatch, WIDE, 64, "dummy:spread")
    assert decode["least"] < 0.8 * decode["expected"]
    assert decode["busiest"] > 6


@pytest.mark.parametrize("shape", ["tiny-moe", "tiny-hybrid"])
def test_uniform_routing_is_a_larger_embedding_and_nothing_else(shape):
    plain, uniform = (
        load_model(name, torch.bfloat16, CPU).model
        for name in (f"dummy:{shape}", f"dummy:{shape}:uniform")
    )
    for (name, a), b in zip(plain.named_parameters(), uniform.parameters(), strict=True):
        assert torch.equal(b, a * UNIFORM_EMBEDDING if name == EMBEDDING else a)
    embedding = plain.get_parameter(EMBEDDING).float()
    assert embedding.std().item() == pytest.approx(0.02, rel=0.02)


def test_routing_that_cannot_be():
    assert open_model("dummy:tiny-moe:uniform").architecture == DUMMY_SHAPES["tiny-moe"]
    with pytest.raises(CheckpointError, match=r"tiny has no experts .*: leave :uniform out"):
        open_model("dummy:tiny:uniform")
    with pytest.raises(CheckpointError, match="routing 'even' is unknown: write dummy:tiny-moe:un"):
        open_model("dummy:tiny-moe:even")
    with pytest.raises(CheckpointError, match="routing '' is unknown"):
        open_model("dummy:tiny-moe:")


def test_option_of_the_benchmarks():
    assert routed(["dummy:tiny-moe", "x"], "as-loaded") == ["dummy:tiny-moe", "x"]
    names = ["dummy:tiny-moe", "dummy:tiny-hybrid:uniform"]
    assert routed(names, "uniform") == [f"dummy:{n}:uniform" for n in ("tiny-moe", "tiny-hybrid")]
    with pytest.raises(ConfigurationError, match="--routing uniform is for dummy:SHAPE models"):
        routed(["./folder"], "uniform")
