"""`Link`: one end of a connection between a coordinator and a client or replica.

A stream socket: TCP between hosts, a Unix socket on one host. Each message is behind its length, an
unsigned int32. Both ends use the same class; the link's owner watches its socket (the
coordinator's selector, a peer's asyncio loop), and nothing here waits.

How a link begins (`Greeting`):

1. A peer connects to the coordinator's address. With a secret, TLS begins at once (`secret.py`).
2. The coordinator greets: a number that is used once, its proof that it has the secret, and, on
   Linux, the name of the socket on which it waits for processes of its host. A peer of this host,
   and of the same user, connects there and goes on with that link, which needs no encryption.
3. The peer sends its proof: 32 bytes. Until then nothing that it says is decoded.
4. The peer says hello (`messages.py`). Until the coordinator has taken it, a peer is a *stranger*:
   its messages have 64 KiB at most, it has five seconds, and there are 256 strangers at most.

Then messages go both ways over this one socket, in their order. What the socket does not take waits
in the link: `send` never waits. A peer whose process ends is noticed at once, because the kernel
closes its socket; of a host that is cut off TCP's keepalive tells; of a process that hangs, pings.

What may wait, and which thread is woken: waking a reader is most of a message's cost. So a
replica's steps that may wait share a message (`token_emitter.py`); a link sends what it is given.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

HEAD = struct.Struct("<I")
"""Before each message: its bytes."""
AT_ONCE = 1 << 16
"""Most bytes that are read before others have their turn."""
PROBES = 4
"""Number of the kernel's probes of a silent host within the silence."""
CREDENTIALS = struct.Struct("3i")
"""Process, user and group at the other end of a Unix socket."""
BACKLOG = 1024
"""Connections that wait to be accepted."""
MAGIC = b"megatron_async 1"
NONCE_BYTES, PROOF_BYTES = 16, 32
ENDED = "its connection has ended"


class Link:
    """One end. A message of more than `most_bytes`, which may be changed, ends the link.

    Attributes:
        channel: different for each encrypted link, and the same at both ends; b"" without
            encryption, None while keys are being agreed.
        why_over: why no further messages come; "": they may.
        is_cut: whether that is because the other end is closed; else it breaks the protocol.
        unsent: messages that wait because the other end does not read.
        unsent_bytes: bytes of these.
        watch: is told whether `flush` is to be called when the socket takes more.
    """

    def __init__(
        self,
        end: socket.socket,
        most_bytes: int,
        encryption: ssl.SSLContext | None = None,
        is_server: bool = False,
    ) -> None:
        end.setblocking(False)
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._end = end
        self.most_bytes = most_bytes
        self.channel: bytes | None = b""
        self.why_over = ""
        self.is_cut = False
        self.unsent: deque[bytes | memoryview] = deque()
        self.unsent_bytes = 0
        self.watch: Callable[[bool], None] = lambda _: None
        self._came = bytearray()
        """The beginning of a message."""
        self._is_deaf = False
        """Whether the other end reads no more."""
        self._tls: ssl.SSLObject | None = None
        if encryption is not None:
            self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
            self._tls = encryption.wrap_bio(self._in, self._out, server_side=is_server)
            self.channel = None
            self._decrypted(b"")

    def fileno(self) -> int:
        """The number of its socket; -1: it is closed."""
        return self._end.fileno()

    def send(self, data: bytes) -> None:
        """Send a message; never waits. To a closed end it goes nowhere: `receive` finds out."""
        data = HEAD.pack(len(data)) + data
        if self._tls is not None:
            self._tls.write(data)
            data = self._out.read()
        self._put(data)

    def flush(self) -> None:
        """Write what waits, as far as the socket takes it."""
        while self.unsent:
            data = self.unsent[0]
            sent = self._write(data)
            self.unsent_bytes -= sent
            if sent < len(data):
                if self.unsent:
                    self.unsent[0] = memoryview(data)[sent:]
                return
            self.unsent.popleft()
        self.watch(False)

    def receive(self) -> list[bytes]:
        """The messages that have come whole, of at most `AT_ONCE` bytes that are read now; never
        waits."""
        try:
            data = self._end.recv(AT_ONCE)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:  # reset
            data = b""
        if not data:
            self._finish(ENDED, is_cut=True)
            return []
        if self._tls is not None:
            data = self._decrypted(data)
        return self._whole(data)

    def close(self, linger_s: float = 0.0) -> None:
        """Read no more; what waits is written if the other end takes it within `linger_s`."""
        if self.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            if linger_s and self.unsent:
                self._end.settimeout(linger_s)
                self._end.sendall(b"".join(self.unsent))
        self._finish("it is closed")
        self.unsent.clear()
        self._end.close()

    def _finish(self, why: str, is_cut: bool = False) -> None:
        if not self.why_over:
            self.why_over, self.is_cut = why, is_cut

    def _put(self, data: bytes) -> None:
        if not self.unsent:
            data = data[self._write(data) :]
            if not data or self._is_deaf:
                return
            self.watch(True)
        self.unsent.append(data)
        self.unsent_bytes += len(data)

    def _write(self, data: bytes | memoryview) -> int:
        """Write now; returns how many bytes were taken."""
        try:
            return self._end.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:  # the other end is closed; what it wrote before can still be read
            self._is_deaf = True
            self.unsent.clear()
            self.unsent_bytes = 0
            self.watch(False)
            return 0

    def _decrypted(self, data: bytes) -> bytes:
        assert self._tls is not None
        self._in.write(data)
        parts = []
        try:
            if self.channel is None:
                self._tls.do_handshake()
                self.channel = self._tls.get_channel_binding("tls-unique")
                if not self.channel:  # without it a proof could be passed on
                    self._finish("it encrypts without a channel binding")
                    return b""
            while part := self._tls.read(AT_ONCE):
                parts.append(part)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._finish(f"it does not encrypt as it should ({error.reason})")
        if data := self._out.read():
            self._put(data)
        return b"".join(parts)

    def _whole(self, data: bytes) -> list[bytes]:
        """The messages that are whole now; the beginning of the next one is kept."""
        came = self._came
        came += data
        found, start = [], 0
        while len(came) - start >= HEAD.size:
            (size,) = HEAD.unpack_from(came, start)
            if size > self.most_bytes:
                why = f"it sends a message of {size} bytes, and a message may have"
                self._finish(f"{why} {self.most_bytes}")
                break
            end = start + HEAD.size + size
            if len(came) < end:
                break
            found.append(bytes(came[start + HEAD.size : end]))
            start = end
        del came[:start]
        return found


