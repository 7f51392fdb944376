"""A secret that coordinator, replicas and clients share: a peer without it gets no connection.

All keys of ZMQ's CURVE (encryption and authentication over Curve25519, http://curvezmq.org) are
derived from the secret. The coordinator proves that it has the secret by its key pair, all peers by
a second one, the only one that the coordinator accepts (ZAP, https://rfc.zeromq.org/spec/27).
"""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from megatron_async.errors import ConfigurationError

FEWEST_BYTES, MOST_BYTES = 16, 4096
ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"megatron_async"
COORDINATOR, PEER = b"coordinator", b"peer"


def read_secret(file: str | Path) -> bytes:
    """The secret in a file, without white space around it.

    Raises:
        ConfigurationError: the file cannot be read, others may read it, or the secret is too short
            or too long.
    """
    path = Path(file)
    try:
        mode, data = path.stat().st_mode, path.read_bytes().strip()
    except OSError as error:
        raise ConfigurationError(
            f"the secret cannot be read from {str(path)!r} ({error.strerror}): make it with "
            "`(umask 077; openssl rand -hex 32 > FILE)`."
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigurationError(
            f"the secret in {str(path)!r} is open to others (mode {stat.S_IMODE(mode):o}): "
            f"`chmod 600 {path}`, and make a new one if others have read it."
        )
    check_secret(data)
    return data


def check_secret(secret: bytes) -> None:
    """Raise ConfigurationError if a secret is too short to be one, or too long."""
    if not FEWEST_BYTES <= len(secret) <= MOST_BYTES:
        raise ConfigurationError(
            f"the secret has {len(secret)} bytes: give it {FEWEST_BYTES} to {MOST_BYTES}, as "
            "`openssl rand -hex 32` makes them."
        )


def secure_coordinator(socket: zmq.Socket[bytes], secret: bytes) -> None:
    """Accept only peers that have the secret. Call it before `bind`, with a `Doorkeeper` in the
    socket's context."""
    public, own = _key_pair(secret, COORDINATOR)
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_PUBLICKEY, public)
    socket.set(zmq.CURVE_SECRETKEY, own)
    socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)


def secure_peer(socket: zmq.Socket[bytes], secret: bytes) -> None:
    """Connect only to a coordinator that has the secret, and prove to have it; before `connect`."""
    public, own = _key_pair(secret, PEER)
    socket.set(zmq.CURVE_SERVERKEY, _key_pair(secret, COORDINATOR)[0])
    socket.set(zmq.CURVE_PUBLICKEY, public)
    socket.set(zmq.CURVE_SECRETKEY, own)


class Doorkeeper:
    """Answers ZMQ's authentication requests: which peers may connect.

    Args:
        context: of the coordinator's socket.
        secret: that peers must have.

    Attributes:
        socket: to be polled; when it is readable, call `answer`.
    """

    def __init__(self, context: zmq.Context[Any], secret: bytes) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(ZAP_ADDRESS)
        self._key = z85.decode(_key_pair(secret, PEER)[0])

    def answer(self) -> None:
        """Answer one question, if there is one."""
        try:
            version, number, _, _, _, mechanism, *credentials = self.socket.recv_multipart(
                zmq.NOBLOCK
            )
        except zmq.Again:
            return
        # The handshake has proved that the peer holds the other half of this key.
        is_known = mechanism == b"CURVE" and credentials == [self._key]
        verdict = [b"200", b"OK"] if is_known else [b"400", b"no such key"]
        self.socket.send_multipart([version, number, *verdict, b"", b""])

    def close(self) -> None:
        """Answer no more."""
        self.socket.close(0)


def _key_pair(secret: bytes, whose: bytes) -> tuple[bytes, bytes]:
    """Public and secret key, Z85."""
    check_secret(secret)
    seed = hashlib.blake2b(secret, digest_size=32, person=whose).digest()
    own = z85.encode(seed)
    return zmq.curve_public(own), own
