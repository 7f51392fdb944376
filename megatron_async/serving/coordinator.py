"""`Coordinator`: the process between clients and replicas; its decisions are the `Dispatcher`'s."""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from itertools import count

from megatron_async.communication.host import is_loopback
from megatron_async.serving.address import forget, listen
from megatron_async.serving.dispatcher import Dispatcher
from megatron_async.serving.link import (
    NONCE_BYTES,
    Greeting,
    Link,
    end_silent,
    is_friend,
    listen_here,
)
from megatron_async.serving.messages import (
    MOST_BYTES,
    UNREADABLE,
    Refused,
    ToClient,
    ToCoordinator,
    ToReplica,
    decode_for_coordinator,
    encode,
)
from megatron_async.serving.reasons import one_line
from megatron_async.serving.records import CoordinatorConfig
from megatron_async.serving.secret import COORDINATOR, PEER, check_secret, encryption, proof_of
from megatron_async.serving.service_counters import LoadLines

logger = logging.getLogger("megatron_async")

TURN_S = 0.05
"""Longest sleep of the loop."""
MOST_UNREAD = 10_000
"""Most messages queued for a peer that does not read, beside those in its socket."""
MOST_UNREAD_BYTES = 2 * MOST_BYTES
"""Most bytes of them."""
MOST_STRANGERS = 256
"""Most connections of peers that are not accepted yet; of more, the oldest ends."""
STRANGER_BYTES = 64 << 10
"""Most bytes of a message of theirs."""
STRANGER_S = 5.0
"""Seconds that each has to say hello."""
NO_FILES_S = 0.1
"""Seconds without accepting peers when the process has too many open files."""
TELL_EVERY_S = 1.0
"""Seconds between two log lines about peers that are refused: a peer can make any number."""


@dataclass(eq=False)
class _Peer:
    """A client, a replica, or one that has yet to say which. It must say its `proof` first, once it
    has been greeted; `is_here` says whether it is a process of this host, by its socket.

    Attributes:
        since: when it was last known to the dispatcher, or was accepted, seconds.
    """

    identity: bytes
    link: Link
    since: float
    is_here: bool
    proof: bytes = b""
    has_proven: bool = False


