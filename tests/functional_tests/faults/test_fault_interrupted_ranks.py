"""Ctrl-C in one of several ranks: what it leaves in the others."""

import pytest

from megatron_async import LLM
from megatron_async.ranks.follower import Follower
from megatron_async.ranks.leader import Leader
from tests.support.bytecodes import ctrl_c
from tests.support.harness import drain, greedy, make_engine
from tests.support.interrupted import MOMENTS, PROMPTS, TOKENS, At, expected, model, right
from tests.support.memory_channel import FollowingEngine, MemoryChannel

__all__ = ["expected", "model"]
pytestmark = pytest.mark.usefixtures("usual_handler")


def test_ctrl_c_while_other_ranks_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break `LLM.generate`: hold nothing while it releases them."""
    passed: list[bool] = []

    def release() -> None:
        ctrl_c()
        passed.append(True)

    with LLM("dummy:tiny", device="cpu") as llm:
        monkeypatch.setattr(llm.engine.group, "release", release)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2]], greedy(2))
    assert passed == [True]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_leader_that_is_interrupted(model, expected, moment: str):
    """The follower does what the leader did, and serves the next call."""
    leader, follower = (
        make_engine(model, lookahead=1, max_requests=4, max_sequence_length=64) for _ in range(2)
    )
    following = FollowingEngine(leader, follower)
    leader.listeners.append(At(moment, ctrl_c))
    with pytest.raises(KeyboardInterrupt):
        leader.generate(PROMPTS, greedy(TOKENS))
    assert right(leader, expected)
    drain(leader)
    leader.close()
    following.join()
    assert following.error is None


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_follower_that_is_interrupted_follows_on(model, expected, moment: str):
    """Break `_follow`: take the action from the received ones before it is replayed, or do not hold
    interrupts meanwhile."""
    leader, follower = (
        make_engine(model, lookahead=1, max_requests=4, max_sequence_length=64) for _ in range(2)
    )
    channel = MemoryChannel()
    leader.loop.join(Leader(channel, channel.check))
    follower.loop.join(Follower(channel, channel.check))
    assert right(leader, expected)
    leader.group.release()
    ended: list[list[int]] = []
    follower.requests.on_end = lambda request: ended.append(request.generated_tokens)
    listener = At(moment, ctrl_c)
    follower.listeners.append(listener)
    with pytest.raises(KeyboardInterrupt):
        follower.follow()
    assert listener.passed == 1
    assert follower.follow()
    assert sorted(ended) == sorted(expected)
    leader.close()
    assert not follower.follow()
