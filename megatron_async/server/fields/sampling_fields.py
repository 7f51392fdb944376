"""Sampling fields of a request as the engine's `SamplingParams`.

Where words differ: top_p 0 is nearly greedy at OpenAI and "off" in the engine, as in Megatron;
top_k -1 is "off" at vLLM, 0 in the engine; vLLM's lower priority is earlier, the engine's higher
one; seeds are any int64 at vLLM, and not negative in the engine.
"""

from __future__ import annotations

import hashlib
from typing import Any

from megatron_async.errors import RequestError
from megatron_async.ops.sampling.slot_records import MAX_TOP_N
from megatron_async.requests.defaults import LIMITS
from megatron_async.requests.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from megatron_async.server.fields.asked import Caller
from megatron_async.server.fields.refusal import Refusal, not_allowed, refusal_of
from megatron_async.server.fields.request_bodies import SharedFields
from megatron_async.server.fields.served_model import ServedModel
from megatron_async.text.structured_output import StructuredOutput

SEED_MASK = 2**63 - 1
SMALLEST = 1e-5
"""A smaller temperature or top_p is greedy: in float32 it may be 0, which means another thing."""
MAX_BIASES = 512
MAX_SALT = 1024
"""Characters of a cache salt."""
MOST_LAG = 2**31 - 1
"""Updates of the weights."""
MAX_PRIORITY = 2**20
"""The engine's (`planning.admission.MAX_PRIORITY`), or its negative."""


def sampling_params(
    request: SharedFields,
    served: ServedModel,
    caller: Caller,
    most: int | None,
    structured: StructuredOutput | None,
) -> SamplingParams:
    """What all choices of a request have in common: all but the seed. `most`: tokens to generate, 1
    or more; None: as many as fit. For fields that are missing stands what `requests/defaults.py`
    says."""
    given = {name: getattr(request, name) for name in LIMITS}
    for name, (_, low, high) in LIMITS.items():
        value = given[name]
        if value is not None and not low <= value <= high:  # NaN is in no range
            raise not_allowed(name, value, f"{low:g} to {high:g}")
    params: dict[str, Any] = served.defaults.complete(given)
    top_k = int(params["top_k"])
    params["top_k"] = 0 if top_k >= served.card.vocab_size else max(top_k, 0)
    if params["temperature"] < SMALLEST:
        params["temperature"] = 0.0
    if params["top_p"] < SMALLEST:
        params["top_p"] = 0.0
        if not served.as_megatron:
            params["top_k"] = 1
    longest, lag = served.card.max_sequence_length, request.max_version_lag
    if lag is not None and not 0 <= lag <= MOST_LAG:
        allowed = f"0 (its first weights alone) to {MOST_LAG}, or left out"
        raise not_allowed("max_version_lag", lag, allowed)
    found = SamplingParams(
        **params,
        num_tokens_to_generate=None if most is None else min(most, longest),
        min_tokens=_min_tokens(request, most, longest),
        termination_id=-1 if request.ignore_eos else None,
        stop_token_ids=_stop_token_ids(request, served),
        stop_words=_stop_words(request, served),
        detokenize_stop_sequence=bool(request.include_stop_str_in_output),
        logit_bias=_logit_bias(request, served),
        bad_words=list(request.bad_words) if request.bad_words else None,
        cache_salt=_salt(request.cache_salt, caller),
        structured_output=structured,
        max_version_lag=lag,
    )
    if served.tokenizer is None and not served.card.replica_makes_text:
        for name in ("bad_words", "stop_words", "structured_output"):
            if getattr(found, name) is not None:
                why = f"{name} needs a tokenizer, which this model does not have."
                raise refusal_of("RequestError", why)
    return found


def check(params: SamplingParams, served: ServedModel) -> None:
    """Raise Refusal for what the engine would refuse."""
    try:
        params.validate(served.card.vocab_size)
    except RequestError as error:
        raise refusal_of("RequestError", str(error)) from error


def seed_of(request: SharedFields, choice: int) -> int | None:
    """The seed of the i-th choice of a prompt: seed + i, as a 63-bit number."""
    if request.seed is None:
        return None
    if not -(2**63) <= request.seed < 2**63:
        raise not_allowed("seed", request.seed, "an integer of 64 bits, -2**63 to 2**63 - 1")
    return (request.seed + choice) & SEED_MASK


def priority_of(request: SharedFields, served: ServedModel, caller: Caller) -> int:
    """The engine's priority; without the admin key within the limit, down to the lowest."""
    wanted = -(request.priority or 0)
    highest = MAX_PRIORITY if caller.is_admin else served.limits.priority
    return max(min(wanted, highest), -MAX_PRIORITY)


def log_prob_count(name: str, value: int | None) -> int | None:
    """A number of log probs."""
    if value is not None and not 0 <= value <= MAX_TOP_N:
        raise not_allowed(name, value, f"0 to {MAX_TOP_N}")
    return value


def _min_tokens(request: SharedFields, most: int | None, longest: int) -> int:
    wanted = request.min_tokens or 0
    limit = longest if most is None else min(most, longest)
    if not 0 <= wanted <= limit:
        raise not_allowed("min_tokens", wanted, f"0 to max_tokens ({limit})")
    return wanted


def _stop_token_ids(request: SharedFields, served: ServedModel) -> list[int] | None:
    found = dict.fromkeys(request.stop_token_ids or ())
    if not request.ignore_eos:
        found |= dict.fromkeys(served.card.eos_ids[1:])  # the first is the engine's own default
    if len(found) > MAX_STOP_TOKEN_IDS:
        raise Refusal(
            f"stop_token_ids has {len(found)} tokens with the model's own: at most "
            f"{MAX_STOP_TOKEN_IDS} are served.", param="stop_token_ids",
        )  # fmt: skip
    return list(found) or None


def _stop_words(request: SharedFields, served: ServedModel) -> list[str] | None:
    stop = request.stop
    words = [stop] if isinstance(stop, str) else stop or []
    if "" in words:
        raise Refusal("stop has an empty text: give texts that are not empty.", param="stop")
    return list(words) or None


def _logit_bias(request: SharedFields, served: ServedModel) -> dict[int, float] | None:
    if not request.logit_bias:
        return None
    if len(request.logit_bias) > MAX_BIASES:
        raise Refusal(
            f"logit_bias has {len(request.logit_bias)} tokens: at most {MAX_BIASES} are served.",
            param="logit_bias",
        )
    found: dict[int, float] = {}
    for key, bias in request.logit_bias.items():
        token = int(key) if len(key) < 10 and key.isascii() and key.isdigit() else -1
        if not 0 <= token < served.card.vocab_size:
            allowed = f"token ids from 0 to {served.card.vocab_size - 1}"
            raise not_allowed("logit_bias", key[:50], f"an object with {allowed} as keys")
        if not -100 <= bias <= 100:
            raise not_allowed("logit_bias", bias, "biases of -100 to 100")
        found[token] = bias
    return found


def _salt(salt: str | None, caller: Caller) -> str | None:
    """The salt of one key's requests: nobody with another key can make the same."""
    if salt is None:
        return None
    if not 0 < len(salt) <= MAX_SALT:
        raise Refusal(
            f"cache_salt has {len(salt)} characters: 1 to {MAX_SALT} are allowed.",
            param="cache_salt",
        )
    text = f"{len(caller.owner)}:{caller.owner}:{salt}"
    return hashlib.sha256(text.encode()).hexdigest()
