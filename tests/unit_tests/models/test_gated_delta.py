"""The Gated DeltaNet mixer over ranks, and in Megatron's checkpoints; what stands around it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.ssm.gated_delta_net.gdn import GatedDeltaNet
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_async.checkpoints import CheckpointError, load_model, open_model
from megatron_async.checkpoints.torch_dist import save_torch_dist
from megatron_async.config import InferenceConfig
from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.fitness import check_model
from megatron_async.models.gated_delta import GatedDeltaMixer
from megatron_async.models.hybrid import (
    build_model,
    hybrid_stack_spec,
    init_dummy_weights,
    transformer_config,
)
from megatron_async.models.norm import make_norm
from megatron_async.models.parallel_state import ParallelSizes, ensure_process_groups
from megatron_async.models.partition import check_partition
from tests.support.ranks import run_ranks
from tests.unit_tests.checkpoints.test_torch_dist import save_training
from tests.unit_tests.models.test_recurrent_mixers import described

CPU = torch.device("cpu")
TINY = DUMMY_SHAPES["tiny-gated-delta"]


def _both_descriptions() -> tuple[list[Any], list[Any]]:
    """Our sharded state of a mixer, and Megatron's of the same parameters."""
    sizes = ParallelSizes(tensor_model_parallel=2)
    model: Any = build_model(TINY, torch.float32, CPU, sizes=sizes)
    mixer = model.decoder.layers[0].self_attention
    ours = described(mixer.sharded_state_dict("mixer."))
    local = mixer.sizes
    mixer.pg_collection, mixer.conv_bias, mixer.tp_size = model.pg_collection, False, 2
    mixer.in_proj_dim, mixer.conv_dim_local_tp = mixer.whole_sizes.in_proj, local.conv
    mixer.qk_dim_local_tp, mixer.v_dim_local_tp = local.keys, local.values
    mixer.cp_size, mixer.num_value_heads = 1, mixer.whole_sizes.value_heads
    mixer.num_v_heads_local_tp = local.value_heads
    GatedDeltaNet._setup_variant_attrs(mixer)
    return ours, described(GatedDeltaNet.sharded_state_dict(mixer, "mixer."))


def test_checkpoints_are_megatrons() -> None:
    for ours, theirs in run_ranks(2, _both_descriptions):
        assert ours == theirs
        names = {entry[0].removeprefix("mixer.") for entry in ours}
        strips = ("query", "key", "value", "z", "beta", "alpha")
        assert names == {
            *(f"in_proj.weight.{strip}" for strip in strips),
            *(f"conv1d.weight.{strip}" for strip in strips[:3]),
            "dt_bias", "A_log", "out_norm.weight", "out_proj.weight",
        }  # fmt: skip


def _save_on_ranks(folder: str) -> None:
    sizes = ParallelSizes(tensor_model_parallel=2)
    model = build_model(TINY, torch.float32, CPU, sizes=sizes)
    generator = torch.Generator().manual_seed(model.pg_collection.tp.rank())
    on_all = ("norm.weight", "router.weight", "gate_weight")
    for name, parameter in model.named_parameters():
        parameter.data.normal_(generator=generator)
        if name.endswith(on_all):
            parameter.data.fill_(0.5)
    Path(folder).mkdir(exist_ok=True)
    save_torch_dist(model, TINY, None, Path(folder))
    source = open_model(folder)
    again = build_model(TINY, torch.float32, CPU, sizes=sizes)
    source.load_weights(again)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


def test_what_two_ranks_save_one_reads(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    run_ranks(2, _save_on_ranks, str(tmp_path / "m"))
    whole = load_model(tmp_path / "m", torch.float32, CPU).model
    mixer = whole.decoder.layers[0].self_attention
    assert mixer.in_proj.weight.unique(dim=0).size(0) == TINY.delta.in_proj


def test_checkpoints_of_training_load(tmp_path: Path) -> None:
    """A hybrid of Megatron-LM's, whose arguments say what it is."""
    trained = replace(TINY, layernorm_epsilon=1e-5, rotary_base=500000.0)
    values = trained.to_dict()
    args = {
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "apply_layernorm_1p": True,
        "swiglu": True,
        "add_bias_linear": False,
        "num_layers": 6,
        "hybrid_layer_pattern": "GEG-|*E",
        "group_query_attention": True,
        "untie_embeddings_and_output_weights": True,
        "num_experts": 8,
        "norm_epsilon": 1e-5,
        "rotary_base": 500000,
        **{name: values[name] for name in ARGUMENTS},
    }
    model = build_model(trained, torch.float32, CPU)
    init_dummy_weights(model)
    save_training(model, tmp_path / "m", args)
    loaded = load_model(tmp_path / "m", torch.float32, CPU)
    assert loaded.architecture == trained
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


def gpt_model(architecture: ModelArchitecture) -> Any:
    """A `GPTModel` whose layers are those of our spec, two of the pattern in one, as Megatron-LM
    trains with `experimental_attention_variant="gated_delta_net"`."""
    config = transformer_config(architecture, torch.float32)
    config.num_layers, config.hybrid_layer_pattern = architecture.num_layers, None
    ours, layers = hybrid_stack_spec(config).submodules, []
    mixers = {"G": ours.gdn_layer, "*": ours.attention_layer}
    ffns = {"-": ours.mlp_layer, "E": ours.moe_layer}
    for mixer, ffn in zip(architecture.pattern[::2], architecture.pattern[1::2], strict=True):
        first, second = mixers[mixer].submodules, ffns[ffn].submodules
        names = first.sharded_state_dict_keys_map | second.sharded_state_dict_keys_map
        parts = {name: getattr(second, name) for name in ("pre_mlp_layernorm", "mlp", "mlp_bda")}
        both = replace(first, **parts, sharded_state_dict_keys_map=names)
        layers.append(ModuleSpec(module=TransformerLayer, submodules=both))
    return GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=layers, layer_norm=make_norm),
        architecture.vocab_size,
        architecture.max_position_embeddings,
        position_embedding_type="none",
        parallel_output=False,
        share_embeddings_and_output_weights=False,
        pg_collection=ensure_process_groups(),
    )


