"""Engines whose end is checked, and what `transformers` says, computed once a test run."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from megatron_async import LLM
from tests.support.harness import (
    NUM_TOKENS,
    EngineFactory,
    engines_are_closed,
    make_engine,
    make_model,
)

CHATS = (
    [{"role": "user", "content": "Name three colours."}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
        {"role": "assistant", "content": "Air scatters blue light more than red light."},
        {"role": "user", "content": "And why is it red in the evening? Think of the long way that "
         "the light of a low sun takes through the air, and of what is left of it at its end."},
    ],
)  # fmt: skip
TEXTS = (
    "A",
    "Hello there",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Water boils when it is heated because its molecules move faster and faster, until they leave "
    "the liquid. The temperature at which this happens depends on the pressure: high on a mountain "
    "it is lower than at the coast, and in a closed pot it is higher. This was not understood for "
    "a long time. Denis Papin built a pot with a tight lid and a valve in 1679, cooked bones in it "
    "until they were soft, and showed it to the Royal Society in London, which is why",
)


@pytest.fixture(autouse=True)
def close_engines() -> Iterator[None]:
    """What a test leaves open is closed behind it, and everything must be back then."""
    with engines_are_closed():
        yield


@pytest.fixture(scope="session")
def tiny_model() -> torch.nn.Module:
    return make_model()


@pytest.fixture
def make_tiny_engine(tiny_model: torch.nn.Module) -> EngineFactory:
    """Engines around the tiny model; see `harness.make_engine`."""
    return partial(make_engine, tiny_model, max_requests=8)


@pytest.fixture
def make_smollm2_engine(smollm2_llm: LLM) -> EngineFactory:
    """Engines around the demo model; see `harness.make_engine`."""
    model = smollm2_llm.engine.controller.inference_wrapped_model.model
    return partial(make_engine, model, max_requests=8, tokenizer=smollm2_llm.tokenizer)


@pytest.fixture(scope="session")
def smollm2_prompts(smollm2_llm: LLM) -> list[list[int]]:
    """Eight prompts of 1 to about 120 tokens, text and chat."""
    tokenizer = smollm2_llm.tokenizer
    assert tokenizer is not None
    prompts = [tokenizer.tokenize(text) for text in TEXTS]
    for chat in CHATS:
        text = tokenizer.apply_chat_template(chat)
        prompts.append(tokenizer.tokenize(text, add_special_tokens=False))
    return prompts


@pytest.fixture(scope="session")
def transformers_tokens(
    smollm2_prompts: list[list[int]], transformers_smollm2: Any
) -> list[list[int]]:
    """Greedy float32 tokens of each prompt by `transformers`, all prompts in one batch."""
    return _greedy_loop(transformers_smollm2, smollm2_prompts)


@torch.inference_mode()
def _greedy_loop(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens by a plain loop with a KV cache, prompts padded on the left. (`generate` adds
    rules of its own.)"""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    lengths = torch.tensor([[len(prompt)] for prompt in prompts])
    positions = torch.arange(longest) - (longest - lengths)
    mask, cache, tokens = (positions >= 0).long(), None, []
    positions = positions.clamp(min=0)
    for _ in range(NUM_TOKENS):
        result = model(
            ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache, ids = result.past_key_values, result.logits[:, -1:].argmax(-1)
        positions = positions[:, -1:] + 1
        mask = torch.cat((mask, torch.ones_like(ids)), 1)
        tokens.append(ids)
    return torch.cat(tokens, 1).tolist()
