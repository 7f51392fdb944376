"""`Bus`: numbered messages from each of some ranks to those that listen to it.

Each rank publishes on a ZMQ XPUB socket and receives from all others through one SUB socket.
Publishing never blocks; queues have no limit, so no message is dropped while a connection lasts.
ZMQ restores a broken connection, but messages sent meanwhile are lost: a gap in their numbers
raises `RankLost`.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Collection, Sequence

import msgspec
import zmq

from megatron_async.communication.host import admit_own_user, bind_addresses, choose_endpoint
from megatron_async.communication.job import EXCHANGE_TIMEOUT_S, Job
from megatron_async.communication.keepalive import end_silent_connections
from megatron_async.communication.waiting import Wait
from megatron_async.errors import RankLost

_HEADER = struct.Struct("<IQ")
"""Sender's rank, number of its message."""

_SUBSCRIBER = b"\x01\xff subscriber "
"""First byte of a subscriber's message to a publisher, followed by its rank."""

MOST_SUBSCRIBER_BYTES = 1 << 16
"""A publisher hears nothing longer: a peer that sends more is disconnected."""

NEVER_MS = 24 * 3600 * 1000
"""Milliseconds: within a host a connection ends with its process, whose name others could take."""

NETWORK_SILENCE_S = 20.0
"""Seconds of silence after which a connection to a host ends; the death watch notices earlier."""


class Bus:
    """Connect to the members; all of them call, with the same arguments, in the same order.

    Use it from one thread at a time.

    Args:
        job: of all ranks.
        name: of the messages; named in errors.
        members: ranks that take part; this process is one of them.
        hears: the ranks from which a member receives.
        timeout_s: seconds that a member may be late.

    Attributes:
        rank: this process.
        members: see above.

    Raises:
        RankLost: a member died meanwhile.
        CommunicationTimeout: a member did not come.
    """

    def __init__(
        self,
        job: Job,
        name: str,
        members: Sequence[int],
        hears: Callable[[int], Collection[int]],
        timeout_s: float = EXCHANGE_TIMEOUT_S,
    ) -> None:
        if job.rank not in members or len(set(members)) != len(members):
            raise ValueError(
                f"members={list(members)} of {name!r} must be different ranks, {job.rank} (this "
                "process) among them."
            )
        self.rank = job.rank
        self.members = tuple(members)
        self._name = name
        self._watch = job.watch
        self._sent = 0
        self._received = dict.fromkeys(members, 0)
        self._waiters: set[asyncio.Future[None]] = set()
        self._publisher = self._subscriber = None
        if len(members) > 1:
            self._publisher = job.context.socket(zmq.XPUB)
            self._subscriber = job.context.socket(zmq.SUB)
            job.on_close(self.close)
            self._connect(job, hears, timeout_s)

    def publish(self, payload: bytes) -> None:
        """Send to all ranks that hear this one, in order; never blocks. `payload` is not empty."""
        if self._publisher is not None:
            self._sent += 1
            self._publisher.send(_HEADER.pack(self.rank, self._sent) + payload, zmq.NOBLOCK)

    def receive(self) -> tuple[int, memoryview] | None:
        """The next message: its sender and payload; None where there is none at the moment.

        Raises:
            RankLost: messages before it were lost with a connection.
        """
        if self._subscriber is None:
            return None
        try:
            message = self._subscriber.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        sender, number = _HEADER.unpack_from(message)
        expected = self._received[sender] + 1
        if number != expected:
            raise RankLost(
                f"{self._watch.describe([self.rank])} received message {number} of {self._name!r} "
                f"from {self._watch.describe([sender])}, but {expected} is the next: the "
                "connection broke in between. Check the network between the hosts.",
                [sender],
            )
        self._received[sender] = number
        return sender, memoryview(message)[_HEADER.size :]

    def wait(
        self, what: str, timeout_s: float | None, remedy: str = "", among: Sequence[int] = ()
    ) -> Wait:
        """A wait for a message.

        Args:
            what: named in errors.
            timeout_s: None waits for ever.
            remedy: advice for the error when time is up.
            among: ranks whose loss ends the wait; empty: any member's.
        """
        return Wait(what, timeout_s, self._watch, among or self.members, remedy)

    def sleep(self, seconds: float) -> None:
        """Until a message comes, a rank is lost, or time is up; at most so many seconds."""
        reads: list[tuple[zmq.Socket[bytes] | int, int]] = []
        if self._subscriber is not None:
            reads.append((self._subscriber, zmq.POLLIN))
        if not self._watch.losses:  # else the pipe stays readable, and we are not concerned
            reads.append((self._watch.fileno(), zmq.POLLIN))
        zmq.zmq_poll(reads, round(1000 * seconds))

    async def sleep_async(self, seconds: float) -> None:
        """Wait for a message, at most so many seconds, while other tasks run on the event loop."""
        if self._subscriber is None:
            await asyncio.sleep(seconds)
            return
        if int(self._subscriber.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # also arms the descriptor
            return
        loop = asyncio.get_running_loop()
        descriptor = int(self._subscriber.getsockopt(zmq.FD))
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.add(waiter)
        loop.add_reader(descriptor, self._wake)
        try:
            await asyncio.wait([waiter], timeout=seconds)
        finally:
            self._waiters.discard(waiter)
            if not self._waiters:
                loop.remove_reader(descriptor)

    def close(self) -> None:
        """Close; messages that were sent linger for a second. May be called twice."""
        if self._publisher is not None:
            self._publisher.close(linger=1000)
        if self._subscriber is not None:
            self._subscriber.close(linger=0)  # subscriptions may wait for lost ranks
        self._publisher = self._subscriber = None

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _connect(self, job: Job, hears: Callable[[int], Collection[int]], timeout_s: float) -> None:
        publisher, subscriber = self._publisher, self._subscriber
        assert publisher is not None
        assert subscriber is not None
        here = [rank for rank in self.members if job.records[rank].on_host_of(job.me)]
        other_hosts = len(here) < len(self.members)
        for socket in (publisher, subscriber):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.IPV6, 1)
            end_silent_connections(socket, NETWORK_SILENCE_S)
            if not other_hosts:
                socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
        admit_own_user(publisher)
        publisher.setsockopt(zmq.MAXMSGSIZE, MOST_SUBSCRIBER_BYTES)
        endpoints = []
        for address in bind_addresses(job.address(), len(here) > 1, other_hosts):
            publisher.bind(address)
            endpoints.append(publisher.getsockopt_string(zmq.LAST_ENDPOINT))
        mine = msgspec.json.encode(endpoints).decode()
        told = job.exchange(f"addresses of {self._name}", mine, self.members, timeout_s)
        for rank in hears(self.rank):
            there = msgspec.json.decode(told[rank], type=list[str])
            subscriber.connect(choose_endpoint(there, job.records[rank].on_host_of(job.me)))
        # In this order: a publisher that hears the second has taken in the first.
        subscriber.subscribe(b"")
        subscriber.subscribe(_SUBSCRIBER[1:] + str(self.rank).encode())
        missing = {rank for rank in self.members if rank != self.rank and self.rank in hears(rank)}
        wait = self.wait(f"subscribers of {self._name!r}", timeout_s)
        while missing:
            if publisher.poll(round(1000 * wait.seconds_to_sleep(missing))):
                heard = publisher.recv()
                rank_of = heard[len(_SUBSCRIBER) :]
                if heard.startswith(_SUBSCRIBER) and rank_of.isdigit():
                    missing.discard(int(rank_of))
        # Or a member that leaves at once would be missed by one whose subscribers are not all here.
        job.exchange(f"connections of {self._name}", "", self.members, timeout_s)
