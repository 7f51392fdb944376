"""Leader and follower in one process: a channel through memory, with messages really encoded, and
all-reduce among threads."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Any, override

import msgspec

from megatron_async import DynamicInferenceEngine
from megatron_async.errors import CommunicationTimeout, RankLost
from megatron_async.planning.step_plan import StepShape
from megatron_async.ranks.actions import Report, Turn, to_builtin
from megatron_async.ranks.expert_consensus import Communicator, SharedExperts
from megatron_async.ranks.follower import Follower
from megatron_async.ranks.leader import Leader
from megatron_async.ranks.rank_group import RankGroup
from tests.support.patience import PATIENCE_S

_encoder = msgspec.msgpack.Encoder(enc_hook=to_builtin)


class MemoryChannel:
    """Both ends of a channel between rank 0, which leads, and rank 1. `sent` has the bytes of every
    message of the leader; set `is_lost`, and both ends find that the other has died."""

    members = (0, 1)

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.is_lost = False
        self._down: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._up: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def send(self, message: Turn) -> None:
        self.sent.append(_encoder.encode(message))
        self._down.put(self.sent[-1])

    def receive(self, timeout_s: float | None = None) -> Turn:
        waited_s = 0.0
        while True:
            self.check()
            try:
                message = self._down.get(timeout=0.02 if timeout_s is None else timeout_s)
                return msgspec.msgpack.decode(message, type=Turn)
            except queue.Empty:
                waited_s += 0.02
                if timeout_s is not None:
                    raise CommunicationTimeout("nothing came") from None

    def report(self, message: Report) -> None:
        self._up.put(_encoder.encode(message))

    def reports(self) -> list[tuple[int, Report]]:
        found = []
        while not self._up.empty():
            found.append((1, msgspec.msgpack.decode(self._up.get(), type=Report)))
        return found

    def check(self) -> None:
        if self.is_lost:
            raise RankLost("rank 1 died", [1])

    def close(self) -> None:
        return


class FollowingEngine:
    """A second engine, made like the leader (with check_ranks_agree), that follows it on a thread
    of its own. `communicator`: a leader's that shares experts. `error` is what `follow`
    raised, `ended` the ended requests by id."""

    def __init__(
        self,
        leader: DynamicInferenceEngine,
        follower: DynamicInferenceEngine,
        communicator: Communicator | None = None,
    ) -> None:
        self.channel = MemoryChannel()
        self.engine = follower
        self.error: BaseException | None = None
        self.ended: dict[int, Any] = {}
        leads = Leader(self.channel, self.channel.check, True)
        leader.loop.join(leads if communicator is None else SharedExperts(leads, communicator))
        follower.loop.join(Follower(self.channel, self.channel.check, check_agreement=True))
        self._end, follower.requests.end = follower.requests.end, self._note_end
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _note_end(self, request: Any, *arguments: Any, **named: Any) -> None:
        self._end(request, *arguments, **named)
        self.ended[request.request_id] = request

    def _run(self) -> None:
        try:
            while self.engine.follow():
                pass
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        """Wait for the end of `follow`, which the leader's close brings."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the follower hangs"


class MemoryCommunicator:
    """One member's end; make all ends with `group`."""

    def __init__(self, shared: _Rounds, rank: int) -> None:
        self._shared, self._rank = shared, rank
        self._rounds = 0

    @classmethod
    def group(cls, size: int) -> list[MemoryCommunicator]:
        """The ends of a group."""
        shared = _Rounds(size)
        return [cls(shared, rank) for rank in range(size)]

    def sync_all_reduce_max(self, *values: int) -> list[int]:
        self._rounds += 1
        return self._shared.reduce(self._rounds, self._rank, values)

    def has_started(self) -> bool:
        return self._shared.latest > self._rounds

    async def started(self) -> None:
        while not self.has_started():
            await asyncio.sleep(0.001)


class _Rounds:
    def __init__(self, size: int) -> None:
        self._size = size
        self._values: dict[int, dict[int, tuple[int, ...]]] = {}
        self._news = threading.Condition()
        self.latest = 0

    def reduce(self, number: int, rank: int, values: tuple[int, ...]) -> list[int]:
        with self._news:
            mine = self._values.setdefault(number, {})
            mine[rank] = values
            self.latest = max(self.latest, number)
            self._news.notify_all()
            done = self._news.wait_for(lambda: len(mine) == self._size, timeout=PATIENCE_S)
            assert done, f"round {number}: only ranks {sorted(mine)} came"
            self._values.pop(number - 2, None)
            return [max(column) for column in zip(*mine.values(), strict=True)]


class BesideOthers(RankGroup):
    """A rank that shares experts with others, which run `steps` more whenever this one stops;
    `launched` counts the steps that this rank was asked for."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._left = 0
        self.launched = 0

    @override
    def stop_together(self, is_stopping: bool) -> None:
        self._left = self.steps if is_stopping else 0

    @property
    @override
    def must_keep_up(self) -> bool:
        return self._left > 0

    @override
    def agree(self, step: int, wanted: StepShape, has_work: bool) -> StepShape:
        if not self._left:
            return wanted
        self._left -= 1
        self.launched += 1
        return StepShape(decode_rows=2, tokens=2)
