"""A secret that coordinator, replicas and clients share: a peer without it gets no connection.

TLS 1.3 encrypts, with new keys for each connection. Its certificate is the one below, whose key
everybody may know: it proves nothing. What proves is the secret: both ends send a keyed hash of the
connection's channel binding (`tls-unique` of RFC 5929, which OpenSSL gives for TLS 1.3 too: the
client's Finished message, a hash of the whole handshake under its keys). It is the same at both
ends, and differs between two connections. So nobody between the two can pass a proof on, and no
proof can be said again.
"""

from __future__ import annotations

import base64
import hashlib
import ssl
import stat
import tempfile
from functools import cache
from pathlib import Path

from megatron_async.errors import ConfigurationError

FEWEST_BYTES, MOST_BYTES = 16, 4096
COORDINATOR, PEER = b"coordinator", b"peer"
CERTIFICATE = (
    "MIHaMIGNAhQGFi3YEliZZYF+zSnSHN95H2HV5zAFBgMrZXAwDzENMAsGA1UEAwwEbGluazAgFw0yNjExMjgxNTQ2MjBaGA8y"
    "MTI2MTEwNDE1NDYyMFowDzENMAsGA1UEAwwEbGluazAqMAUGAytlcAMhAElfOyBzgxab9w3NtV6Hwmas5tYGfahEYJQnTYCY"
    "lLb9MAUGAytlcANBAGRn08G+MYB5RkY1X4EHmm5pIaf38l8a865nN2bX/iPWB599U3B75kL28UHnLoq2BS1WZ4l/a+tPYgwF"
    "Uq66PwE="
)
"""Ed25519, as TLS demands one; nobody checks it."""
ITS_KEY = "MC4CAQAwBQYDK2VwBCIEIG8iDzcWvxFGkAnRPxxLQtQhc+2OpYYE17t3ZXmQF3AT"
"""No secret."""


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


@cache
def encryption(is_coordinator: bool) -> ssl.SSLContext:
    """What encrypts one end of a connection; it does not check the identity of the other end."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_coordinator else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if is_coordinator:
        context.num_tickets = 0  # no connection goes on with the keys of another one
        with tempfile.NamedTemporaryFile("w") as file:
            for kind, text in (("CERTIFICATE", CERTIFICATE), ("PRIVATE KEY", ITS_KEY)):
                data = ssl.DER_cert_to_PEM_cert(base64.b64decode(text))
                file.write(data.replace("CERTIFICATE", kind))
            file.flush()
            context.load_cert_chain(file.name)
    return context


def proof_of(secret: bytes | None, whose: bytes, *seen: bytes) -> bytes:
    """32 bytes that only an owner of the secret can make. Without a secret everybody can make them.
    `whose` is `COORDINATOR` or `PEER`: one cannot say the other's proof. `seen`: what both ends
    know of this connection alone."""
    key = b"" if secret is None else hashlib.blake2b(secret).digest()
    return hashlib.blake2b(b"".join(seen), digest_size=32, key=key, person=whose).digest()
