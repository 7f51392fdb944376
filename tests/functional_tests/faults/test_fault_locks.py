"""Ctrl-C leaves nothing locked for which another thread would wait, or be refused, for ever.

Python's own `threading.Event`, `Future` and executors lock in Python: an interrupt where the method
begins that unlocks leaves them locked.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_async import LLM
from megatron_async.devices import CpuDevice
from megatron_async.engine import admission
from megatron_async.engine.listener import EngineListener
from megatron_async.engine.turn import EngineThread
from megatron_async.errors import JobFailed, RanksDisagree, RecordingError
from megatron_async.lab.recorder import Recorder
from tests.support.attention_model import VOCABULARY, AttentionModel
from tests.support.bytecodes import AtBytecode, ctrl_c
from tests.support.harness import drain, greedy, make_engine, random_prompts
from tests.support.memory_channel import FollowingEngine
from tests.support.patience import PATIENCE_S

PROMPTS = random_prompts(5, (5, 9, 3), VOCABULARY)
pytestmark = pytest.mark.usefixtures("usual_handler")


def interrupted_everywhere(begin: Callable[[], Any], act: Callable[[Any], Any]) -> Iterator[Any]:
    """`act` on what `begin` returns, interrupted before each of its bytecodes: what it is then."""
    number = 0
    while True:
        number += 1
        subject = begin()
        with AtBytecode(number, ctrl_c) as interrupted:
            try:
                act(subject)
            except KeyboardInterrupt:
                assert interrupted.where is not None
        yield subject
        if interrupted.where is None:
            return


def on_another_thread(call: Callable[[], Any]) -> None:
    """Wait until it has been called there."""
    ended = []
    thread = threading.Thread(target=lambda: ended.append(call()), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert ended, "it raised, or waits for ever"


def test_the_thread_of_an_engine_is_given_back() -> None:
    """Break `works`: return an object whose `__exit__` is written in Python."""

    def work(thread: EngineThread) -> None:
        with thread.works(), thread.works():
            pass

    for thread in interrupted_everywhere(EngineThread, work):
        on_another_thread(thread.check)


def test_the_thread_of_a_stream_goes_on() -> None:
    """Break `_Point`: wait by a `threading.Event`."""
    device = CpuDevice()
    gates = []

    def launch() -> Any:
        gates.append(threading.Lock())
        gates[-1].acquire()
        device.compute.launch(gates[-1].acquire)
        event = device.event()
        device.compute.record(event)
        return event

    for event in interrupted_everywhere(launch, lambda event: event.wait_for(0.0)):
        gates[-1].release()
        assert event.wait_for(PATIENCE_S)
    device.close()


def test_a_grammar_s_future_is_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break `wait_for_others`: hold nothing."""
    monkeypatch.setattr(admission, "POLL_S", 0.0)

    def wait(job: Future[None]) -> None:
        entry = SimpleNamespace(grammar_job=job)
        waiting: Any = SimpleNamespace(_requests=SimpleNamespace(compiling={0: (entry, 0)}))
        admission.Admission.wait_for_others(waiting)

    for job in interrupted_everywhere(Future, wait):
        on_another_thread(lambda job=job: job.set_result(None))


def test_closing_an_llm_ends_all_of_it() -> None:
    """Break `LLM.close`: hold nothing."""
    closed = []
    llm: Any = LLM.__new__(LLM)
    llm._recorder = SimpleNamespace(close=lambda: [ctrl_c(), closed.append("recorder")])
    llm.engine = SimpleNamespace(close=lambda: closed.append("engine"))
    with pytest.raises(KeyboardInterrupt):
        llm.close()
    assert closed == ["recorder", "engine"]


class Failing(EngineListener):
    """Cuts the third step short."""

    def __init__(self) -> None:
        self.calls = 0

    def launched(self, plan: Any) -> None:
        self.calls += 1
        if self.calls == 3:
            raise MemoryError("no more")


def test_a_recording_of_a_step_that_was_cut_short_is_incomplete(tmp_path: Path) -> None:
    """Break `Recorder.mended`."""
    engine = make_engine(AttentionModel(), max_sequence_length=64)
    recorder = Recorder(engine, tmp_path / "run.rec")
    engine.listeners.append(Failing())
    with pytest.raises(MemoryError):
        engine.generate(PROMPTS, greedy(6))
    drain(engine)
    with pytest.raises(RecordingError, match=r"incomplete .*cut short by MemoryError"):
        recorder.close()


def test_a_leader_that_was_cut_short_ends_its_job() -> None:
    """Followers may have done more: break `mend` of an engine that is not alone."""
    leader, follower = (make_engine(AttentionModel(), max_sequence_length=64) for _ in range(2))
    following = FollowingEngine(leader, follower)
    leader.listeners.append(Failing())
    future = leader.add_request(0, PROMPTS[0], greedy(6))
    with pytest.raises(JobFailed, match=r"MemoryError.*start the job again"):
        drain(leader)
    assert isinstance(future.result().error, RanksDisagree)
    following.join()
    assert isinstance(following.error, RanksDisagree)
    for engine in (leader, follower):
        refused = engine.add_request(1, PROMPTS[1], greedy(6)).result()
        assert isinstance(refused.error, RanksDisagree)
        engine.close()
