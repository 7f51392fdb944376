"""Requests that begin behind blocks of others are sampled as if they had computed every token:
penalties, bad words and all else that looks at tokens before the first chunk."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceEngine, StructuredOutput
from megatron_async.devices import CpuDevice
from tests.support.attention_model import VOCABULARY, AttentionModel
from tests.support.capturing_cpu import CapturingCpu
from tests.support.drafters import DRAFTERS
from tests.support.harness import Job, alone_once, assert_all_is_back, greedy, make_engine
from tests.support.late_device import LateDevice
from tests.support.letter_tokenizers import Pieces
from tests.support.poison import poison_blocks
from tests.support.schedules import MAX_STEPS

SIZE = 4
"""Tokens of a block."""
TEXT = [(7 * n * n + 3) % VOCABULARY for n in range(40)]
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.6, "frequency_penalty": 0.9, "presence_penalty": 0.5
}  # fmt: skip
EDITS: dict[str, Any] = {"min_tokens": 9, "stop_token_ids": list(range(0, VOCABULARY, 3))}
ASKED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.9},
    {"frequency_penalty": 1.5, "presence_penalty": 0.7},
    {"logit_bias": {3: 5.0, 8: -4.0}, "temperature": 0.9},
    {**EDITS, "repetition_penalty": 0.6},
    {"temperature": 1.3, **PENALTIES},
    {},
    {"return_log_probs": True, "skip_prompt_log_probs": True, **PENALTIES},
]
"""What requests that share blocks ask for; `with_bad_words` adds to it."""
EARLIER: list[dict[str, Any]] = [
    PENALTIES, {"logit_bias": {2: 7.0}}, {"structured_output": StructuredOutput(regex="[a-d]{12}")},
    {"bad_words": [[1], [5, 7], [9, 2, 4]], **PENALTIES}, {**EDITS, "frequency_penalty": -2.0},
    {"structured_output": StructuredOutput(regex="(ab|cd)*"), **PENALTIES}, {"temperature": 1.1},
]  # fmt: skip
"""What the slots' former owners asked for."""
LATER = 2 * len(ASKED)
DRAFTS = 2


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AttentionModel()


