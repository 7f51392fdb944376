"""Megatron checkpoints with multi-token prediction: ours, and those of training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from torch import Tensor, nn

from megatron_async.checkpoints import CheckpointError, load_model, open_model
from megatron_async.checkpoints.convert import convert
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.hybrid import build_model, init_dummy_weights, transformer_config
from megatron_async.models.parallel_state import ensure_process_groups
from tests.support.megatron_mtp import megatron_layer
from tests.unit_tests.checkpoints.test_torch_dist import ARGS, TRAINED, save_training

CPU = torch.device("cpu")
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
    """Of its own class, with its own sharded state; norms but for `eh_proj`'s have the names of the
    linear layers behind them, as in Megatron's TransformerEngine spec."""
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
def test_hybrid_models_of_training(
    args: dict[str, Any], depths: int, repeated: bool, tmp_path: Path
) -> None:
    expected = replace(DENSE, mtp_num_depths=depths, mtp_use_repeated_layer=repeated)
    model = build_model(expected, torch.float32, CPU, with_mtp=True)
    init_dummy_weights(model)
    save_training(model, tmp_path / "h", ARGS | {"num_layers": 6} | args)
    loaded = load_model(tmp_path / "h", torch.float32, CPU, with_mtp=True)
    assert loaded.architecture == expected
    assert_same(parameters(loaded.model), parameters(model))


def gpt_model(a: ModelArchitecture) -> Any:
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
    model = gpt_model(DENSE)
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
