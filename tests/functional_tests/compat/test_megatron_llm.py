"""`MegatronLLM` and `MegatronAsyncLLM`: the tokens of Megatron's own forward, and its calls."""

import asyncio
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.inference.apis import ServeConfig
from megatron.core.inference.inference_request import DynamicInferenceRequest, Status
from megatron.core.models.gpt import GPTModel

from megatron_async.compat.inference.apis import MegatronAsyncLLM, MegatronLLM, SamplingParams
from megatron_async.compat.inference.config import AsyncScheduleMode, InferenceConfig
from megatron_async.compat.inference.engines import EngineSuspendedError
from megatron_async.errors import ConfigurationError
from tests.support.compat_models import VOCABULARY, gpt_model, logits_of

PROMPTS = ["The sea", "a", "0123456789" * 4]
TOKENS = 10


class MegatronTokenizer:
    """What Megatron's tokenizers have; a token is a letter of ASCII."""

    vocab_size, eod, bos = VOCABULARY, VOCABULARY - 1, None

    def tokenize(self, text: str) -> list[int]:
        return [ord(letter) - 32 for letter in text]

    def detokenize(self, tokens: list[int], **_: Any) -> str:
        return "".join(chr(32 + token) for token in tokens)


@pytest.fixture(scope="module")
def model() -> GPTModel:
    return gpt_model().eval()


@pytest.fixture(scope="module")
def expected(model: GPTModel) -> list[list[int]]:
    """Greedy tokens by Megatron's own forward of the whole sequence, again for each token."""
    every = []
    with torch.no_grad():
        for prompt in PROMPTS:
            tokens = MegatronTokenizer().tokenize(prompt)
            for _ in range(TOKENS):
                tokens.append(int(logits_of(model, tokens)[-1].argmax()))
            every.append(tokens[len(prompt) :])
    return every


def config(**fields: Any) -> InferenceConfig:
    return InferenceConfig(
        max_sequence_length=64, max_requests=4, max_tokens=64, buffer_size_gb=0.01,
        block_size_tokens=16, **fields,
    )  # fmt: skip


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(num_tokens_to_generate=TOKENS, top_k=1, termination_id=-1, **fields)


def tokens_of(requests: list[Any]) -> list[list[int]]:
    return [list(request.generated_tokens) for request in requests]


@pytest.mark.parametrize("mode", [AsyncScheduleMode.LEGACY, AsyncScheduleMode.ASYNC])
def test_generate(mode: AsyncScheduleMode, model: GPTModel, expected: list[list[int]]) -> None:
    settings = config(async_sched_mode=mode)
    with (
        torch.inference_mode(),
        MegatronLLM(
            model=model, tokenizer=MegatronTokenizer(), inference_config=settings,
            use_coordinator=False,
        ) as llm,
    ):  # fmt: skip
        requests = llm.generate(PROMPTS, greedy())
        assert tokens_of(requests) == expected
        assert all(isinstance(request, DynamicInferenceRequest) for request in requests)
        assert [request.prompt for request in requests] == PROMPTS
        assert [request.status for request in requests] == [Status.COMPLETED] * 3
        assert requests[0].generated_text == MegatronTokenizer().detokenize(expected[0])
        # One prompt gives a list, too; so do token ids; nothing gives nothing.
        assert tokens_of(llm.generate(PROMPTS[0], greedy())) == expected[:1]
        ids = MegatronTokenizer().tokenize(PROMPTS[0])
        assert tokens_of(llm.generate(ids, greedy())) == expected[:1]
        assert llm.generate([]) == []
        assert llm.context.max_tokens == 64
        assert llm.engine.context is llm.context
        assert llm.controller is llm.engine.controller
        assert llm.is_primary_rank
    llm.shutdown()
    llm.wait_for_shutdown()
    with pytest.raises(EngineSuspendedError):
        llm.generate(PROMPTS)


def test_paused_and_suspended_engines_go_on(model: GPTModel, expected: list[list[int]]) -> None:
    with MegatronLLM(model=model, tokenizer=MegatronTokenizer(), inference_config=config()) as llm:
        llm.pause()
        with pytest.raises(EngineSuspendedError):
            llm.generate(PROMPTS, greedy())
        llm.unpause()
        llm.engine.reset()
        assert tokens_of(llm.generate(PROMPTS, greedy())) == expected
        llm.suspend()
        llm.resume()
        assert tokens_of(llm.generate(PROMPTS, greedy())) == expected


