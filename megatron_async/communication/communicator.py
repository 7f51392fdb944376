"""`AsyncZMQCommunicator`: small agreements of host threads, without the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from operator import index

import msgspec

from megatron_async.communication.bus import Bus
from megatron_async.communication.job import EXCHANGE_TIMEOUT_S, Job
from megatron_async.communication.waiting import Wait
from megatron_async.errors import RanksDisagree

ROUND_TIMEOUT_S = 60.0
"""Seconds, as for collectives: a rank that is later than this counts as hanging."""

SPIN_S = 100e-6
"""Seconds of polling before a sleep: a round that all members begin together is over by then."""


class Contribution(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A member's message for a round.

    Attributes:
        round: its number; members count alike.
        operation: the operation that the member runs in this round.
        values: its integers.
    """

    round: int
    operation: str
    values: tuple[int, ...]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Contribution).decode


class PendingRound:
    """A round that this rank has begun: its contribution is sent; others may be missing.

    Ask for results in the order in which the rounds began; the remaining messages of a skipped
    round are dropped.
    """

    def __init__(
        self, communicator: AsyncZMQCommunicator, mine: Contribution, awaited: frozenset[int]
    ) -> None:
        self._communicator = communicator
        self.mine = mine
        self.awaited = awaited

    def result(self, timeout_s: float = ROUND_TIMEOUT_S) -> list[int]:
        """The maximum of each value over all members; waits for them.

        Raises:
            RankLost: a member is gone.
            CommunicationTimeout: a member did not come within `timeout_s`. The round is over, and
                the next one begins anew.
            RanksDisagree: another member is in another operation, or gives more or fewer values.
        """
        return _max(self._communicator.finish(self, timeout_s))


