"""Rope in Hugging Face's `config.json`: base, scaling, and the share of a head that it turns.

Rope is read in the spelling of transformers 5 and in the one before it. transformers 5 takes
`rope_scaling`, where a file has it, in place of `rope_parameters`. What that set lacks is taken
from the top of the file, and then from the family's defaults. A value that two places give
differently is refused, since one of them would be passed over.
"""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.files import check_number, check_size
from megatron_async.checkpoints.settings import Settings
from megatron_async.models.architecture import (
    LINEAR,
    LLAMA3,
    YARN,
    ModelArchitecture,
    RopeScaling,
    yarn_factor,
)

LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
YARN_KEYS = ("factor", LLAMA3_KEYS[3], "beta_fast", "beta_slow", "truncate", "attention_factor")
DERIVED = ("mscale", "mscale_all_dim")
"""Keys of YaRN from which its `attention_factor` follows."""
KEYS = {"default": (), LLAMA3: LLAMA3_KEYS, LINEAR: LLAMA3_KEYS[:1], YARN: YARN_KEYS}
"""Kinds of rope that are served, and the keys of each beside `GENERAL`."""
ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
"""Keys at the top of a file."""
GENERAL = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
FOR_IMAGES = ("mrope_section", "mrope_interleaved")
"""How positions of images are spread. A text's three positions are one, so it is the same."""
HAS_IMAGES = ("qwen3_5", "qwen3_5_moe")
ORIGINAL = "original_max_position_embeddings"


def read_rope(
    config: Settings, head_dim: int, percent: float | None = None
) -> tuple[float, RopeScaling | None, float]:
    """Base, scaling and the share of a head that rope turns (`percent`: of a family that knows one
    alone).

    Raises:
        CheckpointError: another kind of rope or share, an unknown key, two values for one.
    """
    new, old = _set(config, "rope_parameters"), _set(config, "rope_scaling")
    if not (new or old):
        new = config.default("rope_parameters") or {}
    place, rope = ("rope_scaling", old) if old else ("rope_parameters", new)
    kind = _kind(config, place, rope)
    if old and new and _kind(config, "rope_parameters", new) not in ("default", kind):
        raise CheckpointError(
            f"{config.where}: rope_scaling = {old!r} and rope_parameters = {new!r} are two kinds "
            "of rope: leave one of them out"
        )
    if kind not in KEYS:
        raise CheckpointError(
            f"{config.where}: rope_type = {kind!r} is not supported in {place} (only "
            f"{', '.join(map(repr, KEYS))})"
        )
    known = {
        *GENERAL,
        *KEYS[kind],
        *(DERIVED if kind == YARN else ()),
        *(FOR_IMAGES if config.family in HAS_IMAGES else ()),
    }
    # The other set is passed over, but what it says must not be another thing.
    for name, entries in (("rope_parameters", new), ("rope_scaling", old)):
        unknown = [key for key, value in entries.items() if value is not None and key not in known]
        if unknown:
            raise CheckpointError(
                f"{config.where}: {unknown[0]} = {entries[unknown[0]]!r} in {name} is not known to "
                f"rope of type {kind!r}: leave it out"
            )
    values = {key: _value(config, key, rope) for key in ("rope_theta", "partial_rotary_factor")}
    if kind == LINEAR:
        values["factor"] = rope.get("factor")
    if kind == LLAMA3:
        values |= {key: rope.get(key) for key in LLAMA3_KEYS[:3]}
    if kind == YARN:
        values |= {key: rope.get(key) for key in (*YARN_KEYS[0:1], *YARN_KEYS[2:], *DERIVED)}
    if kind in (LLAMA3, YARN):
        values[ORIGINAL] = _value(config, ORIGINAL, rope) or config.size("max_position_embeddings")
    for key, value in new.items() if old else ():
        if key in values and value != values[key]:
            raise CheckpointError(
                f"{config.where}: {key} = {value!r} in rope_parameters, but {values[key]!r} in "
                "rope_scaling or by default: rope_scaling counts, so write it there"
            )
    base = check_number(values["rope_theta"], "rope_theta", config.where)
    share = _share(config, values["partial_rotary_factor"], head_dim, percent)
    if kind == "default":
        return base, None, share
    if kind == LINEAR:
        factor = check_number(values["factor"], "factor", config.where)
        return base, RopeScaling(factor, kind=kind), share
    if kind == YARN:
        return base, _yarn(config, values), share
    factor, low, high = (check_number(values[key], key, config.where) for key in LLAMA3_KEYS[:3])
    if low >= high:
        raise config.error("low_freq_factor", f"must be less than high_freq_factor = {high}", low)
    original = check_size(values[ORIGINAL], ORIGINAL, config.where)
    return base, RopeScaling(factor, low, high, original), share


