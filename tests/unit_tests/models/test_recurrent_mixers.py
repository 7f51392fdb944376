"""Mixers of recurrent layers, Mamba-2's and Gated DeltaNet's: over ranks, in checkpoints of
Megatron, and what stands around them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.ssm.gated_delta_net.gdn import GatedDeltaNet
from megatron.core.ssm.mamba_mixer import MambaMixer

from megatron_async.checkpoints import load_model, open_model
from megatron_async.checkpoints.convert import convert
from megatron_async.checkpoints.torch_dist import save_torch_dist
from megatron_async.config import InferenceConfig
from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.fitness import check_model
from megatron_async.models.gated_delta import GatedDeltaMixer
from megatron_async.models.hybrid import build_model, init_dummy_weights, transformer_config
from megatron_async.models.parallel_state import ParallelSizes
from megatron_async.models.partition import check_partition, recurrent_layers
from megatron_async.models.sizes import MambaSizes
from megatron_async.ops.recurrent.gated_norms import gated_rms_norm
from tests.support.ranks import run_ranks
from tests.support.whole_sequence import whole_logits
from tests.unit_tests.checkpoints.hybrid_families import save_hybrid

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 128, (21,), generator=torch.Generator().manual_seed(4)).tolist()
FAMILIES = ("nemotron-3", "granite-moe", "qwen3-next", "qwen3.5")
"""Mamba-2 with two groups, and with one that both ranks hold; Gated DeltaNet with a key head's rows
of `in_proj` together, and in strips; the latter with experts, and without."""
TENSOR, EXPERTS = {"tensor_model_parallel": 2}, {"expert_model_parallel": 2}
STAGES, SEQUENCE = {"pipeline_model_parallel": 2}, TENSOR | {"sequence_parallel": True}
TINY = DUMMY_SHAPES["tiny-gated-delta"]
MAMBA = ModelArchitecture(
    "nemotron_h", 4, 64, 4, 2, 16, 96, 128, pattern="MM*-", activation="squared_relu",
    position_embedding_type="none", mamba_num_heads=8, mamba_head_dim=16, mamba_state_dim=16,
    mamba_num_groups=2,
)  # fmt: skip
KINDS = {"mamba": MAMBA, "mamba of one group": replace(MAMBA, mamba_num_groups=1), "delta": TINY}
TWO = ParallelSizes(tensor_model_parallel=2)


def mixer_of(model: Any, layer: int = 0) -> Any:
    found = model.decoder.layers[layer]
    return getattr(found, "mixer", None) or found.self_attention


def strips_of(mixer: Any, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parts of a weight of the mixer's input, by name."""
    strips = mixer.sizes.strips if weight is mixer.in_proj.weight else mixer.sizes.conv_strips
    return dict(zip(strips, weight.data.split(list(strips.values())), strict=True))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("hybrid")
    for name in FAMILIES:
        save_hybrid(name, root / name)
        convert(root / name, root / f"{name} of Megatron")
    kinds = ("", " of Megatron")
    return {name + kind: str(root / (name + kind)) for name in FAMILIES for kind in kinds}


def _columns_on_ranks(folder: str, sizes: dict[str, Any]) -> list[list[float]]:
    """Logits of this rank; of the first of two pipeline stages, none."""
    source = open_model(folder)
    model: Any = build_model(source.architecture, torch.float32, CPU, sizes=ParallelSizes(**sizes))
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    source.load_weights(model)
    if not model.pre_process:
        hidden = torch.empty(len(TOKENS), 1, model.config.hidden_size)
        torch.distributed.recv(hidden, 0)
        model.set_input_tensor(hidden)
    logits = whole_logits(model, TOKENS)
    if not model.post_process:
        torch.distributed.send(logits.contiguous(), 1)
        return []
    columns: list[list[float]] = logits.tolist()
    return columns


@pytest.mark.parametrize(
    ("name", "sizes", "ranks"),
    [
        ("nemotron-3", TENSOR, 2),
        ("granite-moe", TENSOR, 2),
        ("nemotron-3 of Megatron", SEQUENCE, 2),
        ("granite-moe of Megatron", SEQUENCE, 2),
        ("nemotron-3", STAGES, 2),
        ("nemotron-3", EXPERTS, 2),
        ("granite-moe", EXPERTS | TENSOR, 4),
        ("qwen3-next", TENSOR, 2),
        ("qwen3.5", TENSOR, 2),
        ("qwen3-next of Megatron", SEQUENCE, 2),
        ("qwen3.5 of Megatron", TENSOR, 2),
        ("qwen3.5", STAGES, 2),
        ("qwen3-next", EXPERTS, 2),
        ("qwen3-next", EXPERTS | TENSOR, 4),
    ],
)
def test_ranks_say_what_one_says(name: str, sizes: dict[str, Any], ranks: int, folders):
    whole = folders[name.removesuffix(" of Megatron")]
    expected = whole_logits(load_model(whole, torch.float32, CPU).model, TOKENS)
    found = run_ranks(ranks, _columns_on_ranks, folders[name], sizes)
    if "pipeline_model_parallel" in sizes:
        assert found.pop(0) == []
    shared = sizes.get("tensor_model_parallel", 1)
    for first in range(0, len(found), shared):
        logits = torch.cat([torch.tensor(part) for part in found[first : first + shared]], 1)
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["nemotron-3", "qwen3-next"])
def test_megatron_reads_what_we_write(name: str, folders: dict[str, str]) -> None:
    folder = folders[f"{name} of Megatron"]
    expected = load_model(folder, torch.float32, CPU)
    model = build_model(expected.architecture, torch.float32, CPU)
    init_dummy_weights(model)
    state = dist_checkpointing.load(model.sharded_state_dict(prefix=""), folder)
    model.load_state_dict(state)
    for name, parameter in expected.model.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    if name == "qwen3-next":
        keys = {item for item in dist_checkpointing.load_tensors_metadata(folder)}
        assert "decoder.layers.0.self_attention.in_proj.layer_norm_weight" in keys
        assert "decoder.layers.1.mlp.shared_experts.gate_weight" in keys


