"""Rope in Hugging Face's `config.json`, in the spelling of transformers 5 and that before it."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.json_files import read_number, read_size
from megatron_async.models.architecture import ModelArchitecture, RopeScaling

LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_rope(
    config: dict[str, Any], where: str, percent: float = 1.0
) -> tuple[float, RopeScaling | None]:
    """Base and scaling of rope.

    Args:
        config: content of a `config.json`.
        where: file name for error messages.
        percent: share of a head that it turns in this family.

    Raises:
        CheckpointError: another kind of rope or another share.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError(f"{where}: rope_parameters = {rope!r}: one set for all layers only")
    base = read_number({**config, **rope}, "rope_theta", where, 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor", percent) != percent:
        raise CheckpointError(
            f"{where}: partial_rotary_factor = {rope['partial_rotary_factor']!r} is not supported "
            f"(only {percent})"
        )
    if kind == "default":
        return base, None
    if kind != "llama3":
        raise CheckpointError(
            f"{where}: rope_type = {kind!r} is not supported (only 'default' and 'llama3')"
        )
    context = config.get("max_position_embeddings")
    return base, RopeScaling(
        read_number(rope, "factor", where),
        read_number(rope, "low_freq_factor", where),
        read_number(rope, "high_freq_factor", where),
        read_size(rope, "original_max_position_embeddings", where, context),
    )


def write_rope(a: ModelArchitecture) -> dict[str, Any]:
    """Entries of a `config.json` that describe rope, in both spellings."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": a.rotary_base}
    if a.rope_scaling is not None:
        rope["rope_type"] = "llama3"
        rope |= {key: getattr(a.rope_scaling, key) for key in LLAMA3_KEYS}
    if a.rotary_percent != 1:
        rope["partial_rotary_factor"] = a.rotary_percent
    # Older readers (transformers 4, llama.cpp, Megatron-Bridge) look for the second.
    config: dict[str, Any] = {"rope_parameters": rope, "rope_theta": a.rotary_base}
    if a.rope_scaling is not None:
        config["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return config
