"""`ExtraFields`: sampling fields that this server takes at every endpoint, beside those of its
protocol."""

from __future__ import annotations

from typing import Any

from megatron_async.server.fields.not_served import KnownFields
from megatron_async.server.fields.shared_fields import StructuredOutputs


class ExtraFields(KnownFields, kw_only=True):
    """Fields of `ChatRequest` that protocols without a name for them take by ours; None is the
    default."""

    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def extra_fields(request: ExtraFields) -> dict[str, Any]:
    """The values of these fields, by name, as keyword arguments of `ChatRequest`."""
    return {name: getattr(request, name) for name in ExtraFields.__annotations__}
