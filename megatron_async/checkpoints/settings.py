"""`Settings`: the keys of a Hugging Face `config.json`, each read or accounted for.

A reader asks for a key by `size`, `number`, `flag`, `only` or `get`. So it is known at the end
which keys nobody asked for: `finish` refuses those that would change the computation, and tells
once of those that nobody knows.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.files import check_number, check_size
from megatron_async.checkpoints.huggingface_defaults import (
    ALIASES,
    DEFAULTS,
    HARMLESS,
    HARMLESS_IN,
    NEUTRAL,
    NEUTRAL_IN,
    NULLABLE,
)
from megatron_async.models.architecture import MLP, ModelArchitecture, moe_pattern

logger = logging.getLogger("megatron_async")
FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of attention in `layer_types`."""
DTYPES = ("auto", "float32", "float16", "bfloat16", "float64")
NULL_COUNTS = ("is_causal",)
"""Keys whose null is a value: transformers takes it as false."""
EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps")
POSITIONS = re.compile(r"rope|rotary|yarn|alibi")
"""A key of such a name that nobody knows is refused: what it means would be guessed."""


class Settings:
    """One family's view of a `config.json`. What is missing, malformed or not served is a
    `CheckpointError` that names file and key.

    Args:
        config: the file's content.
        where: its name, for error messages.
        family: `ModelArchitecture.model_type`.
    """

    def __init__(self, config: Mapping[str, Any], where: str, family: str) -> None:
        self.where = where
        self.family = family
        self._values = dict(config)
        self._defaults = DEFAULTS[family]
        self._nullable = NULLABLE.get(family, ())
        self._taken: set[str] = set()
        self._alias_of: dict[str, str] = {}
        for alias, key in ALIASES.get(family, {}).items():
            if alias not in self._values:
                continue
            value = self._values.pop(alias)
            if value is None:
                raise self.error(alias, f"must not be null: leave it out, or write {key}")
            own = self._values.setdefault(key, value)
            if own != value:
                raise CheckpointError(
                    f"{where}: {alias} = {value!r} and {key} = {own!r} are the same setting: leave "
                    "one of them out"
                )
            self._alias_of[key] = alias

    def raw(self, key: str) -> Any:
        """A key's value as it stands in the file; None where it is missing."""
        self._taken.add(key)
        return self._values.get(key)

    def default(self, key: str) -> Any:
        """What a missing key means in this family; None: nothing of its own."""
        return self._defaults.get(key)

    def knows(self, key: str) -> bool:
        """Whether this family has a default for a key."""
        return key in self._defaults

    def pass_over(self, *keys: str) -> None:
        """Account for keys without a meaning in a model like this."""
        self._taken.update(keys)

    def get(self, key: str) -> Any:
        """A key's value as it stands there; where it is missing, the family's default, or None."""
        self._taken.add(key)
        value = self._values.get(key, self._defaults.get(key))
        is_null = value is None and key in self._values and key in self._defaults
        if is_null and key not in self._nullable:
            raise self.error(key, f"must not be null (missing, it means {self._means(key)})")
        return value

    def size(self, key: str, otherwise: int | None = None) -> int:
        """A positive integer, `otherwise` where neither the file nor the family has a number."""
        return check_size(self._number(key, otherwise), self.name(key), self.where)

    def number(self, key: str, otherwise: float | None = None) -> float:
        """A positive finite number; as `size`."""
        return check_number(self._number(key, otherwise), self.name(key), self.where)

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self.get(key)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false", value)
        return value

    def only(self, key: str, *supported: Any) -> None:
        """Check a setting that is served with some values alone; a missing one, where the family
        has no default, is always served, and so is null."""
        value = self.get(key)
        if value is not None and not is_one_of(value, supported):
            raise self.error(key, f"is not supported (only {listed(supported)})", value)

    def whole(self, key: str) -> int:
        """An integer, 0 or more."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(key, "must be an integer, 0 or more", value)
        return value

    def integers(self, key: str) -> list[int]:
        """A list of integers; null and a missing one are empty."""
        value = self.get(key)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(type(entry) is int for entry in value):
            raise self.error(key, "must be a list of integers", value)
        return value

    def name(self, key: str) -> str:
        """The name by which the file has a key."""
        return self._alias_of.get(key, key)

    def error(self, key: str, problem: str, value: Any = None) -> CheckpointError:
        """An error that names the file, the key as the file has it, and its value."""
        space = "" if problem.startswith(",") else " "
        return CheckpointError(f"{self.where}: {self.name(key)} = {value!r:.200}{space}{problem}")

    def check_listed(self, count: int, layers: int) -> None:
        """Check that as many layers are listed as there are."""
        if count != layers:
            problem = f", but {count} layers are listed in layer_types"
            raise self.error("num_hidden_layers", problem, layers)

    def finish(self, epsilon: float) -> None:
        """Account for the keys that no reader has asked for: those that change the computation are
        refused. `epsilon` is the norms', which some families have under two names."""
        for key in ("dtype", "torch_dtype"):
            if key in self._values:
                self.only(key, *DTYPES, *(f"torch.{name}" for name in DTYPES))
        known = HARMLESS | HARMLESS_IN.get(self.family, {})
        neutral = NEUTRAL_IN.get(self.family, NEUTRAL)
        unknown = []
        for key in self._values.keys() - self._taken - known.keys():
            value = self._values[key]
            if value is None and key not in NULL_COUNTS:
                continue
            if key in EPSILONS:
                if value != epsilon:
                    own = ", ".join(name for name in EPSILONS if name in self._taken)
                    raise self.error(key, f"is not read: the model has {own} = {epsilon}", value)
            elif key == "layer_types":
                if value != [FULL] * int(self._values["num_hidden_layers"]):
                    raise self.error(key, f"is not supported (only {FULL!r} for each layer)", value)
            elif key in neutral:
                if not is_one_of(value, neutral[key]):
                    problem = f"is not supported (only {listed(neutral[key])})"
                    raise self.error(key, problem, value)
            elif POSITIONS.search(key):
                raise self.error(key, "is not known, and may change positions: leave it out", value)
            else:
                unknown.append(key)
        if unknown:
            tell_unknown(self.where, self.family, tuple(sorted(unknown)))

    def _number(self, key: str, otherwise: float | None) -> Any:
        value = self.get(key)
        return otherwise if value is None else value

    def _means(self, key: str) -> str:
        value = self._defaults[key]
        return "what follows from other keys" if value is None else repr(value)


