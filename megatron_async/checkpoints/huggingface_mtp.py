"""Multi-token prediction (MTP) in a Hugging Face folder: `config.json` read and written, and which
tensors are its own.

| family | depths | layers of a depth |
| --- | --- | --- |
| Qwen3-Next | `num_nextn_predict_layers` | attention, experts |
| Qwen3.5, Qwen3.5-MoE | `mtp_num_hidden_layers` | attention, and an MLP or experts |
| Nemotron-H | `num_nextn_predict_layers` | `mtp_layers_block_type` or |
| | | `mtp_hybrid_override_pattern` |
| MiMo | `num_nextn_predict_layers` | attention, MLP |

Where the number is not told (published files of Qwen3-Next), the names of tensors tell it. Of a
folder of another family no MTP is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.family_names import MTP_NAMES
from megatron_async.checkpoints.huggingface_hybrid import LAYER_NAMES, NAMES_OF_KINDS
from megatron_async.checkpoints.settings import Settings
from megatron_async.models.architecture import ATTENTION, EXPERTS, KINDS, MLP, ModelArchitecture

REPEATED = "mtp_use_repeated_layer"
"""Megatron-Core's name; Hugging Face has none."""


def read_mtp(
    architecture: ModelArchitecture, config: Settings, names: Iterable[str] = ()
) -> dict[str, Any]:
    """The fields of `ModelArchitecture` that describe MTP; none where a model has no MTP. Names of
    the stored tensors tell the number of depths where the configuration does not."""
    a = architecture
    if a.model_type not in MTP_NAMES:
        return {}
    key = MTP_NAMES[a.model_type].depths
    told, repeated = config.raw(key), config.raw(REPEATED)
    pattern = ATTENTION + (EXPERTS if a.num_moe_experts else MLP)
    if a.model_type == "nemotron_h":
        pattern = _nemotron_pattern(config, is_used=told != 0)
    if told == 0 and told is not False:
        return {}
    if told is None:
        depths = _stored_depths(a.model_type, len(pattern), names)
    else:
        depths = config.size(key)
    if not depths:
        return {}
    if EXPERTS in pattern and not a.num_moe_experts:
        raise config.error(
            key,
            f"with layers {pattern!r}, but the model has no experts. Set {key} to 0 to serve the "
            "model without multi-token prediction.",
            depths,
        )
    if repeated is None:
        repeated = _is_repeated(a.model_type, depths)
    elif not isinstance(repeated, bool):
        raise config.error(REPEATED, "must be true or false", repeated)
    return {
        "mtp_pattern": pattern,
        "mtp_num_depths": depths,
        "mtp_use_repeated_layer": repeated,
        "mtp_hidden_before_norm": a.model_type == "mimo",
    }


def write_mtp(a: ModelArchitecture) -> dict[str, Any]:
    """Entries of a `config.json` that describe MTP.

    Raises:
        CheckpointError: the family has none, or not of this form.
    """
    if not a.mtp_pattern:
        return {}
    kind = f"multi-token prediction of a {a.model_type} model with mtp_pattern = {a.mtp_pattern!r}"
    remedy = "convert to torch_dist instead, or without it (--no-mtp)"
    names = MTP_NAMES.get(a.model_type)
    if names is None:
        raise CheckpointError(f"{kind} has no Hugging Face form; {remedy}")
    if names.has_shared_ends and a.mtp_num_depths > 1:
        raise CheckpointError(
            f"{kind} and {a.mtp_num_depths} depths has no Hugging Face form, in which all depths "
            f"share their norms and eh_proj; {remedy}"
        )
    config: dict[str, Any] = {names.depths: a.mtp_num_depths}
    if a.model_type == "nemotron_h":
        # The one is read by transformers 5, the other by everybody else.
        config["mtp_layers_block_type"] = [NAMES_OF_KINDS[kind] for kind in a.mtp_pattern]
        config["mtp_hybrid_override_pattern"] = a.mtp_pattern
    if a.mtp_use_repeated_layer != _is_repeated(a.model_type, a.mtp_num_depths):
        config[REPEATED] = a.mtp_use_repeated_layer
    said = read_mtp(a, Settings(config, "config.json", a.model_type))
    lost = [name for name, value in said.items() if getattr(a, name) != value]
    if lost:
        values = ", ".join(f"{name} = {getattr(a, name)!r}" for name in lost)
        raise CheckpointError(f"{kind} and {values} has no Hugging Face form; {remedy}")
    return config


def split_mtp(names: Iterable[str], model_type: str) -> tuple[list[str], list[str]]:
    """Names of stored tensors: those of the model, and those of its MTP."""
    found = MTP_NAMES.get(model_type)
    model: list[str] = []
    mtp: list[str] = []
    for name in names:
        is_mtp = found is not None and name.startswith(found.beginning)
        (mtp if is_mtp else model).append(name)
    return model, mtp


def _is_repeated(model_type: str, depths: int) -> bool:
    """Nemotron's one depth is trained as two (Megatron-Bridge's recipes of Nemotron 3 Super and
    Nemotron 3.5 Lightning)."""
    return model_type == "nemotron_h" and depths == 1


def _nemotron_pattern(config: Settings, is_used: bool) -> str:
    """Layers of a depth; where they are not used, whatever stands there."""
    pattern = config.raw("mtp_hybrid_override_pattern")
    listed = config.get("mtp_layers_block_type")
    if not is_used or (listed is None and pattern is None):
        return ATTENTION + EXPERTS  # as transformers has it
    if isinstance(listed, list) and listed and not set(map(str, listed)) - LAYER_NAMES.keys():
        return "".join(LAYER_NAMES[name] for name in listed)
    if listed is None and isinstance(pattern, str) and pattern and not set(pattern) - KINDS.keys():
        return pattern
    key, value = "mtp_layers_block_type", listed
    if listed is None:
        key, value = "mtp_hybrid_override_pattern", pattern
    kinds = f"{', '.join(LAYER_NAMES)}, or {', '.join(map(repr, KINDS))}"
    raise config.error(key, f"is not supported (only layers {kinds})", value)


def _stored_depths(model_type: str, layers: int, names: Iterable[str]) -> int:
    """Depths of so many layers each, by the names of their tensors."""
    inside = re.escape(MTP_NAMES[model_type].inside)
    number = re.compile(re.sub(r"\\\{\w+\\\}", r"(\\d+)", inside))
    found = [int(match[1]) for name in names if (match := number.match(name))]
    count = max(found, default=-1) + 1
    return -(-count // layers) if "{layer}" in MTP_NAMES[model_type].inside else count
