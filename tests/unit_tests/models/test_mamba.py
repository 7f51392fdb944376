"""The Mamba-2 mixer over tensor-parallel ranks, and in Megatron's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.ssm.mamba_mixer import MambaMixer

from megatron_async.checkpoints import load_model, open_model
from megatron_async.checkpoints.torch_dist import save_torch_dist
from megatron_async.config import InferenceConfig
from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.fitness import check_model
from megatron_async.models.hybrid import build_model, init_dummy_weights, transformer_config
from megatron_async.models.mamba import Mamba2Mixer
from megatron_async.models.parallel_state import ParallelSizes
from megatron_async.models.partition import check_partition, mamba_sizes, recurrent_layers
from megatron_async.ops.recurrent.gated_norms import gated_rms_norm
from tests.support.ranks import run_ranks
from tests.unit_tests.checkpoints.test_torch_dist import save_training
from tests.unit_tests.models.test_recurrent_mixers import described

CPU = torch.device("cpu")


def _both_descriptions() -> tuple[list[Any], list[Any]]:
    """Our sharded state of a mixer, and Megatron's of the same parameters."""
    architecture = hybrid_architecture()
    sizes = ParallelSizes(tensor_model_parallel=2)
    mixer: Any = build_model(architecture, torch.float32, CPU, sizes=sizes).decoder.layers[0].mixer
    ours = described(mixer.sharded_state_dict("mixer."))
    local = mixer.sizes
    mixer.d_inner_local_tp, mixer.nheads_local_tp = local.inner, local.heads
    mixer.ngroups_local_tp, mixer.d_state = local.groups, local.state_dim
    theirs = described(MambaMixer.sharded_state_dict(mixer, "mixer."))
    return ours, theirs


def hybrid_architecture(groups: int = 2) -> ModelArchitecture:
    return ModelArchitecture(
        "nemotron_h", 4, 64, 4, 2, 16, 96, 128, pattern="MM*-", activation="squared_relu",
        position_embedding_type="none", mamba_num_heads=8, mamba_head_dim=16,
        mamba_state_dim=16, mamba_num_groups=groups,
    )  # fmt: skip


def test_checkpoints_are_megatrons() -> None:
    for rank, (ours, theirs) in enumerate(run_ranks(2, _both_descriptions)):
        # Its norm is a class of mamba-ssm's, which splits its weight as we do.
        norm = [entry for entry in ours if entry[0] == "mixer.norm.weight"]
        assert [entry[1:3] for entry in norm] == [((128,), (64 * rank,))]
        others = [entry for entry in ours if entry not in norm]
        assert others == [entry for entry in theirs if entry[0] != "mixer.norm.weight"]
        names = {entry[0].removeprefix("mixer.") for entry in ours}
        strips = {f"in_proj.weight.{strip}" for strip in ("z", "x", "B", "C", "dt")}
        conv = {f"conv1d.{part}.{strip}" for part in ("weight", "bias") for strip in "xBC"}
        assert names == strips | conv | {
            "dt_bias", "A_log", "D", "norm.weight", "out_proj.weight"
        }  # fmt: skip


def _save_on_ranks(folder: str, groups: int) -> None:
    architecture = hybrid_architecture(groups)
    sizes = ParallelSizes(tensor_model_parallel=2)
    model = build_model(architecture, torch.float32, CPU, sizes=sizes)
    torch.manual_seed(model.pg_collection.tp.rank())
    for name, parameter in model.named_parameters():
        parameter.data.normal_()
        if (parameter.dim() == 1 and "layernorm" in name) or name.endswith("norm.weight"):
            parameter.data.fill_(0.5)  # the same on both
    for layer in model.decoder.layers:
        if isinstance(getattr(layer, "mixer", None), Mamba2Mixer) and groups == 1:
            for weight, strips in (
                (layer.mixer.in_proj.weight, layer.mixer.sizes.strips),
                (layer.mixer.conv1d_weight, layer.mixer.sizes.conv_strips),
                (layer.mixer.conv1d_bias, layer.mixer.sizes.conv_strips),
            ):
                parts = weight.data.split(list(strips.values()))
                for strip, part in zip(strips, parts, strict=True):
                    if strip in ("B", "C"):
                        part.fill_(0.25)
    Path(folder).mkdir(exist_ok=True)
    save_torch_dist(model, architecture, None, Path(folder))
    source = open_model(folder)
    again = build_model(architecture, torch.float32, CPU, sizes=sizes)
    source.load_weights(again)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


