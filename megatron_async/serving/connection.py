"""`Connection`: a client's or a replica's way to the coordinator, for an asyncio loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio

from megatron_async.communication.keepalive import end_silent_connections
from megatron_async.errors import ConfigurationError, CoordinatorLost
from megatron_async.serving.address import check_address
from megatron_async.serving.messages import (
    MOST_BYTES,
    UNREADABLE,
    ClientHello,
    Message,
    Ping,
    Refused,
    ReplicaHello,
    Welcome,
    encode,
)

SLICE_S = 0.2
"""A wait looks so often whether the connection has ended."""
HOST_SILENCE_S = 4.0
"""A coordinator's host that is silent for so long is gone."""


class Connection[Heard]:
    """One connection; after a loss another one is made.

    Args:
        address: of the coordinator.
        decode: of the messages that come in.
        on_ping: what is answered to a ping.

    Raises:
        ConfigurationError: the address is none.
    """

    def __init__(
        self, address: str, decode: Callable[[bytes], Heard], on_ping: Callable[[], Message]
    ) -> None:
        check_address(address)
        self.address = address
        self._decode = decode
        self._on_ping = on_ping
        self._silence_s: float | None = None
        self._last_heard = time.monotonic()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 200)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RECONNECT_IVL, 100)
        self._socket.set(zmq.RCVHWM, 0)  # a full queue would hide the connection's end
        end_silent_connections(self._socket, HOST_SILENCE_S)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigurationError(
                f"{address!r} is no address of a coordinator ({error}): write it as "
                "tcp://127.0.0.1:9500 or ipc:///tmp/coordinator."
            ) from error

    async def open(self, hello: ClientHello | ReplicaHello, timeout_s: float) -> None:
        """Say hello and wait for the coordinator's welcome.

        Raises:
            CoordinatorLost: nobody answers within `timeout_s`, or somebody else.
            ConfigurationError: it refuses; the message says why.
        """
        self.send(hello)
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if not await self._socket.poll(round(1000 * min(left, SLICE_S))):
                continue
            message: Any = await self._next()
            if isinstance(message, Refused):
                raise ConfigurationError(f"the coordinator at {self.address}: {message.reason}")
            if isinstance(message, Welcome):
                self._silence_s, self._last_heard = message.silence_s, time.monotonic()
                return
        raise CoordinatorLost(
            f"no coordinator answers at {self.address} (waited {timeout_s:.0f} s): start it with "
            "`megatron-async coordinator`, or correct the address."
        )

    def send(self, message: Message) -> None:
        """Send; never waits.

        Raises: one of `UNSENDABLE`, also for a message of too many bytes; nothing is sent.
        """
        # Without a limit to what may wait in the socket, it is done at once.
        self._socket.send(check_sendable(message))

    async def receive(self) -> Heard | None:
        """The next message; None after a while without one, and after a ping, which is answered.

        Raises:
            CoordinatorLost: the connection has ended, or the coordinator is silent or gave us up.
        """
        if not await self._socket.poll(round(1000 * SLICE_S)):
            self._check()
            return None
        message = await self._next()
        self._last_heard = time.monotonic()
        if isinstance(message, Refused):
            raise CoordinatorLost(f"the coordinator at {self.address}: {message.reason}")
        if not isinstance(message, Ping):
            return message
        self.send(self._on_ping())
        return None

    async def _next(self) -> Heard:
        try:
            return self._decode(await self._socket.recv())
        except UNREADABLE as error:
            raise CoordinatorLost(
                f"what answers at {self.address} is no coordinator of ours: {error}"
            ) from error

    def _check(self) -> None:
        if int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            raise CoordinatorLost(
                f"the coordinator at {self.address} is gone: its connection has ended."
            )
        silent = time.monotonic() - self._last_heard
        if self._silence_s is not None and silent >= self._silence_s:
            raise CoordinatorLost(
                f"the coordinator at {self.address} has said nothing for {silent:.1f} s."
            )

    def close(self) -> None:
        """End it. What was sent last is still delivered, if that takes no longer than 0.2 s."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()


def check_sendable(message: Message) -> bytes:
    """The bytes of a message.

    Raises: one of `UNSENDABLE`, also for a message of too many bytes.
    """
    data = encode(message)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it takes {len(data)} bytes, and a message may have {MOST_BYTES}")
    return data
