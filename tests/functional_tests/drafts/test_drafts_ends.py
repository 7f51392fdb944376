"""Requests end inside a row of accepted drafts as they end anywhere: by stop words, by logits that
leave no token, beside rows under a grammar, and in captured steps."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceEngine, SamplingParams, Status
from megatron_async.errors import NoTokenToChoose
from megatron_async.ops.sampling.slot_records import RowFeature
from tests.support.attention_model import VOCABULARY, AttentionModel
from tests.support.capturing_cpu import CapturingCpu
from tests.support.drafters import DRAFTERS
from tests.support.harness import Job, drain, greedy, make_engine
from tests.support.late_device import LateDevice
from tests.support.pipeline_scenarios import GRAMMARS, JOBS, PROMPTS, letter_tokenizer, stage_model
from tests.support.poison import spoil_logits

PIECES = [chr(97 + n % 26) + "yz"[n % 2] * (n % 3) for n in range(VOCABULARY)]
TOKENS, DRAFTS = 22, 3
PROMPT = [4, 9, 2]
PLACES = range(1, 19)
"""Generated tokens with which a stop word is complete: at every place in a row."""


class Letters:
    """A tokenizer whose tokens are one to three letters."""

    eod = -1

    def tokenize(self, text: str) -> list[int]:
        raise NotImplementedError

    def detokenize(self, tokens: list[int]) -> str:
        return "".join(PIECES[token] for token in tokens)


class ByteLetters(Letters):
    """A letter tokenizer which tells the bytes of its tokens, so that few of them are looked at."""

    def token_bytes(self, num_tokens: int) -> list[bytes]:
        return [piece.encode() for piece in PIECES[:num_tokens]]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AttentionModel()


def endless(model: torch.nn.Module, **asked: Any) -> list[int]:
    """Prompt and tokens, on behind every end."""
    engine = make_engine(model, lookahead=0)
    found = engine.generate([PROMPT], greedy(TOKENS + 8, **asked))[0].generated_tokens
    engine.close()
    return [*PROMPT, *found]


def stopping(model: torch.nn.Module) -> tuple[list[Job], list[list[int]]]:
    """Requests of which each has a stop word that is complete with another token, and what each
    would say without."""
    jobs, answers = [], []
    for place in PLACES:
        asked = {"temperature": 1.1, "seed": place, "return_log_probs": True, "top_n_logprobs": 2}
        answer = endless(model, **asked)
        text = Letters().detokenize(answer[3 : 3 + place])
        words = ["never", text[-3:], text[-1:] + PIECES[answer[3 + place]][:1]]
        more = {"min_tokens": place} if place % 3 else {"detokenize_stop_sequence": True}
        jobs.append(Job(PROMPT, greedy(TOKENS, stop_words=words, **asked, **more)))
        answers.append(answer)
    return jobs, answers


async def stream_all(engine: DynamicInferenceEngine, jobs: list[Job]) -> list[dict[str, Any]]:
    """What requests have, what was streamed of them, and what steps reported."""
    futures = [engine.add_request(n, job.prompt, job.params) for n, job in enumerate(jobs)]

    async def read(number: int) -> tuple[list[int], str]:
        tokens, text = [], ""
        async for chunk in engine.stream(number):
            tokens += chunk.tokens
            text += chunk.text or ""
        return tokens, text

    readers = [asyncio.create_task(read(number)) for number in range(len(jobs))]
    reported: list[list[int]] = [[] for _ in jobs]
    while engine.has_unfinished_requests():
        for output in (await engine.async_step())["outputs"]:
            for number, token in zip(output.token_request_ids, output.tokens, strict=True):
                reported[number].append(int(token))
    streamed = [await reader for reader in readers]
    found = []
    for future, (tokens, text), report in zip(futures, streamed, reported, strict=True):
        request = await future
        assert tokens == report == request.generated_tokens
        assert text == request.generated_text
        found.append(
            {
                "tokens": tokens,
                "text": text,
                "reason": request.finish_reason,
                "log probs": pytest.approx(request.generated_log_probs, abs=1e-4),
                "alternatives": [list(place) for place in request.generated_top_n_logprobs],
            }
        )
        assert len(request.generated_log_probs) == len(tokens)
    assert engine.stats()["generated_tokens"] == sum(map(len, reported))
    return found


@pytest.mark.parametrize("tokenizer", [Letters, ByteLetters])
def test_stop_words_inside_a_row(model: torch.nn.Module, lookahead, tokenizer: type[Letters]):
    jobs, answers = stopping(model)
    plain = make_engine(model, tokenizer=Letters(), device=LateDevice(), lookahead=0)
    expected = asyncio.run(stream_all(plain, jobs))
    plain.close()
    ends = {len(found["tokens"]) for found in expected if found["reason"] == "stop_word"}
    assert {end % (DRAFTS + 1) for end in ends} == {0, 1, 2, 3}
    drafter = DRAFTERS["oracle"]([[], *answers], VOCABULARY, (len(answers) + 1, len(answers[0])))
    engine = make_engine(
        model, tokenizer=tokenizer(), device=LateDevice(), drafter=drafter, lookahead=lookahead,
        num_speculative_tokens=DRAFTS, max_requests=7, block_size_tokens=4,
    )  # fmt: skip
    found = asyncio.run(stream_all(engine, jobs))
    for place, mine, its in zip(PLACES, found, expected, strict=True):
        assert mine == its | {"log probs": mine["log probs"]}, place
        assert its["log probs"] == mine["log probs"].expected, place
    assert engine.stats()["accepted_tokens"] > len(jobs) * 3


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "filtered": {"temperature": 0.9, "top_k": 9, "seed": 0},
    "processed": {"frequency_penalty": 1.3, "bad_words": [[3, 4]], "return_log_probs": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_inside_a_row(model: torch.nn.Module, kind: str, lookahead: int) -> None:
    """The tokens before it in its row are kept, and the others' rows are not touched."""
    asked = KINDS[kind] | {"seed": 0}
    answer = endless(model, **asked)
    long, short = greedy(TOKENS, **asked), greedy(9, **asked)
    for position in range(13, 18):
        engine = make_engine(
            model, drafter=DRAFTERS["oracle"]([answer], VOCABULARY), lookahead=lookahead,
            num_speculative_tokens=DRAFTS, max_requests=4, block_size_tokens=4,
        )  # fmt: skip
        spoil_logits(engine, position)
        failed, sound = engine.generate([PROMPT, PROMPT], [long, short])
        drain(engine)
        assert isinstance(failed.error, NoTokenToChoose)
        assert failed.error.position == position
        assert failed.status == Status.FAILED
        assert failed.generated_tokens == answer[3:position]
        if failed.generated_log_probs is not None:
            assert len(failed.generated_log_probs) == position - 3
        assert sound.error is None
        assert sound.generated_tokens == answer[3:12]
        stats = engine.stats()
        assert stats["accepted_tokens"] > 6
        assert stats["generated_tokens"] == position - 3 + 9


