"""`HostSockets`: a coordinator's ends of Unix sockets to clients and replicas of its host."""

from __future__ import annotations

import select
from collections.abc import Iterator

from megatron_async.serving.host_listener import connect
from megatron_async.serving.host_socket import MOST_AT_ONCE, HostSocket


class HostSockets:
    """Open sockets by the peer's identity. Used by the coordinator's thread only.

    Args:
        epoll: watches them while they are open; None: this system has no such sockets.
    """

    def __init__(self, epoll: select.epoll | None) -> None:
        self._sockets: dict[bytes, HostSocket] = {}
        self._peers: dict[int, bytes] = {}
        self._epoll = epoll

    def __len__(self) -> int:
        return len(self._sockets)

    def open(self, identity: bytes, name: str) -> bool:
        """A peer offers a socket; one of another host is not found.

        Args:
            identity: of the peer.
            name: of the socket, as in `HostSocketAt`.

        Returns:
            whether it is open. The next message to the peer must then go by ZMQ, and be
            `HostSocketOpen`.
        """
        self.close(identity)
        if self._epoll is None or (end := connect(name)) is None:
            return False
        opened = self._sockets[identity] = HostSocket()
        opened.attach(end)
        self._epoll.register(end.fileno(), select.EPOLLIN)
        self._peers[end.fileno()] = identity
        return True

    def send(self, identity: bytes, data: bytes) -> bool:
        """Write a message; never waits.

        Returns:
            whether it was written; if not, it must go by ZMQ.
        """
        found = self._sockets.get(identity)
        return found is not None and found.send(data)

    def sent_otherwise(self, identity: bytes) -> None:
        """A message went to the peer by ZMQ."""
        if (found := self._sockets.get(identity)) is not None:
            found.sent_otherwise += 1

    def before_message(self, identity: bytes) -> list[bytes]:
        """A message of the peer has come by ZMQ: those that were written before it."""
        return [] if identity not in self._sockets else self._receive(identity)

    def after_message(self, identity: bytes) -> list[bytes]:
        """A message of ZMQ is heard: those that waited for it."""
        if (found := self._sockets.get(identity)) is None:
            return []
        found.heard_otherwise += 1
        return self._receive(identity)

    def read(self, number: int) -> Iterator[tuple[bytes, list[bytes]]]:
        """What has come by a socket: identity of the peer, and its messages. The first one is given
        before the kernel is asked for more.

        Args:
            number: of the socket; others than those that are open here give nothing.
        """
        for most in (1, MOST_AT_ONCE):
            if (identity := self._peers.get(number)) is not None:
                yield identity, self._receive(identity, most)

    def close(self, identity: bytes) -> list[bytes]:
        """Use a peer's socket no more.

        Returns:
            the messages that it had written.
        """
        if (found := self._sockets.get(identity)) is None:
            return []
        rest = self._receive(identity)
        self._drop(identity, found.fileno())
        found.close()
        self._sockets.pop(identity, None)
        return rest

    def close_all(self) -> None:
        """Use none any more."""
        for identity in list(self._sockets):
            self.close(identity)

    def _receive(self, identity: bytes, most: int | None = None) -> list[bytes]:
        found = self._sockets[identity]
        number = found.fileno()
        messages = found.receive(most)
        if found.fileno() < 0:
            self._drop(identity, number)  # the kernel has taken a closed one out of the epoll
            if found.is_over:
                del self._sockets[identity]
        return messages

    def _drop(self, identity: bytes, number: int) -> None:
        if self._peers.get(number) == identity:
            del self._peers[number]
