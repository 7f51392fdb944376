"""Every key of transformers' configuration classes: read as transformers reads it, or refused by
name; and keys that nobody knows. Models of these files are run by `scripts/check_settings.py`."""

import json
import logging
import math
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from check_settings import EQUAL, Comparison, keys_of
from settings_families import COMPOSITES, FAMILIES, composite_config, config_class, plain_config
from settings_grid import Variant, variants
from settings_theirs import their_architecture, their_config

from megatron_async.checkpoints import CheckpointError
from megatron_async.checkpoints.huggingface_config import (
    ROPE_KEYS,
    SUPPORTED,
    read_architecture,
    write_config,
)
from megatron_async.checkpoints.huggingface_defaults import (
    ALIASES,
    DEFAULTS,
    HARMLESS,
    HARMLESS_IN,
    NEUTRAL,
    NULLABLE,
    REQUIRED,
)
from megatron_async.checkpoints.huggingface_delta import language_model_config
from megatron_async.models.architecture import ModelArchitecture

WHERE = "config.json"
LLAMA = {"model_type": "llama"}
WITHOUT_ROPE = ("nemotron_h", "mamba2")


def read(config: dict[str, Any]) -> ModelArchitecture:
    """The architecture of a file with this content."""
    content = json.loads(json.dumps(config))
    return read_architecture(language_model_config(content, WHERE), WHERE)


def said_or[T](kind: type[Exception], call: Callable[[], T]) -> T | str:
    """What a call returns, or what its error says."""
    try:
        return call()
    except kind as error:
        return str(error)


