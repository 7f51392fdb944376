"""What a request that says nothing is answered with: one rule for Python, the command line, the
server and its page.

1. What the request itself says.
2. What the model says: its `generation_config.json`, or `general.sampling.*` in a GGUF file.
   `do_sample: false` is greedy there.
3. The likeliest token (temperature 0), so that the first answer of any model is sane and the same
   everywhere. A request, or a model, that filters samples (top_p, top_k or min_p) and names no
   temperature wants samples: temperature 1, as in OpenAI's protocol.

`SamplingParams()` itself keeps Megatron-Core's defaults (temperature 1, no limit of tokens), since
scripts for Megatron-Core rely on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_async.errors import ConfigurationError
from megatron_async.ops.sampling.slot_records import FILTERS

if TYPE_CHECKING:
    from megatron_async.requests.sampling_params import SamplingParams

NUM_TOKENS = 256
"""Most tokens of an answer, in Python and of `generate`, where neither request nor model says."""
GREEDY, PLAIN_SAMPLES = 0.0, 1.0
"""Temperatures."""
_PLAIN = tuple(name for name in FILTERS.values() if name not in ("top_k", "top_p"))
"""Filters of which this protocol and the engine have the same value that changes nothing."""
LIMITS: dict[str, tuple[float, float, float]] = {
    "temperature": (PLAIN_SAMPLES, 0, 100),
    "top_k": (0, -1, 2**63),
    "top_p": (1.0, 0, 1),
    **dict.fromkeys(_PLAIN, (0.0, 0, 1)),
    "frequency_penalty": (0.0, -2, 2),
    "presence_penalty": (0.0, -2, 2),
    "repetition_penalty": (1.0, 0.01, 100),
}
"""Numbers that choose tokens, by the names of generation_config.json and of vLLM's protocol: the
value that changes nothing, the smallest and the largest one."""
MAX_NEW_TOKENS = "max_new_tokens"


@dataclass(frozen=True)
class GenerationDefaults:
    """What a model says of its sampling.

    Attributes:
        numbers: of `LIMITS`, those that the model names.
        is_greedy: the model says that it takes the likeliest token (`do_sample: false`, or
            temperature 0).
        max_new_tokens: most tokens of an answer, if the model names it.
    """

    numbers: Mapping[str, float]
    is_greedy: bool = False
    max_new_tokens: int | None = None

    def complete(self, given: Mapping[str, float | None]) -> dict[str, float]:
        """Every number of `LIMITS` for a request.

        Args:
            given: numbers of `LIMITS` that the request names, None for those that it does not.
        """
        named = {name: value for name, value in given.items() if value is not None}
        found = {name: off for name, (off, _, _) in LIMITS.items()} | dict(self.numbers)
        found |= {name: float(value) for name, value in named.items()}
        if "temperature" not in named and (self.is_greedy or "temperature" not in self.numbers):
            # Of a model that says it is greedy, only the request's own filters ask for samples.
            asked = named if self.is_greedy else {**self.numbers, **named}
            found["temperature"] = PLAIN_SAMPLES if _filters(asked) else GREEDY
        return found

    def told(self) -> dict[str, float | None]:
        """What a request that says nothing gets, for people and programs. `max_tokens` is None
        where the model names no limit."""
        numbers = {n: int(v) if n == "top_k" else v for n, v in self.complete({}).items()}
        return {**numbers, "max_tokens": self.max_new_tokens}


def default_sampling_params(
    defaults: GenerationDefaults, most: int = NUM_TOKENS, **given: Any
) -> SamplingParams:
    """Parameters of a request in Python or on the command line.

    Args:
        defaults: of the model.
        most: tokens to generate, where neither `given` nor the model says.
        **given: fields of `SamplingParams` that the request names.
    """
    # Imported here: the command line has these defaults in its help.
    from megatron_async.requests.sampling_params import SamplingParams

    numbers: dict[str, Any] = defaults.complete({name: given.get(name) for name in LIMITS})
    numbers["top_k"] = max(int(numbers["top_k"]), 0)
    if numbers["top_p"] == 1:
        numbers["top_p"] = 0.0  # the engine's word for all of them
    length: dict[str, Any] = {}
    if given.get("num_tokens_total") is None:
        length["num_tokens_to_generate"] = defaults.max_new_tokens or most
    return SamplingParams(**{**length, **given, **numbers})


def generation_defaults(model: Any) -> GenerationDefaults:
    """What a model says of its sampling.

    Args:
        model: its tokenizer or its `ModelCard`, which have its `generation_config`; what has none
            (None, or another class of tokenizers) says nothing.

    Raises:
        ConfigurationError: a value that cannot be; the message names it.
    """
    fields = getattr(model, "generation_config", None) or {}
    where = str(getattr(model, "source", None) or getattr(model, "model", "the model"))
    numbers: dict[str, float] = {}
    for name, (_, low, high) in LIMITS.items():
        if (value := fields.get(name)) is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            raise _cannot_be(where, name, value, f"a number from {low:g} to {high:g}")
        if name == "top_k" and value != int(value):
            raise _cannot_be(where, name, value, "a whole number")
        numbers[name] = float(value)
    do_sample, most = fields.get("do_sample"), fields.get(MAX_NEW_TOKENS)
    if not isinstance(do_sample, bool | None):
        raise _cannot_be(where, "do_sample", do_sample, "true or false")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise _cannot_be(where, MAX_NEW_TOKENS, most, "an integer, 1 or more")
    if do_sample is True:
        numbers.setdefault("temperature", PLAIN_SAMPLES)
    is_greedy = do_sample is False or numbers.get("temperature") == GREEDY
    return GenerationDefaults(numbers, is_greedy, most)


def _filters(named: Mapping[str, float]) -> bool:
    is_cut = named.get("top_k", 0) > 1 or 0 < named.get("top_p", 1) < 1
    return is_cut or any(named.get(name, 0) > 0 for name in _PLAIN)


def _cannot_be(where: str, name: str, value: Any, allowed: str) -> ConfigurationError:
    return ConfigurationError(
        f"{where}: its generation_config has {name}={value!r}, which must be {allowed}: correct "
        "it, or leave it out."
    )