class Greeting(NamedTuple):
    """The coordinator's first message on a link.

    Attributes:
        here: name of the socket for peers of its host; "": this link is one already, or this system
            has none.
    """

    nonce: bytes
    proof: bytes
    here: str

    def encode(self) -> bytes:
        """The greeting as it travels."""
        return MAGIC + self.nonce + self.proof + self.here.encode()

    @classmethod
    def decode(cls, data: bytes) -> Greeting:
        """Read one; ValueError if it is none."""
        place = len(MAGIC) + NONCE_BYTES
        here = data[place + PROOF_BYTES :]
        if not data.startswith(MAGIC) or len(data) < place + PROOF_BYTES or len(here) > 64:
            raise ValueError(f"it begins with {data[:20]!r}")
        return cls(data[len(MAGIC) : place], data[place : place + PROOF_BYTES], here.decode())


# ---- Sockets -------------------------------------------------------------------------------------


def listen_here() -> tuple[socket.socket, str] | None:
    """A socket that waits for processes of this host, and its name; None: this system has none.

    It is an abstract socket of Linux: it has no file, so none is left behind, and other hosts and
    containers do not find it. All users of the host can list its name, so each end asks the kernel
    whose process the other one is (`is_friend`).
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    name, listener = secrets.token_hex(16), socket.socket(socket.AF_UNIX)
    listener.setblocking(False)
    listener.bind(_address_here(name))
    listener.listen(BACKLOG)
    return listener, name


def connect_here(name: str) -> socket.socket | None:
    """A socket to the listener of this name; None where there is none: it is on another host, or
    another user's."""
    if not name or not hasattr(socket, "SO_PEERCRED"):
        return None
    end = socket.socket(socket.AF_UNIX)
    end.setblocking(False)
    with contextlib.suppress(OSError, ValueError):  # another host's, or no name at all
        end.connect(_address_here(name))
        if is_friend(end):
            return end
    end.close()
    return None


def is_friend(end: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is this user's, or root's."""
    given = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, user, _ = CREDENTIALS.unpack(given)
    return user in (0, os.getuid())


def end_silent(end: socket.socket, silence_s: float) -> None:
    """Let a TCP connection end after a silence of the other host.

    The kernel of the other host answers, so a process that is busy or stopped is not silent. Probes
    of an idle connection also keep firewalls from dropping it. A listener's connections get this
    from it. The silence may be up to a second longer; `silence_s` is at least 1."""
    interval_s = max(1, math.floor(silence_s / PROBES))
    options = {
        "TCP_KEEPIDLE": interval_s,
        "TCP_KEEPINTVL": interval_s,
        "TCP_KEEPCNT": max(1, math.ceil(silence_s / interval_s) - 1),
        # While data is on the way nobody asks: then this counts.
        "TCP_USER_TIMEOUT": round(1000 * silence_s),
    }
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:  # some are Linux'
            end.setsockopt(socket.IPPROTO_TCP, option, value)


def _address_here(name: str) -> str:
    return f"\0megatron-async-{name}"
