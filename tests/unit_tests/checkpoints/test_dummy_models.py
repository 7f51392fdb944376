"""Models named `dummy:`: their sizes by name or by hand, their weights, and how evenly `:uniform`
spreads tokens over experts."""

import dataclasses
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from engine_loads.options import routed
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import megatron_async.checkpoints.quantised_model as quantised_model
from megatron_async import LLM, SamplingParams
from megatron_async.checkpoints import CheckpointError, open_model
from megatron_async.checkpoints.info import model_info
from megatron_async.checkpoints.mapping import Shard, weights
from megatron_async.checkpoints.registry import UNIFORM_EMBEDDING, load_model
from megatron_async.cli.main import main
from megatron_async.errors import ConfigurationError, OutOfMemoryError
from megatron_async.lab.workloads import start_steady_decode
from megatron_async.models import hybrid
from megatron_async.models.dummy_shapes import DUMMY_FORMS, DUMMY_SHAPES
from megatron_async.models.held_weight import is_linear, quantised_weights
from megatron_async.models.hybrid import fill_dummy_weight
from megatron_async.models.moe import MoELayer
from megatron_async.models.pipeline import EMBEDDING
from megatron_async.ops.experts.expert_routing import NO_EXPERT
from megatron_async.ops.linear.quantised_weight import widened

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

    forced = None

    def __init__(self, engine):
        model = engine.controller.inference_wrapped_model.model
        self.layers = [[] for each in model.modules() if isinstance(each, MoELayer)]
        self._layer = cycle(self.layers)
        engine.context.gpu_view.routing = self

    def note(self, routing):
        next(self._layer).append(routing.experts.clone())

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
    """Spread of prefill (4 tokens for each of `batch` requests) and decode."""
    monkeypatch.setitem(DUMMY_SHAPES, "spread", architecture)
    with LLM(
        name, device="cpu", max_requests=batch, max_sequence_length=64, block_size_tokens=64,
        num_kv_blocks=batch,
    ) as llm:  # fmt: skip
        seen = ExpertSpread(llm.engine)
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
    with pytest.raises(
        CheckpointError, match=r"numbers 'even' is unknown: .* with :uniform .* :nvfp4"
    ):
        open_model("dummy:tiny-moe:even")
    with pytest.raises(CheckpointError, match="numbers '' is unknown"):
        open_model("dummy:tiny-moe:")


WIDE_ROWS = (
    "qwen3_moe:layers=1,hidden=256,heads=4,groups=2,head=64,ffn=128,vocab=64,experts=4,topk=2"
)


@pytest.mark.parametrize("form", DUMMY_FORMS)
@pytest.mark.parametrize(
    ("shape", "shard"),
    [(WIDE_ROWS, Shard()), (WIDE_ROWS, Shard(1, 2, 1, 2)), ("tiny-hybrid", Shard())],
    ids=["whole", "ranks", "hybrid"],
)
def test_weights_of_a_form_are_kept_as_they_are_decoded(form, shape, shard):
    """Also a rank's parts; about as large as other random weights."""
    source = open_model(f"dummy:{shape}:{form}")
    layouts = source.layouts(shard, True)
    plain = {w.name: torch.empty(w.shape) for w in weights(source.architecture, shard)}
    kept = {
        name: layouts[name].empty(like.shape, torch.float32, CPU)
        if name in layouts
        else like.clone()
        for name, like in plain.items()
    }
    source.load_into(plain, shard)
    source.load_into(kept, shard)
    assert set(layouts) == {name for name in plain if is_linear(name)}
    for name, weight in kept.items():
        assert torch.equal(widened(weight), plain[name]), name
        assert name not in layouts or plain[name].std().item() == pytest.approx(0.02, rel=0.35)
    assert len({float(w.scales.float().std()) for w in map(kept.get, layouts)}) > 1
    assert source.quantised.bits < 5.1