class AsyncZMQCommunicator:
    """Rounds of integers among some ranks, under the names of Megatron-Core's class.

    Constructor and results differ: Megatron's class is made of a ZMQ context and a process group,
    and gives one integer for one value and a tuple for more; here it is always a list. There, one
    rank gathers and answers. Here each member sends to all others: this
    takes one message time instead of two, and each member sees which ranks are missing and whether
    another has begun a round. All members construct it, and call the same rounds in the same order;
    different operations in one round are an error. Use it from one thread at a time.

    Args:
        job: of all ranks.
        members: ranks that agree, this process among them.
        name: of the agreement; named in errors.
        timeout_s: seconds that a member may be late when it is constructed.

    Raises:
        RankLost: a member died meanwhile.
        CommunicationTimeout: a member did not come.
    """

    def __init__(
        self,
        job: Job,
        members: Sequence[int],
        name: str = "agreement",
        timeout_s: float = EXCHANGE_TIMEOUT_S,
    ) -> None:
        self._others = frozenset(members) - {job.rank}
        self._name = name
        self._rank = job.rank
        self._begun = 0
        self._over = 0
        self._inbox: dict[int, dict[int, Contribution]] = {}
        self._bus = Bus(
            job, name, members, lambda rank: [r for r in members if r != rank], timeout_s
        )

    async def all_reduce_max(self, *values: int, timeout_s: float = ROUND_TIMEOUT_S) -> list[int]:
        """`sync_all_reduce_max` that leaves the event loop to others while it waits."""
        pending = self.start_all_reduce_max(*values)
        wait = self._wait(pending, timeout_s)
        try:
            while missing := self.missing(pending):
                await self._bus.sleep_async(wait.seconds_to_sleep(missing))
        except BaseException:
            self._drop(pending.mine.round)
            raise
        return _max(self._take(pending))

    def sync_all_reduce_max(self, *values: int, timeout_s: float = ROUND_TIMEOUT_S) -> list[int]:
        """The maximum of each value over all members.

        Args:
            values: 64-bit integers; as many on each member.
            timeout_s: how late a member may come.

        Returns:
            as many.

        Raises:
            RankLost: a member is gone.
            CommunicationTimeout: a member did not come. The round is over: a later member is not
                heard, and the next one begins anew.
            RanksDisagree: another member is in another operation, or gives more or fewer values.
        """
        return self.start_all_reduce_max(*values).result(timeout_s)

    def start_all_reduce_max(self, *values: int) -> PendingRound:
        """Begin a round, and do other work before asking for its `result`."""
        return self._begin(f"all_reduce_max of {len(values)}", values, self._others)

    def sync_broadcast(
        self, values: Sequence[int] | None, root: int, timeout_s: float = ROUND_TIMEOUT_S
    ) -> list[int]:
        """One member's values, on all of them; the root does not wait for the others.

        Args:
            values: 64-bit integers; read on the root only.
            root: its rank.
            timeout_s: how late the root may come.

        Raises:
            RankLost: a member is gone.
            CommunicationTimeout: the root did not come within `timeout_s`. The round is over, and
                the next one begins anew.
            RanksDisagree: another member is in another operation.
            ValueError: the root has no values, or `root` is no member.
        """
        operation = f"broadcast from {root}"
        if self._rank == root:
            if values is None:
                raise ValueError(f"Rank {root} is the root of this broadcast: it needs values.")
            pending = self._begin(operation, values, frozenset())
        elif root in self._others:
            pending = self._begin(operation, None, frozenset([root]))
        else:
            raise ValueError(f"root={root} is no member of {self._name!r}.")
        return list(self.finish(pending, timeout_s)[-1].values)

    def barrier(self, name: str, timeout_s: float = ROUND_TIMEOUT_S) -> None:
        """Wait until all members are here.

        Args:
            name: of the place, the same on all members.
            timeout_s: how late a member may come.

        Raises:
            RankLost: a member is gone.
            CommunicationTimeout: a member did not come within `timeout_s`. The round is over, and
                the next one begins anew.
            RanksDisagree: another member is in another operation.
        """
        self.finish(self._begin(f"barrier {name!r}", (), self._others), timeout_s)

    def has_started(self) -> bool:
        """Whether another member has begun a round that this one has not; does not wait.

        A member without work asks this instead of beginning rounds for nothing.
        """
        self._read()
        return self._begun + 1 in self._inbox

    async def started(self) -> None:
        """Sleep on an event loop until `has_started`; may be cancelled.

        Raises:
            RankLost: a member is gone.
        """
        wait = self._bus.wait(f"a round of {self._name!r} to begin", None)
        while not self.has_started():
            await self._bus.sleep_async(wait.seconds_to_sleep(self._others))

    def missing(self, pending: PendingRound) -> frozenset[int]:
        """Members whose contribution to a round has not come yet; does not wait."""
        self._read()
        return pending.awaited - self._inbox.get(pending.mine.round, {}).keys()

    def finish(self, pending: PendingRound, timeout_s: float) -> list[Contribution]:
        """Wait for a round; returns this member's contribution and those that were awaited."""
        try:
            spin_until = time.perf_counter() + SPIN_S
            wait = None
            while missing := self.missing(pending):
                if wait is None:
                    if time.perf_counter() < spin_until:
                        continue
                    wait = self._wait(pending, timeout_s)
                self._bus.sleep(wait.seconds_to_sleep(missing))
        except BaseException:
            self._drop(pending.mine.round)
            raise
        return self._take(pending)

    def close(self) -> None:
        """Close; what was sent still arrives."""
        self._bus.close()

    def _begin(
        self, operation: str, values: Sequence[int] | None, awaited: frozenset[int]
    ) -> PendingRound:
        """Begin a round; with no values this member only listens."""
        mine = Contribution(self._begun + 1, operation, tuple(map(index, values or ())))
        self._begun += 1
        if values is not None:
            self._bus.publish(_encode(mine))
        return PendingRound(self, mine, awaited)

    def _read(self) -> None:
        while (found := self._bus.receive()) is not None:
            sender, payload = found
            contribution = _decode(payload)
            # To a round that is over here it comes too late.
            if contribution.round > self._over:
                self._inbox.setdefault(contribution.round, {})[sender] = contribution

    def _take(self, pending: PendingRound) -> list[Contribution]:
        mine = pending.mine
        came = self._inbox.get(mine.round, {})
        self._drop(mine.round)
        for rank, theirs in came.items():
            if theirs.operation != mine.operation:
                raise RanksDisagree(
                    f"Round {mine.round} of {self._name!r} is {mine.operation} on rank "
                    f"{self._rank}, but {theirs.operation} on rank {rank}: all members must call "
                    "the same rounds in the same order."
                )
        return [mine, *(came[rank] for rank in pending.awaited)]

    def _drop(self, number: int) -> None:
        self._over = max(self._over, number)
        for old in [key for key in self._inbox if key <= self._over]:
            del self._inbox[old]

    def _wait(self, pending: PendingRound, timeout_s: float) -> Wait:
        mine = pending.mine
        return self._bus.wait(f"round {mine.round} of {self._name!r} ({mine.operation})", timeout_s)


def _max(contributions: Sequence[Contribution]) -> list[int]:
    return list(map(max, zip(*(contribution.values for contribution in contributions))))