def numbered(params: SamplingParams, number: int) -> SamplingParams:
    return replace(params, seed=number)


def test_grammars_beside_drafts(lookahead: int) -> None:
    """Rows under a grammar have width 1, and drafts of the others are accepted beside them.
    `_unpack_decode_rows` without `brought` writes drafts of constrained rows to blocks that the
    slots' former owners had."""
    model, tokenizer = stage_model(1), letter_tokenizer()
    wanted = [JOBS[0].params, *GRAMMARS, JOBS[2].params, *GRAMMARS]
    params = [numbered(each, number) for number, each in enumerate(wanted)]
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(params))]
    plain = make_engine(model, tokenizer=tokenizer, lookahead=0)
    expected = [request.generated_tokens for request in plain.generate(prompts, params)]
    plain.close()
    # The answers of constrained requests are known to the drafter too, and drafted for nothing.
    answers = [[*prompt, *tokens] for prompt, tokens in zip(prompts, expected, strict=True)]
    engine = make_engine(
        model, tokenizer=tokenizer, drafter=DRAFTERS["oracle"](answers, 128), lookahead=lookahead,
        num_speculative_tokens=DRAFTS, max_requests=5, block_size_tokens=4, max_tokens=64,
        num_kv_blocks=60,
    )  # fmt: skip
    launch, seen = engine.controller.enqueue_step, 0

    def launch_and_look(plan: Any) -> Any:
        nonlocal seen
        features = engine.context.slots.features[plan.slots]
        constrained = (features & RowFeature.CONSTRAINED) != 0
        assert (plan.widths[constrained] == 1).all()
        seen += bool(constrained.any()) and plan.width > 1 and plan.widths.max() > 1
        return launch(plan)

    engine.controller.enqueue_step = launch_and_look  # type: ignore[method-assign]
    for each in params:  # so that all run together
        if each.structured_output is not None:
            engine.grammars.begin(each.structured_output).result()
    found = engine.generate(prompts, params)
    drain(engine)
    assert [request.generated_tokens for request in found] == expected
    assert seen > 2
    assert engine.stats()["accepted_tokens"] > 10


@pytest.mark.pairs
@pytest.mark.parametrize("drafter", ["oracle", "fickle"])
@pytest.mark.parametrize("count", [1, 3])
def test_captured_steps(model: torch.nn.Module, lookahead: int, count: int, drafter: str) -> None:
    """Padded rows of several tokens, replayed."""
    asked = [{"seed": 0}, {"seed": 1, "temperature": 1.2}, {"seed": 2, "frequency_penalty": 1.0}]
    answers = [endless(model, **each) for each in asked]
    jobs = [Job(PROMPT, greedy(5 + 7 * n, **asked[n % 3])) for n in range(3)] * 2
    engine = make_engine(
        model, device=CapturingCpu(), drafter=DRAFTERS[drafter](answers, VOCABULARY),
        lookahead=lookahead, num_speculative_tokens=count, num_cuda_graphs=2, max_requests=4,
        block_size_tokens=4, max_tokens=32, num_kv_blocks=24,
    )  # fmt: skip
    found = engine.generate([job.prompt for job in jobs], [job.params for job in jobs])
    drain(engine)
    for number, request in enumerate(found):
        most = jobs[number].params.num_tokens_to_generate
        assert request.generated_tokens == answers[number % 3][3 : 3 + most], number
    stats = engine.stats()
    assert stats["captured_steps"] > 4
    assert stats["accepted_tokens"] > 4