def _yarn(config: Settings, values: dict[str, Any]) -> RopeScaling:
    """Scaling by YaRN, with the defaults of transformers."""
    original = check_size(values[ORIGINAL], ORIGINAL, config.where)
    if values["factor"] is None:
        values["factor"] = config.size("max_position_embeddings") / original
    numbers = {"factor": values["factor"], "beta_fast": 32.0, "beta_slow": 1.0}
    keys = (*numbers, "attention_factor")
    numbers |= {key: values[key] for key in keys if values[key] is not None}
    found = {key: check_number(value, key, config.where) for key, value in numbers.items()}
    truncate = True if values["truncate"] is None else values["truncate"]
    if not isinstance(truncate, bool):
        raise config.error("truncate", "must be true or false", truncate)
    # transformers takes a 0 of one of them as if both were missing.
    given = all(values[key] for key in DERIVED)
    mscale, of_all = (
        check_number(values[key], key, config.where) if given else None for key in DERIVED
    )
    found.setdefault("attention_factor", yarn_factor(found["factor"], mscale, of_all))
    return RopeScaling(
        original_max_position_embeddings=original, kind=YARN, truncate=truncate, **found
    )


def _set(config: Settings, key: str) -> dict[str, Any]:
    """A set of values of rope; empty where there is none."""
    rope = config.raw(key)
    rope = {} if rope is None else rope
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise config.error(key, "is not supported (only one set for all layers)", rope)
    return rope


def _kind(config: Settings, place: str, rope: dict[str, Any]) -> str:
    kinds = [rope[key] for key in ("rope_type", "type") if rope.get(key) is not None]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        raise CheckpointError(
            f"{config.where}: rope_type = {kinds[0]!r} and type = {kinds[1]!r} in {place} are the "
            "same setting: leave one of them out"
        )
    return str(kinds[0]) if kinds else "default"


def _value(config: Settings, key: str, rope: dict[str, Any]) -> Any:
    """A value that stands in a set of rope, or else at the top of the file."""
    if key not in rope:
        return config.get(key)
    inner, outer = rope[key], config.raw(key)
    if inner is None:
        raise config.error(f"{key} of rope", "must not be null: leave it out")
    # transformers writes a family's default share there, whatever is inside.
    if outer not in (None, inner, config.default("partial_rotary_factor")):
        raise config.error(key, f"is {inner!r} among the values of rope: leave one out", outer)
    return inner


def _share(config: Settings, value: Any, head_dim: int, percent: float | None) -> float:
    """The share of a head that rope turns: null and a missing one are all of it, or `percent`."""
    key = "partial_rotary_factor"
    share = (percent or 1.0) if value is None else check_number(value, key, config.where)
    if share > 1 or (percent is not None and share != percent):
        only = "at most 1" if percent is None else percent
        raise config.error(key, f"is not supported (only {only})", value)
    if int(head_dim * share) % 2 or int(head_dim * share) == 0:
        raise config.error(
            key, f"of head_dim = {head_dim} must be an even number of elements", share
        )
    return share


def write_rope(a: ModelArchitecture) -> dict[str, Any]:
    """Entries of a `config.json` that describe rope, in both spellings."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": a.rotary_base}
    if a.rope_scaling is not None:
        kind = a.rope_scaling.kind
        rope["rope_type"] = kind
        rope |= {key: getattr(a.rope_scaling, key) for key in KEYS[kind]}
    if a.rotary_percent != 1:
        rope["partial_rotary_factor"] = a.rotary_percent
    # Older readers (transformers 4, llama.cpp, Megatron-Bridge) look for the second.
    config: dict[str, Any] = {"rope_parameters": rope, "rope_theta": a.rotary_base}
    if a.rope_scaling is not None:
        config["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return config
