"""`/generate` of SGLang's server, as trainers use it: token ids in, token ids, log probs and
versions of weights out. A request is a completion in other words.

Facts: `srt/managers/io_struct.py` (`GenerateReqInput`), `srt/sampling/sampling_params.py` and
`srt/managers/tokenizer_manager.py` of SGLang 0.5.23.
"""

from __future__ import annotations

import base64
import math
from typing import Any, override

import msgspec
import numpy as np

from megatron_async.server.answers.choice_text import CUT
from megatron_async.server.answers.choice_writer import CompletionWriter
from megatron_async.server.answers.items import Item, ItemResult, Usage
from megatron_async.server.answers.log_prob_json import Place
from megatron_async.server.endpoints import Endpoint
from megatron_async.server.fields.ask import ask_completion
from megatron_async.server.fields.asked import Asked, AskedChoice, Caller
from megatron_async.server.fields.not_served import KnownFields, refuse_what_is_not_served
from megatron_async.server.fields.refusal import Refusal, not_allowed, told_at
from megatron_async.server.fields.request_bodies import CompletionRequest, StructuredOutputs
from megatron_async.server.fields.served_model import ServedModel
from megatron_async.serving.readers import TokenLogProbs

NEW_TOKENS = 128
"""SGLang's default of `max_new_tokens`."""
REPEATED = ("return_text_in_logprobs", "routed_experts_start_len")
"""Fields that say how the answer is written."""
FIELDS = {
    "max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim", "request_id": "rid", "prompt": "input_ids",
    "top_logprobs": "top_logprobs_num", "logprobs": "top_logprobs_num",
    "return_routing": "return_routed_experts", "prompt_log_probs_from": "logprob_start_len",
}  # fmt: skip
"""Fields of completions and of the engine -> SGLang's names."""


class Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """SGLang's `sampling_params`. `spaces_between_special_tokens`: a tokenizer of today reads it
    not."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None
    n: int = 1
    json_schema: str | None = None
    regex: str | None = None


class GenerateRequest(KnownFields, kw_only=True, forbid_unknown_fields=True):
    """The body of /generate: one prompt."""

    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: Sampling = msgspec.field(default_factory=Sampling)
    rid: str | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    stream: bool = False
    priority: int | None = None


def ask_generate(request: GenerateRequest, served: ServedModel, caller: Caller) -> Asked:
    """What the engine is asked.

    Raises:
        Refusal: naming the field in SGLang's words, its value and what is allowed.
    """
    refuse_what_is_not_served(request)
    one, start = request.sampling_params, request.logprob_start_len
    if (request.text is None) == (request.input_ids is None):
        raise Refusal("give one of text and input_ids.", param="input_ids")
    for name in ("logprob_start_len", "routed_experts_start_len"):
        if (value := getattr(request, name)) < -(name == "logprob_start_len"):
            raise not_allowed(name, value, "0 or more (logprob_start_len=-1: none of the prompt)")
    top_n = request.top_logprobs_num if request.return_logprob else None
    wanted = {"json": one.json_schema, "regex": one.regex}
    structured: dict[str, Any] = {
        name: value for name, value in wanted.items() if value is not None
    }
    completion = CompletionRequest(
        prompt=request.text if request.input_ids is None else list(request.input_ids),
        max_tokens=NEW_TOKENS if one.max_new_tokens is None else one.max_new_tokens,
        min_tokens=one.min_new_tokens, include_stop_str_in_output=one.no_stop_trim,
        seed=one.sampling_seed, logprobs=top_n, prompt_logprobs=None if start < 0 else top_n,
        structured_outputs=StructuredOutputs(**structured) if structured else None,
        request_id=request.rid, priority=request.priority, return_weight_versions=True, n=one.n,
        **{name: getattr(one, name) for name in SAME},
    )  # fmt: skip
    with told_at(FIELDS):
        asked = ask_completion(completion, served, caller)
    for choice in asked.choices:
        choice.params.return_routing = request.return_routed_experts
        choice.params.prompt_log_probs_from = max(start, 0)
    # Its id is what /abort_request calls it by.
    name = request.rid or asked.style.id
    repeated = {name: getattr(request, name) for name in REPEATED}
    style = msgspec.structs.replace(
        asked.style, id=name, is_stream=request.stream, field_names=FIELDS, repeated=repeated
    )
    return msgspec.structs.replace(asked, style=style)


def shown_version(version: str | int | None) -> str:
    """A version as SGLang tells it, with its label for weights that nobody has named."""
    return "default" if version is None else str(version)


SAME = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens",
)  # fmt: skip
"""Fields of `Sampling` that completions call so too."""


class GenerateWriter(CompletionWriter):
    """Writes the answer; an `ItemWriter`. Each event of a stream has all so far, as SGLang's
    has."""

    _so_far, _num_sent = "", 0

    def __init__(self, asked: Asked, choice: AskedChoice, served: ServedModel) -> None:
        super().__init__(asked, choice, served)
        self._keeps_tokens, self.splice = self.style.top_n is not None, None
        self._ids: list[int] = []
        self._written: dict[str, bytearray] = {}
        """Log probs of all tokens but those of `_taken`, as JSON without brackets."""

    @override
    def took(self, tokens: list[int], log_probs: TokenLogProbs | None) -> None:
        super().took(tokens, log_probs)
        self._ids += tokens

    @override
    def body(self, choices: list[dict[str, Any]], usage: Usage) -> Any:
        return choices if len(choices) > 1 else choices[0]

    @override
    def more(self, item: Item, text: str) -> bytes:
        item.texts.append(text)
        self._so_far += text
        return self._part()

    @override
    def rest(self) -> bytes:
        return self._part() if self._num_sent < self._num_tokens else b""

    @override
    def finished(self, result: ItemResult) -> bytes:
        return self._event(self.whole(result)) if self.style.is_stream else b""

    def _part(self) -> bytes:
        """What there is so far, as an event of a stream."""
        if not self.style.is_stream:
            return b""
        self._num_sent = self._num_tokens
        ids, prompt = self._ids, self._prompt_ids() or ()
        meta = {"id": self.style.id, "finish_reason": None, "prompt_tokens": len(prompt)}
        meta |= {"completion_tokens": len(ids)} | self._output()
        return self._event({"text": self._so_far, "output_ids": ids, "meta_info": meta})

    @override
    def _event(self, choice: dict[str, Any]) -> bytes:
        index = {"index": self.choice.index} if len(self.asked.choices) > 1 else {}
        return b"data: %b\n\n" % msgspec.json.encode(choice | index)

    def _output(self) -> dict[str, Any]:
        """Log probs of all tokens so far. Each is written once, or a stream's work would grow with
        the square of its length, and others' answers wait for it."""
        if self.style.top_n is None:
            return {}
        for name, news in self._told("output", self._places()).items():
            written = self._written.setdefault(name, bytearray())
            written += b"," if news and written else b""
            written += msgspec.json.encode(news)[1:-1]
        self._taken = []
        return {name: msgspec.Raw(b"[" + rows + b"]") for name, rows in self._written.items()}

    @override
    def whole(self, result: ItemResult) -> dict[str, Any]:
        end, style = result.end, self.style
        ids = self._ids
        meta: dict[str, Any] = {
            "id": style.id,
            "finish_reason": self._reason(result, ids),
            "prompt_tokens": end.num_prompt_tokens,
            "completion_tokens": len(ids),
            "cached_tokens": end.num_cached_tokens or 0,
            "e2e_latency": end.latency,
        }
        for name, spans in self._versions(result).items():
            meta[name] = [one | {"version": shown_version(one["version"])} for one in spans]
        last = meta["weight_versions"][-1:] or [{"version": shown_version(None)}]
        meta["weight_version"] = last[0]["version"]
        if style.top_n is not None and (found := self._prompt_places(result, style.top_n)):
            meta |= self._told("input", found)
        meta |= self._output()
        if end.routing is not None:
            start = style.repeated["routed_experts_start_len"]
            rows = np.frombuffer(end.routing.ids, end.routing.dtype).reshape(end.routing.shape)
            sent = base64.b64encode(rows[start:].astype("<i4").tobytes()).decode()
            meta |= {"routed_experts": sent, "routed_experts_start_len": start}
        return {"text": self._whole_text(result), "output_ids": ids, "meta_info": meta}

    def _reason(self, result: ItemResult, ids: list[int]) -> dict[str, Any]:
        """SGLang's finish reason: an object with a type."""
        if result.end.finish_reason in CUT:
            return {"type": "abort", "message": result.end.finish_reason}
        if result.reason == "length":
            return {"type": "length", "length": len(ids)}
        return {"type": "stop", "matched": result.stop_word or (ids[-1] if ids else None)}

    def _told(self, of: str, found: list[Place]) -> dict[str, Any]:
        """Log prob, id and text of each token, and of the likeliest ones beside it."""
        told = {f"{of}_token_logprobs": [self._one(token, value) for token, value, _ in found]}
        if self.style.top_n:
            told[f"{of}_top_logprobs"] = [
                [self._one(token, value) for token, value in top] for _, _, top in found
            ]
        return told

    def _one(self, token: int, value: float) -> list[Any]:
        with_text = self.style.repeated.get("return_text_in_logprobs")
        text = self.served.names_of_tokens.text_of(token) if with_text else None
        return [None if math.isnan(value) else value, token, text]


GENERATE = Endpoint(GenerateRequest, ask_generate, GenerateWriter)
