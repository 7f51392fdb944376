"""Arguments of training runs: what is read of them, and what is refused or left unread."""

import dataclasses
import io
import os
import pickle
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.training.arguments import add_megatron_arguments

from megatron_async.checkpoints import CheckpointError, load_model, open_model
from megatron_async.checkpoints.megatron_args import architecture_from_args
from megatron_async.checkpoints.megatron_defaults import IS_HARMLESS, ONLY_IN_SOME, SUPPORTED
from megatron_async.checkpoints.pickled import UnreadObject, load_common_state
from megatron_async.checkpoints.settings import tell_unknown
from megatron_async.models.architecture import ModelArchitecture, RopeScaling
from tests.unit_tests.checkpoints.training_checkpoints import (
    LENGTH,
    VOCABULARY,
    megatron_log_probs,
    parsed_args,
    save_run,
    trained_model,
)

CPU = torch.device("cpu")
LOST = "lost_training_module"


def read(**changes: Any) -> ModelArchitecture:
    args = vars(parsed_args(**changes))
    return architecture_from_args({k: v for k, v in args.items() if v != "absent"}, 96, (), "run")


class Danger:
    """Runs a command when an ordinary unpickler reads it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


@pytest.fixture
def lost() -> Iterator[ModuleType]:
    """A module whose objects are pickled, and which is then no more."""
    module = ModuleType(LOST)

    def own(name: str, base: Any, **members: Any) -> None:
        made = type(name, (base,), {"__module__": LOST, **members})
        setattr(module, name, made)

    own("Plain", object)
    own("Listed", list)
    own("Mapped", dict)
    module.Kind = Enum("Kind", ["RMSNorm"], module=LOST)  # type: ignore[attr-defined]
    outer = type("Outer", (), {"__module__": LOST})
    inner = Enum("Inner", ["one"], module=LOST, qualname="Outer.Inner")
    outer.Inner = inner  # type: ignore[attr-defined]
    module.Outer = outer  # type: ignore[attr-defined]
    sys.modules[LOST] = module
    yield module
    sys.modules.pop(LOST, None)


def test_objects_of_unknown_classes_do_not_stop_loading(lost: Any, tmp_path: Path) -> None:
    plain = lost.Plain()
    plain.attribute = [1]
    args = parsed_args(
        plain=plain,
        listed=lost.Listed([1, 2]),
        mapped=lost.Mapped(a=1),
        kind=lost.Kind.RMSNorm,
        kinds=[lost.Kind.RMSNorm],
        inner=lost.Outer.Inner.one,
        by_kind={lost.Kind.RMSNorm: 1},
        danger=Danger(tmp_path / "ran"),
        generator=torch.Generator().get_state(),
    )
    model = trained_model(args)
    save_run(model, tmp_path / "m", args)
    (tmp_path / "ran").unlink(missing_ok=True)  # copying the arguments ran it
    sys.modules.pop(LOST)
    loaded = load_model(tmp_path / "m", torch.float32, CPU)
    assert loaded.architecture.layernorm_epsilon == args.layernorm_epsilon
    assert loaded.architecture.max_position_embeddings == LENGTH
    assert not (tmp_path / "ran").exists()


def test_an_unknown_object_that_is_needed_is_named(lost: Any, tmp_path: Path) -> None:
    args = parsed_args(normalization=lost.Kind.RMSNorm)
    save_run(trained_model(parsed_args()), tmp_path, args)
    sys.modules.pop(LOST)
    message = rf"normalization = <{LOST}\.Kind, not read>.*place an architecture\.json"
    with pytest.raises(CheckpointError, match=message):
        _ = open_model(tmp_path).architecture


def test_values_of_known_classes_are_kept(tmp_path: Path) -> None:
    file = io.BytesIO()
    args = parsed_args()
    torch.save({"args": args, "weight": torch.ones(2)}, file)
    state = load_common_state(file.getvalue())
    found, expected = vars(state["args"]), vars(args)
    assert found.keys() == expected.keys()
    unread = {name for name, value in found.items() if isinstance(value, UnreadObject)}
    assert unread == {"attention_backend", "inference_cuda_graph_scope", "exit_signal"}
    for name in found.keys() - unread - {"cuda_graph_modules"}:
        assert found[name] == expected[name], name
    assert isinstance(state["weight"], UnreadObject)


def test_nothing_in_the_index_runs(tmp_path: Path) -> None:
    args = parsed_args()
    save_run(trained_model(args), tmp_path / "m", args)
    index = tmp_path / "m" / ".metadata"
    index.write_bytes(pickle.dumps(Danger(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"\.metadata: truncated or corrupt \(it is a Unread"):
        _ = open_model(tmp_path / "m").architecture
    assert not (tmp_path / "ran").exists()


def test_names_of_earlier_parsers() -> None:
    """`--norm-epsilon` and `--apply-layernorm-1p` were arguments of these names before 0.19, and
    have the names of `TransformerConfig` since."""
    assert read(layernorm_epsilon=1e-6).layernorm_epsilon == 1e-6
    assert read(layernorm_epsilon="absent", norm_epsilon=1e-6).layernorm_epsilon == 1e-6
    assert read(layernorm_epsilon="absent").layernorm_epsilon == 1e-5
    assert read(layernorm_zero_centered_gamma=True).layernorm_zero_centered_gamma
    old = read(layernorm_zero_centered_gamma="absent", apply_layernorm_1p=True)
    assert old.layernorm_zero_centered_gamma


def test_windows_and_which_layers_have_them() -> None:
    assert not any(read().attention_windows)
    assert not any(read(window_size=(-1, -1), window_attn_skip_freq=2).attention_windows)
    whole = read(window_size=(127, 0))  # those before it, and the token
    assert set(whole.attention_windows) == {128}
    layers = whole.num_layers
    mixed = read(window_size=(127, 0), window_attn_skip_freq=2).attention_windows
    assert mixed == (128, 0, 128, 0, 128, 0)[:layers]
    listed = [0] * (layers - 1) + [1]
    mixed = read(window_size=(127, 0), window_attn_skip_freq=listed).attention_windows
    assert mixed == (*[0] * (layers - 1), 128)
    for wrong in (0, "2", [1] * (layers + 1), [1.0] * layers):
        with pytest.raises(CheckpointError, match="window_attn_skip_freq"):
            read(window_size=(127, 0), window_attn_skip_freq=wrong)


YARN = {
    "position_embedding_type": "yarn",
    "yarn_rotary_scaling_factor": 32.0,
    "yarn_original_max_position_embeddings": 4096,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": None,
    "yarn_mscale_all_dim": None,
    "yarn_correction_range_round_to_int": False,
}
GPT_OSS = {
    "num_experts": 4,
    "add_bias_linear": True,
    "add_qkv_bias": True,
    "softmax_type": "learnable",
    "swiglu": False,
    "quick_geglu": True,
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
    **YARN,
}


def test_gpt_oss() -> None:
    """Features of gpt-oss make its family; another value leaves none with a Hugging Face form."""
    found = read(**GPT_OSS)
    assert found.model_type == "gpt_oss"
    assert found.rope_scaling == RopeScaling(
        32.0,
        original_max_position_embeddings=4096,
        kind="yarn",
        truncate=False,
        attention_factor=pytest.approx(1.34657, abs=1e-5),
    )
    for name, value in (
        ("softmax_type", "off-by-one"),
        ("glu_linear_offset", 0.5),
        ("activation_func_clamp_value", None),
        ("add_bias_linear", False),
    ):
        other = read(**GPT_OSS | {name: value})
        assert other.model_type == "megatron"
        assert getattr(other, name) == value
    for changes, message in (
        ({"yarn_beta_fast": None}, "yarn_beta_fast = None must be a positive number"),
        ({"glu_linear_offset": "x"}, "glu_linear_offset = 'x' must be a positive number"),
        ({"swiglu": True}, "swiglu = True, quick_geglu = True"),
        ({"moe_shared_expert_intermediate_size": 8}, "add_bias_linear = True is not supported"),
        ({"quick_geglu": False, "squared_relu": True}, "only of a gate"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read(**GPT_OSS | changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no_rope_freq", [0, 1]),
        ("apply_residual_connection_post_layernorm", True),
        ("moe_mlp_glu_interleave_size", 32),
        ("moe_expert_capacity_factor", 1.0),
        ("moe_apply_probs_on_input", True),
        ("heterogeneous_layers_config_path", "layers.json"),
        ("rotary_interleaved", True),
        ("rotary_seq_len_interpolation_factor", 4),
        ("window_size", (128, 128)),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_router_load_balancing_type", ["aux_loss", "quantile_balancing"]),
        *((name, "something else") for name in SUPPORTED),
        ("final_logit_softcapping", 30.0),  # of a fork: no name of Megatron's
        ("embedding_multiplier", 12.0),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"{name} = .*is not supported \(only"):
        read(num_experts=4, **{name: value})


class Recorder(dict[str, Any]):
    """Arguments, and which of them were read."""

    def __init__(self, args: Namespace) -> None:
        super().__init__(vars(args))
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)


def parser_names() -> dict[str, Any]:
    """Every option of Megatron-LM's parser, and its default."""
    parser = ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return vars(parser.parse_args([]))