@pytest.mark.parametrize("groups", [1, 2])
def test_what_two_ranks_save_one_reads(groups: int, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    run_ranks(2, _save_on_ranks, str(folder), groups)
    whole = load_model(folder, torch.float32, CPU).model
    sizes = hybrid_architecture(groups).mamba
    mixer = whole.decoder.layers[0].mixer
    z, _x, b, _c, _dt = mixer.in_proj.weight.split(list(sizes.strips.values()))
    assert z.unique(dim=0).size(0) == len(z)
    assert (b == 0.25).all() == (groups == 1)


@pytest.mark.parametrize("activation", ["squared_relu", "silu"])
def test_checkpoints_of_training_load(activation: str, tmp_path: Path) -> None:
    """A hybrid of Megatron-LM's, whose arguments say what it is."""
    values = DUMMY_SHAPES["tiny-hybrid"].to_dict() | {"activation": activation, "pattern": "MEM*-E"}
    trained = ModelArchitecture.from_dict(values)
    args = {
        "normalization": "RMSNorm",
        "position_embedding_type": "none",
        "swiglu": activation == "silu",
        "squared_relu": activation == "squared_relu",
        "add_bias_linear": False,
        "num_layers": 6,
        "hybrid_layer_pattern": "MEM|*-E",
        "group_query_attention": True,
        "untie_embeddings_and_output_weights": True,
        "num_experts": 8,
        "norm_epsilon": 1e-5,
        **{name: values[name] for name in ARGUMENTS},
    }
    model = build_model(trained, torch.float32, CPU)
    init_dummy_weights(model)
    save_training(model, tmp_path / "m", args)
    loaded = load_model(tmp_path / "m", torch.float32, CPU)
    assert loaded.architecture == trained
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


ARGUMENTS = (
    "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size",
    "max_position_embeddings", "mamba_num_heads", "mamba_head_dim", "mamba_state_dim",
    "mamba_num_groups", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_score_function",
    "moe_router_enable_expert_bias", "moe_router_topk_scaling_factor",
    "moe_shared_expert_intermediate_size",
)  # fmt: skip
"""Fields of `ModelArchitecture` that are arguments of Megatron-LM under the same name."""


def _dummy_part() -> dict[str, list[float]]:
    source = open_model("dummy:tiny-hybrid")
    model = build_model(source.architecture, torch.float32, CPU, sizes=ParallelSizes(2))
    source.load_weights(model)
    mixer = model.decoder.layers[0].mixer
    return {"in_proj": mixer.in_proj.weight.tolist(), "A_log": mixer.A_log.tolist()}


def test_dummy_weights_do_not_depend_on_ranks() -> None:
    loaded = load_model("dummy:tiny-hybrid", torch.float32, CPU)
    mixer = loaded.model.decoder.layers[0].mixer
    strips = list(mixer.sizes.strips.values())
    halves = [part.chunk(2) for part in mixer.in_proj.weight.split(strips)]
    assert (mixer.D == 1).all()
    for rank, found in enumerate(run_ranks(2, _dummy_part)):
        expected = torch.cat([half[rank] for half in halves])
        assert torch.equal(torch.tensor(found["in_proj"]), expected)
        assert torch.equal(torch.tensor(found["A_log"]), mixer.A_log.chunk(2)[rank])


def test_gated_norm() -> None:
    y, z, weight = torch.randn(5, 12), torch.randn(5, 20)[:, :12], torch.randn(12)
    found = gated_rms_norm.reference(y, z, weight, 3, 1e-5)
    for group in range(3):
        part = slice(4 * group, 4 * group + 4)
        gated = y[:, part] * z[:, part] * torch.sigmoid(z[:, part])
        normed = torch.nn.functional.rms_norm(gated, (4,), weight[part], 1e-5)
        torch.testing.assert_close(found[:, part], normed)


@pytest.mark.parametrize(
    ("changes", "ranks", "impl", "message"),
    [
        ({"mamba_num_groups": 2}, 4, "local", "=4 does not divide the model's 2"),
        ({"mamba_num_heads": 9}, 2, "local", r"2 does not divide the model's 9 Mamba-2 heads"),
    ],
)
def test_mixers_that_cannot_be_shared_out(
    changes: dict[str, int], ranks: int, impl: str, message: str
) -> None:
    values = hybrid_architecture().to_dict() | {"num_query_groups": 4} | changes
    with pytest.raises(ConfigurationError, match=message):
        check_partition(ModelArchitecture.from_dict(values), ParallelSizes(ranks), impl)


def test_what_a_stage_needs_room_for() -> None:
    architecture = ModelArchitecture.from_dict(hybrid_architecture().to_dict() | {"num_layers": 4})
    config = transformer_config(architecture, torch.bfloat16, ParallelSizes(2, 2))
    assert config.hybrid_layer_pattern == "MM|*-"
    found = []
    for config.pipeline_stage in (0, 1):
        found.append(recurrent_layers(config))
    assert found == ["MM", ""]
    rank = mamba_sizes(config).of_rank(2)
    assert (rank.state_shape, rank.conv) == ((4, 16, 16), 96)
    assert recurrent_layers(transformer_config(DUMMY_SHAPES["tiny"], torch.bfloat16)) == ""


def test_a_context_of_another_model() -> None:
    model = build_model(hybrid_architecture(), torch.float32, CPU)
    other = transformer_config(hybrid_architecture(groups=4), torch.float32)
    with pytest.raises(ConfigurationError, match=r"Mamba-2 sizes MambaSizes.*groups=2.*has room"):
        check_model(model, other, InferenceConfig())
    check_model(model, model.config, InferenceConfig())


def test_outside_of_the_engine() -> None:
    model = build_model(hybrid_architecture(), torch.float32, CPU)
    with pytest.raises(RuntimeError, match="Mamba2Mixer runs only inside the engine"):
        model.decoder.layers[0].mixer(torch.zeros(1, 1, 64))
    assert [model.decoder.layers[n].mixer.state_layer_index for n in (0, 1)] == [0, 1]
