"""From Megatron's `SamplingParams` to ours and back."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megatron.core.inference.sampling_params import SamplingParams as MegatronParams

from megatron_async.compat.conversions.settings import LOGPROBS_MODES
from megatron_async.config import InferenceConfig
from megatron_async.errors import RequestError
from megatron_async.names_of_megatron import PARAMS_OF_MAIN
from megatron_async.requests.sampling_params import SamplingParams

MEGATRON_FIELDS = frozenset(field.name for field in fields(MegatronParams))
OWN_FIELDS = frozenset(field.name for field in fields(SamplingParams))


class RefusedParams(SamplingParams):
    """Parameters whose request fails alone, with this error, as soon as it is prepared."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def copy(self) -> RefusedParams:
        """Raise the error."""
        raise self._error


def to_own_params(params: MegatronParams, logprobs_mode: str) -> SamplingParams:
    """The parameters that Megatron's mean here.

    Attributes that were set beside Megatron's fields (`add_attributes`) are ours, by their names.
    `logprobs_mode` is from `InferenceConfig`, by Megatron's name.

    Raises:
        RequestError: an attribute that neither knows, or one that is not served.
    """
    given = vars(params)
    for name, advice in PARAMS_OF_MAIN.items():
        if advice and given.get(name):
            raise RequestError(f"SamplingParams.{name}={given[name]!r} is not served: {advice}.")
    unknown = sorted(given.keys() - MEGATRON_FIELDS - OWN_FIELDS - PARAMS_OF_MAIN.keys())
    if unknown:
        known = ", ".join(sorted(OWN_FIELDS - MEGATRON_FIELDS))
        raise RequestError(
            f"SamplingParams has attributes that are not served: {', '.join(unknown)}. Remove "
            f"them; beside Megatron's own these are served: {known}."
        )
    own = {name: value for name, value in given.items() if name in OWN_FIELDS}
    own.setdefault("logprobs_mode", LOGPROBS_MODES[logprobs_mode])
    return SamplingParams(**own)


def to_megatron_params(params: SamplingParams) -> MegatronParams:
    """Our parameters as Megatron's, what Megatron lacks as attributes where it is not our default.

    `to_own_params` gives them back.
    """
    shared = {name: getattr(params, name) for name in MEGATRON_FIELDS & OWN_FIELDS}
    converted = MegatronParams(**shared)
    extra: dict[str, Any] = {}
    for field in fields(SamplingParams):
        value = getattr(params, field.name)
        if field.name not in MEGATRON_FIELDS and value != field.default:
            extra[field.name] = value
    converted.add_attributes(extra)
    return converted


def resolve_limits(params: MegatronParams, own: SamplingParams, prompt: int, longest: int) -> None:
    """Write into Megatron's parameters what they meant, as Megatron's engine does. `own` are ours,
    once the request is admitted; `prompt`: its tokens of the prompt; `longest`:
    `max_sequence_length`."""
    wanted = params.num_tokens_to_generate
    if params.num_tokens_total is not None:
        wanted = params.num_tokens_total - prompt
    left = longest - prompt
    params.num_tokens_total = None
    params.num_tokens_to_generate = left if wanted is None else min(wanted, left)
    params.termination_id = -1 if own.termination_id is None else own.termination_id


class SamplingSeed:
    """Megatron's `controller.sampling_rng` for scripts that seed it.

    Random numbers here follow from each request's seed and the place of the token, and no generator
    has a state. A request without a seed of its own takes the engine's, mixed with its id.
    """

    def __init__(self, settings: InferenceConfig) -> None:
        self._settings = settings

    def manual_seed(self, seed: int) -> SamplingSeed:
        """Seed the requests that are added after the call; gives the generator, as torch does."""
        self._settings.inference_sampling_seed = int(seed)
        return self

    def initial_seed(self) -> int:
        """The present seed."""
        return self._settings.inference_sampling_seed
