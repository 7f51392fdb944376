"""A peer of a coordinator that says and hears what a test wants, and waits for it."""

import contextlib
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from megatron_async.serving.address import target_of
from megatron_async.serving.coordinator import Coordinator
from megatron_async.serving.link import Greeting, Link
from megatron_async.serving.messages import MOST_BYTES, Message, decode_for_client, encode
from megatron_async.serving.secret import PEER, encryption, proof_of
from tests.support.patience import PATIENCE_S


def connected(address: str) -> socket.socket:
    """A socket at a coordinator's address, on which nothing is said yet."""
    target = target_of(address)
    end = socket.socket(socket.AF_UNIX if isinstance(target, str) else socket.AF_INET)
    end.settimeout(PATIENCE_S)
    end.connect(target)
    return end


@contextlib.contextmanager
def running(coordinator: Coordinator) -> Iterator[Coordinator]:
    """The coordinator, which serves on a thread of its own."""
    thread = threading.Thread(target=coordinator.run, daemon=True)
    thread.start()
    yield coordinator
    coordinator.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


class Peer:
    """Stays with the socket that it connects first. `decode` reads the messages that come in;
    `encrypts` None: if it has a secret; `proof` makes what it gives in place of the proof of its
    `secret`."""

    def __init__(
        self,
        address: str,
        decode: Callable[[bytes], Any] = decode_for_client,
        secret: bytes | None = None,
        encrypts: bool | None = None,
        proof: Callable[[Greeting], bytes] | None = None,
    ) -> None:
        encrypts = secret is not None if encrypts is None else encrypts
        self._decode = decode
        self._came: deque[bytes] = deque()
        tls = encryption(is_coordinator=False) if encrypts else None
        self.link = Link(connected(address), MOST_BYTES, tls)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.link.fileno(), selectors.EVENT_READ)
        self.greeting = Greeting.decode(self.next())
        assert self.link.channel is not None
        seen = self.link.channel, self.greeting.nonce
        self.proof = proof_of(secret, PEER, *seen) if proof is None else proof(self.greeting)
        self.link.send(self.proof)

    def say(self, message: Message | bytes) -> None:
        """Send; never waits."""
        self.link.send(message if isinstance(message, bytes) else encode(message))

    def next(self) -> bytes:
        """The next message: a ConnectionError if the coordinator has closed this connection, a
        TimeoutError if nothing comes."""
        while not self._came:
            if self.link.why_over:
                raise ConnectionError(self.link.why_over)
            if not self._selector.select(PATIENCE_S):
                raise TimeoutError("nothing has come")
            self._came += self.link.receive()
        return self._came.popleft()

    def hear(self, kind: type[Message]) -> Any:
        """The next message of a kind; others are passed over."""
        while not isinstance(message := self._decode(self.next()), kind):
            pass
        return message

    def is_cut_off(self) -> bool:
        """Whether the coordinator hangs up; what it says before is passed over."""
        with contextlib.suppress(ConnectionError):
            while True:
                self.next()
        self.close()
        return True

    def close(self) -> None:
        """Close the connection."""
        self._selector.close()
        self.link.close()
