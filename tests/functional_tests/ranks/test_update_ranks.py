"""Weights change on all ranks before the same plan, or on none."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from megatron_async import DynamicInferenceEngine
from megatron_async.errors import RanksDisagree, UpdateError
from tests.functional_tests.ranks.test_expert_consensus import ExpertRanks
from tests.support.attention_model import VOCABULARY, AttentionModel
from tests.support.harness import (
    Job,
    assert_all_is_back,
    drain,
    greedy,
    make_engine,
    random_prompts,
)
from tests.support.memory_channel import FollowingEngine
from tests.support.patience import PATIENCE_S
from tests.support.staged_weights import StagedWeights, Stopped, by_token

PROMPTS = random_prompts(5, (3, 40, 11, 1, 26), VOCABULARY)
CONFIG = {"block_size_tokens": 4, "max_tokens": 16, "max_requests": 4, "num_kv_blocks": 64}


class Pair:
    """A leader and its follower; `staged` are the stages of both."""

    def __init__(self, **config: Any) -> None:
        config = {"enable_prefix_caching": True, **CONFIG, **config}
        self.leader = make_engine(AttentionModel(), **config)
        self.following = FollowingEngine(self.leader, make_engine(AttentionModel(), **config))
        self.follower = self.following.engine

    def stage(self, number: int, seed: int) -> list[StagedWeights]:
        stages = []
        for engine in (self.follower, self.leader):
            stages.append(StagedWeights(engine, AttentionModel(seed)))
            engine.updating.stage(number, stages[-1])
        return stages

    def end(self) -> None:
        drain(self.leader)
        self.leader.close()
        self.following.join()
        assert self.following.error is None, self.following.error
        assert_all_is_back(self.follower)
        assert self.follower.updating.epoch == self.leader.updating.epoch
        assert self.follower.weight_version == self.leader.weight_version
        self.follower.close()


@pytest.mark.parametrize("policy", ["keep", "recompute", "abort"])
def test_a_follower_changes_before_the_same_plan(policy, lookahead):
    """Plans and samples of each step are compared by `check_agreement`."""
    pair = Pair(lookahead=lookahead)
    futures = [pair.leader.add_request(n, p, greedy(14)) for n, p in enumerate(PROMPTS)]
    done = []
    for step in range(9):
        if step in (3, 6):
            pair.stage(step, step)
            done.append(pair.leader.updating.commit(step, f"v{step}", policy))
        if step == 7:
            pair.leader.updating.label("named")
        pair.leader.step_modern()
    pair.end()
    for number, future in enumerate(futures):
        mine, theirs = future.result(), pair.following.ended[number]
        assert mine.weight_versions == theirs.weight_versions
        assert mine.kv_versions == theirs.kv_versions
    assert [each.result().epoch for each in done] == [1, 2]


def test_no_plan_is_made_of_weights_that_a_follower_lacks():
    """The leader steps on meanwhile; an idle one waits for the follower alone."""
    pair = Pair(lookahead=1)
    leader = pair.leader
    future = leader.add_request(0, PROMPTS[0], greedy(9))
    leader.updating.stage(1, StagedWeights(leader, AttentionModel(5)))
    staged, done = leader.updating.staged(1), leader.updating.commit(1, "b")
    while leader.in_flight or not future.done():
        leader.step_modern()
    assert not staged.done()
    assert future.result().weight_versions == [(None, 0, 9)]
    pair.follower.updating.stage(1, StagedWeights(pair.follower, AttentionModel(5)))
    drain(leader)  # of which nothing is left but the update
    assert staged.done()
    assert done.result().version == "b"
    assert leader.generate([PROMPTS[1]], greedy(3))[0].weight_versions == [("b", 0, 3)]
    pair.end()


@pytest.mark.parametrize("failing", ["leader", "follower"])
def test_a_rank_that_cannot_stage_fails_the_round_on_all(failing):
    pair = Pair(lookahead=1)
    leader, future = pair.leader, pair.leader.add_request(0, PROMPTS[0], greedy(14))
    leader.step_modern()
    good, bad = pair.follower, leader
    if failing == "follower":
        good, bad = bad, good
    stage = StagedWeights(good, AttentionModel(5))
    good.updating.stage(1, stage)
    bad.updating.fail(1, "no memory")
    done = leader.updating.commit(1, "b") if failing == "follower" else leader.updating.staged(1)
    drain(leader)
    rank = "rank 1: no memory" if failing == "follower" else "no memory"
    with pytest.raises(UpdateError, match=f"^{rank}$"):
        done.result()
    assert future.result().weight_versions == [(None, 0, 14)]
    pair.stage(2, 7)
    leader.updating.commit(2, "c", "recompute")
    drain(leader)
    assert leader.generate([PROMPTS[0]], greedy(4))[0].weight_versions == [("c", 0, 4)]
    assert stage.was_dropped
    pair.end()


def test_copies_that_break_off_on_a_follower_end_the_job():
    pair = Pair(lookahead=1)
    leader = pair.leader
    pair.follower.updating.stage(1, StagedWeights(pair.follower, AttentionModel(5), OSError("x")))
    leader.updating.stage(1, StagedWeights(leader, AttentionModel(5)))
    leader.updating.commit(1, "b")
    drain(leader)
    pair.following.join()
    assert isinstance(pair.following.error, RanksDisagree)
    pair.follower.loop.updating.torn = ""
    pair.follower.close()


# ---- Leaders that share experts ---------------------------------------------------------------


class Replicas(ExpertRanks):
    """Leaders with weights of their own; `ready` is reached when all have come."""

    model = AttentionModel

    def __init__(self, size: int, **config: Any) -> None:
        super().__init__(size, **config)
        self.ready = threading.Barrier(size, timeout=PATIENCE_S)


def serving(
    replicas: Replicas, prompts: list[list[int]], act: Callable[[DynamicInferenceEngine, int], Any]
) -> Callable[[DynamicInferenceEngine], Any]:
    """Serve `prompts` with an update under way, `act(engine, step)` before each step; go on while
    another replica has work. The requests."""

    def call(engine: DynamicInferenceEngine) -> list[Any]:
        futures = [engine.add_request(n, p, greedy(16)) for n, p in enumerate(prompts)]
        engine.group.begin_together()
        step = 0
        while engine.has_unfinished_requests() or engine.group.others_work:
            act(engine, step)
            engine.step_modern()
            step += 1
        return [future.result() for future in futures]

    return call


def test_replicas_that_share_experts_change_before_the_same_step(lookahead):
    """One of them is idle; each stages at another time."""
    replicas = Replicas(3, lookahead=lookahead, max_requests=4, max_tokens=16)
    done: dict[int, Any] = {}

    def act(engine: DynamicInferenceEngine, step: int) -> None:
        rank = replicas.engines.index(engine)
        if step == 3 + 2 * rank:
            engine.updating.stage(1, StagedWeights(engine, AttentionModel(5)))
            done[rank] = engine.updating.commit(1, "b")

    work = [serving(replicas, prompts, act) for prompts in (PROMPTS, PROMPTS[3:], [])]
    results = replicas.run(*work)
    assert len({each.result().step for each in done.values()}) == 1
    models = {None: AttentionModel(), "b": AttentionModel(5)}
    stopped = Stopped(make_engine(AttentionModel(), lookahead=0), models)
    mixed = 0
    for prompts, requests in zip((PROMPTS, PROMPTS[3:]), results, strict=False):
        for number, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
            versions = by_token(request.weight_versions)
            expected = stopped.tokens(Job(prompt, greedy(16)), number, versions)
            assert request.generated_tokens == expected
            mixed += len(set(versions)) == 2
    assert mixed >= 4
    replicas.check()


def test_replicas_without_work_change_too_and_a_failure_of_one_is_all_of_theirs():
    replicas = Replicas(2, lookahead=1)

    def call(engine: DynamicInferenceEngine) -> list[Any]:
        rank, found = replicas.engines.index(engine), []
        for number in (1, 2, 3):
            if number == 2 and rank == 1:
                engine.updating.fail(2, "no memory")
                done: Any = engine.updating.staged(2)
            else:
                time.sleep(0.02 * rank)
                engine.updating.stage(number, StagedWeights(engine, AttentionModel(number)))
                done = engine.updating.commit(number, number)
            while not done.done():
                engine.step_modern()
            found.append(done.exception() or done.result()[:3])
            replicas.ready.wait()
        return found

    for found in replicas.run(call, call):
        assert [found[0], found[2]] == [(0, 1, 1), (0, 2, 3)]
        assert "no memory" in str(found[1]) or "another replica" in str(found[1])
    for engine in replicas.engines:
        assert_all_is_back(engine)


def test_replicas_that_are_paused_change_together():
    replicas = Replicas(2, lookahead=2, max_requests=4, max_tokens=16)

    def call(engine: DynamicInferenceEngine) -> Any:
        future = engine.add_request(0, PROMPTS[0], greedy(20))
        engine.group.begin_together()
        for _ in range(4):
            engine.step_modern()
        engine.pause()
        known = len(engine.context.slots.tokens_since(0, 0) or ())
        engine.updating.stage(1, StagedWeights(engine, AttentionModel(5)))
        done = engine.updating.commit(1, "b")
        while not done.done():
            engine.step_modern()
        engine.unpause()
        while engine.has_unfinished_requests() or engine.group.others_work:
            engine.step_modern()
        return known, future.result().weight_versions

    for known, versions in replicas.run(call, call):
        assert versions == [(None, 0, known), ("b", known, 20)]
    replicas.check()
