"""`Connection`: a client's or a replica's connection to the coordinator, for an asyncio loop.

A callback reads the messages of its `Link`: no task is woken for a message.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from megatron_async.errors import ConfigurationError, CoordinatorLost
from megatron_async.serving.address import check_address, target_of
from megatron_async.serving.link import Greeting, Link, connect_here, end_silent
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
from megatron_async.serving.secret import COORDINATOR, PEER, check_secret, encryption, proof_of

logger = logging.getLogger("megatron_async")

SLICE_S = 0.2
"""Seconds between two checks whether the coordinator is silent."""
RETRY_S = 0.1
"""Seconds between two attempts to connect."""
FROZEN_S = 1.0
"""Seconds: a process without a check for so long was stopped, or had no CPU time."""
HOST_SILENCE_S = 4.0
"""Seconds of silence after which a coordinator's host counts as lost."""
LINGER_S = 0.2
"""Seconds for which a connection that is closed may still write."""


class Outlet(Protocol):
    """Receives a replica's messages."""

    def send(self, message: Message) -> None:
        """Send; never waits.

        Raises: one of `messages.UNSENDABLE`; nothing is sent.
        """


class Connection[Heard]:
    """One connection; after a loss another one is made. Made and used on one running event loop.
    `on_ping` makes what is answered to a ping.

    Raises:
        ConfigurationError: the address is none, or no process can connect to it.
    """

    def __init__(
        self,
        address: str,
        decode: Callable[[bytes], Heard],
        on_ping: Callable[[], Message],
        secret: bytes | None = None,
    ) -> None:
        check_address(address)
        self.address, self._target = address, target_of(address)
        if secret is not None:
            check_secret(secret)
        self._secret = secret
        self._decode = decode
        self._on_ping = on_ping
        self._loop = asyncio.get_running_loop()
        self._link: Link | None = None
        self._silence_s: float | None = None
        self._last_heard = self._last_look = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._error: CoordinatorLost | None = None
        self._inbox: deque[Heard] = deque()
        self._news = asyncio.Event()
        self._hear: Callable[[Heard], None] = self._keep
        self._after: Callable[[], None] = lambda: None
        self._lost: Callable[[CoordinatorLost], None] = lambda _: None

    async def open(self, hello: ClientHello | ReplicaHello, timeout_s: float) -> Welcome:
        """Connect, say hello and wait for the coordinator's welcome.

        Raises:
            CoordinatorLost: nobody answers within `timeout_s`, or another program does.
            ConfigurationError: the coordinator refuses; the message says why.
        """
        deadline = self._loop.time() + timeout_s
        while self._loop.time() < deadline:
            try:
                async with asyncio.timeout_at(deadline):
                    self._attach(await self._connect())
                    self.send(hello)
                    return await self._welcome()
            except (OSError, TimeoutError):  # nobody is there yet, or goes again
                self._detach()
            await asyncio.sleep(min(RETRY_S, max(deadline - self._loop.time(), 0.0)))
        raise CoordinatorLost(
            f"no coordinator answers at {self.address} (waited {timeout_s:.0f} s): start it with "
            "`megatron-async coordinator`, or correct the address. If it has a secret, all peers "
            "need the same one (`--secret-file`)."
        )

    def send(self, message: Message) -> None:
        """Send; never waits.

        Raises: one of `UNSENDABLE`, also for a message of too many bytes; nothing is sent.
        """
        data = check_sendable(message)
        if self._link is not None:
            self._link.send(data)

    def listen(
        self,
        hear: Callable[[Heard], None],
        after: Callable[[], None],
        lost: Callable[[CoordinatorLost], None],
    ) -> None:
        """From now on, call `hear` for each message that comes, and has come since the welcome.
        `after` is called behind the messages that had arrived, `lost` once, when no more messages
        will come."""
        self._hear, self._after, self._lost = hear, after, lost
        while self._inbox:
            hear(self._inbox.popleft())
        after()
        if self._error is not None:
            lost(self._error)

    def close(self) -> None:
        """Close it. Messages sent before are still delivered, if this takes at most 0.2 s."""
        self._detach(LINGER_S)

    # ---- To connect --------------------------------------------------------------------------

    async def _connect(self) -> Link:
        """A link to a coordinator that has the secret, which has been told that so has this end.

        Raises:
            OSError: there is none.
        """
        secure = None if self._secret is None else encryption(is_coordinator=False)
        link = Link(await self._reach(), MOST_BYTES, secure)
        try:
            greeting = await self._greeting(link)
            assert link.channel is not None, "it has greeted"
            proof = proof_of(self._secret, COORDINATOR, link.channel)
            if not hmac.compare_digest(proof, greeting.proof):
                raise ConnectionRefusedError("it has another secret")
            link, greeting = await self._moved(link, greeting)
            assert link.channel is not None, "likewise"
            link.send(proof_of(self._secret, PEER, link.channel, greeting.nonce))
        except BaseException:
            link.close()
            raise
        return link

    async def _reach(self) -> socket.socket:
        if isinstance(self._target, str):
            end = socket.socket(socket.AF_UNIX)
            place: Any = self._target
        else:
            host, port = self._target
            found = await self._loop.getaddrinfo(
                host, port, family=socket.AF_INET, type=socket.SOCK_STREAM
            )
            end = socket.socket(socket.AF_INET)
            end_silent(end, HOST_SILENCE_S)
            place = found[0][4]
        try:
            end.setblocking(False)
            await self._loop.sock_connect(end, place)
            if end.family != socket.AF_UNIX and end.getsockname() == end.getpeername():
                raise ConnectionRefusedError("a free port of this host that reached itself")
        except BaseException:
            end.close()
            raise
        return end

    async def _moved(self, link: Link, greeting: Greeting) -> tuple[Link, Greeting]:
        """The coordinator's Unix socket instead of a link, if it is of this host, and its greeting;
        else the link and the greeting that are given."""
        if (end := connect_here(greeting.here)) is None:
            return link, greeting
        here = Link(end, MOST_BYTES)
        try:
            greeting = await self._greeting(here)
        except OSError:  # it does not take this user's processes there
            here.close()
            return link, greeting
        except BaseException:
            here.close()
            raise
        link.close()
        return here, greeting

    async def _greeting(self, link: Link) -> Greeting:
        came, number = asyncio.Event(), link.fileno()
        self._loop.add_reader(number, came.set)
        try:
            while not (messages := link.receive()):
                if link.is_cut:
                    raise ConnectionResetError(link.why_over)
                if link.why_over:
                    raise self._stranger(link.why_over)
                came.clear()
                await came.wait()
        finally:
            self._loop.remove_reader(number)
        try:
            return Greeting.decode(messages[0])
        except ValueError as error:
            raise self._stranger(error) from error

    def _stranger(self, why: object) -> CoordinatorLost:
        return CoordinatorLost(f"what answers at {self.address} is no coordinator of ours: {why}")

    async def _welcome(self) -> Welcome:
        while True:
            while self._inbox:
                message: Any = self._inbox.popleft()
                if isinstance(message, Refused):
                    raise ConfigurationError(f"the coordinator at {self.address}: {message.reason}")
                if isinstance(message, Welcome):
                    self._silence_s, self._last_heard = message.silence_s, time.monotonic()
                    self._look()
                    return message
            if self._error is not None:
                error, self._error = self._error, None
                if self._link is not None and self._link.is_cut:
                    raise ConnectionResetError(str(error))
                raise error
            self._news.clear()
            await self._news.wait()

    def _attach(self, link: Link) -> None:
        number = link.fileno()

        def watch(is_full: bool) -> None:
            if is_full:
                self._loop.add_writer(number, link.flush)
            else:
                self._loop.remove_writer(number)

        link.watch = watch
        watch(bool(link.unsent))
        self._link = link
        self._loop.add_reader(number, self._read)

    def _detach(self, linger_s: float = 0.0) -> None:
        link, self._link = self._link, None
        if self._timer is not None:
            self._timer.cancel()
        if link is not None:
            self._loop.remove_reader(link.fileno())
            self._loop.remove_writer(link.fileno())
            link.close(linger_s)

    # ---- What the loop calls -----------------------------------------------------------------

    def _read(self) -> None:
        """Take in all that has come."""
        link = self._link
        if link is None:
            return
        messages = link.receive()
        for data in messages:
            if self._error is not None or self._link is not link:
                return
            self._take(data)
        if messages:
            self._last_heard = time.monotonic()
            self._after()
        if link.is_cut:
            self._end(f"the coordinator at {self.address} is gone: {link.why_over}.")
        elif link.why_over:
            self._end(str(self._stranger(link.why_over)))

    def _take(self, data: bytes) -> None:
        try:
            message: Any = self._decode(data)
        except UNREADABLE as error:
            self._end(str(self._stranger(error)))
            return
        if isinstance(message, Ping):
            self.send(self._on_ping())
        elif isinstance(message, Refused) and self._silence_s is not None:
            self._end(f"the coordinator at {self.address}: {message.reason}")
        else:
            try:
                self._hear(message)
            except Exception as error:  # whatever it is, nobody is to wait for ever
                logger.exception("A message of the coordinator could not be taken in.")
                self._end(f"what the coordinator at {self.address} said is not understood: {error}")

    def _keep(self, message: Heard) -> None:
        self._inbox.append(message)
        self._news.set()

    def _look(self) -> None:
        """Check whether the coordinator is silent."""
        assert self._silence_s is not None
        now = time.monotonic()
        if now - self._last_look > FROZEN_S:  # what was sent to us meanwhile is still on its way
            self._last_heard = now
        self._last_look = now
        if (silent := now - self._last_heard) >= self._silence_s:
            self._end(f"the coordinator at {self.address} has said nothing for {silent:.1f} s.")
        if self._error is None:
            self._timer = self._loop.call_later(SLICE_S, self._look)

    def _end(self, reason: str) -> None:
        if self._error is None:
            self._error = CoordinatorLost(reason)
            if self._link is not None:  # there is nothing more to be read
                self._loop.remove_reader(self._link.fileno())
            self._news.set()
            self._lost(self._error)


def check_sendable(message: Message) -> bytes:
    """The bytes of a message.

    Raises: one of `UNSENDABLE`, also for a message of too many bytes.
    """
    data = encode(message)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it takes {len(data)} bytes, and a message may have {MOST_BYTES}")
    return data
