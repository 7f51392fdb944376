"""Megatron checkpoints with multi-token prediction: ours, and those of training."""

import dataclasses
import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron_async.checkpoints import CheckpointError, load_model, open_model
from megatron_async.checkpoints.convert import convert
from megatron_async.checkpoints.torch_dist_strategy import SynchronousSaveStrategy
from megatron_async.models.architecture import ModelArchitecture, RopeScaling
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.hybrid import build_model, init_dummy_weights, transformer_config
from megatron_async.models.parallel_state import ensure_process_groups
from tests.support.megatron_mtp import megatron_layer
from tests.unit_tests.checkpoints.hybrid_families import (
    FAMILIES,
    assert_same_weights,
    huggingface_state,
)

CPU = torch.device("cpu")
TRAINED = dataclasses.replace(
    DUMMY_SHAPES["tiny"],
    model_type="qwen2",
    num_layers=3,
    pattern="",
    add_qkv_bias=True,
    tie_word_embeddings=False,
    rope_scaling=RopeScaling(16.0, 1.0, 4.0, 8192),
)
ARGS = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "swiglu": True,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "qk_layernorm": False,
    "num_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 16,
    "ffn_hidden_size": 128,
    "norm_epsilon": 1e-5,
    "rotary_base": 10000,
    "use_rope_scaling": True,
    "rope_scaling_factor": 16.0,
    "untie_embeddings_and_output_weights": True,
    "max_position_embeddings": 4096,
    "num_experts": None,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_is_bit_exact(family: str, family_folder: Callable[[str], Path], tmp_path):
    folder = family_folder(family)
    convert(folder, tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "back", to="huggingface")
    assert open_model(tmp_path / "megatron").format == "torch_dist"
    assert_same_weights(
        load_file(tmp_path / "back" / "model.safetensors"), load_file(folder / "model.safetensors")
    )
    architectures = {open_model(p).architecture for p in (folder, *tmp_path.iterdir())}
    assert len(architectures) == 1


@pytest.mark.parametrize("family", ["qwen3-tied", "mixtral"])
def test_megatron_itself_reads_what_we_write(family: str, family_folder, tmp_path):
    folder = family_folder(family)
    convert(folder, tmp_path / "m")
    expected = load_model(folder, torch.float32, CPU)
    model = build_model(expected.architecture, torch.float32, CPU)
    init_dummy_weights(model)
    state = dist_checkpointing.load(model.sharded_state_dict(prefix=""), str(tmp_path / "m"))
    model.load_state_dict(state)
    assert_same_weights(dict(model.named_parameters()), dict(expected.model.named_parameters()))


