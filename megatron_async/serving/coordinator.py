"""`Coordinator`: the process between clients and replicas; its decisions are the `Dispatcher`'s."""

from __future__ import annotations

import errno
import logging
import os
import socket as sockets
import stat
import threading
import time
from collections import Counter, deque

import zmq

from megatron_async.communication.host import is_loopback
from megatron_async.communication.keepalive import end_silent_connections
from megatron_async.errors import ConfigurationError
from megatron_async.serving.address import check_address, why_not_bound
from megatron_async.serving.dispatcher import Dispatcher
from megatron_async.serving.host_sockets import HostSockets
from megatron_async.serving.inputs import Inputs
from megatron_async.serving.load_lines import LoadLines
from megatron_async.serving.messages import (
    MOST_BYTES,
    UNREADABLE,
    HostSocketAt,
    HostSocketOpen,
    Refused,
    StepPipeAt,
    ToClient,
    ToCoordinator,
    ToReplica,
    decode_for_coordinator,
    encode,
)
from megatron_async.serving.reasons import one_line
from megatron_async.serving.records import CoordinatorConfig
from megatron_async.serving.secret import Doorkeeper, secure_coordinator
from megatron_async.serving.step_pipes import StepPipes

logger = logging.getLogger("megatron_async")

TURN_MS = 50
"""Longest sleep of the loop."""
MOST_UNREAD = 10_000
"""Most messages queued for a peer that does not read, beside those in its socket."""
MOST_UNREAD_BYTES = 2 * MOST_BYTES
"""Most bytes of them."""
TELL_EVERY_S = 1.0
"""Seconds between two log lines about peers that are refused: a peer can make any number."""


