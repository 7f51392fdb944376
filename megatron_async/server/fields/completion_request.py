"""`CompletionRequest`: the body of /v1/completions."""

from __future__ import annotations

from megatron_async.server.fields.shared_fields import SharedFields


class CompletionRequest(SharedFields, kw_only=True):
    """A request for completions.

    Attributes:
        prompt: one text, several, token ids, or several lists of them.
        logprobs: the log prob of each token, and this many likeliest ones beside it.
        max_completion_tokens: another name of `max_tokens`, which wins.
    """

    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    max_completion_tokens: int | None = None
