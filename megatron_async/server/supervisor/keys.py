"""Keys of the API: where they come from, and what is kept of them."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megatron_async.errors import ConfigurationError
from megatron_async.server.api_config import ADMIN, KeyDigest

KEY_VARIABLE = "MEGATRON_ASYNC_API_KEY"
"""Environment: keys, with commas between them."""
ADMIN_VARIABLE = "MEGATRON_ASYNC_ADMIN_KEY"
"""Environment: the admin key."""
OPEN_VARIABLE = "MEGATRON_ASYNC_OPEN_SERVER"
"""Environment: 1 lets everybody use the server that stands for Megatron's, without a key."""
PASSWORD_VARIABLE = "MEGATRON_ASYNC_SSL_KEYFILE_PASSWORD"
"""Environment: the password of the certificate's key."""
SECRETS = (KEY_VARIABLE, ADMIN_VARIABLE, PASSWORD_VARIABLE)
MOST_KEYS = 1000
"""Every key is tried for every request: the time must not tell which one is nearly right."""
LONGEST_KEY = 512
LONGEST_NAME = 64


def read_keys(
    given: Sequence[str], file: str | None, environment: Mapping[str, str]
) -> tuple[KeyDigest, ...]:
    """The keys of all three sources together, without repetition. In the file there is one key a
    line, or "NAME KEY"; empty lines and those that begin with "#" are none.

    Raises:
        ConfigurationError: a key cannot be sent in a header, or has two names, or there are too
            many; the message does not repeat a key. Names of several keys: see `check_keys`.
    """
    found: dict[str, KeyDigest] = {}
    owners: dict[str, str] = {}
    lines: list[tuple[str, str, str]] = [("", key, "--api-key") for key in given]
    if file is not None:
        lines += _lines(file)
    inherited = environment.get(KEY_VARIABLE, "")
    lines += [("", key.strip(), KEY_VARIABLE) for key in inherited.split(",") if key.strip()]
    for number, (name, key, source) in enumerate(lines, 1):
        _check(key, source)
        digest = digest_of(key, name or f"key-{number}")
        owner = owners.setdefault(digest.sha256, name)
        if name and owner and name != owner:
            raise ConfigurationError(
                f"{source}: {owner!r} and {name!r} have the same key, and would be counted as one: "
                "give each a key of its own."
            )
        if digest.sha256 not in found or (name and not owner):
            owners[digest.sha256], found[digest.sha256] = owner or name, digest
    if len(found) > MOST_KEYS:
        raise ConfigurationError(f"{len(found)} API keys were given, at most {MOST_KEYS} may be.")
    return tuple(found.values())


def read_admin_key(given: str | None, environment: Mapping[str, str]) -> KeyDigest | None:
    """The key of control endpoints, or None without one; arguments as those of `read_keys`."""
    key, source = given, "--admin-key"
    if key is None:
        key, source = environment.get(ADMIN_VARIABLE), ADMIN_VARIABLE
    if key is None:
        return None
    _check(key, source)
    return digest_of(key, ADMIN)


def read_password(given: str | None, environment: Mapping[str, str]) -> str | None:
    """The password of the certificate's key; None: it has none."""
    return environment.get(PASSWORD_VARIABLE) if given is None else given


def is_open_server(environment: Mapping[str, str]) -> bool:
    """Whether `OPEN_VARIABLE` says that no key is needed.

    Raises:
        ConfigurationError: it is neither 0 nor 1.
    """
    found = environment.get(OPEN_VARIABLE, "0")
    if found not in ("0", "1"):
        raise ConfigurationError(f"{OPEN_VARIABLE}={found!r} must be 1, 0, or left out.")
    return found == "1"


def digest_of(key: str, name: str) -> KeyDigest:
    """The stored form of a key."""
    return KeyDigest(name, hashlib.sha256(key.encode()).hexdigest())


def without_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for processes that need no keys."""
    return {k: v for k, v in environment.items() if k not in SECRETS}


def _lines(file: str) -> Iterable[tuple[str, str, str]]:
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--api-key-file {file}: cannot be read ({error}).") from error
    mode = path.stat().st_mode
    if os.name == "posix" and stat.S_ISREG(mode) and mode & stat.S_IROTH:
        raise ConfigurationError(
            f"--api-key-file {file}: every user of this host can read it: `chmod 600 {file}`."
        )
    for number, line in enumerate(text.split("\n"), 1):  # Python has more ends of lines than files
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        source = f"--api-key-file {file}, line {number}"
        if len(words) > 2 or len(words[0]) > (LONGEST_NAME if len(words) == 2 else LONGEST_KEY):
            raise ConfigurationError(
                f"{source}: write a key, or a name of at most {LONGEST_NAME} characters and a key."
            )
        if len(words) == 2 and not words[0].isprintable():
            raise ConfigurationError(
                f"{source}: the name {words[0]!r} must have printable characters only."
            )
        yield (words[0] if len(words) == 2 else ""), words[-1], source
    return


def _check(key: str, source: str) -> None:
    if not key or len(key) > LONGEST_KEY or not key.isascii() or not key.isprintable():
        raise ConfigurationError(
            f"{source}: a key has 1 to {LONGEST_KEY} characters of printable ASCII, so that a "
            "header can carry it."
        )
    if " " in key:
        raise ConfigurationError(f"{source}: a key has no spaces.")