def test_a_model_of_a_form_says_what_it_says_decoded(monkeypatch, caplog):
    monkeypatch.setattr(quantised_model, "keeps_on", lambda device: True)
    said = {}
    for quantization in ("file", "none"):
        with LLM("dummy:tiny-moe:int4", device="cpu", quantization=quantization) as llm:
            served = llm.engine.controller.inference_wrapped_model.model
            assert bool(dict(quantised_weights(served))) == (quantization == "file")
            said[quantization] = llm.score([[5, 9, 17, 300]])[0].prompt_log_probs
    assert said["file"] == pytest.approx(said["none"], abs=1e-5)
    with pytest.raises(ConfigurationError, match=r"'fp8' is for weights of 16 bits.*holds INT4"):
        LLM("dummy:tiny:int4", device="cpu", quantization="fp8")
    with pytest.raises(
        ConfigurationError, match="no whole groups of 128: use another tensor_model"
    ):
        open_model(f"dummy:{WIDE_ROWS}:int4").layouts(Shard(0, 4), True)
    # Where nobody has asked, such weights are decoded.
    source = open_model(f"dummy:{WIDE_ROWS}:int4")
    for size, kept in (1, "file"), (4, None):
        on = quantised_model.Kept.on("cpu", {}, source, tensor_size=size)
        assert on.quantization == kept
    assert "All weights are decoded: " in caplog.text


def test_option_of_the_benchmarks():
    assert routed(["dummy:tiny-moe", "x"], "as-loaded") == ["dummy:tiny-moe", "x"]
    assert routed(["dummy:tiny-moe:uniform:int4"], "uniform") == ["dummy:tiny-moe:uniform:int4"]
    names = ["dummy:tiny-moe", "dummy:tiny-hybrid:uniform"]
    assert routed(names, "uniform") == [f"dummy:{n}:uniform" for n in ("tiny-moe", "tiny-hybrid")]
    with pytest.raises(ConfigurationError, match="--routing uniform is for dummy:SHAPE models"):
        routed(["./folder"], "uniform")


TINY = "layers=2,hidden=64,heads=4,groups=2,ffn=96,vocab=256"
EXPERTS = "layers=2,hidden=64,heads=4,ffn=96,vocab=256,experts=4,topk=2"


def parameters(model: type, config: object) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in model(config).parameters())


@pytest.mark.parametrize("uniform", ["", ":uniform"])
def test_sizes_are_those_of_transformers(uniform: str) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 96, "vocab_size": 256, "tie_word_embeddings": False}
    found = open_model(f"dummy:mixtral:{EXPERTS}{uniform}").architecture
    config = MixtralConfig(**sizes, num_key_value_heads=4, num_local_experts=4)
    assert found.num_parameters == parameters(MixtralForCausalLM, config)
    dense = open_model(f"dummy:llama:{TINY}").architecture
    config = LlamaConfig(**sizes, num_key_value_heads=2)
    assert dense.num_parameters == parameters(LlamaForCausalLM, config)
    assert (dense.kv_channels, dense.max_position_embeddings) == (16, 32768)
    given = open_model(f"dummy:qwen3:positions=100,head=32,{TINY}").architecture
    assert (given.kv_channels, given.max_position_embeddings, given.qk_layernorm) == (32, 100, True)


def test_shapes_of_megatrons_scripts() -> None:
    """357 million are GPT-2's weights by arithmetic; learned positions and biases are not here."""
    hidden, layers, vocab, positions = 1024, 24, 51200, 2048
    matrices = layers * 12 * hidden**2 + vocab * hidden
    norms, biases = (2 * layers + 1) * hidden, layers * 11 * hidden + hidden
    assert round((matrices + positions * hidden + norms + biases) / 1e6) == 357
    assert DUMMY_SHAPES["gpt-357m"].num_parameters == matrices + norms
    assert model_info("dummy:gpt-12b").parameters == 12_247_782_400  # Mistral-NeMo's


