"""The policy "rollback" gives the tokens of "reconcile", and books no zombie rows."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
import torch

from megatron_async import DynamicInferenceEngine, SamplingParams, Status
from megatron_async.device_state.slot_states import PerSlotState, StateStep
from megatron_async.errors import ConfigurationError, StepFailed
from megatron_async.ops.sampling.sampling import SamplingMode
from megatron_async.ops.sampling.slot_records import RowFeature
from tests.support.capturing_cpu import CapturingCpu
from tests.support.harness import (
    EngineFactory,
    Job,
    drain,
    greedy,
    make_engine,
    random_prompts,
    run_at,
    run_together,
)
from tests.support.patience import PATIENCE_S
from tests.support.schedules import wrong_results

POLICIES = ("reconcile", "rollback")
TOKENS = 24
PROMPTS = random_prompts(8, (9, 3, 40, 1, 17, 26))
LATER = {0: 3, 3: 2, 11: 1}
"""Arrivals: how many at which step."""


class Letters:
    """A tokenizer: each token of the tiny model is one character."""

    eod = -1

    def detokenize(self, tokens: list[int]) -> str:
        return "".join(chr(200 + token) for token in tokens)


def arrivals(params: list[SamplingParams]) -> dict[int, list[Job]]:
    jobs = [Job(prompt, mine) for prompt, mine in zip(PROMPTS, params, strict=True)]
    return {step: [jobs.pop(0) for _ in range(count)] for step, count in LATER.items()}


@pytest.fixture(scope="module")
def whole(tiny_model: torch.nn.Module) -> list[list[int]]:
    """Tokens of the prompts when nothing stops them."""
    engine = make_engine(tiny_model, lookahead=0)
    tokens = run_at(engine, arrivals([greedy(TOKENS)] * len(PROMPTS)))
    engine.close()
    return tokens


def stopped(whole: list[list[int]], how: str) -> tuple[list[SamplingParams], list[list[int]]]:
    """Parameters that stop each request at a token of its own, and the tokens up to there."""
    params, cut = [], []
    for number, tokens in enumerate(whole):
        at = tokens.index(tokens[2 + 3 * number])
        cut.append(tokens[: at + 1])
        text = Letters().detokenize(tokens[at : at + 1])
        params.append(
            greedy(TOKENS, stop_words=[text])
            if how == "stop words"
            else greedy(TOKENS, stop_token_ids=[tokens[at]])
        )
    return params, cut


SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunks": {"max_tokens": 9},
    "pauses": {"num_kv_blocks": 20, "block_size_tokens": 4},
    "evictions": {"num_kv_blocks": 20, "block_size_tokens": 4, "paused_buffer_size_gb": 1e-9},
    "few slots": {"max_requests": 2},
}


@pytest.mark.parametrize(
    ("settings", "how"),
    [
        *((name, "stop tokens") for name in SETTINGS),
        *((name, "stop words") for name in ("roomy", "evictions")),
    ],
)
def test_stops(make_tiny_engine, whole: list[list[int]], lookahead, settings: str, how: str):
    params, cut = stopped(whole, how)
    for policy in POLICIES:
        engine = make_tiny_engine(
            lookahead=lookahead, invalidation=policy, tokenizer=Letters(), **SETTINGS[settings]
        )
        assert run_at(engine, arrivals(params)) == cut
        stats = engine.stats()
        rolls = policy == "rollback" and lookahead > 0
        assert (stats["discarded_steps"] > 0) == (stats["discarded_rows"] > 0) == rolls
        if settings != "evictions":  # whose rows in flight are zombies under both policies
            assert (stats["zombie_rows"] > 0) == (lookahead > 0 and not rolls)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lookahead", [1, 2, 3])
def test_what_an_end_costs(make_tiny_engine, whole: list[list[int]], lookahead, policy: str):
    """Three decode; one stops, the two others do not: `lookahead` steps of three rows are in
    flight then. Ends by length are foreseen and cost nothing."""
    tokens = whole[2]
    at = next(i for i in range(5, TOKENS) if tokens[i] not in tokens[:i])
    params = [greedy(TOKENS), greedy(TOKENS), greedy(TOKENS, termination_id=tokens[at])]
    engine = make_tiny_engine(lookahead=lookahead, invalidation=policy)
    jobs = [Job(*pair) for pair in zip(PROMPTS, params, strict=False)]
    assert run_together(engine, jobs) == [whole[0], whole[1], tokens[: at + 1]]
    stats = engine.stats()
    found = [stats[f"{name}"] for name in ("discarded_steps", "discarded_rows", "zombie_rows")]
    assert found == ([lookahead, 3 * lookahead, 0] if policy == "rollback" else [0, 0, lookahead])
    assert stats["steps"] - stats["discarded_steps"] == TOKENS
    assert stats["generated_tokens"] == 2 * TOKENS + at + 1


@pytest.mark.parametrize("first", [0, 9])
def test_chaos(tiny_model: torch.nn.Module, make_tiny_engine: EngineFactory, first: int) -> None:
    """Also with pauses and suspends of the engine in between."""
    serial_engine = make_tiny_engine(lookahead=0, max_requests=16)
    counts: Counter[str] = Counter()
    for seed in range(first, first + 9):
        chooser = random.Random(seed)

        def stop_at_times(engine: DynamicInferenceEngine, chooser: random.Random = chooser) -> None:
            if chooser.random() < 0.1:
                engine.pause()
                engine.unpause()
            if chooser.random() < 0.05:
                engine.suspend(free_kv_cache=chooser.random() < 0.3)
                engine.resume()
                counts["suspends"] += 1

        wrong = wrong_results(
            tiny_model, serial_engine, seed, counts, stop_at_times, invalidation="rollback"
        )
        assert wrong == []
    for event in ("pauses", "evictions", "discarded_steps", "aborted", "suspends"):
        assert counts[event] > 0, counts


@pytest.mark.parametrize("policy", POLICIES)
def test_abort_after_any_step(make_tiny_engine, whole: list[list[int]], lookahead, policy: str):
    for after in (0, 1, 2, 3, 6, 13):
        engine = make_tiny_engine(lookahead=lookahead, invalidation=policy, max_tokens=16)
        futures = [engine.add_request(i, PROMPTS[i], greedy(TOKENS)) for i in range(3)]
        for _ in range(after):
            engine.step_modern()
        engine.abort_request(1)
        again = engine.add_request(1, PROMPTS[1], greedy(TOKENS))
        drain(engine)
        assert [futures[i].result().generated_tokens for i in (0, 2)] == [whole[0], whole[2]]
        aborted = futures[1].result().generated_tokens
        assert aborted == whole[1][: len(aborted)]
        assert again.result().generated_tokens == whole[1]
        assert policy == "reconcile" or engine.stats()["zombie_rows"] == 0


@pytest.mark.parametrize("late", [False, True], ids=["before its samples", "behind its samples"])
@pytest.mark.parametrize("policy", POLICIES)
def test_failing_steps(make_tiny_engine, whole, lookahead, policy: str, late: bool):
    """Any two steps fail, also such as are discarded then, at their beginning or their end. Their
    requests fail, others that were launched behind them go on."""
    for bad in ({0, 1}, {2, 3}, {5, 9}):
        engine = make_tiny_engine(
            lookahead=lookahead, invalidation=policy, max_tokens=20, max_requests=3
        )
        owner = engine.context.gpu_view if late else engine.controller.inference_wrapped_model
        name = "feed_back" if late else "forward"
        work: Any = getattr(owner, name)
        calls: list[int] = []

        def faulty(*args: Any, work: Any = work, calls: Any = calls, bad: Any = bad) -> Any:
            calls.append(1)
            if not late and len(calls) - 1 in bad:
                raise FloatingPointError("made up")
            result = work(*args)
            if len(calls) - 1 in bad:
                raise FloatingPointError("made up")
            return result

        setattr(owner, name, faulty)
        futures = [engine.add_request(i, PROMPTS[i], greedy(TOKENS)) for i in range(len(PROMPTS))]
        drain(engine)
        failed = 0
        for future, want in zip(futures, whole, strict=True):
            request = future.result()
            if request.status == Status.COMPLETED:
                assert request.generated_tokens == want
            else:
                failed += 1
                assert isinstance(request.error, StepFailed)
                assert request.generated_tokens == want[: request.generated_length]
        assert failed > 0
        if policy == "rollback":  # a failed step's own rows, and no others
            assert engine.stats()["zombie_rows"] == failed


@pytest.mark.parametrize("lookahead", [1, 2])
def test_a_discarded_step_may_have_failed_before_its_first_work(make_tiny_engine, whole, lookahead):
    """Then the device knows nothing of the blocks that were given and the requests that were
    admitted for it; the step that takes its place must tell."""
    params, cut = stopped(whole, "stop tokens")
    discarded = 0
    for bad in range(26):
        engine = make_tiny_engine(
            lookahead=lookahead, invalidation="rollback", max_requests=3, block_size_tokens=2
        )
        view, calls = engine.context.gpu_view, []

        def faulty(*step: Any, view: Any = view, calls: Any = calls, bad: int = bad) -> None:
            calls.append(step)
            if len(calls) - 1 == bad:
                raise FloatingPointError("made up")
            type(view).begin_step(view, *step)

        view.begin_step = faulty  # type: ignore[method-assign]
        futures = [engine.add_request(i, PROMPTS[i], params[i]) for i in range(len(PROMPTS))]
        drain(engine)
        for future, want in zip(futures, cut, strict=True):
            request = future.result()
            if request.status == Status.COMPLETED:
                assert request.generated_tokens == want
        discarded += len(calls) > bad and engine.stats()["failed_steps"] == 0
    assert discarded > 1


@pytest.mark.parametrize("lookahead", [1, 2])
def test_streams(make_tiny_engine: EngineFactory, whole: list[list[int]], lookahead: int) -> None:
    params, cut = stopped(whole, "stop tokens")
    engine = make_tiny_engine(lookahead=lookahead, invalidation="rollback", max_requests=4)

    async def read(number: int) -> list[int]:
        return [token async for chunk in engine.stream(number) for token in chunk.tokens]

    async def main() -> list[list[int]]:
        runner = asyncio.create_task(engine.run_engine())
        for number, prompt in enumerate(PROMPTS):
            engine.add_request(number, prompt, params[number])
        tokens = await asyncio.wait_for(asyncio.gather(*map(read, range(len(PROMPTS)))), PATIENCE_S)
        while engine.has_unfinished_requests():
            await asyncio.sleep(0)
        runner.cancel()
        return tokens

    assert asyncio.run(main()) == cut
    assert engine.stats()["discarded_steps"] > 0


def test_captured_steps(make_tiny_engine, whole: list[list[int]], lookahead):
    params, cut = stopped(whole, "stop tokens")
    engine = make_tiny_engine(
        lookahead=lookahead, invalidation="rollback", device=CapturingCpu(), num_cuda_graphs=2
    )
    assert run_at(engine, arrivals(params)) == cut
    assert engine.stats()["captured_steps"] > 10
    assert (engine.stats()["discarded_steps"] > 0) == (lookahead > 0)


class FedTokens(PerSlotState):
    """The number of a sequence's tokens that have passed, by slot: of so many words."""

    def __init__(self, slots: int, words: int) -> None:
        self.count = torch.zeros(slots + 1, words, dtype=torch.int64)
        self.wrong = 0

    def begin_chunks(self, view: StateStep, mode: SamplingMode) -> None:
        slots = view.step.row_slots[view.dims.decode_rows :]
        starts = (view.step.features[view.dims.decode_tokens :] & RowFeature.STARTS) != 0
        self.count[slots[starts]] = 0
        self.count[slots] += view.step.prefill_starts.diff()[:, None]

    def begin_step(self, view: StateStep) -> None:
        slots = view.step.row_slots[: view.dims.decode_rows]
        self.count[slots] += 1
        self.wrong += int((self.count[slots, -1] != view.step.lengths[: len(slots)]).sum())


@pytest.mark.parametrize("words", [1, 33], ids=["small", "large"])
def test_other_state_joins(make_tiny_engine, whole: list[list[int]], words: int):
    """A state without a method for the policy: a small one forgets the discarded steps, for the
    requests that go on; requests with a large one are prefilled again. Break it: in `SlotShadows`,
    save no state; or lose no request."""
    params, cut = stopped(whole, "stop tokens")
    params[1], cut[1] = greedy(TOKENS), whole[1]
    engine = make_tiny_engine(lookahead=2, invalidation="rollback", max_tokens=16)
    state = FedTokens(engine.context.max_requests, words)
    engine.context.gpu_view.states.append(state)
    jobs = [Job(*pair) for pair in zip(PROMPTS, params, strict=True)]
    assert run_together(engine, jobs) == cut
    drain(engine)
    assert state.wrong == 0
    stats = engine.stats()
    assert stats["discarded_steps"] > 0
    assert (stats["recomputed_tokens"] > 0) == (words > 1)


def test_an_unknown_policy(make_tiny_engine: EngineFactory) -> None:
    with pytest.raises(ConfigurationError, match=r"invalidation='undo' .* reconcile, rollback"):
        make_tiny_engine(invalidation="undo")
