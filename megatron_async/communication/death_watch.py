"""Which ranks of this job are lost, and the end of a process that hangs after a loss."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import zmq

from megatron_async.communication.host import (
    bind_addresses,
    choose_endpoint,
    list_ranks,
    process_state,
)
from megatron_async.communication.record import RankRecord
from megatron_async.communication.stopped import StoppedProcesses
from megatron_async.communication.watch_link import Link
from megatron_async.errors import ConfigurationError, RankLost

logger = logging.getLogger("megatron_async.death_watch")

SILENCE_VARIABLE = "MEGATRON_ASYNC_SILENCE_S"
"""Environment: seconds after which a silent host, or a stopped rank, is lost (default 4)."""

GRACE_VARIABLE = "MEGATRON_ASYNC_LOSS_GRACE_S"
"""Environment: seconds that a process has to end by itself after a loss (default 5), or "off"."""

EXIT_CODE_RANK_LOST = 75
"""Exit code of a process that the watch ended: it hung after a loss (EX_TEMPFAIL: start again)."""


class Goodbye(msgspec.Struct, tag=True, frozen=True):
    """I leave; in order, or because of `failure`."""

    failure: str


class Gone(msgspec.Struct, tag=True, frozen=True):
    """From rank 0: this rank is gone; lost because of `loss`, or in order if that is ""."""

    rank: int
    loss: str


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Goodbye | Gone).decode


@dataclass(frozen=True)
class Loss:
    """A rank that is gone without having left in order.

    Attributes:
        rank: which.
        reason: what is known of its end.
        noticed: on the clock of `time.monotonic`.
    """

    rank: int
    reason: str
    noticed: float


class DeathWatch:
    """Watches all ranks, from a thread of its own. Rank 0 has a `Link` to each other rank and
    informs the others of losses; each rank watches rank 0 itself.

    Connections of a stopped process stay open. The first rank of its host sees its state (the
    others see the first rank's) and informs rank 0. Two cases are not seen: a stopped rank that is
    alone on its host, and, on other hosts, a stopped rank 0. Time limits of waits end these.

    Before `start`, the bootstrap calls `step`.

    Args:
        rank: this process.

    Attributes:
        end_process_after_s: seconds after a loss at which the watch ends this process, because it
            hangs in a collective, which nothing else can interrupt. None for processes that handle
            losses themselves. From MEGATRON_ASYNC_LOSS_GRACE_S.
        needed: the ranks whose loss ends this process; None: any. A service sets those without
            which it cannot step: other replicas of its job may be lost, and it goes on.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._silence_s = _seconds(SILENCE_VARIABLE, "4") or 4.0
        self.end_process_after_s = _seconds(GRACE_VARIABLE, "5")
        self.needed: Collection[int] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._links: dict[int, Link] = {}
        self._stopped = StoppedProcesses(self._silence_s)
        self._poller = zmq.Poller()
        self._records: dict[int, RankRecord] = {}
        self._losses: dict[int, Loss] = {}
        self._left: set[int] = set()
        self._callbacks: list[Callable[[Loss], None]] = []
        self._lock = threading.Lock()
        self._goodbye: Goodbye | None = None
        self._thread: threading.Thread | None = None
        # Readable for good after the first loss: sleepers poll it, and wake.
        self._loss_read, self._loss_write = os.pipe()
        self._wake_read, self._wake_write = os.pipe()
        self._poller.register(self._wake_read, zmq.POLLIN)

    def bind(self, address: str, is_here: bool) -> list[str]:
        """Let rank 0 connect; returns the endpoints.

        Args:
            address: of this host, for other hosts.
            is_here: rank 0 is on this host, so no network is used.
        """
        addresses = bind_addresses(address, others_on_this_host=is_here, other_hosts=not is_here)
        return self._new_link(0).bind(addresses)

    def connect(self, me: RankRecord, peer: RankRecord, endpoints: Sequence[str]) -> None:
        """On rank 0: watch a rank that has come, and is bound to these endpoints."""
        endpoint = choose_endpoint(endpoints, me.on_host_of(peer))
        self._new_link(peer.rank).connect(endpoint)

    def know(self, records: Iterable[RankRecord]) -> None:
        """Learn names, for messages."""
        self._records.update({record.rank: record for record in records})

    def unlinked(self) -> list[int]:
        """Ranks whose link is not up yet."""
        return [rank for rank, link in self._links.items() if not link.is_up]

    def check_unlinked(self) -> None:
        """Lose the ranks of this host that have ended before their link was up."""
        me = self._records.get(self._rank)
        for rank in self.unlinked():
            peer = self._records.get(rank)
            if me is None or peer is None or not peer.on_host_of(me):
                continue
            if process_state(peer.pid) == "ended":
                self._lose(rank, "it ended while the job started")

    def start(self) -> None:
        """Watch from a thread, from now on."""
        if self._links:
            self._thread = threading.Thread(target=self._watch, name="death-watch", daemon=True)
            self._thread.start()

    @property
    def losses(self) -> list[Loss]:
        """All losses, in the order in which they were noticed."""
        return list(self._losses.values())

    def has_left(self, rank: int) -> bool:
        """Whether a rank has said goodbye."""
        return rank in self._left

    def fileno(self) -> int:
        """Becomes readable at the first loss and stays so; never read it."""
        return self._loss_read

    def check(self, members: Sequence[int] | None = None, waiting_for: str = "") -> None:
        """Raise if a rank was lost.

        Args:
            members: the ranks that matter; None: all.
            waiting_for: named in the message.

        Raises:
            RankLost: names ranks, hosts and reasons.
        """
        if not self._losses:
            return
        lost = [x for x in self.losses if members is None or x.rank in members]
        if lost:
            raise RankLost(self._message(lost, waiting_for), [x.rank for x in lost])

    def on_loss(self, callback: Callable[[Loss], None]) -> None:
        """Call back at each loss, from the watch's thread; at once for those there were."""
        with self._lock:
            known = self.losses
            self._callbacks.append(callback)
        for loss in known:
            callback(loss)

    def describe(self, ranks: Sequence[int]) -> str:
        """Ranks by name, with what is known of each, such as "rank 3 (host-b, pid 77)"."""
        known = [str(self._records.get(rank, f"rank {rank}")) for rank in ranks]
        return ", ".join(known) if known else list_ranks([])

    def step(self, timeout_s: float) -> None:
        """Wait for messages, at most so long, and handle them."""
        self._poller.poll(round(1000 * timeout_s))
        for rank, link in self._links.items():
            for message in link.read():
                try:
                    news = _decode(message)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    logger.warning("The death watch dropped a message that is none of ours.")
                    continue
                self._hear(rank, news)
            if link.is_down and rank not in self._left and rank not in self._losses:
                self._lose(rank, self._reason(rank, link))
        for rank in self._stopped.look(self._neighbours()):
            reason = f"its process was stopped (SIGSTOP?), {self._silence_s:g} s ago"
            self._lose(rank, reason)
            if self._rank and rank:
                self._links[0].send(_encode(Gone(rank, reason)))

    def close(self, failure: str = "") -> None:
        """Say goodbye and stop watching. May be called twice.

        Args:
            failure: why this rank does not end in order; others then count it as lost.
        """
        if self._context is None:
            return
        # A rank that fails because another was lost adds nothing to what all know.
        self._goodbye = Goodbye("" if self._losses else failure)
        os.write(self._wake_write, b"x")
        if self._thread is not None:
            self._thread.join(5.0)
        else:
            self._leave(self._goodbye)
        self._context = None

    def _new_link(self, peer: int) -> Link:
        if self._context is None:
            # Its own: data does not delay a goodbye.
            self._context = zmq.Context()
        self._links[peer] = link = Link(self._context, self._silence_s)
        for socket in link.sockets:
            self._poller.register(socket, zmq.POLLIN)
        return link

    def _watch(self) -> None:
        while self._goodbye is None:
            needed = self.needed
            lost = self._losses.values()
            first = next((x for x in lost if needed is None or x.rank in needed), None)
            grace = self.end_process_after_s
            left_s = self._stopped.interval_s
            if first is not None and grace is not None:
                left_s = first.noticed + grace - time.monotonic()
                if left_s <= 0:
                    self._end_process(grace)
            # A grace period that is changed meanwhile is seen within a second.
            self.step(min(left_s, 1.0) if first is not None else left_s)
        self._leave(self._goodbye)

    def _leave(self, goodbye: Goodbye) -> None:
        message = _encode(goodbye)
        self.step(0.0)
        for link in self._links.values():
            link.send(message)
            link.close()
        assert self._context is not None
        self._context.term()

    def _hear(self, peer: int, message: Goodbye | Gone) -> None:
        match message:
            case Goodbye(failure="") | Gone(loss=""):
                rank = message.rank if isinstance(message, Gone) else peer
                self._left.add(rank)
                self._tell(Gone(rank, ""))
            case Goodbye():
                self._lose(peer, f"it ended with {message.failure}")
            case Gone():
                self._lose(message.rank, message.loss)

    def _lose(self, rank: int, reason: str) -> None:
        if rank in self._losses or rank == self._rank:
            return
        loss = Loss(rank, reason, time.monotonic())
        with self._lock:
            self._losses[rank] = loss
            callbacks = list(self._callbacks)
        os.write(self._loss_write, b"x")
        self._tell(Gone(rank, reason))
        logger.error("%s", self._message([loss]))
        for callback in callbacks:
            try:
                callback(loss)
            except Exception:
                logger.exception("A callback of the death watch raised.")

    def _tell(self, news: Gone) -> None:
        if self._rank == 0:
            for rank, link in self._links.items():
                if rank != news.rank:
                    link.send(_encode(news))

    def _reason(self, rank: int, link: Link) -> str:
        if not link.is_up:
            return "it ended while the job started"
        me, peer = self._records.get(self._rank), self._records.get(rank)
        if me is not None and peer is not None and me.on_host_of(peer):
            if _has_ended(peer.pid):
                return "its process has ended without a goodbye"
            return "its connection closed, though its process has not ended"
        return (
            f"its connection closed, or its host was silent for {self._silence_s:g} s: the process "
            "ended, or the network between the hosts is down"
        )

    def _neighbours(self) -> dict[int, int]:
        """Process ids of the ranks of this host that are looked at, and still there."""
        me = self._records.get(self._rank)
        if me is None:
            return {}
        here = [rank for rank in sorted(self._records) if self._records[rank].on_host_of(me)]
        seen = here[1:] if self._rank == here[0] else here[:1]
        gone = self._left | self._losses.keys()
        return {rank: self._records[rank].pid for rank in seen if rank not in gone}

    def _message(self, lost: Sequence[Loss], waiting_for: str = "") -> str:
        said = "; ".join(f"{self.describe([loss.rank])}: {loss.reason}" for loss in lost)
        message = f"{self.describe([self._rank])} lost {said}."
        return f"{message} It was waiting for {waiting_for}." if waiting_for else message

    def _end_process(self, grace_s: float) -> None:
        sys.stderr.write(
            f"megatron_async: {self._message(self.losses)} This process has not ended by itself "
            f"within {grace_s:g} s, so it is ended now, with exit code {EXIT_CODE_RANK_LOST} "
            f"({GRACE_VARIABLE} changes this). Where its threads are:\n"
        )
        sys.stderr.flush()
        try:
            faulthandler.dump_traceback(sys.stderr.fileno())
        finally:
            os._exit(EXIT_CODE_RANK_LOST)


def _has_ended(pid: int) -> bool:
    """Whether a process of this host is dead; the kernel closes its connections a little before."""
    for _ in range(20):
        if process_state(pid) == "ended":
            return True
        time.sleep(0.01)
    return False


def _seconds(variable: str, default: str) -> float | None:
    text = os.environ.get(variable, default)
    if text == "off":
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise ConfigurationError(f'{variable}={text!r} must be seconds above 0, or "off".')
    return seconds