def test_a_request_that_cannot_be_served_fails_alone(model: GPTModel, expected: list[list[int]]):
    with MegatronLLM(model=model, tokenizer=MegatronTokenizer(), inference_config=config()) as llm:
        requests = llm.generate([PROMPTS[0], "x" * 65, PROMPTS[1]], greedy())
        assert tokens_of([requests[0], requests[2]]) == expected[:2]
        assert requests[1].status is Status.FAILED


def test_async_generate_shares_batches(model: GPTModel, expected: list[list[int]]) -> None:
    async def use() -> None:
        async with MegatronAsyncLLM(
            model=model, tokenizer=MegatronTokenizer(), inference_config=config()
        ) as llm:
            first, rest = await asyncio.gather(
                llm.generate(PROMPTS[0], greedy()), llm.generate(PROMPTS[1:], greedy())
            )
            assert tokens_of([first, *rest]) == expected
            assert await llm.generate([]) == []
            steps = llm.context.step_count
            assert steps < 2 * TOKENS + 2  # and not one after the other
            await llm.pause()
            waiting = asyncio.ensure_future(llm.generate(PROMPTS, greedy()))
            await asyncio.sleep(0.02)
            assert not waiting.done()
            await llm.suspend()
            await llm.unpause()
            await llm.resume()
            assert tokens_of(await waiting) == expected
            with pytest.raises(ConfigurationError, match="use_coordinator=True"):
                await llm.serve(ServeConfig(port=1))
            ended = asyncio.ensure_future(llm.wait_for_shutdown())
        await ended
        await llm.shutdown()

    asyncio.run(use())


def test_async_generate_ends_with_the_engine(model: GPTModel) -> None:
    async def use() -> None:
        llm = MegatronAsyncLLM(
            model=model, tokenizer=MegatronTokenizer(), inference_config=config()
        )
        await llm.wait_for_shutdown()
        await llm.pause()
        waiting = asyncio.ensure_future(llm.generate(PROMPTS, greedy()))
        await asyncio.sleep(0.02)
        await llm.shutdown()
        requests = await waiting
        assert [request.status for request in requests] == [Status.FAILED] * 3

    asyncio.run(use())


def test_a_second_event_loop_may_go_on(model: GPTModel, expected: list[list[int]]) -> None:
    llm = MegatronAsyncLLM(model=model, tokenizer=MegatronTokenizer(), inference_config=config())
    for _ in range(2):
        assert tokens_of(asyncio.run(llm.generate(PROMPTS, greedy()))) == expected
    asyncio.run(llm.shutdown())


@pytest.mark.parametrize("kind", [MegatronLLM, MegatronAsyncLLM])
@pytest.mark.parametrize("where", [{"coordinator_host": "a"}, {"coordinator_port": 1}])
def test_where_a_coordinator_is_needs_one(
    kind: type, where: dict[str, Any], model: GPTModel
) -> None:
    with pytest.raises(ConfigurationError, match="host/port require use_coordinator=True"):
        kind(model=model, tokenizer=MegatronTokenizer(), use_coordinator=False, **where)


def test_experts_of_other_ranks_are_refused(model: GPTModel, monkeypatch):
    monkeypatch.setattr(parallel_state, "get_expert_model_parallel_world_size", lambda: 4)
    with pytest.raises(ConfigurationError, match="expert_model_parallel_size > 1"):
        MegatronLLM(model=model, tokenizer=MegatronTokenizer())


@pytest.mark.parametrize("prompts", [{1, 2}, 1.5, [1.5], {"k": "v"}, None, (1, 2)])
def test_prompts_of_another_form_are_refused(prompts: Any, model: GPTModel) -> None:
    with (
        MegatronLLM(model=model, tokenizer=MegatronTokenizer(), inference_config=config()) as llm,
        pytest.raises(TypeError, match="prompts="),
    ):
        llm.generate(prompts)