@pytest.fixture(scope="module")
def serial(model: torch.nn.Module) -> Iterator[DynamicInferenceEngine]:
    """Plain decoding, with room for all, and nothing shared."""
    engine = make_engine(
        model, tokenizer=Pieces(), lookahead=0, max_requests=16, block_size_tokens=16
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def earlier() -> list[Job]:
    """Jobs of other prompts than `later` has."""
    return [
        Job([number, number + 1], greedy(12, seed=number, **asked))
        for number, asked in enumerate(EARLIER)
    ]


@pytest.fixture(scope="module")
def later(serial: DynamicInferenceEngine) -> list[Job]:
    """Prompts that begin alike, each request with bad words that it would say: of one to four of
    its tokens, at several places of its answer."""
    jobs = []
    for number in range(LATER):
        prompt = [*TEXT[: 24 + number % 5], number % VOCABULARY]
        asked = ASKED[number % len(ASKED)]
        words: list[list[int]] = []
        for end in (3, 9, 14):
            plain = greedy(24, seed=number, **asked, **({"bad_words": words} if words else {}))
            (answer,) = alone_once(serial, [Job(prompt, plain)])
            length = 1 + (number + end) % 4
            if len(answer) > end:
                words.append(answer[end + 1 - min(length, end) : end + 1])
        with_words = {"bad_words": words} if number % 3 else {}
        jobs.append(Job(prompt, greedy(24, seed=number, **asked, **with_words)))
    return jobs


@pytest.fixture(scope="module")
def expected(serial: DynamicInferenceEngine, later: list[Job]) -> list[list[int]]:
    return alone_once(serial, later)


def test_what_is_asked_for_changes_tokens(serial, later, expected):
    """Or the other tests here would see little."""
    plain = [Job(job.prompt, greedy(24, seed=job.params.seed)) for job in later]
    changed = [a != b for a, b in zip(expected, alone_once(serial, plain), strict=True)]
    assert sum(changed) >= LATER - 2


@pytest.mark.pairs
@pytest.mark.parametrize("drafts", [0, DRAFTS])
@pytest.mark.parametrize("device", [CpuDevice, LateDevice, CapturingCpu])
def test_skipped_tokens_count(
    model: torch.nn.Module,
    earlier: list[Job],
    later: list[Job],
    expected: list[list[int]],
    lookahead: int,
    device: type[CpuDevice],
    drafts: int,
) -> None:
    """Every slot had another owner, and most prompts are in the cache but for their ends.

    Break one of these, and it fails:

    - `begin_chunks.reference`: count the chunk alone, or do not reset the counts of a slot whose
      owner begins behind cached tokens
    - `unpack_step_reference`: do not keep the tokens of prefill chunks
    """
    answers = [[*job.prompt, *tokens] for job, tokens in zip(later, expected, strict=True)]
    engine = make_engine(
        model,
        device=device(),
        tokenizer=Pieces(),
        drafter=DRAFTERS["fickle"](answers, VOCABULARY) if drafts else None,
        enable_prefix_caching=True,
        lookahead=lookahead,
        max_requests=len(EARLIER),
        block_size_tokens=SIZE,
        max_tokens=40,
        num_speculative_tokens=drafts,
    )
    blocks = poison_blocks(engine)
    engine.controller.create_cuda_graphs()
    serve(engine, earlier, first_id=LATER)
    assert engine.stats()["prefix_cache_hits"] == 0
    assert serve(engine, later) == expected
    assert engine.stats()["prefix_cache_hits"] >= 5 * SIZE * (LATER - 2)
    assert bool(engine.stats()["captured_steps"]) == device.captures_graphs
    engine.reset_prefix_cache()
    assert_all_is_back(engine)
    blocks.check_free_blocks()


@pytest.mark.pairs
@pytest.mark.parametrize("drafts", [0, DRAFTS])
@pytest.mark.parametrize("every", [2, 3, 5])
def test_evicted_requests_find_their_own_tokens(
    model: torch.nn.Module,
    later: list[Job],
    expected: list[list[int]],
    lookahead: int,
    every: int,
    drafts: int,
) -> None:
    """All are evicted again and again, and begin behind their own generated tokens: these count as
    such, and bad words begin in them.

    Break one of these, and it fails:

    - `unpack_rows`: do not keep the tokens of decode rows
    - `begin_chunks.reference`: take the window of bad words from the chunk alone, the skipped
      tokens from another row's table, or mark them all as the prompt's
    """
    answers = [[*job.prompt, *tokens] for job, tokens in zip(later, expected, strict=True)]
    engine = make_engine(
        model,
        drafter=DRAFTERS["fickle"](answers, VOCABULARY) if drafts else None,
        enable_prefix_caching=True,
        lookahead=lookahead,
        max_requests=5,
        block_size_tokens=SIZE,
        max_tokens=100,
        num_speculative_tokens=drafts,
    )
    blocks = poison_blocks(engine)
    futures = [engine.add_request(n, job.prompt, job.params) for n, job in enumerate(later)]
    evicted = 0
    for steps in range(1, MAX_STEPS):
        if not engine.has_unfinished_requests():
            break
        engine.step_modern()
        # A request must get a token between two evictions, and lookahead delays that.
        if steps % (every + lookahead) == 0:
            evicted += engine.context.max_requests - engine.context.slots.num_free
            engine.context.scheduler.evict_all()
    assert [future.result().error for future in futures] == [None] * LATER
    assert [future.result().generated_tokens for future in futures] == expected
    assert evicted > LATER
    assert engine.stats()["prefix_cache_hits"] > 6 * SIZE * evicted
    engine.reset_prefix_cache()
    assert_all_is_back(engine)
    blocks.check_free_blocks()


def serve(engine: DynamicInferenceEngine, jobs: list[Job], first_id: int = 0) -> list[list[int]]:
    """Tokens of jobs of which one arrives with every step."""
    futures: list[Any] = []
    for _ in range(MAX_STEPS):
        if len(futures) == len(jobs) and not engine.has_unfinished_requests():
            break
        if len(futures) < len(jobs):
            job = jobs[len(futures)]
            futures.append(engine.add_request(first_id + len(futures), job.prompt, job.params))
        engine.step_modern()
    assert [future.result().error for future in futures] == [None] * len(jobs)
    return [future.result().generated_tokens for future in futures]