@pytest.mark.parametrize("shape", [f"qwen2:{TINY}", "small-gpt"])
def test_one_answers(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(
        DUMMY_SHAPES["gpt-357m"], num_layers=2, pattern="*-", hidden_size=64, vocab_size=256,
        num_attention_heads=4, num_query_groups=4, kv_channels=16, ffn_hidden_size=96,
    )  # fmt: skip
    monkeypatch.setitem(DUMMY_SHAPES, "small-gpt", small)
    with LLM(f"dummy:{shape}", device="cpu", num_kv_blocks=4, max_requests=1) as llm:
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=3, termination_id=-1)
        (answer,) = llm.generate([[1, 2, 3]], params)
    assert len(answer.generated_tokens) == 3
    assert all(0 <= token < 256 for token in answer.generated_tokens)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("llama:hiden=64," + TINY, "unknown size 'hiden'; did you mean hidden"),
        ("llama:color=1," + TINY, "unknown size 'color'; llama has layers, hidden, heads, ffn"),
        ("llama:experts=4," + TINY, "unknown size 'experts'"),
        ("llama:" + TINY + ",", "unknown size ''"),
        ("llama:" + TINY + ",heads=8", "heads is there twice"),
        ("llama:layers=2,hidden=64", "heads, ffn, vocab missing; such as llama:layers=40,hidden"),
        ("mixtral:" + TINY, "experts, topk missing"),
        ("llama", "llama needs sizes: dummy:llama:layers="),
        ("gemma:" + TINY, r"sizes are given to a family \(llama, qwen2, .*\), not to 'gemma'"),
        ("tiny:layers=3", "sizes are given to a family .*, not to 'tiny'"),
        ("llama:groups=3,head=16," + TINY.replace("groups=2,", ""), "heads=4 must be a multiple"),
        ("llama:" + TINY.replace("hidden=64", "hidden=66"), "hidden=66 must be a multiple"),
        ("llama:" + TINY.replace("hidden=64", "hidden=60"), r"head=15 .* must be even"),
        ("mixtral:" + EXPERTS.replace("topk=2", "topk=5"), "topk=5 is more than experts=4"),
        *(
            (f"llama:ffn={value}," + TINY.replace("ffn=96,", ""), f"ffn={value}.* must be a positi")
            for value in ("0", "-4", "1e3", "9.5", "", "4_0", "٤", "x")
        ),
        ("llama:" + TINY.replace("ffn=96", "ffn=" + "9" * 5000), "ffn=9{40} is more than"),
        ("llama:" + TINY.replace("layers=2", "layers=5000"), "layers=5000 is more than any model"),
        ("llama:" + TINY.replace("vocab=256", "vocab=100000000"), "vocab=.* is more than"),
        ("mixtral:" + EXPERTS.replace("experts=4", "experts=9" + "0" * 9), "experts=.* more than"),
        ("llama:" + TINY + ":even", "numbers 'even' is unknown: write dummy:llama:layers=2,.*unif"),
        ("llama:" + TINY + ":uniform", "has no experts over which to spread"),
        ("mixtral:" + EXPERTS + ":uniform:uniform", "numbers 'uniform:uniform' is unknown"),
        ("tiny:int4:nvfp4", "numbers 'int4:nvfp4' is unknown"),
        ("tiny:int8", "numbers 'int8' is unknown"),
    ],
)  # fmt: skip
def test_what_is_no_shape(shape: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        open_model(f"dummy:{shape}")
    assert len(str(caught.value)) < 1000


def test_absurd_sizes_are_refused_before_memory(capsys: pytest.CaptureFixture[str]) -> None:
    huge = "dummy:llama:layers=4096,hidden=1000000,heads=10,ffn=2000000000,vocab=16000000"
    with pytest.raises(OutOfMemoryError, match=r"the weights take .* GiB"):
        LLM(huge, device="cpu")
    assert main(["info", huge]) == 0
    assert "does not fit" in capsys.readouterr().out
    assert main(["info", "dummy:llama:layers=2"]) != 0
    assert "hidden, heads, ffn, vocab missing" in capsys.readouterr().err


NAMES = {
    "decoder.layers.0.mixer.A_log": (16,),
    "decoder.layers.0.mixer.dt_bias": (16,),
    "decoder.layers.0.mixer.D": (16,),
    "decoder.layers.0.mixer.conv1d.weight": (40, 1, 4),
    "decoder.layers.0.mixer.conv1d.bias": (40,),
    "decoder.layers.0.input_layernorm.weight": (24,),
    "decoder.layers.1.mlp.linear_fc1.weight": (48, 24),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_a_16_bit_model_has_the_float32_models_weights_rounded(monkeypatch, name, dtype):
    """Else `check_parity.py` compares two models."""
    monkeypatch.setattr(hybrid, "PART", 500)
    whole = torch.full(NAMES[name], torch.nan)
    half = whole.to(dtype)
    fill_dummy_weight(name, whole)
    fill_dummy_weight(name, half)
    assert whole.isfinite().all()
    assert torch.equal(half, whole.to(dtype))
    if name.endswith("fc1.weight"):
        assert len(whole.unique()) > 0.99 * whole.numel()  # no part is another one's
