"""How many tokens an answer took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_async.serving.readers import RequestEnd

REASONS = {"length": "length", "aborted": "abort"}
"""OpenAI's names of our finish reasons; all others are "stop"."""


def finish_reason(end: RequestEnd) -> str:
    """How a choice ended, in OpenAI's words."""
    return REASONS.get(end.finish_reason or "", "stop")


@dataclass
class Usage:
    """Counts of one answer; prompts count once, whatever n is.

    Attributes:
        prompt: tokens of the prompts.
        completion: generated tokens so far.
        cached: tokens of the prompts that were found in a cache.
    """

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