def gpt_model(a: ModelArchitecture) -> torch.nn.Module:
    """The deprecated GPTModel, as Megatron-LM trains it."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    ensure_process_groups()
    config = transformer_config(a, torch.float32)
    config.num_layers = a.num_layers
    config.moe_token_dispatcher_type = "allgather"
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(
            a.num_moe_experts or None, qk_layernorm=a.qk_layernorm, normalization="RMSNorm"
        ),
        a.vocab_size,
        a.max_position_embeddings,
        position_embedding_type="none",
        share_embeddings_and_output_weights=a.tie_word_embeddings,
        parallel_output=False,
    )
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.normal_(generator=generator)
    return model


def save_training(
    model: Any, folder: Path, args: dict[str, Any] | None, metadata: dict[str, Any] | None = None
) -> None:
    """What `save_checkpoint` of Megatron-LM leaves, as far as it concerns the model."""
    folder.mkdir(parents=True)
    state = model.sharded_state_dict(prefix="", metadata=metadata)
    state |= {"iteration": 7, "checkpoint_version": 3.0}
    if args is not None:
        state["args"] = Namespace(**args)
    dist_checkpointing.save(state, str(folder), SynchronousSaveStrategy())


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("common_file", [True, False])
def test_gpt_model_checkpoints_of_training_load(stacked: bool, common_file: bool, tmp_path):
    model = gpt_model(TRAINED)
    folder = tmp_path / "iter_0000007"
    metadata = {"non_homogeneous_layers": not stacked}
    save_training(model, folder, None if common_file else ARGS, metadata)
    if common_file:  # before Megatron-Core 0.19
        torch.save({"args": Namespace(**ARGS), "iteration": 7}, folder / "common.pt")
        _forget_common_state(folder)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
    loaded = load_model(tmp_path, torch.float32, CPU)
    assert loaded.architecture == TRAINED
    expected = dict(model.named_parameters())
    renamed = {}
    for name in dict(loaded.model.named_parameters()):
        parts = name.replace("final_norm", "final_layernorm").split(".")
        if parts[1] == "layers":
            parts[2] = str(int(parts[2]) // 2)
        renamed[name] = expected.pop(".".join(parts)).detach()
    assert not expected
    assert_same_weights(dict(loaded.model.named_parameters()), renamed)


def test_experts_of_training_load(tmp_path: Path) -> None:
    trained = dataclasses.replace(
        DUMMY_SHAPES["tiny-moe"], model_type="qwen3_moe", qk_layernorm=True, num_moe_experts=3,
        moe_ffn_hidden_size=24, moe_router_pre_softmax=True, ffn_hidden_size=24,
    )  # fmt: skip
    args = ARGS | {
        "add_qkv_bias": False,
        "qk_layernorm": True,
        "num_layers": 2,
        "use_rope_scaling": False,
        "untie_embeddings_and_output_weights": False,
        "ffn_hidden_size": 24,
        "num_experts": 3,
        "moe_router_pre_softmax": True,
    }
    model = gpt_model(trained)
    save_training(model, tmp_path / "m", args, {"non_homogeneous_layers": True})
    loaded = load_model(tmp_path / "m", torch.float32, CPU)
    assert loaded.architecture == trained
    found = dict(loaded.model.named_parameters())
    expected = dict(model.named_parameters())
    for expert in range(3):
        for name in ("linear_fc1.weight", "linear_fc2.weight"):
            theirs = expected[f"decoder.layers.1.mlp.experts.local_experts.{expert}.{name}"]
            assert torch.equal(found[f"decoder.layers.3.mlp.experts.{name}"][expert], theirs)
    for theirs, ours in (("0.mlp.router", "1.mlp.router"), ("1.pre_mlp", "3.pre_mlp")):
        suffix = ".weight" if "router" in ours else "_layernorm.weight"
        found_weight = found[f"decoder.layers.{ours}{suffix}"]
        assert torch.equal(found_weight, expected[f"decoder.layers.{theirs}{suffix}"])


def _forget_common_state(folder: Path) -> None:
    import pickle

    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata.pop("common_state/shard_0_1")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.fixture
def trained_hybrid(tmp_path: Path) -> Callable[[dict[str, Any] | None], Path]:
    def make(args: dict[str, Any] | None) -> Path:
        model = build_model(TRAINED, torch.float32, CPU)
        init_dummy_weights(model)
        save_training(model, tmp_path / "h", args)
        return tmp_path / "h"

    return make


def test_hybrid_model_checkpoints_of_training_load(trained_hybrid):
    folder = trained_hybrid(ARGS | {"num_layers": 6, "hybrid_layer_pattern": "*-*-*-"})
    loaded = load_model(folder, torch.float32, CPU)
    assert loaded.architecture == TRAINED
    assert huggingface_state(loaded.model, TRAINED)["lm_head.weight"].std() > 0.01


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (None, "says nothing about the model's architecture; place an architecture.json"),
        (ARGS | {"num_experts": 8}, r"router\.weight' .*is missing"),
        (ARGS | {"experimental_attention_variant": "dsa"}, "attention_variant = 'dsa'"),
        (ARGS | {"normalization": "LayerNorm"}, "normalization = 'LayerNorm' .*'RMSNorm'"),
        (ARGS | {"hybrid_layer_pattern": "*-*E*-"}, "and 'E' where num_experts says how many"),
        (ARGS | {"qk_layernorm": True}, r"q_layernorm\.weight' .*is missing"),
        (ARGS | {"hybrid_layer_pattern": "D-D-*-"}, "pattern 'D-D-\\*-' is not supported"),
        (ARGS | {"hidden_size": None}, "hidden_size = None"),
        ({k: v for k, v in ARGS.items() if k != "swiglu"}, "swiglu = False"),
        (ARGS | {"ffn_hidden_size": 64}, r"linear_fc1.weight' .*expected \[128, 64\], found \[256"),
        (ARGS | {"num_layers": 2}, "is not part of a 2-layer"),
        (
            ARGS | {"untie_embeddings_and_output_weights": False},
            r"'output_layer\.weight' .*is not part of .* tie_word_embeddings = True",
        ),
        (ARGS | {"num_layers": 4}, r"decoder\.layers\.6\..* is missing"),
    ],
)
def test_training_checkpoints_that_cannot_be_served(
    args: dict[str, Any] | None,
    message: str,
    trained_hybrid: Callable[[dict[str, Any] | None], Path],
) -> None:
    folder = trained_hybrid(args)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, torch.float32, CPU)


def _distcp(folder: Path) -> Path:
    return next(folder.glob("*.distcp"))


def _cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _json(name: str, **changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        values = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps(values))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: _cut(_distcp(f)), "a .distcp file is missing, truncated or corrupt"),
        (lambda f: _distcp(f).unlink(), "a .distcp file is missing, truncated or corrupt"),
        (lambda f: _cut(f / ".metadata"), ".metadata: truncated or corrupt"),
        (lambda f: (f / ".metadata").unlink(), ".metadata: is missing"),
        (_json("metadata.json", sharded_backend="zarr"), "sharded_backend = 'zarr'"),
        (_json("architecture.json", colour="red"), "architecture.json: not a ModelArchitecture"),
        (_json("architecture.json", vocab_size=5), "expected \\[5, 64\\], found \\[128, 64\\]"),
    ],
)
def test_damaged_checkpoints(damage: Callable[[Path], Any], message: str, family_folder, tmp_path):
    convert(family_folder("llama-tied"), tmp_path / "m")
    damage(tmp_path / "m")
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "m", torch.float32, CPU)


@pytest.mark.parametrize("mask", [0x01, 0xFF])
def test_a_flipped_byte_of_the_metadata_is_one_clear_error(mask: int, family_folder, tmp_path):
    """A pickle reads damaged bytes as anything, and anything may be raised: MemoryError too."""
    convert(family_folder("llama-tied"), tmp_path / "m")
    file = tmp_path / "m" / ".metadata"
    good = file.read_bytes()
    refused = 0
    for place in range(len(good) // 120, len(good), len(good) // 60):
        file.write_bytes(good[:place] + bytes([good[place] ^ mask]) + good[place + 1 :])
        try:
            load_model(tmp_path / "m", torch.float32, CPU)
        except CheckpointError:
            refused += 1
    assert refused > 40


def test_tracker_that_names_nothing(family_folder: Callable[[str], Path], tmp_path: Path) -> None:
    convert(family_folder("llama-tied"), tmp_path / "release")
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("release")
    assert open_model(tmp_path).architecture.num_layers == 3
    shutil.rmtree(tmp_path / "release")
    with pytest.raises(CheckpointError, match="names iteration 'release'"):
        open_model(tmp_path)


DENSE = replace(TRAINED, mtp_pattern="*-", mtp_num_depths=2)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("shape", ["tiny-mtp", "tiny-hybrid-mtp"])
def test_what_is_written_is_read(shape: str, tmp_path: Path) -> None:
    """By us and by Megatron-Core, with and without multi-token prediction."""
    expected = load_model(f"dummy:{shape}", torch.bfloat16, CPU, with_mtp=True)
    a = expected.architecture
    convert(f"dummy:{shape}", tmp_path / "m")
    assert open_model(tmp_path / "m").architecture == a
    assert open_model(tmp_path / "m").has_mtp_weights
    found = load_model(tmp_path / "m", torch.bfloat16, CPU, with_mtp=True).model
    assert_same(parameters(found), parameters(expected.model))
    model = build_model(a, torch.bfloat16, CPU, with_mtp=True)
    init_dummy_weights(model, seed=5)
    state = dist_checkpointing.load(model.sharded_state_dict(prefix=""), str(tmp_path / "m"))
    model.load_state_dict(state)
    assert_same(parameters(model), parameters(expected.model))
    # A checkpoint with it serves without, and one without it serves as ever.
    trunk = {k: t for k, t in parameters(expected.model).items() if not k.startswith("mtp.")}
    assert_same(parameters(load_model(tmp_path / "m", torch.bfloat16, CPU).model), trunk)
    convert(tmp_path / "m", tmp_path / "plain", with_mtp=False)
    assert open_model(tmp_path / "plain").architecture == a.without_mtp
    assert_same(parameters(load_model(tmp_path / "plain", torch.bfloat16, CPU).model), trunk)


def test_keys_are_those_of_megatrons_layer(tmp_path: Path) -> None:
    """Keys of Megatron's class, with its own sharded state; norms but for `eh_proj`'s have the
    names of the linear layers behind them, as in Megatron's TransformerEngine spec."""
    a = DUMMY_SHAPES["tiny-mtp"]
    model: Any = build_model(a, torch.float32, CPU, with_mtp=True)
    prefix = "mtp.layers.0."
    found = model.sharded_state_dict(prefix="")
    mine = {value.key for key, value in found.items() if key.startswith(prefix)}
    layer = megatron_layer(model.config, a.mtp_pattern)
    theirs = {value.key for value in layer.sharded_state_dict(prefix).values()}
    assert mine == {
        key.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_").replace(
            "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"
        )
        for key in theirs
    }