@pytest.mark.parametrize("frequency", [3, [1, 1, 0]])
def test_gpt_model_checkpoints_of_training_load(frequency: Any, tmp_path: Path) -> None:
    trained = replace(TINY, layernorm_epsilon=1e-5, pattern="G-G-*-", **DENSE)
    values = trained.to_dict()
    args = {
        **{name: values[name] for name in ARGUMENTS if not name.startswith("moe")},
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "apply_layernorm_1p": True,
        "swiglu": True,
        "add_bias_linear": False,
        "num_layers": 3,
        "group_query_attention": True,
        "untie_embeddings_and_output_weights": True,
        "norm_epsilon": 1e-5,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": frequency,
    }
    model = gpt_model(trained)
    for parameter in model.parameters():
        parameter.data.normal_()
    save_training(model, tmp_path / "m", args, {"non_homogeneous_layers": True})
    loaded = load_model(tmp_path / "m", torch.float32, CPU)
    assert loaded.architecture == trained
    theirs = dict(model.named_parameters())
    for name, parameter in loaded.model.named_parameters():
        parts = name.replace("final_norm", "final_layernorm").split(".")
        if parts[1] == "layers":
            parts[2] = str(int(parts[2]) // 2)
        assert torch.equal(parameter, theirs.pop(".".join(parts))), name
    assert not theirs
    with pytest.raises(ConfigurationError, match="2 recurrent layers, where the context has room"):
        check_model(model, model.config, InferenceConfig(max_sequence_length=64))
    args["linear_attention_freq"] = None
    save_training(model, tmp_path / "other", args, {"non_homogeneous_layers": True})
    with pytest.raises(CheckpointError, match="linear_attention_freq = None must be"):
        load_model(tmp_path / "other", torch.float32, CPU)


DENSE = {
    "num_moe_experts": 0, "moe_router_topk": 0, "moe_ffn_hidden_size": 0,
    "moe_shared_expert_intermediate_size": 0, "moe_shared_expert_gate": False,
}  # fmt: skip
ARGUMENTS = (
    "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size",
    "max_position_embeddings", "rotary_percent", "qk_layernorm", "attention_output_gate",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "moe_ffn_hidden_size", "moe_router_topk",
    "moe_shared_expert_intermediate_size", "moe_shared_expert_gate",
)  # fmt: skip
"""Fields of `ModelArchitecture` that are arguments of Megatron-LM under the same name."""


def _dummy_part() -> list[list[float]]:
    source = open_model("dummy:tiny-gated-delta")
    model = build_model(source.architecture, torch.float32, CPU, sizes=ParallelSizes(2))
    source.load_weights(model)
    weight: list[list[float]] = model.decoder.layers[0].self_attention.in_proj.weight.tolist()
    return weight


def test_dummy_weights_do_not_depend_on_ranks() -> None:
    model = load_model("dummy:tiny-gated-delta", torch.float32, CPU).model
    mixer = model.decoder.layers[0].self_attention
    assert (mixer.out_norm.weight == 0).all(), "norms multiply by 1"
    assert (model.decoder.final_norm.weight == 0).all()
    parts = [
        part.chunk(2) for part in mixer.in_proj.weight.split(list(mixer.sizes.strips.values()))
    ]
    for rank, found in enumerate(run_ranks(2, _dummy_part)):
        assert torch.equal(torch.tensor(found), torch.cat([part[rank] for part in parts]))


def test_sizes_of_a_rank() -> None:
    assert TINY.delta.of_rank(2).strips == {
        "query": 16, "key": 16, "value": 32, "z": 32, "beta": 2, "alpha": 2,
    }  # fmt: skip
    assert TINY.delta.of_rank(2).state_shape == (2, 16, 16)


@pytest.mark.parametrize(
    ("changes", "ranks", "impl", "message"),
    [
        (
            {"num_query_groups": 4},
            4,
            "local",
            "=4 does not divide the model's 2 Gated DeltaNet key",
        ),
    ],
)
def test_what_cannot_be_split(changes: dict[str, Any], ranks: int, impl: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_partition(replace(TINY, **changes), ParallelSizes(ranks), impl)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_key_heads": 4}, "a layer's Gated DeltaNet sizes"),
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim=3"),
        ({"layernorm_zero_centered_gamma": False}, "layernorm_zero_centered_gamma=False, which a"),
    ],
)
def test_a_context_of_another_model(changes: dict[str, Any], message: str) -> None:
    model = build_model(TINY, torch.float32, CPU)
    config = transformer_config(TINY, torch.float32)
    for name, value in changes.items():
        setattr(config, name, value)
        setattr(model.config, name, value)
    for module in model.modules():
        if isinstance(module, GatedDeltaMixer):
            module.config = config
    with pytest.raises(ConfigurationError, match=message):
        check_model(model, config, InferenceConfig(max_sequence_length=64))


def test_a_mixer_without_an_engine() -> None:
    model = build_model(TINY, torch.float32, CPU)
    with pytest.raises(RuntimeError, match="Megatron-Core's own GatedDeltaNet"):
        model.decoder.layers[0].self_attention(torch.zeros(1, 1, 64))


def test_value_heads_share_key_heads() -> None:
    with pytest.raises(ValueError, match="linear_num_value_heads = 3 must be a multiple"):
        ModelArchitecture.from_dict(TINY.to_dict() | {"linear_num_value_heads": 3})
