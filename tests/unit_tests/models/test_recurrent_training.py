"""Recurrent models that Megatron-LM trained: checkpoints of its runs load as they were saved."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_async.checkpoints import CheckpointError, load_model
from megatron_async.config import InferenceConfig
from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.fitness import check_model
from megatron_async.models.hybrid import build_model, init_dummy_weights
from megatron_async.models.hybrid_stack import hybrid_stack_spec
from megatron_async.models.model_config import transformer_config
from megatron_async.models.norm import make_norm
from megatron_async.models.parallel_state import ensure_process_groups
from tests.unit_tests.checkpoints.test_torch_dist import save_training

CPU = torch.device("cpu")
TINY = DUMMY_SHAPES["tiny-gated-delta"]


def arguments_of(trained: ModelArchitecture, **others: Any) -> dict[str, Any]:
    """Arguments of a training run of Megatron-LM, which say what the model is."""
    values = trained.to_dict()
    names = [*ARGUMENTS, *(MAMBA_ARGUMENTS if "M" in trained.pattern else DELTA_ARGUMENTS)]
    names += MOE_ARGUMENTS if trained.num_moe_experts else ()
    return {
        **{name: values[name] for name in names},
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "group_query_attention": True,
        "untie_embeddings_and_output_weights": True,
        "norm_epsilon": 1e-5,
        **others,
    }


ARGUMENTS = (
    "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size",
    "max_position_embeddings",
)  # fmt: skip
"""Fields of `ModelArchitecture` that are arguments of Megatron-LM under the same name."""
MOE_ARGUMENTS = ("moe_ffn_hidden_size", "moe_router_topk", "moe_shared_expert_intermediate_size")
MAMBA_ARGUMENTS = (
    "mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups",
    "moe_router_score_function", "moe_router_enable_expert_bias", "moe_router_topk_scaling_factor",
)  # fmt: skip
DELTA_ARGUMENTS = (
    "rotary_percent", "qk_layernorm", "attention_output_gate", "linear_num_key_heads",
    "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
)  # fmt: skip
DELTA_RUN = {"position_embedding_type": "rope", "apply_layernorm_1p": True, "swiglu": True}
HYBRID = replace(DUMMY_SHAPES["tiny-hybrid"], pattern="MEM*-E")


@pytest.mark.parametrize(
    ("trained", "others"),
    [
        *(
            (
                replace(HYBRID, activation=activation),
                {
                    "position_embedding_type": "none",
                    "swiglu": activation == "silu",
                    "squared_relu": activation == "squared_relu",
                    "hybrid_layer_pattern": "MEM|*-E",
                },
            )
            for activation in ("squared_relu", "silu")
        ),
        (
            replace(TINY, layernorm_epsilon=1e-5, rotary_base=500000.0),
            DELTA_RUN
            | {
                "hybrid_layer_pattern": "GEG-|*E",
                "moe_shared_expert_gate": True,
                "rotary_base": 500000,
            },
        ),
    ],
    ids=["mamba-squared_relu", "mamba-silu", "delta"],
)
def test_checkpoints_of_training_load(trained: ModelArchitecture, others: dict[str, Any], tmp_path):
    model = build_model(trained, torch.float32, CPU)
    init_dummy_weights(model)
    args = arguments_of(trained, num_layers=6, num_experts=8, **others)
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
    args = arguments_of(
        trained,
        num_layers=3,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=frequency,
        **DELTA_RUN,
    )
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