def test_missing_weights_are_named(tmp_path: Path) -> None:
    """A checkpoint whose arguments tell of multi-token prediction, but that has none of it."""
    model = build_model(TRAINED, torch.float32, CPU)
    init_dummy_weights(model)
    args = ARGS | {"num_layers": 6, "hybrid_layer_pattern": "*-*-*-/*-", "mtp_num_layers": 1}
    save_training(model, tmp_path / "h", args)
    assert not open_model(tmp_path / "h").has_mtp_weights
    load_model(tmp_path / "h", torch.float32, CPU)
    with pytest.raises(CheckpointError, match=r"tensor 'mtp\.layers\.0\.enorm\.weight'.*ngram"):
        load_model(tmp_path / "h", torch.float32, CPU, with_mtp=True)


@pytest.mark.parametrize(
    ("args", "depths", "repeated"),
    [
        ({"hybrid_layer_pattern": "*-*-|*-/*-/*-", "mtp_num_layers": 2}, 2, False),
        ({"hybrid_layer_pattern": "*-*-|*-/*-/*-"}, 2, False),
        ({"hybrid_layer_pattern": "*-*-*-/*-/*-", "mtp_num_layers": 2,
          "mtp_use_repeated_layer": True}, 1, True),
        ({"hybrid_override_pattern": "*-*-*-", "mtp_hybrid_override_pattern": "*-",
          "mtp_num_layers": 1}, 1, False),
    ],
)  # fmt: skip
def test_hybrid_models_of_training(args: dict[str, Any], depths: int, repeated: bool, tmp_path):
    expected = replace(DENSE, mtp_num_depths=depths, mtp_use_repeated_layer=repeated)
    model = build_model(expected, torch.float32, CPU, with_mtp=True)
    init_dummy_weights(model)
    save_training(model, tmp_path / "h", ARGS | {"num_layers": 6} | args)
    loaded = load_model(tmp_path / "h", torch.float32, CPU, with_mtp=True)
    assert loaded.architecture == expected
    assert_same(parameters(loaded.model), parameters(model))