class Coordinator:
    """Binds one address for clients and replicas, and serves them until it is stopped.

    Args:
        address: "tcp://HOST:PORT" ("tcp://127.0.0.1:*" takes a free port), or "ipc://FILE".
        config: limits and policies.
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
        check_address(address)
        self._config = config or CoordinatorConfig()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        options = {
            zmq.ROUTER_MANDATORY: 1,  # who is gone is noticed when something is sent to it
            zmq.LINGER: 200,
            zmq.MAXMSGSIZE: MOST_BYTES,  # who sends more is cut off
        }
        for option, value in options.items():
            self._socket.set(option, value)
        end_silent_connections(self._socket, self._config.silence_s)
        self._doorkeeper: Doorkeeper | None = None
        if secret is not None:
            self._doorkeeper = Doorkeeper(self._context, secret)
            secure_coordinator(self._socket, secret)
        try:
            _check_is_free(address)
            self._socket.bind(address)
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(0)
            raise ConfigurationError(why_not_bound(address, error)) from error
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)
        is_tcp = self.address.startswith("tcp://")
        if secret is None and is_tcp and not is_loopback(_host(self.address)):
            logger.warning(
                "Whoever reaches %s can send requests and stop replicas: there is no "
                "authentication. Give a secret, or bind 127.0.0.1.", self.address,
            )  # fmt: skip
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._waiting: dict[bytes, deque[bytes]] = {}
        self._unread: Counter[bytes] = Counter()
        """Bytes of what waits."""
        self._refused, self._tell_at = 0, 0.0
        self._gone: dict[bytes, str] = {}
        self._pipes = StepPipes()
        watched = [self._socket, self._monitor]
        if self._doorkeeper is not None:
            watched.append(self._doorkeeper.socket)
        self._inputs = Inputs(watched)
        self._sockets = HostSockets(self._inputs.epoll)
        self._is_probing = False
        self._stop = threading.Event()
        self.dispatcher = Dispatcher(self._config, self._send, time.monotonic())
        self.latest_stats = self.dispatcher.stats()

    def run(self) -> None:
        """Serve until `stop`; then all peers see that the coordinator is gone."""
        told, load = 0.0, LoadLines(time.monotonic())
        try:
            while not self._stop.is_set():
                wait_s = self._pipes.wait_s(time.monotonic(), TURN_MS / 1000)
                for number in self._inputs.wait(wait_s):
                    for identity, messages in self._sockets.read(number):
                        for data in messages:
                            self._hear(identity, data)
                if self._inputs.is_due(time.monotonic()):
                    self._receive()
                now = time.monotonic()
                for identity, steps in self._pipes.due(now):
                    self._follow(identity, steps, now)
                self._flush()
                self._bury()
                now = time.monotonic()
                self.dispatcher.tick(now)
                self._bury()
                if now - told >= self._config.ping_interval_s:
                    told, self.latest_stats = now, self.dispatcher.stats()
                    if line := load.line(self.latest_stats, now):
                        logger.info("%s", line)
        finally:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close()
            self._pipes.close_all()
            self._sockets.close_all()
            self._inputs.close()
            if self._doorkeeper is not None:
                self._doorkeeper.close()
            self._context.term()

    def stop(self) -> None:
        """Let `run` return; may be called from another thread or a signal handler."""
        self._stop.set()

    def _receive(self) -> None:
        """What has come by ZMQ: all messages, up to the limit of a turn."""
        if self._doorkeeper is not None and self._inputs.is_readable(self._doorkeeper.socket):
            self._doorkeeper.answer()
        for _ in range(1000):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            for data in self._sockets.before_message(identity):
                self._hear(identity, data)
            self._hear(identity, frames[-1] if frames else b"")
            for data in self._sockets.after_message(identity):
                self._hear(identity, data)

        if self._inputs.is_readable(self._monitor):
            self._probe()

    def _hear(self, identity: bytes, data: bytes) -> None:
        """A peer's message."""
        try:
            message = decode_for_coordinator(data)
        except UNREADABLE as error:
            # Who sent it waits for an answer, and nobody knows which.
            self._refuse(identity, f"it sent a message that cannot be read ({error})")
            return
        now = time.monotonic()
        if isinstance(message, HostSocketAt):
            self._open_socket(identity, message.name)
            return
        if isinstance(message, StepPipeAt):
            if identity in self.dispatcher.replicas:
                self._pipes.open(identity, message.name)
            return
        for steps in self._pipes.before_message(identity, now):
            self._follow(identity, steps, now)
        self._follow(identity, message, now)

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
        if self._is_due_to_tell():
            more = self._refused and f" (and {self._refused} since the last such line)"
            logger.warning("A peer is refused: %s.%s", one_line(reason), more or "")
            self._refused, self._tell_at = -1, time.monotonic() + TELL_EVERY_S
        self._refused += 1
        self._pipes.close(identity)
        self._send(identity, Refused(f"{reason[:1000]}: connect again."))
        self.dispatcher.lost(identity, reason, time.monotonic())

    def _is_due_to_tell(self) -> bool:
        return time.monotonic() >= self._tell_at

    def _open_socket(self, identity: bytes, name: str) -> None:
        """A peer offers a socket of its host."""
        is_known = identity in self.dispatcher.replicas or identity in self.dispatcher.clients
        if not is_known or identity in self._waiting or not self._sockets.open(identity, name):
            return
        if not self._try(identity, encode(HostSocketOpen())):
            self._sockets.close(identity)

    def _probe(self) -> None:
        """A connection has ended: send each peer a message by ZMQ, to find which one."""
        self._is_probing = True
        try:
            while True:
                self._monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            self.dispatcher.ping()
        finally:
            self._is_probing = False

    def _send(self, identity: bytes, message: ToClient | ToReplica) -> None:
        waiting = self._waiting.get(identity)
        data = encode(message)
        if waiting is None:
            is_written = not self._is_probing and self._sockets.send(identity, data)
            if is_written or self._try(identity, data):
                return
            waiting = self._waiting[identity] = deque()
        waiting.append(data)
        self._unread[identity] += len(data)
        if len(waiting) > MOST_UNREAD or self._unread[identity] > MOST_UNREAD_BYTES:
            self._gone[identity] = f"it does not read: {len(waiting)} messages wait for it"

    def _try(self, identity: bytes, data: bytes) -> bool:
        """Send; False if the peer's queue is full."""
        self._inputs.look_again()
        try:
            self._socket.send_multipart([identity, data], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._gone[identity] = "its connection has ended: it died, or the network did"
        self._sockets.sent_otherwise(identity)
        return True

    def _flush(self) -> None:
        for identity, waiting in list(self._waiting.items()):
            while waiting and self._try(identity, waiting[0]):
                self._unread[identity] -= len(waiting.popleft())
            if not waiting:
                del self._waiting[identity], self._unread[identity]

    def _bury(self) -> None:
        while self._gone:
            identity, reason = self._gone.popitem()
            self._waiting.pop(identity, None)
            self._unread.pop(identity, None)
            for data in self._sockets.close(identity):  # its last words
                self._hear(identity, data)
            self._pipes.close(identity)
            self.dispatcher.lost(identity, reason, time.monotonic())


def _host(address: str) -> str:
    """The IP address in "tcp://ADDRESS:PORT"."""
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def _check_is_free(address: str) -> None:
    """ZMQ would take an `ipc://` file away from who listens there, or from whom it belongs to."""
    file = address.removeprefix("ipc://")
    if not address.startswith("ipc://") or not os.path.exists(file):
        return
    if not stat.S_ISSOCK(os.stat(file).st_mode):
        raise OSError("the file there is no socket")
    with sockets.socket(sockets.AF_UNIX) as probe:
        try:
            probe.connect(file)
        except ConnectionRefusedError:
            return
    raise OSError(errno.EADDRINUSE, "address already in use")
