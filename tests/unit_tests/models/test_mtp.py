"""Layers of multi-token prediction: against Megatron-Core's own, over ranks, and what they cost."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async import DynamicInferenceContext, GPTInferenceWrapper, InferenceConfig
from megatron_async.checkpoints import open_model
from megatron_async.devices import CpuDevice
from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.attention import PagedSelfAttention
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.hybrid import build_model
from megatron_async.models.parallel_state import ParallelSizes
from tests.support.megatron_mtp import megatron_layer, megatron_output
from tests.support.ranks import run_ranks
from tests.support.whole_sequence import WholeSequence, whole_pass

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 512, (13,), generator=torch.Generator().manual_seed(4)).tolist()
TINY, HYBRID = DUMMY_SHAPES["tiny-mtp"], DUMMY_SHAPES["tiny-hybrid-mtp"]
SHAPES = {
    "dense": TINY,
    "two depths": replace(TINY, mtp_num_depths=2),
    "experts": HYBRID,
    "zero-centred": DUMMY_SHAPES["tiny-gated-delta-mtp"],
    "MiMo": replace(TINY, model_type="mimo", add_qkv_bias=True, mtp_hidden_before_norm=True),
}  # fmt: skip


def make(architecture: ModelArchitecture, with_mtp: bool = True, **sizes: int) -> Any:
    """A model whose weights say nothing by chance, the same on all ranks: norms are not ones."""
    model = build_model(
        architecture, torch.float32, CPU, sizes=ParallelSizes(**sizes), with_mtp=with_mtp
    )
    source = open_model("dummy:tiny")
    source._architecture = architecture  # type: ignore[attr-defined]
    source.load_weights(model)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        # Not those that ranks share: each would have other numbers.
        if parameter.dim() == 1 and "norm" in name and "mixer.norm" not in name:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
        elif "experts.linear" in name:
            parameter.data *= 8
    return model


def inputs(hidden: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return (
        torch.randn(len(TOKENS), 1, hidden, generator=generator),
        torch.randn(len(TOKENS), hidden, generator=generator),
    )


@torch.inference_mode()
def depths_of(model: Any, embedded: Tensor, hidden: Tensor) -> list[Tensor]:
    """Hidden states of all depths, one after the other."""
    view: Any = WholeSequence(model.config, len(hidden))
    found = []
    for layer in model.mtp.layers:
        hidden = layer(embedded, hidden, view).squeeze(1)
        found.append(hidden)
    return found


@pytest.mark.parametrize("name", ["dense", "two depths"])
def test_a_depth_says_what_megatrons_says(name: str) -> None:
    model = make(SHAPES[name])
    whole_pass(model, TOKENS)  # which numbers KV layers
    embedded, hidden = inputs(64)
    for layer, found in zip(model.mtp.layers, depths_of(model, embedded, hidden), strict=True):
        theirs = megatron_layer(model.config, model.config.mtp_pattern)
        assert {n for n, _ in theirs.named_parameters()} == {n for n, _ in layer.named_parameters()}
        theirs.load_state_dict(layer.state_dict())
        expected = megatron_output(theirs, model.config, embedded, hidden).squeeze(1)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        assert found.std() > 0.1
        hidden = found


@pytest.mark.parametrize("name", SHAPES)
def test_the_trunk_is_what_it_was(name: str) -> None:
    """And hands on what the first depth takes."""
    a = SHAPES[name]
    model, plain = make(a), make(a, with_mtp=False)
    assert plain.mtp is None
    found, hidden = whole_pass(model, TOKENS)
    expected, nothing = whole_pass(plain, TOKENS)
    assert torch.equal(found, expected)
    assert nothing is None
    assert hidden is not None
    assert hidden.shape == (len(TOKENS), a.hidden_size)
    if a.mtp_hidden_before_norm:
        hidden = model.decoder.final_norm(hidden)
    tied = model.embedding.word_embeddings.weight if a.tie_word_embeddings else None
    logits = model.output_layer(hidden[:, None], tied)[0].squeeze(1)
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("name", SHAPES)
def test_it_costs_nothing_where_it_is_not_asked_for(name: str) -> None:
    a = SHAPES[name]
    model, plain = make(a), make(a, with_mtp=False)
    counts = [sum(p.numel() for p in m.parameters()) for m in (model, plain)]
    assert counts == [a.num_parameters + a.mtp_parameters, a.num_parameters]
    assert a.without_mtp.num_parameters == a.num_parameters
    assert a.without_mtp.mtp_parameters == 0
    settings = InferenceConfig(num_kv_blocks=4, max_sequence_length=64, max_requests=2)
    layers = []
    for found in (model, plain):
        context = DynamicInferenceContext(found.config, settings, CpuDevice())
        GPTInferenceWrapper(found, context)
        layers.append(context.gpu_view.kv_cache.num_layers)
    attention = a.pattern.count("*")
    assert layers == [attention + a.mtp_num_depths, attention]
    assert a.mtp_kv_bytes_per_token(4) == a.mtp_num_depths * a.kv_bytes_per_token(4) / attention
    # Behind the trunk's, in the order of the depths.
    numbers = [m.kv_layer_index for m in model.mtp.modules() if isinstance(m, PagedSelfAttention)]
    assert numbers == list(range(attention, attention + a.mtp_num_depths))


def _on_ranks(name: str, sizes: dict[str, int]) -> list[list[list[float]]]:
    model = make(SHAPES[name], **sizes)
    _, hidden = whole_pass(model, TOKENS)
    assert hidden is not None
    found = depths_of(model, inputs(64)[0], hidden)
    return [hidden.tolist(), *(depth.tolist() for depth in found)]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("two depths", {"tensor_model_parallel": 2}),
        ("experts", {"tensor_model_parallel": 2}),
        ("zero-centred", {"tensor_model_parallel": 2}),
        ("experts", {"expert_model_parallel": 2}),
    ],
)
def test_two_ranks_say_what_one_says(name: str, sizes: dict[str, int]) -> None:
    expected = _on_ranks(name, {})
    for found in run_ranks(2, _on_ranks, name, sizes):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"sizes": ParallelSizes(pipeline_model_parallel=2)},
         "pipeline_model_parallel_size=2 is not served with multi-token prediction: use 1"),
        ({}, {"sizes": ParallelSizes(2, sequence_parallel=True)}, "sequence_parallel=True is not"),
        ({"mtp_pattern": "M*"}, {}, r"Mamba-2 \(M\) layers are not served in multi-token pre"),
        ({"mtp_pattern": "GE"}, {}, r"Gated DeltaNet \(G\) layers are not served .*'GE'"),
        ({"mtp_pattern": "", "mtp_num_depths": 0, "mtp_use_repeated_layer": False}, {},
         "has no layers of multi-token .*: use speculative_method='ngram', .*or none"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], options: dict[str, Any], message: str) -> None:
    a = replace(HYBRID, **changes)
    with pytest.raises(ConfigurationError, match=message):
        build_model(a, torch.float32, CPU, with_mtp=True, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mtp_pattern": "*Q"}, r"mtp_pattern '\*Q' has \['Q'\]: it may have '\*' \(attention\)"),
        ({"mtp_pattern": ""}, "mtp_num_depths = 1 with mtp_pattern = ''"),
        ({"mtp_num_depths": 0}, r"mtp_num_depths = 0 with mtp_pattern = '\*-'"),
        ({"mtp_num_depths": 2, "mtp_use_repeated_layer": True}, "it is one depth that is repeated"),
        ({"mtp_pattern": "*E"}, r"mtp_pattern '\*E' has experts, but num_moe_experts = 0"),
    ],
)
def test_descriptions_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)


def test_a_description_is_stored_whole() -> None:
    for a in SHAPES.values():
        assert ModelArchitecture.from_dict(a.to_dict()) == a
    before = {k: v for k, v in TINY.to_dict().items() if not k.startswith("mtp_")}
    assert ModelArchitecture.from_dict(before) == TINY.without_mtp


@pytest.mark.parametrize(
    ("name", "billions"), [("llama-3.1-8b-mtp", 0.252), ("nemotron-3-nano-30b-mtp", 1.335)]
)
def test_well_known_sizes(name: str, billions: float) -> None:
    a = DUMMY_SHAPES[name]
    assert a.without_mtp == DUMMY_SHAPES[name.removesuffix("-mtp")]
    assert a.mtp_parameters / 1e9 == pytest.approx(billions, abs=0.005)