def mtp_gpt_model(a: ModelArchitecture) -> Any:
    """The deprecated GPTModel, as Megatron-LM trains it with multi-token prediction."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )

    ensure_process_groups()
    config = transformer_config(a, torch.float32)
    config.num_layers, config.mtp_num_layers = a.num_layers, a.mtp_num_depths
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(
        config,
        spec,
        a.vocab_size,
        a.max_position_embeddings,
        position_embedding_type="none",
        share_embeddings_and_output_weights=a.tie_word_embeddings,
        parallel_output=False,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False),
    )
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.normal_(generator=generator)
    return model


@pytest.mark.parametrize("stacked", [True, False])
def test_gpt_models_of_training(stacked: bool, tmp_path: Path) -> None:
    """Whose depths are one transformer layer each."""
    model = mtp_gpt_model(DENSE)
    args = ARGS | {"mtp_num_layers": 2}
    save_training(model, tmp_path / "m", args, {"non_homogeneous_layers": not stacked})
    loaded = load_model(tmp_path / "m", torch.float32, CPU, with_mtp=True)
    assert loaded.architecture == DENSE
    theirs = {n: t for n, t in parameters(model).items() if n.startswith("mtp.")}
    found = {n: t for n, t in parameters(loaded.model).items() if n.startswith("mtp.")}
    for name, tensor in found.items():
        for number in "01":
            name = name.replace(f"mtp_model_layer.layers.{number}.", "mtp_model_layer.")
        assert torch.equal(theirs.pop(name), tensor), name
    assert not theirs
    plain = load_model(tmp_path / "m", torch.float32, CPU).model
    assert parameters(plain).keys() == parameters(loaded.model).keys() - found.keys()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"hybrid_layer_pattern": "*-*-*-/*D"}, r"pattern '\*-\*-\*-/\*D' is not supported"),
        ({"hybrid_layer_pattern": "*-*-*-", "mtp_num_layers": 1}, "without a pattern behind '/'"),
        ({"mtp_num_layers": -1}, "mtp_num_layers = -1 must be a positive integer"),
    ],
)
def test_arguments_that_are_refused(args: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = build_model(TRAINED, torch.float32, CPU)
    init_dummy_weights(model)
    save_training(model, tmp_path / "h", ARGS | args)
    with pytest.raises(CheckpointError, match=message):
        _ = open_model(tmp_path / "h").architecture