def is_one_of(value: Any, supported: Iterable[Any]) -> bool:
    """Whether it is one of these values; true and 1 are not the same, 1 and 1.0 are."""
    return any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in supported
    )


def listed(supported: tuple[Any, ...]) -> str:
    """Values that are served, as an error names them."""
    return " or ".join(map(repr, supported)) or "none"


@lru_cache(maxsize=64)
def tell_unknown(where: str, family: str, keys: tuple[str, ...]) -> None:
    """Tell of settings that nobody knows, once for a file: a model is opened several times."""
    logger.warning(
        "%s: nothing is known of %s in a %s model: passed over.", where, ", ".join(keys), family
    )


def read_heads(config: Settings) -> dict[str, Any]:
    """The fields of `ModelArchitecture` that describe heads of attention."""
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    return {
        "num_attention_heads": heads,
        "num_query_groups": config.size("num_key_value_heads", heads),
        "kv_channels": config.size("head_dim", hidden // heads),
    }


def read_experts(config: Settings, layers: int) -> dict[str, Any]:
    """The fields of `ModelArchitecture` that describe experts, of so many layers."""
    qwen = config.family == "qwen3_moe"
    size = "moe_intermediate_size" if qwen else "intermediate_size"
    return read_choice(config, "num_experts" if qwen else "num_local_experts") | {
        "moe_ffn_hidden_size": config.size(size),
        "moe_router_pre_softmax": qwen and not config.flag("norm_topk_prob"),
        "pattern": moe_pattern(layers, dense_layers(config, layers) if qwen else ()),
    }


def read_choice(config: Settings, name: str, least: int = 1) -> dict[str, Any]:
    """How many experts there are (key `name`), and how many a token goes to, `least` or more."""
    experts, chosen = config.size(name), config.size("num_experts_per_tok")
    if not least <= chosen <= experts:
        has = f"{config.name(name)} = {experts}"
        problem = f"must be {least} to {has}" if least > 1 else f"is more than {has}"
        raise config.error("num_experts_per_tok", problem, chosen)
    return {"num_moe_experts": experts, "moe_router_topk": chosen}


def write_experts(architecture: ModelArchitecture) -> dict[str, Any]:
    """Entries of a `config.json` that describe the experts; none for a dense model."""
    a = architecture
    if not a.num_moe_experts:
        return {}
    config: dict[str, Any] = {
        "num_experts_per_tok": a.moe_router_topk,
        "output_router_logits": False,
    }
    if a.model_type in ("mixtral", "gpt_oss"):
        if a.moe_router_pre_softmax or MLP in a.pattern:
            raise CheckpointError(
                f"a {a.model_type} model with moe_router_pre_softmax = "
                f"{a.moe_router_pre_softmax} and pattern = {a.pattern!r} has no Hugging Face form; "
                "convert to torch_dist instead"
            )
        return config | {
            "num_local_experts": a.num_moe_experts,
            "intermediate_size": a.moe_ffn_hidden_size,
        }
    return config | {
        "num_experts": a.num_moe_experts,
        "moe_intermediate_size": a.moe_ffn_hidden_size,
        "norm_topk_prob": not a.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [n for n, kind in enumerate(a.pattern[1::2]) if kind == MLP],
    }


def dense_layers(config: Settings, layers: int) -> tuple[int, ...]:
    """Layers without experts, of so many: those that are listed, and all but every n-th."""
    step, listed = config.size("decoder_sparse_step"), set(config.integers("mlp_only_layers"))
    return tuple(n for n in range(layers) if n in listed or (n + 1) % step)