def test_every_argument_is_read_or_refused_or_known_to_be_harmless() -> None:
    """An option or a field of a later Megatron-Core makes this test fail: see what it does, and
    read it, or write it into `megatron_defaults`."""
    experts = {"num_experts": 4, "moe_shared_expert_intermediate_size": 8}
    recorders = [
        Recorder(parsed_args(use_rope_scaling=True, **experts)),
        Recorder(parsed_args(hybrid_layer_pattern="M*-E/*-", **experts)),
        Recorder(parsed_args(**YARN)),
        Recorder(parsed_args(layernorm_zero_centered_gamma=None, layernorm_epsilon=None)),
        Recorder(
            parsed_args(experimental_attention_variant="gated_delta_net", linear_attention_freq=2)
        ),
    ]
    for recorder in recorders:
        architecture_from_args(recorder, VOCABULARY, (), "run")
    taken = set[str]().union(*(recorder.read for recorder in recorders))
    assert taken >= set(ONLY_IN_SOME)
    fields = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    names = parser_names().keys() | fields
    assert not sorted(name for name in names - taken if not IS_HARMLESS(name))


def test_a_whole_command_line_is_read_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    tell_unknown.cache_clear()
    args = parsed_args()
    whole = read(**(parser_names() | vars(args)))
    assert whole == read()
    assert not caplog.messages