def described(state: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What a checkpoint would hold: key, whole shape, place, which replica."""
    found = []
    for value in state.values():
        parts = value.build() if hasattr(value, "build_fn") else [value]
        for part in (part for part in parts if "_extra_state" not in part.key):
            found.append((part.key, part.global_shape, part.global_offset, part.replica_id))
    return sorted(found, key=str)


def _both_descriptions(kind: str) -> tuple[list[Any], list[Any]]:
    """Our sharded state of a mixer, and Megatron's of the same parameters."""
    model: Any = build_model(KINDS[kind], torch.float32, CPU, sizes=TWO)
    mixer = mixer_of(model)
    ours, local = described(mixer.sharded_state_dict("mixer.")), mixer.sizes
    if kind == "mamba":
        mixer.d_inner_local_tp, mixer.nheads_local_tp = local.channels, local.heads
        mixer.ngroups_local_tp, mixer.d_state = local.groups, local.state_dim
        return ours, described(MambaMixer.sharded_state_dict(mixer, "mixer."))
    mixer.pg_collection, mixer.conv_bias, mixer.tp_size = model.pg_collection, False, 2
    mixer.in_proj_dim, mixer.conv_dim_local_tp = mixer.whole_sizes.in_proj, local.conv
    mixer.qk_dim_local_tp, mixer.v_dim_local_tp = local.key_heads * local.key_dim, local.channels
    mixer.cp_size, mixer.num_value_heads = 1, mixer.whole_sizes.value_heads
    mixer.num_v_heads_local_tp = local.value_heads
    GatedDeltaNet._setup_variant_attrs(mixer)
    return ours, described(GatedDeltaNet.sharded_state_dict(mixer, "mixer."))


@pytest.mark.parametrize(
    ("kind", "strips", "conv", "whole"),
    [
        ("mamba", ("z", "x", "B", "C", "dt"), ("weight", "bias"), {"D", "norm.weight"}),
        (
            "delta",
            ("query", "key", "value", "z", "beta", "alpha"),
            ("weight",),
            {"out_norm.weight"},
        ),
    ],
)
def test_checkpoints_are_megatrons(
    kind: str, strips: tuple[str, ...], conv: tuple[str, ...], whole: set[str]
) -> None:
    convolved = strips[1:4] if kind == "mamba" else strips[:3]
    for rank, (ours, theirs) in enumerate(run_ranks(2, _both_descriptions, kind)):
        names = {entry[0].removeprefix("mixer.") for entry in ours}
        assert names == whole | {"dt_bias", "A_log", "out_proj.weight"} | {
            *(f"in_proj.weight.{strip}" for strip in strips),
            *(f"conv1d.{part}.{strip}" for part in conv for strip in convolved),
        }
        # The norm of Mamba-2 is a class of mamba-ssm's, which splits its weight as we do.
        norm = [entry for entry in ours if entry[0] == "mixer.norm.weight"]
        assert [entry[1:3] for entry in norm] == [((128,), (64 * rank,))] * (kind == "mamba")
        others = [entry for entry in ours if entry not in norm]
        assert others == [entry for entry in theirs if entry[0] != "mixer.norm.weight"]


def _save_on_ranks(kind: str, folder: str) -> None:
    model = build_model(KINDS[kind], torch.float32, CPU, sizes=TWO)
    generator = torch.Generator().manual_seed(model.pg_collection.tp.rank())
    on_all = ("norm.weight", "router.weight", "gate_weight")
    for name, parameter in model.named_parameters():
        parameter.data.normal_(generator=generator)
        if name.endswith(on_all) or (parameter.dim() == 1 and "layernorm" in name):
            parameter.data.fill_(0.5)
    for mixer in (mixer_of(model, 0), mixer_of(model, 1)) if kind == "mamba of one group" else ():
        for weight in (mixer.in_proj.weight, mixer.conv1d_weight, mixer.conv1d_bias):
            strips = strips_of(mixer, weight)
            strips["B"].fill_(0.25)
            strips["C"].fill_(0.25)
    save_torch_dist(model, KINDS[kind], None, Path(folder))
    source = open_model(folder)
    again = build_model(KINDS[kind], torch.float32, CPU, sizes=TWO)
    source.load_weights(again)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


@pytest.mark.parametrize("kind", KINDS)
def test_what_two_ranks_save_one_reads(kind: str, tmp_path: Path) -> None:
    run_ranks(2, _save_on_ranks, kind, str(tmp_path))
    mixer = mixer_of(load_model(tmp_path, torch.float32, CPU).model)
    weight = mixer.in_proj.weight
    if kind == "delta":
        assert weight.unique(dim=0).size(0) == TINY.delta.in_proj
        return
    strips = strips_of(mixer, weight)
    assert strips["z"].unique(dim=0).size(0) == len(strips["z"])
    assert (strips["B"] == 0.25).all() == (kind == "mamba of one group")


def _dummy_part(name: str) -> dict[str, list[float]]:
    source = open_model(name)
    model = build_model(source.architecture, torch.float32, CPU, sizes=ParallelSizes(2))
    source.load_weights(model)
    mixer = mixer_of(model)
    return {"in_proj": mixer.in_proj.weight.tolist(), "A_log": mixer.A_log.tolist()}


@pytest.mark.parametrize("name", ["dummy:tiny-hybrid", "dummy:tiny-gated-delta"])
def test_dummy_weights_do_not_depend_on_ranks(name: str) -> None:
    model = load_model(name, torch.float32, CPU).model
    mixer = mixer_of(model)
    if name == "dummy:tiny-hybrid":
        assert (mixer.D == 1).all()
    else:
        assert (mixer.out_norm.weight == 0).all(), "norms multiply by 1"
        assert (model.decoder.final_norm.weight == 0).all()
    halves = [part.chunk(2) for part in strips_of(mixer, mixer.in_proj.weight).values()]
    for rank, found in enumerate(run_ranks(2, _dummy_part, name)):
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


def test_sizes_of_a_rank() -> None:
    assert TINY.delta.of_rank(2).strips == {
        "query": 16, "key": 16, "value": 32, "z": 32, "beta": 2, "alpha": 2,
    }  # fmt: skip
    assert TINY.delta.of_rank(2).state_shape == (2, 16, 16)


@pytest.mark.parametrize(
    ("architecture", "ranks", "message"),
    [
        (replace(MAMBA, num_query_groups=4), 4, "=4 does not divide the model's 2"),
        (
            replace(MAMBA, num_query_groups=4, mamba_num_heads=9),
            2,
            r"2 does not divide the model's 9 Mamba-2 heads",
        ),
        (
            replace(TINY, num_query_groups=4),
            4,
            "=4 does not divide the model's 2 Gated DeltaNet key",
        ),
    ],
)
def test_what_cannot_be_split(architecture: ModelArchitecture, ranks: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_partition(architecture, ParallelSizes(ranks), "local")


def test_what_a_stage_needs_room_for() -> None:
    config = transformer_config(MAMBA, torch.bfloat16, ParallelSizes(2, 2))
    assert config.hybrid_layer_pattern == "MM|*-"
    found = []
    for config.pipeline_stage in (0, 1):
        found.append(recurrent_layers(config))
    assert found == ["MM", ""]
    rank = MambaSizes.of(config).of_rank(2)
    assert (rank.state_shape, rank.conv) == ((4, 16, 16), 96)
    assert recurrent_layers(transformer_config(DUMMY_SHAPES["tiny"], torch.bfloat16)) == ""


def test_a_context_of_other_groups() -> None:
    model = build_model(MAMBA, torch.float32, CPU)
    other = transformer_config(replace(MAMBA, mamba_num_groups=4), torch.float32)
    with pytest.raises(ConfigurationError, match=r"Mamba-2 sizes MambaSizes.*groups=2.*has room"):
        check_model(model, other, InferenceConfig())
    check_model(model, model.config, InferenceConfig())


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


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        (MAMBA, "Mamba2Mixer runs only inside the engine"),
        (TINY, "Megatron-Core's own GatedDeltaNet"),
    ],
)
def test_outside_of_the_engine(architecture: ModelArchitecture, message: str) -> None:
    model = build_model(architecture, torch.float32, CPU)
    with pytest.raises(RuntimeError, match=message):
        mixer_of(model)(torch.zeros(1, 1, 64))


def test_layers_are_counted() -> None:
    model = build_model(MAMBA, torch.float32, CPU)
    assert [mixer_of(model, n).state_layer_index for n in (0, 1)] == [0, 1]


def test_value_heads_share_key_heads() -> None:
    with pytest.raises(ValueError, match="linear_num_value_heads = 3 must be a multiple"):
        ModelArchitecture.from_dict(TINY.to_dict() | {"linear_num_value_heads": 3})