class Coordinator:
    """Binds one address for clients and replicas, and serves them until it is stopped.

    Args:
        address: "tcp://HOST:PORT" ("tcp://127.0.0.1:*" takes a free port), or "ipc://FILE".
        secret: that all peers must have; None: no secret is needed. See `secret.read_secret`.

    Attributes:
        address: where clients and replicas find it.
        latest_stats: `stats` of about a ping's interval ago, for other threads.

    Raises:
        ConfigurationError: the address is in use or cannot be bound.
    """

    def __init__(
        self, address: str, config: CoordinatorConfig | None = None, secret: bytes | None = None
    ) -> None:
        self._config = config or CoordinatorConfig()
        if secret is not None:
            check_secret(secret)
        self._secret = secret
        self._listener, self.address = listen(address)
        is_tcp = self.address.startswith("tcp://")
        host = self.address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        if secret is None and is_tcp and not is_loopback(host):
            logger.warning(
                "Every peer that reaches %s can send requests and stop replicas: there is no "
                "authentication. Give a secret, or bind 127.0.0.1.", self.address,
            )  # fmt: skip
        if is_tcp:
            end_silent(self._listener, self._config.silence_s)
        self._here = listen_here() if is_tcp or secret is not None else None
        self._selector = selectors.DefaultSelector()
        self._accepts_again_at = 0.0
        self._peers: dict[bytes, _Peer] = {}
        self._numbers = count()
        self._refused, self._tell_at = 0, 0.0
        self._gone: dict[bytes, str] = {}
        self._stop = threading.Event()
        self.dispatcher = Dispatcher(self._config, self._send, time.monotonic())
        self.latest_stats = self.dispatcher.stats()

    def run(self) -> None:
        """Serve until `stop`; then all peers see that the coordinator is gone."""
        told, load = 0.0, LoadLines(time.monotonic())
        self._listen(True)
        try:
            while not self._stop.is_set():
                for key, events in self._selector.select(TURN_S):
                    peer = key.data
                    if peer is None:
                        self._accept(key.fileobj)  # type: ignore[arg-type]
                        continue
                    if events & selectors.EVENT_WRITE:
                        peer.link.flush()
                    if events & selectors.EVENT_READ:
                        self._read(peer)
                self._bury()
                now = time.monotonic()
                self.dispatcher.tick(now)
                self._bury()
                if now - told >= self._config.ping_interval_s:
                    self._end_strangers(now, MOST_STRANGERS)
                    told, self.latest_stats = now, self.dispatcher.stats()
                    if line := load.line(self.latest_stats, now):
                        logger.info("%s", line)
                if self._accepts_again_at and now >= self._accepts_again_at:
                    self._listen(True)
        finally:
            for peer in self._peers.values():
                peer.link.close()
            self._selector.close()
            for listener in self._listeners():
                listener.close()
            forget(self.address)

    def stop(self) -> None:
        """Let `run` return; may be called from another thread or a signal handler."""
        self._stop.set()

    # ---- Peers come ------------------------------------------------------------------------------

    def _listeners(self) -> list[socket.socket]:
        return [self._listener] if self._here is None else [self._listener, self._here[0]]

    def _listen(self, accepts: bool) -> None:
        self._accepts_again_at = 0.0 if accepts else time.monotonic() + NO_FILES_S
        for listener in self._listeners():
            if accepts:
                self._selector.register(listener, selectors.EVENT_READ)
            else:
                self._selector.unregister(listener)

    def _accept(self, listener: socket.socket) -> None:
        now = time.monotonic()
        try:
            end, _ = listener.accept()
        except (BlockingIOError, ConnectionError):  # it is gone again
            return
        except OSError as error:
            if self._is_due_to_tell():
                logger.warning("Nobody can connect now: %s.", error)
            self._end_strangers(now, 0)
            self._listen(False)
            return
        is_here = listener is not self._listener
        if is_here and not is_friend(end):
            end.close()
            return
        encrypts = None if is_here or self._secret is None else encryption(is_coordinator=True)
        link = Link(end, STRANGER_BYTES, encrypts, is_server=True)
        peer = _Peer(b"%d" % next(self._numbers), link, now, is_here)
        self._peers[peer.identity] = peer
        self._selector.register(end, selectors.EVENT_READ, peer)
        link.watch = lambda is_full: self._watch(peer, is_full)
        self._greet(peer)
        known = len(self.dispatcher.replicas) + len(self.dispatcher.clients)
        if len(self._peers) - known > MOST_STRANGERS:
            self._end_strangers(now, MOST_STRANGERS)

    def _watch(self, peer: _Peer, is_full: bool) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_full else 0)
        with contextlib.suppress(KeyError, ValueError):  # its link is being closed
            self._selector.modify(peer.link.fileno(), events, peer)

    def _greet(self, peer: _Peer) -> None:
        """The first message to a peer, as soon as there are keys."""
        if peer.proof or (channel := peer.link.channel) is None:
            return
        nonce = secrets.token_bytes(NONCE_BYTES)
        here = "" if self._here is None or peer.is_here else self._here[1]
        own = proof_of(self._secret, COORDINATOR, channel)
        peer.proof = proof_of(self._secret, PEER, channel, nonce)
        peer.link.send(Greeting(nonce, own, here).encode())

    def _is_known(self, peer: _Peer) -> bool:
        dispatcher = self.dispatcher
        return peer.identity in dispatcher.replicas or peer.identity in dispatcher.clients

    def _end_strangers(self, now: float, most: int) -> None:
        """End the connections of peers that say no hello, and, beyond `most`, of the oldest ones.
        A peer that was told to connect again has time to read it."""
        strangers = []
        for peer in self._peers.values():
            if self._is_known(peer):
                peer.since = now
            else:
                strangers.append(peer)
        strangers.sort(key=lambda peer: peer.since)
        for number, peer in enumerate(strangers, 1):
            if now - peer.since >= STRANGER_S or number <= len(strangers) - most:
                self._gone[peer.identity] = "it did not say hello in time"

    # ---- Peers speak -----------------------------------------------------------------------------

    def _read(self, peer: _Peer) -> None:
        """What a peer has said."""
        for data in peer.link.receive():
            if peer.identity not in self._gone:
                self._hear(peer, data)
        self._greet(peer)
        if why := peer.link.why_over:
            if peer.link.is_cut:
                why += ": it died, or the network did"
            else:
                self._tell(why)
            self._gone.setdefault(peer.identity, why)

    def _hear(self, peer: _Peer, data: bytes) -> None:
        """A peer's message."""
        identity = peer.identity
        if not peer.has_proven:
            peer.has_proven = hmac.compare_digest(data, peer.proof)
            if not peer.has_proven:
                self._tell("it has another secret")
                self._gone[identity] = "it has another secret"
            return
        try:
            message = decode_for_coordinator(data)
        except UNREADABLE as error:
            # The sender waits for an answer, and nobody knows which.
            self._refuse(identity, f"it sent a message that cannot be read ({error})")
            return
        self._follow(identity, message, time.monotonic())
        if peer.link.most_bytes == STRANGER_BYTES and self._is_known(peer):
            peer.link.most_bytes = MOST_BYTES

    def _follow(self, identity: bytes, message: ToCoordinator, now: float) -> None:
        """Do what a message asks. Whatever that raises ends this peer, and no other."""
        try:
            self.dispatcher.hear(identity, message, now)
        except Exception as error:
            if self._is_due_to_tell():
                logger.exception("A message of type %s is not followed.", type(message).__name__)
            kind = type(error).__name__
            self._refuse(identity, f"its message led to an error here ({kind}: {error})")

    def _refuse(self, identity: bytes, reason: str) -> None:
        """A peer is disconnected for what it said."""
        self._tell(reason)
        self._send(identity, Refused(f"{reason[:1000]}: connect again."))
        self.dispatcher.lost(identity, reason, time.monotonic())

    def _tell(self, reason: str) -> None:
        """Log that a peer is refused."""
        if self._is_due_to_tell():
            more = self._refused and f" (and {self._refused} since the last such line)"
            logger.warning("A peer is refused: %s.%s", one_line(reason), more or "")
            self._refused, self._tell_at = -1, time.monotonic() + TELL_EVERY_S
        self._refused += 1

    def _is_due_to_tell(self) -> bool:
        return time.monotonic() >= self._tell_at

    def _send(self, identity: bytes, message: ToClient | ToReplica) -> None:
        if (peer := self._peers.get(identity)) is None:
            return
        link = peer.link
        link.send(encode(message))
        if len(link.unsent) > MOST_UNREAD or link.unsent_bytes > MOST_UNREAD_BYTES:
            self._gone[identity] = f"it does not read: {len(link.unsent)} messages wait for it"

    def _bury(self) -> None:
        """Close the connections that are over."""
        while self._gone:
            identity, reason = self._gone.popitem()
            if (peer := self._peers.pop(identity, None)) is not None:
                self._selector.unregister(peer.link.fileno())
                peer.link.close()
            self.dispatcher.lost(identity, reason, time.monotonic())
