"""Conversations that a chat model makes up by itself: what a draft layer learns from.

Given nothing but the opening of a user's turn, a chat model writes a plausible prompt; then it
answers that. (Xu et al. 2024, "Magpie", arXiv 2406.08464.) No data set is needed, and the texts
are those that the model will be asked to write.
"""

from __future__ import annotations

from typing import Any

from megatron_async import LLM, SamplingParams
from megatron_async.text.tokenizer import Tokenizer

MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
MOST_PROMPT_TOKENS = 96
ANSWER_TEMPERATURES = (0.0, 0.7, 1.0)
"""In turn: drafts are wanted at all of them."""


def opening_of(tokenizer: Tokenizer) -> tuple[str, str]:
    """What stands before a user's words in a conversation, and what ends them.

    Raises:
        TokenizerError: the model has no chat template.
    """
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": MARK}], add_generation_prompt=False
    )
    before, _, behind = text.partition(MARK)
    return before, behind.strip()


def make_up(llm: LLM, count: int, most_tokens: int, seed: int) -> list[list[int]]:
    """Token ids of conversations of one prompt and its answer.

    Args:
        llm: the model; it has a tokenizer with a chat template.
        count: conversations.
        most_tokens: of an answer.
        seed: of all.
    """
    tokenizer = llm.tokenizer
    assert tokenizer is not None, "opening_of has read it"
    before, end = opening_of(tokenizer)
    opening = tokenizer.tokenize(before, add_special_tokens=False)
    asked = [
        SamplingParams(
            num_tokens_to_generate=MOST_PROMPT_TOKENS, temperature=1.0, seed=seed + number,
            stop_words=[end] if end else [],
        )
        for number in range(count)
    ]  # fmt: skip
    questions = [_text(request) for request in llm.generate([opening] * count, asked, True)]
    prompts = [
        tokenizer.tokenize(
            tokenizer.apply_chat_template([{"role": "user", "content": question}]),
            add_special_tokens=False,
        )
        for question in questions
    ]
    wanted = [
        SamplingParams(
            num_tokens_to_generate=most_tokens, seed=seed + number,
            temperature=ANSWER_TEMPERATURES[number % len(ANSWER_TEMPERATURES)],
        )
        for number in range(count)
    ]  # fmt: skip
    answers = llm.generate(prompts, wanted, True)
    return [
        [*prompt, *answer.generated_tokens]
        for prompt, answer in zip(prompts, answers, strict=True)
        if answer.error is None
    ]


def _text(request: Any) -> str:
    if request.error is not None:
        raise request.error
    return str(request.generated_text).strip()
