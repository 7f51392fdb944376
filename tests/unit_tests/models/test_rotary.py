"""The rotary table against `transformers`, bit for bit: token-exact comparisons rest on it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from megatron_async.models.architecture import (
    LINEAR,
    ModelArchitecture,
    RopeScaling,
    yarn_factor,
)
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.model_config import transformer_config
from megatron_async.models.rotary import RotaryTable, inverse_frequencies
from megatron_async.ops.attention.rope_append import apply_rotary_reference

CPU = torch.device("cpu")
SCALINGS = [
    None,
    RopeScaling(8.0, 1.0, 4.0, 8192),  # Llama 3.1
    RopeScaling(32.0, 1.0, 4.0, 8192),  # Llama 3.2
    RopeScaling(2.0, 0.5, 3.0, 64),
    RopeScaling(  # gpt-oss
        32.0, original_max_position_embeddings=4096, kind="yarn", truncate=False,
        attention_factor=yarn_factor(32.0, None, None),
    ),
    RopeScaling(  # DeepSeek
        40.0, original_max_position_embeddings=512, kind="yarn", beta_fast=16.0, beta_slow=2.0,
        attention_factor=yarn_factor(40.0, 0.9, 0.7),
    ),
]  # fmt: skip


def llama_rotary(dim, base, scaling):
    parameters = {"rope_type": "default", "rope_theta": base}
    if scaling is not None:
        parameters = {"rope_type": scaling.kind, "rope_theta": base, **vars(scaling)}
        if scaling.factor == 40:
            parameters |= {"attention_factor": None, "mscale": 0.9, "mscale_all_dim": 0.7}
    config = LlamaConfig(
        hidden_size=4 * dim,
        num_attention_heads=4,
        head_dim=dim,
        max_position_embeddings=131072,
        rope_parameters=parameters,
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("dim", "base"), [(64, 1e4), (128, 5e5), (16, 1e5)])
def test_table_equals_transformers(dim, base, scaling):
    theirs = llama_rotary(dim, base, scaling)
    assert torch.equal(inverse_frequencies(dim, base, scaling), theirs.inv_freq)
    config = SimpleNamespace(kv_channels=dim, rotary_base=base, rope_scaling=scaling)
    table = RotaryTable.described(config, 3000, CPU)
    cos, sin = theirs(torch.zeros(1), torch.arange(3000)[None])
    assert torch.equal(table.cos, cos[0])
    assert torch.equal(table.sin, sin[0])


@pytest.mark.parametrize("linear", [None, 8.0])
def test_tables_of_layers(linear):
    """Window layers have a base of their own, which is not scaled, as Gemma 3's; some have no
    rope."""
    scaling = None if linear is None else RopeScaling(linear, kind=LINEAR)
    architecture = replace(
        DUMMY_SHAPES["tiny"], num_layers=3, pattern="*-*-*-", sliding_window=8,
        window_attn_skip_freq=(1, 0, 1), no_rope_freq=(0, 0, 1), window_rotary_base=500.0,
        rope_scaling=scaling,
    )  # fmt: skip
    assert ModelArchitecture.from_dict(architecture.to_dict()) == architecture
    config = transformer_config(architecture, torch.float32)
    table = RotaryTable.described(config, 300, CPU)
    full = {"rope_type": "linear", "factor": linear} if linear else {"rope_type": "default"}
    theirs = Gemma3RotaryEmbedding(
        Gemma3TextConfig(
            num_hidden_layers=3,
            head_dim=architecture.kv_channels,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {"rope_theta": architecture.rotary_base, **full},
            },
        )
    )
    for layer, kind in enumerate(("sliding_attention", "full_attention")):
        cos, sin = theirs(torch.zeros(1), torch.arange(300)[None], kind)
        assert torch.equal(table.of(layer).cos, cos[0])
        assert torch.equal(table.of(layer).sin, sin[0])
    assert table.of(2).cos.shape == (300, 0)
    with pytest.raises(ValueError, match=r"no_rope_freq has 2 entries, but num_layers = 3: give"):
        replace(architecture, no_rope_freq=(0, 1))


def test_scaling_keeps_short_waves_and_stretches_long_ones():
    scaling = SCALINGS[1]
    ratio = inverse_frequencies(128, 5e5) / inverse_frequencies(128, 5e5, scaling)
    assert ratio[0] == 1
    assert ratio[-1] == 8
    assert ((ratio > 1) & (ratio < 8)).any()
    assert (ratio.diff() >= 0).all()


def test_rotation_equals_transformers_in_any_order_of_positions():
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(9, n, 32, generator=generator) for n in (6, 2))
    positions = torch.randint(500, (9,), generator=generator)
    table = RotaryTable(inverse_frequencies(32, 1e4), 500, CPU)
    cos, sin = table.cos[positions], table.sin[positions]
    found = apply_rotary_reference(query, key, cos[:, None], sin[:, None])
    theirs = apply_rotary_pos_emb(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos[None], sin[None]
    )
    for ours, other in zip(found, theirs):
        assert torch.equal(ours, other[0].transpose(0, 1))
