"""The connection between rank 0 and one other rank, by which each notices the other's end.

No messages are sent while both run. The kernel closes the connection of a dead process, and probes
other hosts. No Python thread has to answer, so a process that holds the GIL for a minute does not
count as dead. `keepalive` says why libzmq's heartbeats are not used.
"""

from __future__ import annotations

import zmq
from zmq.utils.monitor import recv_monitor_message

from megatron_async.communication.host import admit_own_user
from megatron_async.communication.keepalive import end_silent_connections

EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
)

LINGER_MS = 500
"""Milliseconds in which a goodbye must be sent; after that it is dropped."""

MOST_BYTES = 1 << 20
"""Size of a message: a goodbye has the text of an error. A peer that sends more is disconnected."""

NEVER_MS = 24 * 3600 * 1000
"""Milliseconds: a lost connection is not restored."""


class Link:
    """A ZMQ PAIR socket whose connection is watched. Belongs to one thread.

    Args:
        context: of the watch.
        silence_s: a host that has not answered for so long counts as lost.

    Attributes:
        is_up: the peer has answered.
        is_down: it had answered, and its connection is gone; or it refused the connection.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], silence_s: float) -> None:
        self._socket = context.socket(zmq.PAIR)
        end_silent_connections(self._socket, silence_s)
        admit_own_user(self._socket)
        # Not -1: it drops what the peer said last.
        self._socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # a full queue would hide the connection's end
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        self._monitor = self._socket.get_monitor_socket(EVENTS)
        self._connects = False
        self._descriptor: int | None = None
        self.is_up = False
        self.is_down = False

    def bind(self, addresses: list[str]) -> list[str]:
        """Bind to ZMQ addresses; returns what a peer connects to."""
        endpoints = []
        for address in addresses:
            self._socket.bind(address)
            endpoints.append(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        return endpoints

    def connect(self, endpoint: str) -> None:
        """Connect to where the peer is bound."""
        self._connects = True
        self._socket.connect(endpoint)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """To poll for reading."""
        return [self._socket, self._monitor]

    def send(self, message: bytes) -> None:
        """Send, unless the connection is gone."""
        if self.is_up and not self.is_down:
            try:
                self._socket.send(message, zmq.NOBLOCK)
            except zmq.Again:
                self.is_down = True

    def read(self) -> list[bytes]:
        """Handle events: sets `is_up` and `is_down`, and returns the messages that have arrived.

        When `is_down` is set, all messages that the peer sent before have been returned.
        """
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            kind, descriptor = event["event"], event["value"]
            if kind in (zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED):
                if not self.is_up:
                    self._descriptor = descriptor
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_up = True
            elif kind == zmq.EVENT_DISCONNECTED:
                # Others that knock at a bound port (a scanner) come and go with another one.
                self.is_down |= self.is_up and descriptor == self._descriptor
            elif self._connects and not self.is_up:
                self.is_down = True  # refused
        messages = []
        while True:
            try:
                messages.append(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return messages

    def close(self) -> None:
        """Close; what was sent to a peer that is there lingers for `LINGER_MS`."""
        if self.is_down or not self.is_up:
            self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