def changes_nothing(variant: Variant) -> bool:
    """Whether a file that transformers refuses may be served: for a key without an effect."""
    family, key = variant.family, variant.key
    is_null = variant.what.startswith("null") and key not in DEFAULTS[family]
    is_outer = key == "tie_word_embeddings" and "text_config" in variant.config
    return (
        is_null
        or is_outer
        or key in HARMLESS
        or key in HARMLESS_IN.get(family, {})
        or key in ("torch_dtype", "num_nextn_predict_layers")
        or (key == "rope" and family in WITHOUT_ROPE)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_mean_what_they_mean_to_transformers(family: str) -> None:
    served = 0
    for variant in variants(family):
        ours = said_or(CheckpointError, lambda: read(variant.config))  # noqa: B023
        if isinstance(ours, str):
            assert any(key in ours for key in keys_of(variant)), f"{variant.name}: {ours}"
            continue
        theirs = said_or(Exception, lambda: their_architecture(their_config(variant)))  # noqa: B023
        if isinstance(theirs, str):
            assert changes_nothing(variant), f"{variant.name}: {theirs}"
            continue
        found = {name: getattr(ours, name, []) for name in theirs}
        assert found == theirs, variant.name
        served += 1
    assert served > 50


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_the_class(family: str) -> None:
    defaults = dict(DEFAULTS[family])
    kind = config_class(family)
    theta = defaults.pop("rope_theta", None)
    if theta is not None:
        assert theta == kind().rope_parameters["rope_theta"]
    known = {*ROPE_KEYS, *SUPPORTED, *REQUIRED, *HARMLESS, *HARMLESS_IN.get(family, ())}
    known |= {"dtype", *NEUTRAL}
    for field in fields(kind):
        if field.name in defaults:
            assert defaults.pop(field.name) == field.default, field.name
        else:
            assert field.name in known or field.default is MISSING, f"{field.name} is unknown"
    # What is left stands in no field: transformers takes it from files all the same.
    assert set(defaults) <= {
        "head_dim", "partial_rotary_factor", "full_attention_interval", "attention_bias",
    }  # fmt: skip


def test_tables_do_not_contradict_each_other() -> None:
    assert not HARMLESS.keys() & NEUTRAL.keys()
    for family, defaults in DEFAULTS.items():
        assert not (HARMLESS.keys() - {"residual_in_fp32", "time_step_min"}) & defaults.keys(), (
            family
        )
        assert set(NULLABLE.get(family, ())) <= defaults.keys(), family
        assert set(ALIASES.get(family, {}).values()) <= defaults.keys(), family
    assert all(HARMLESS.values())


def test_a_key_that_nobody_knows_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    config = plain_config("llama") | {"a_new_key": 1, "another": None, "tokens_seen": 2}
    with caplog.at_level(logging.WARNING, "megatron_async"):
        for _ in range(2):
            assert read_architecture(config, "told/config.json") == read(plain_config("llama"))
    told = [record.getMessage() for record in caplog.records if "told/" in record.getMessage()]
    assert told == [
        "told/config.json: nothing is known of a_new_key, tokens_seen in a llama model: "
        "passed over."
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_files_are_known(family: str, caplog: pytest.LogCaptureFixture) -> None:
    """Files of transformers, and files that this package writes."""
    with caplog.at_level(logging.WARNING, "megatron_async"):
        ours = read(plain_config(family))
        assert read(write_config(ours, "bfloat16")) == ours
    assert not caplog.records


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            "rope_type = 'dynamic'.*rope_scaling",
        ),
        ({"rope_theta": 5e5}, "rope_theta = 500000.0 is 3000.0 among the values of rope"),
        (
            {"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}},
            "rope_theta = 3000.0 in rope_parameters, but 500000.0 in rope_scaling",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "mscale": 1.0}},
            "mscale = 1.0 in rope_parameters",
        ),
        ({"rope_local_base_freq": 1e4}, "rope_local_base_freq = 10000.0 is not known"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config = .*only none"),
        ({"per_layer_config": {"0": {"rms_norm_eps": 0.5}}}, "per_layer_config = "),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping = 30.0"),
        ({"sliding_window": 16}, "sliding_window = 16"),
        ({"is_causal": None}, "is_causal = None"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false' must be true or false"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps = inf must be a positive number"),
        ({"dtype": "int3"}, "dtype = 'int3' is not supported .only 'auto' or 'float32'"),
        ({"head_dim": 15}, "head_dim = 15 must be an even number"),
        ({"use_qk_norm": True}, "use_qk_norm = True is not supported .only False"),
        ({"rope_scaling": False}, "rope_scaling = False is not supported"),
        ({"model_type": "qwen3"}, "LlamaForCausalLM.* and model_type = 'qwen3' are two families"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(plain_config("llama") | changes)


ODD = (None, [], {}, "x", [[]], [{"a": 1}], {"a": []}, -1, 0, True, 0.5, 10**40, math.nan, "1")


@pytest.mark.parametrize("family", FAMILIES)
def test_odd_values_end_in_an_error_that_names_the_file(family: str) -> None:
    plain = plain_config(family)
    keys = (*plain, "rope_scaling", "rope_theta", "partial_rotary_factor", "text_config")
    for key in keys:
        for value in ODD:
            files = [plain | {key: value}]
            if family in COMPOSITES:
                files += [composite_config(family, files[0])]
                files += [composite_config(family, plain) | {key: value}]
            for config in files:
                said = said_or(CheckpointError, lambda: read(config))  # noqa: B023
                assert not isinstance(said, str) or said.startswith(f"{WHERE}: "), said
                assert len(str(said)) < 2000


@pytest.mark.parametrize("family", COMPOSITES)
def test_settings_beside_the_language_model(family: str) -> None:
    """What stands beside `text_config` and is not read there is not passed over."""
    plain = plain_config(family)
    whole = composite_config(family, plain)
    assert read(whole) == read(plain)
    unnamed = {key: value for key, value in whole.items() if key != "architectures"}
    assert read(unnamed) == read(plain)
    assert read(whole | {"tie_word_embeddings": True}).tie_word_embeddings
    for key, value in (
        ("rope_scaling", {"rope_type": "dynamic", "factor": 4.0}),
        ("rms_norm_eps", 0.5),
        ("quantization_config", {"quant_method": "fp8"}),
    ):
        with pytest.raises(CheckpointError, match=f"{key} = "):
            read(whole | {key: value})
    for two in (whole | {"model_type": "qwen2_vl"}, whole | {"text_config": plain | LLAMA}):
        with pytest.raises(CheckpointError, match="are two families"):
            read(two)
    inner = plain | {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(CheckpointError, match="quantization_config = "):
        read(whole | {"text_config": inner, "quantization_config": None})


def test_published_files_of_older_forms_are_known(caplog: pytest.LogCaptureFixture) -> None:
    """Keys of published files that transformers' classes have no fields for."""
    codestral = {"norm_before_gate": True, "rms_norm": True, "intermediate_size": 128,
                 "time_step_init_scheme": "random", "time_step_scale": 1.0}  # fmt: skip
    granite = {"normalization_function": "rmsnorm", "init_method": "mup"}
    nemotron = {"norm_eps": 1e-3, "mamba_proj_bias": False, "num_hidden_layers": 4,
                "rope_theta": 10000, "hybrid_override_pattern": "MEM*"}  # fmt: skip
    qwen = {"use_mrope": False, "use_sliding_window": False, "max_window_layers": 21}
    with caplog.at_level(logging.WARNING, "megatron_async"):
        assert read(plain_config("mamba2") | codestral) == read(plain_config("mamba2"))
        assert read(plain_config("granitemoehybrid") | granite)
        assert read(plain_config("nemotron_h") | nemotron).pattern == "ME*-"
        assert read(plain_config("qwen2") | qwen)
        coder = {"use_qk_norm": True, "qkv_bias": False}
        assert read(plain_config("qwen3_moe") | coder) == read(plain_config("qwen3_moe"))
    assert not caplog.records


def test_biases_of_mimo_need_no_key() -> None:
    """MiMo's published code is Qwen2's, which has them without a word."""
    mimo = plain_config("qwen2") | {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    assert "attention_bias" not in mimo
    assert read(mimo) == read(mimo | {"attention_bias": True})
    with pytest.raises(CheckpointError, match="attention_bias = False is not supported"):
        read(mimo | {"attention_bias": False})


def test_pages_say_what_a_key_means() -> None:
    page = Path(__file__).parents[3] / "docs" / "models.md"
    assert "scripts/check_settings.py" in page.read_text()


@pytest.mark.parametrize(
    ("family", "key", "what"),
    [
        ("mixtral", "rope_parameters", "left out"),
        ("mixtral", "num_experts_per_tok", "= 1"),
        ("mamba2", "n_groups", "= 4"),
        ("llama", "rope", "llama3 with theta beside default"),
        ("granitemoehybrid", "rope", "old llama3 by type"),
        ("qwen3_next", "rope", "share at the top null"),
    ],
)
def test_models_compute_what_transformers_computes(family: str, key: str, what: str, tmp_path):
    """One of each kind; `scripts/check_settings.py` runs them all."""
    chosen = [v for v in variants(family) if (v.key, v.what) == (key, what)]
    assert [Comparison(tmp_path).check(variant) for variant in chosen] == [(EQUAL, "")]