@pytest.mark.parametrize(
    "config",
    [
        {"apply_query_key_layer_scaling": True},
        {"attention_softmax_in_fp32": False},
        {"fp32_residual_connection": True},
        {"mup_embedding_mult": 3.0, "mup_output_mult": 0.3, "mup_attn_scale_power": 0.5},
        {"window_attn_skip_freq": 2, "mrope_section": [1, 1, 2]},
        {"moe_router_dtype": "fp64", "moe_z_loss_coeff": 0.1, "calculate_per_token_loss": True},
        {"qk_clip": True, "mlp_chunks_for_prefill": 2, "moe_enable_routing_replay": True},
    ],
)
def test_harmless_arguments_change_nothing_in_megatron_either(config: dict[str, Any]) -> None:
    args = parsed_args(num_experts=4)
    expected = megatron_log_probs(trained_model(args), list(range(24)))
    changed = megatron_log_probs(trained_model(args, **config), list(range(24)))
    torch.testing.assert_close(changed, expected, rtol=0, atol=1e-4)
    assert read(num_experts=4, **config) == read(num_experts=4)


def test_unknown_arguments_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    tell_unknown.cache_clear()
    for _ in range(2):
        assert read(residual_gain=0.5, head_gain=2.0, unset_gain=None, scale_emb=1) == read()
    (message,) = caplog.messages
    assert "nothing is known of head_gain, residual_gain in a llama model" in message


@pytest.mark.parametrize("name", ["rope_gain", "alibi_slopes", "use_yarn"])
def test_unknown_arguments_of_positions_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{name} = 2 is not known, and may change positi"):
        read(**{name: 2})


def test_a_hybrid_model_without_a_pattern_is_refused() -> None:
    with pytest.raises(CheckpointError, match="is_hybrid_model = True without hybrid_layer_pat"):
        read(is_hybrid_model=True, hybrid_attention_ratio=0.1)


def test_vocabulary_is_that_of_the_stored_embedding(tmp_path: Path) -> None:
    args = parsed_args(padded_vocab_size=None)
    save_run(trained_model(args), tmp_path, args)
    assert open_model(tmp_path).architecture.vocab_size == VOCABULARY
