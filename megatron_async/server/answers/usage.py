"""`usage`: the numbers of tokens of an answer."""

from __future__ import annotations

import msgspec


class PromptTokensDetails(msgspec.Struct):
    """How many of the prompt's tokens were found in the prefix cache."""

    cached_tokens: int = 0


class Usage(msgspec.Struct):
    """Numbers of tokens, as OpenAI gives them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None


class UsageCount:
    """Counts what the choices of one answer use; a prompt of several choices counts once.

    Args:
        num_prompts: of the answer.
    """

    def __init__(self, num_prompts: int) -> None:
        self._prompts = [0] * num_prompts
        self._cached = [0] * num_prompts
        self.generated = 0

    def set_prompt(self, prompt: int, tokens: int, cached: int = 0) -> None:
        """Length of a prompt, and most cached tokens of it among the choices."""
        self._prompts[prompt] = max(self._prompts[prompt], tokens)
        self._cached[prompt] = max(self._cached[prompt], cached)

    def usage(self) -> Usage:
        """The numbers so far."""
        prompt = sum(self._prompts)
        details = PromptTokensDetails(sum(self._cached))
        return Usage(prompt, self.generated, prompt + self.generated, details)
