"""`Connection`: a client's or a replica's connection to the coordinator, for an asyncio loop.

The loop watches ZMQ's file descriptor, and a callback reads all messages: no task is woken for a
message. The descriptor signals only changes, so the callback reads until no message is left, and
the queue is checked again after each send (ZMQ's manual, `ZMQ_FD`).

To a coordinator of this host most messages go by a Unix socket, in order with those of ZMQ
(`host_socket.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from megatron_async.communication.keepalive import end_silent_connections
from megatron_async.errors import ConfigurationError, CoordinatorLost
from megatron_async.serving.address import check_address
from megatron_async.serving.host_socket import OfferedSocket
from megatron_async.serving.messages import (
    MOST_BYTES,
    UNREADABLE,
    ClientHello,
    HostSocketAt,
    HostSocketOpen,
    Message,
    Ping,
    Refused,
    ReplicaHello,
    Welcome,
    encode,
)
from megatron_async.serving.secret import secure_peer

logger = logging.getLogger("megatron_async")

SLICE_S = 0.2
"""Seconds between two checks whether the connection has ended."""
FROZEN_S = 1.0
"""Seconds: a process without a check for so long was stopped, or had no CPU time."""
HOST_SILENCE_S = 4.0
"""Seconds of silence after which a coordinator's host counts as lost."""
MOST_AT_ONCE = 64
"""Most messages that are read before other callbacks of the event loop run."""


class Outlet(Protocol):
    """Receives a replica's messages."""

    def send(self, message: Message) -> None:
        """Send; never waits.

        Raises: one of `messages.UNSENDABLE`; nothing is sent.
        """


