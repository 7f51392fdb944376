"""A follower that replays its leader's log does the same, step for step, and faults end both."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from megatron_async import DynamicInferenceEngine, SamplingParams
from megatron_async.engine import arrival
from megatron_async.errors import JobFailed, RankLost, RanksDisagree, StepFailed
from megatron_async.ranks import leader, rank_group
from tests.support.harness import (
    assert_all_is_back,
    drain,
    greedy,
    make_engine,
    make_model,
    random_prompts,
)
from tests.support.memory_channel import FollowingEngine
from tests.support.patience import PATIENCE_S

PROMPTS = random_prompts(5, (3, 40, 11, 1, 26))
PARAMS = [
    greedy(20),
    greedy(12, temperature=0.8, top_k=20),
    greedy(20, return_log_probs=True, top_n_logprobs=2),
    greedy(30, temperature=1.0, seed=4, logit_bias={np.int64(3): 2.5}),
    greedy(9, repetition_penalty=1.3),
]
MODEL = make_model()


class Pair:
    """A leader and its follower, around one model, each with a KV cache of its own."""

    def __init__(self, **config: Any) -> None:
        config = {"num_kv_blocks": 32, **config}
        self.leader = make_engine(MODEL, **config)
        follower = make_engine(MODEL, **config)
        self.following = FollowingEngine(self.leader, follower)

    @property
    def follower(self) -> DynamicInferenceEngine:
        return self.following.engine

    def end(self) -> None:
        """Close the leader; the follower must have done what it did."""
        ended = {request.request_id: request for request in self.all_ended}
        self.leader.close()
        self.following.join()
        assert self.following.error is None, self.following.error
        assert self.following.ended.keys() == ended.keys()
        for number, request in ended.items():
            mine = self.following.ended[number]
            assert mine.generated_tokens == request.generated_tokens
            assert mine.finish_reason == request.finish_reason
        assert_all_is_back(self.follower)
        counted = (
            "steps", "pauses", "evictions", "zombie_rows", "failed_steps", "aborted_requests",
            "prefix_cache_hits", "prefix_cache_evictions",
        )  # fmt: skip
        ours, theirs = self.leader.stats(), self.follower.stats()
        assert {name: ours[name] for name in counted} == {name: theirs[name] for name in counted}

    all_ended: list[Any]


@pytest.fixture
def pair_of() -> Iterator[Any]:
    pairs: list[Pair] = []

    def make(**config: Any) -> Pair:
        pair = Pair(**config)
        pairs.append(pair)
        pair.all_ended = []
        end = pair.leader.requests.end

        def note(request: Any, *arguments: Any, **named: Any) -> None:
            end(request, *arguments, **named)
            pair.all_ended.append(request)

        pair.leader.requests.end = note  # type: ignore[method-assign]
        return pair

    yield make
    for pair in pairs:
        pair.leader.close()
        pair.following.join()
        pair.follower.close()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_tokens": 8, "max_requests": 3},
        {"num_kv_blocks": 14, "block_size_tokens": 8},
        {"invalidation": "rollback"},
    ],
    ids=["roomy", "chunked", "short of blocks", "rollback"],
)
def test_a_follower_does_the_same(pair_of, lookahead, settings):
    pair = pair_of(lookahead=lookahead, **settings)
    outputs = pair.leader.generate(PROMPTS, PARAMS)
    assert all(output.error is None for output in outputs)
    drain(pair.leader)
    pair.end()


def test_a_follower_finds_the_same_blocks(pair_of, lookahead):
    """In a pool that is too small for all, with salts, and after the cache was reset."""
    pair = pair_of(
        lookahead=lookahead, num_kv_blocks=14, block_size_tokens=4, max_requests=4,
        enable_prefix_caching=True, check_ranks_agree=True,
    )  # fmt: skip
    leader, start = pair.leader, PROMPTS[1][:22]
    for turn in range(3):
        for number in range(6):
            params = greedy(14, cache_salt="ab"[number % 2])
            leader.add_request(10 * turn + number, [*start, number], params)
            leader.step_modern()
        if turn == 1:
            leader.reset_prefix_cache()
        drain(leader)
    assert leader.stats()["prefix_cache_hits"] > 200
    assert leader.stats()["evictions"] > 0
    drain(leader)
    pair.end()


@pytest.mark.parametrize("keeps", [False, True])
def test_aborts_pauses_and_suspends_in_flight(pair_of, keeps: bool):
    """Followers give back what their leader gives back, with a copy where it keeps one."""
    pair = pair_of(lookahead=2, num_kv_blocks=20, block_size_tokens=8, enable_sleep_mode=keeps)
    leader = pair.leader
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        leader.add_request(number, prompt, params)
        leader.step_modern()
    leader.abort_request(1)
    leader.pause()
    leader.abort_request(4)
    leader.add_request(7, PROMPTS[0], PARAMS[0], priority=3)
    leader.unpause()
    for _ in range(3):
        leader.step_modern()
    leader.suspend(free_kv_cache=True)
    leader.resume()
    for _ in range(3):
        leader.step_modern()
    evicted = leader.stats()["evictions"]
    leader.suspend(free=["kv_cache"], copies=["kv_cache"])
    leader.resume(["kv_cache"])
    assert leader.stats()["evictions"] == evicted
    drain(leader)
    pair.end()


def test_requests_that_come_and_go_while_the_leader_waits_for_the_device(pair_of):
    """Coroutines add and abort between a launch and the resolves behind it."""
    pair = pair_of(lookahead=1)
    leader = pair.leader

    async def run() -> None:
        loop = asyncio.create_task(leader.run_engine())
        futures = []
        for number in range(12):
            futures.append(leader.add_request(number, PROMPTS[number % 5], PARAMS[number % 5]))
            await asyncio.sleep(0.002)
            if number % 4 == 3 and number - 1 in leader.requests:
                leader.abort_request(number - 1)
        await asyncio.gather(*futures)
        loop.cancel()

    asyncio.run(run())
    drain(leader)
    pair.end()


def test_bad_requests_do_not_reach_followers(pair_of):
    pair = pair_of()
    bad = pair.leader.add_request(0, [1, 2], SamplingParams(top_p=7.0))
    good = pair.leader.generate([PROMPTS[0]], PARAMS[0])[0]
    assert bad.result().error is not None
    assert good.error is None
    pair.leader.close()
    pair.following.join()
    assert pair.following.error is None
    assert list(pair.following.ended) == [good.request_id]


def _fail_in_step(engine: DynamicInferenceEngine, step: int) -> None:
    compute = engine.controller._compute_step

    def fail(dims: Any, mode: Any, number: int = -1, *rest: Any) -> None:
        if number == step:
            raise ValueError("injected")
        compute(dims, mode, number, *rest)

    engine.controller._compute_step = fail  # type: ignore[method-assign]


def test_a_step_that_fails_on_all_ranks_ends_its_requests_alone(pair_of):
    pair = pair_of()
    for engine in (pair.leader, pair.follower):
        _fail_in_step(engine, 3)
    outputs = pair.leader.generate(PROMPTS[:2], PARAMS[:2])
    assert all(isinstance(output.error, StepFailed) for output in outputs)
    again = pair.leader.generate([PROMPTS[2]], PARAMS[2])[0]
    assert again.error is None
    drain(pair.leader)
    pair.end()


@pytest.mark.parametrize("failing", ["leader", "follower"])
def test_a_step_that_fails_on_one_rank_ends_the_job(pair_of, failing, monkeypatch):
    monkeypatch.setattr(leader, "CONFIRMATION_TIMEOUT_S", 0.3)
    pair = pair_of()
    _fail_in_step(getattr(pair, failing), 3)
    future = pair.leader.add_request(0, PROMPTS[0], PARAMS[0])
    message = "failed on this rank.*rank 1" if failing == "leader" else "failed on rank 1 alone"
    with pytest.raises(RanksDisagree, match=message):
        drain(pair.leader)
    assert isinstance(future.result().error, RanksDisagree)
    pair.following.join()
    assert isinstance(pair.following.error, RanksDisagree)
    with pytest.raises(JobFailed):
        pair.leader.step_modern()


def test_who_waits_in_a_step_learns_that_another_rank_failed_in_it(pair_of, monkeypatch):
    """Like a collective: the leader's step ends only if the follower's does."""
    monkeypatch.setattr(leader, "CONFIRMATION_TIMEOUT_S", 0.3)
    pair = pair_of()
    _fail_in_step(pair.follower, 3)
    compute, stuck = pair.leader.controller._compute_step, []

    def wait_in_step(dims: Any, mode: Any, number: int = -1, *rest: Any) -> None:
        if number == 3:
            stuck.append(number)
            while stuck:
                time.sleep(0.01)
        compute(dims, mode, number, *rest)

    pair.leader.controller._compute_step = wait_in_step  # type: ignore[method-assign]
    pair.leader.add_request(0, PROMPTS[0], PARAMS[0])
    with pytest.raises(RanksDisagree, match="step 3 failed on rank 1 alone"):
        drain(pair.leader)
    stuck.clear()


def test_a_dead_rank_ends_the_job(pair_of):
    pair = pair_of()
    future = pair.leader.add_request(0, PROMPTS[0], PARAMS[3])
    pair.leader.step_modern()
    event = pair.leader.in_flight[0].ready
    pair.following.channel.is_lost = True
    pair.following.join()
    assert isinstance(pair.following.error, RankLost)
    event.wait_for = lambda seconds: False  # type: ignore[method-assign]
    with pytest.raises(RankLost):
        drain(pair.leader)
    assert isinstance(future.result().error, RankLost)
    # Nobody waits for ever for what comes later, and nothing is sent to ranks that are gone.
    later = pair.leader.add_request(1, PROMPTS[0], PARAMS[3])
    error = later.result().error
    assert isinstance(error, RankLost)
    assert error.ranks == future.result().error.ranks != ()
    pair.leader.unpause()


def test_another_model_is_noticed(pair_of):
    leader = make_engine(MODEL, num_kv_blocks=32)
    follower = make_engine(make_model(seed=1), num_kv_blocks=32)
    following = FollowingEngine(leader, follower)
    with pytest.raises(RanksDisagree, match="rank 1 has other samples than its leader"):
        leader.generate(PROMPTS, PARAMS)
    following.join()
    leader.close()
    follower.close()


def test_a_follower_is_not_stepped(pair_of):
    pair = pair_of()
    with pytest.raises(RanksDisagree, match=r"does what rank 0 does.*call generate or follow"):
        pair.follower.step_modern()


def test_a_message_a_step_is_small(pair_of):
    pair = pair_of()
    pair.leader.generate([PROMPTS[0]], greedy(50))
    sizes = [len(message) for message in pair.following.channel.sent]
    assert len(sizes) <= 2 * 52
    assert sorted(sizes)[len(sizes) // 2] <= 16


def test_a_follower_is_told_in_order_and_the_leader_can_wait_for_it(pair_of: Any) -> None:
    pair = pair_of()
    heard: list[tuple[str, Any, bool]] = []
    may_go_on = threading.Event()

    def hear(what: str, value: Any) -> None:
        assert may_go_on.wait(PATIENCE_S)
        heard.append((what, value, pair.follower.is_stopped))

    pair.follower.group.on_told = hear
    pair.leader.add_request(1, PROMPTS[0], PARAMS[0])
    pair.leader.step_modern()
    pair.leader.group.tell("before")
    pair.leader.pause()
    pair.leader.group.tell("after", {"a": 1})

    async def wait() -> None:
        told = asyncio.ensure_future(pair.leader.group.until_told())
        await asyncio.sleep(0.05)
        assert not told.done()
        may_go_on.set()
        await asyncio.wait_for(told, PATIENCE_S)

    asyncio.run(wait())
    assert heard == [("before", None, False), ("after", {"a": 1}, True)]
    pair.leader.group.tell("never heard")
    pair.following.channel.is_lost = True
    with pytest.raises(RankLost):
        asyncio.run(pair.leader.group.until_told())
    pair.leader.close()


def test_the_leader_waits_for_what_another_thread_of_a_follower_does(pair_of: Any) -> None:
    """News behind it wait too: what is reported is one number."""
    pair, work = pair_of(), Future[None]()
    pair.follower.group.on_told = lambda what, value: work if what == "long" else None
    pair.leader.group.tell("long")
    pair.leader.group.tell("short")

    async def wait() -> None:
        told = asyncio.ensure_future(pair.leader.group.until_told())
        await asyncio.sleep(4 * rank_group.WATCH_EVERY_S)
        assert not told.done()
        work.set_result(None)
        await asyncio.wait_for(told, PATIENCE_S)

    asyncio.run(wait())
    pair.leader.close()


def test_followers_know_the_trace_of_a_request(pair_of: Any) -> None:
    pair = pair_of()
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"
    pair.leader.add_request(1, PROMPTS[0], PARAMS[0], traceparent=trace)
    pair.leader.add_request(2, PROMPTS[1], PARAMS[1])
    drain(pair.leader)
    pair.end()
    assert [pair.following.ended[number].traceparent for number in (1, 2)] == [trace, ""]


def test_one_thread_reads_what_followers_send(pair_of: Any, monkeypatch):
    """A long wait for samples takes a thread, while the event loop may stop the engine: both would
    read one socket."""
    pair = pair_of()
    channel, readers, waited = pair.following.channel, set(), []
    reports, compute = channel.reports, pair.leader.controller._compute_step
    monkeypatch.setattr(arrival, "TOLD_WITHIN_S", 0.001)
    monkeypatch.setattr(rank_group, "WATCH_EVERY_S", 0.005)

    def read() -> Any:
        readers.add(threading.current_thread())
        return reports()

    def slow(*arguments: Any) -> Any:
        time.sleep(0.02)
        return compute(*arguments)

    async def wait(event: Any) -> None:
        waited.append(event)
        await wait_async(event)

    wait_async = pair.leader.group.wait_async
    monkeypatch.setattr(channel, "reports", read)
    monkeypatch.setattr(pair.leader.controller, "_compute_step", slow)
    monkeypatch.setattr(pair.leader.group, "wait_async", wait)

    async def serve() -> None:
        loop = asyncio.create_task(pair.leader.run_engine())
        await pair.leader.add_request(0, PROMPTS[0], PARAMS[0])
        loop.cancel()
        await asyncio.wait([loop])

    asyncio.run(serve())
    drain(pair.leader)
    assert len(waited) > 5
    assert readers == {threading.current_thread()}
    pair.end()
