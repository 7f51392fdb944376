"""`StepChannel`: messages of a group's leader to its followers, and their reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from megatron_async.communication.bus import Bus
from megatron_async.communication.job import EXCHANGE_TIMEOUT_S, Job
from megatron_async.errors import CommunicationTimeout

SPIN_S = 20e-6
"""Seconds that a follower polls before it sleeps; waking up takes about as long."""


class StepChannel[Message, Report]:
    """An ordered log from the leader, `members[0]`, to the followers, the other members; and
    messages back. All members make it, with the same arguments, in the same order.

    A group of one has a channel too: `send` does nothing. Use it from one thread at a time.

    Args:
        job: of all ranks.
        members: ranks of the group, this process among them.
        message_type: of the leader: a msgspec Struct, or a union of tagged ones.
        report_type: of the followers, likewise; None: as `message_type`.
        enc_hook: of msgspec: converts values of types that msgspec does not know.
        name: of the channel; named in errors.
        timeout_s: how late a member may come.

    Attributes:
        members: see above.
        is_leader: whether this rank is the leader.

    Raises:
        RankLost: a member died meanwhile.
        CommunicationTimeout: a member did not come.
    """

    def __init__(
        self,
        job: Job,
        members: Sequence[int],
        message_type: Any,
        report_type: Any = None,
        enc_hook: Callable[[Any], Any] | None = None,
        name: str = "steps",
        timeout_s: float = EXCHANGE_TIMEOUT_S,
    ) -> None:
        leader = members[0]
        followers = [rank for rank in members if rank != leader]
        self.is_leader = job.rank == leader
        self._name = name
        self._leader = leader
        self.members: Sequence[int] = tuple(members)
        self._watch = job.watch
        self._encode = msgspec.msgpack.Encoder(enc_hook=enc_hook).encode
        read_type = (report_type or message_type) if self.is_leader else message_type
        self._decode = msgspec.msgpack.Decoder(read_type).decode
        self._bus = Bus(
            job,
            name,
            members,
            lambda rank: followers if rank == leader else [leader],
            timeout_s,
        )

    def send(self, message: Message) -> None:
        """On the leader: append to the log of all followers. Never blocks."""
        if not self.is_leader:
            raise RuntimeError(f"Only rank {self._leader} leads {self._name!r}: use report().")
        self._bus.publish(self._encode(message))

    def receive(self, timeout_s: float | None = None) -> Message:
        """On a follower: the next message of the log.

        Args:
            timeout_s: seconds. None waits for ever, because an idle leader sends nothing. 0: only
                a message that has arrived.

        Raises:
            RankLost: a member of the group is gone.
            CommunicationTimeout: nothing came in time.
        """
        message = self.poll()
        if message is not None:
            return message
        if timeout_s == 0:
            raise CommunicationTimeout("No message is there.", [self._leader])
        spin_until = time.perf_counter() + SPIN_S
        while time.perf_counter() < spin_until:
            message = self.poll()
            if message is not None:
                return message
        # An idle leader is not late: without a time limit nobody is missing.
        missing = [self._leader]
        wait = self._bus.wait(f"the next message of {self._name!r}", timeout_s)
        while True:
            seconds = wait.seconds_to_sleep(missing)
            self._bus.sleep(seconds)
            message = self.poll()
            if message is not None:
                return message

    def poll(self) -> Message | None:
        """On a follower: the next message of the log if it is there already, else None."""
        if self.is_leader:
            raise RuntimeError(f"Rank {self._leader} leads {self._name!r}: use reports().")
        found = self._bus.receive()
        return None if found is None else self._decode(found[1])

    def report(self, message: Report) -> None:
        """On a follower: send the leader a message. Never blocks."""
        if self.is_leader:
            raise RuntimeError(f"Rank {self._leader} leads {self._name!r}: use send().")
        self._bus.publish(self._encode(message))

    def reports(self) -> list[tuple[int, Report]]:
        """On the leader: (rank, message) of all that followers reported since the last call; of
        each follower in its order. Does not wait."""
        if not self.is_leader:
            raise RuntimeError(f"Only rank {self._leader} leads {self._name!r}: use receive().")
        found = []
        while (next_one := self._bus.receive()) is not None:
            found.append((next_one[0], self._decode(next_one[1])))
        return found

    def check(self) -> None:
        """Raise RankLost if a member died. Cheap: to be called often during other waits."""
        self._watch.check(self.members, f"a step of {self._name!r}")

    def close(self) -> None:
        """Close; messages that were sent still arrive."""
        self._bus.close()