class Connection[Heard]:
    """One connection; after a loss another one is made. Made and used on one running event loop.

    Args:
        address: of the coordinator.
        decode: of the messages that come in.
        on_ping: what is answered to a ping.
        secret: the coordinator's, if it asks for one.

    Attributes:
        num_sent: messages that were sent.

    Raises:
        ConfigurationError: the address is none.
    """

    def __init__(
        self,
        address: str,
        decode: Callable[[bytes], Heard],
        on_ping: Callable[[], Message],
        secret: bytes | None = None,
    ) -> None:
        check_address(address)
        self.address = address
        self.num_sent = 0
        self._decode = decode
        self._on_ping = on_ping
        self._loop = asyncio.get_running_loop()
        self._silence_s: float | None = None
        self._last_heard = self._last_look = time.monotonic()
        self._is_closed = self._is_due = False
        self._error: CoordinatorLost | None = None
        self._inbox: deque[Heard] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._hear: Callable[[Heard], None] = self._keep
        self._after: Callable[[], None] = lambda: None
        self._lost: Callable[[CoordinatorLost], None] = lambda _: None
        self._here: OfferedSocket | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 200)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RECONNECT_IVL, 100)
        self._socket.set(zmq.RCVHWM, 0)  # a full queue would hide the connection's end
        end_silent_connections(self._socket, HOST_SILENCE_S)
        if secret is not None:
            secure_peer(self._socket, secret)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._timer = self._loop.call_later(SLICE_S, self._look)
        self._watched = int(self._socket.get(zmq.FD))
        self._loop.add_reader(self._watched, self._read)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigurationError(
                f"{address!r} is no address of a coordinator ({error}): write it as "
                "tcp://127.0.0.1:9500 or ipc:///tmp/coordinator."
            ) from error

    async def open(self, hello: ClientHello | ReplicaHello, timeout_s: float) -> Welcome:
        """Say hello and wait for the coordinator's welcome.

        Raises:
            CoordinatorLost: nobody answers within `timeout_s`, or another program does.
            ConfigurationError: the coordinator refuses; the message says why.
        """
        self.send(hello)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            message: Any = await self._next(min(deadline - time.monotonic(), SLICE_S))
            if isinstance(message, Refused):
                raise ConfigurationError(f"the coordinator at {self.address}: {message.reason}")
            if isinstance(message, Welcome):
                self._silence_s, self._last_heard = message.silence_s, time.monotonic()
                self._here = OfferedSocket.offer(self._take_all)
                if self._here is not None:
                    self.send(HostSocketAt(self._here.name))
                return message
        raise CoordinatorLost(
            f"no coordinator answers at {self.address} (waited {timeout_s:.0f} s): start it with "
            "`megatron-async coordinator`, or correct the address. If it has a secret, all who "
            "connect need the same one (`--secret-file`)."
        )

    def send(self, message: Message) -> None:
        """Send; never waits.

        Raises: one of `UNSENDABLE`, also for a message of too many bytes; nothing is sent.
        """
        data = check_sendable(message)
        self.num_sent += 1
        if self._here is not None:
            if self._here.send(data):
                return
            self._here.sent_otherwise += 1
        # Without a limit to what may wait in the socket, it is done at once.
        self._socket.send(data, zmq.NOBLOCK)
        self._look_again()

    def listen(
        self,
        hear: Callable[[Heard], None],
        after: Callable[[], None],
        lost: Callable[[CoordinatorLost], None],
    ) -> None:
        """From now on, call `hear` for each message instead of keeping messages for `receive`.

        Args:
            hear: called with each message but pings.
            after: called after the messages that had arrived, at most `MOST_AT_ONCE`.
            lost: called once, when no more messages will come.
        """
        self._hear, self._after, self._lost = hear, after, lost
        while self._inbox:
            hear(self._inbox.popleft())
        after()
        if self._error is not None:
            lost(self._error)

    async def receive(self) -> Heard | None:
        """The next message; None after a while without one.

        Raises:
            CoordinatorLost: the connection has ended, or the coordinator is silent or gave us up.
        """
        message = await self._next(SLICE_S)
        if isinstance(message, Refused):
            raise CoordinatorLost(f"the coordinator at {self.address}: {message.reason}")
        return message

    async def _next(self, wait_s: float) -> Heard | None:
        if not self._inbox and self._error is None:
            waiter = self._waiter = self._loop.create_future()
            timer = self._loop.call_later(wait_s, _wake, waiter)
            try:
                await waiter
            finally:
                timer.cancel()
                self._waiter = None
        if self._inbox:
            return self._inbox.popleft()
        if self._error is not None:
            raise self._error
        return None

    def _keep(self, message: Heard) -> None:
        self._inbox.append(message)
        if self._waiter is not None:
            _wake(self._waiter)

    # ---- What the loop calls -----------------------------------------------------------------

    def _read(self) -> None:
        """Take in what is there."""
        self._is_due = False
        heard = 0
        while not self._is_closed and self._error is None:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._take_in_order(data)
            heard += 1
            if heard == MOST_AT_ONCE:
                self._look_again()
                break
        if heard:
            self._last_heard = time.monotonic()
            self._after()

    def _take_in_order(self, data: bytes) -> None:
        """Take in a message of ZMQ, after those that were written before it."""
        here = self._here
        if here is None:
            self._take(data)
            return
        for before in here.receive():
            self._take(before)
        counts = here.heard_otherwise >= 0
        self._take(data)
        here.heard_otherwise += counts
        for behind in here.receive():
            self._take(behind)

    def _take_all(self, messages: list[bytes]) -> None:
        """Take in what has come from a coordinator of this host."""
        for data in messages:
            if self._is_closed or self._error is not None:
                return
            self._take(data)
        self._last_heard = time.monotonic()
        self._after()

    def _take(self, data: bytes) -> None:
        try:
            message: Any = self._decode(data)
        except UNREADABLE as error:
            self._end(f"what answers at {self.address} is no coordinator of ours: {error}")
            return
        if isinstance(message, Ping):
            self.send(self._on_ping())
        elif isinstance(message, HostSocketOpen):
            if self._here is not None:
                self._here.heard_otherwise = 0
        elif isinstance(message, Refused) and self._silence_s is not None:
            self._end(f"the coordinator at {self.address}: {message.reason}")
        else:
            try:
                self._hear(message)
            except Exception as error:  # whatever it is, nobody is to wait for ever
                logger.exception("A message of the coordinator could not be taken in.")
                self._end(f"what the coordinator at {self.address} said is not understood: {error}")

    def _look_again(self) -> None:
        """Read soon, if there is something that the descriptor will not tell of."""
        if self._is_due or self._is_closed:
            return
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._is_due = True
            self._loop.call_soon(self._read)

    def _look(self) -> None:
        """Check whether the connection has ended."""
        now = time.monotonic()
        if now - self._last_look > FROZEN_S:  # what was sent to us meanwhile is still on its way
            self._last_heard = now
        self._last_look = now
        self._look_again()
        if self._error is not None:
            return
        self._timer = self._loop.call_later(SLICE_S, self._look)
        if self._is_due:
            return  # what has come is heard first
        if self._silence_s is None:
            return  # nobody has answered yet, and `open` knows for how long to wait
        if int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            if self._here is not None and (last := self._here.receive()):
                self._take_all(last)
            self._end(f"the coordinator at {self.address} is gone: its connection has ended.")
            return
        silent = now - self._last_heard
        if silent >= self._silence_s:
            self._end(f"the coordinator at {self.address} has said nothing for {silent:.1f} s.")

    def _end(self, reason: str) -> None:
        if self._error is None:
            self._error = CoordinatorLost(reason)
            if self._waiter is not None:
                _wake(self._waiter)
            self._lost(self._error)

    def close(self) -> None:
        """Close it. Messages sent before are still delivered, if this takes at most 0.2 s."""
        if self._is_closed:
            return
        self._is_closed = True
        self._timer.cancel()
        if self._here is not None:
            self._here.close()
        self._loop.remove_reader(self._watched)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def check_sendable(message: Message) -> bytes:
    """The bytes of a message.

    Raises: one of `UNSENDABLE`, also for a message of too many bytes.
    """
    data = encode(message)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it takes {len(data)} bytes, and a message may have {MOST_BYTES}")
    return data
