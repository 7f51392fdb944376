"""`CompletionRequest`: the body of /v1/completions."""

from __future__ import annotations

from megatron_async.server.fields.shared_fields import SharedFields


class CompletionRequest(SharedFields, kw_only=True):
    """A request for completions.

    Attributes:
        prompt: one text, several, token ids, or several lists of them.
        logprobs: the log prob of each token, and this many likeliest ones beside it.
        suffix: not served.
    """

    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    suffix: str | None = None
