"""`MovedRequest`: an unfinished request as plain data, which another engine of the model goes on
with.

A token follows from the tokens before it, from the seed and from its position (the random numbers
have no state), so ids are all that moves. The other engine prefills them, as after an eviction.
What comes from elsewhere is data: its types, lengths and ids are checked before it is used.
"""

from __future__ import annotations

import reprlib
from base64 import b64decode
from dataclasses import fields
from typing import Any, Literal

import msgspec
import numpy as np

from megatron_async.errors import RequestError
from megatron_async.ops.sampling.slot_records import Header
from megatron_async.requests.inference_request import DynamicInferenceRequest
from megatron_async.requests.sampling_params import SamplingParams

MOVED = "moved"
"""Finish reason of a request that was exported."""


class MovedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What moves of a request; `plain` and `read` convert it to and from values of JSON."""

    format: Literal["megatron_async request 1"] = "megatron_async request 1"
    prompt: list[int]
    text: str | None
    """The prompt, where it was given as text."""
    generated: list[int]
    params: SamplingParams
    """Complete: seed, lengths and the model's own end are filled in."""
    priority: int
    log_probs: bytes
    """Words of `RequestLogProbs.state`."""
    prompt_log_probs: bytes
    versions: list[tuple[int, str | int | None]]
    """From which generated token on which weights count."""
    version_lag: int

    @classmethod
    def of(cls, request: DynamicInferenceRequest, generated: list[int]) -> MovedRequest:
        """The data of a request with these tokens so far."""
        assert request.record is not None, "it was prepared"
        words, params = request.record.words, request.sampling_params.copy()
        seed = words[[Header.SEED_LOW, Header.SEED_HIGH]].astype("<i4").view("<i8")
        params.seed, params.num_tokens_total = int(seed[0]), None
        params.num_tokens_to_generate = int(words[Header.MAX_LENGTH]) - len(request.prompt_tokens)
        params.termination_id = -1 if params.termination_id is None else params.termination_id
        log_probs = prompt_log_probs = b""  # one without tokens begins again
        if generated and request.log_probs is not None:
            log_probs, prompt_log_probs = request.log_probs.state()
        return cls(
            prompt=request.prompt_tokens.tolist(),  # sync-ok: NumPy
            text=request.prompt,
            generated=generated,
            params=params,
            priority=request.priority,
            log_probs=log_probs,
            prompt_log_probs=prompt_log_probs,
            versions=request.weights.tokens,
            version_lag=request.version_lag,
        )

    def plain(self) -> dict[str, Any]:
        """Values that JSON and msgpack can hold; bytes as base64."""
        found: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return found

    @classmethod
    def read(cls, data: Any) -> MovedRequest:
        """The request of `plain` values.

        Raises:
            RequestError: they are none.
        """
        try:
            found = msgspec.convert(data, cls, str_keys=True)
            unknown = data["params"].keys() - {field.name for field in fields(SamplingParams)}
            if unknown:
                raise ValueError(f"params has {reprlib.repr(sorted(map(str, unknown)))}")
            if isinstance(forced := found.params.forced_routing, str):
                found.params.forced_routing = b64decode(forced, validate=True)
        except (msgspec.ValidationError, RequestError, ValueError, TypeError, KeyError) as error:
            raise RequestError(
                f"the data is no request that an engine has exported ({error}): give what "
                "export_request returned, unchanged."
            ) from error
        return found

    def restore(
        self, request: DynamicInferenceRequest, generated: np.ndarray, vocab_size: int
    ) -> None:
        """Give a request, which is prepared, what it had: `generated` are the checked tokens.

        Raises:
            RequestError: the parts do not fit together, or the request has ended.
        """
        params, count = self.params, len(generated)
        most = int(params.num_tokens_to_generate or 0)
        if request.record is None or request.record.words[Header.MAX_LENGTH] != (
            len(request.prompt_tokens) + most
        ):
            raise RequestError(
                f"the moved request may generate {most} tokens, for which this engine has no room "
                "behind its prompt: raise max_sequence_length."
            )
        ends = {params.termination_id, *(params.stop_token_ids or ())}
        if count and (count >= most or ends & set(self.generated)):
            raise RequestError(f"the moved request has ended with its {count} tokens: keep it.")
        places = [place for place, _ in self.versions]
        is_wrong = places[:1] != [0] or places != sorted(set(places)) or places[-1] > count
        if is_wrong and (places or count):
            raise RequestError(
                f"versions={reprlib.repr(self.versions)} of a moved request do not count its "
                f"{count} tokens from 0 on."
            )
        if request.log_probs is not None:
            request.log_probs.restore(count, self.log_probs, self.prompt_log_probs, vocab_size)
        elif self.log_probs or self.prompt_log_probs:
            raise RequestError("a moved request has log probs, which its params do not ask for.")
        request.generated_tokens = generated.tolist()  # sync-ok: NumPy
        request.weights.tokens = self.versions
        request.num_moved, request.version_lag = count, max(self.version_lag, 0)
