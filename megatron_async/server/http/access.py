"""Access: names of the server in Host headers, keys, and ids of requests."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Mapping

from megatron_async.server.api_config import ApiConfig
from megatron_async.server.fields.asked import NOBODY, Caller
from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.http.request_log import RequestNote

TRAINER = Caller("rl-socket", is_admin=True)
"""A caller of `--rl-socket`, which has no key."""
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
REQUEST_ID = b"x-request-id"
ID_BYTES = 12
_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class Access:
    """Decides which clients are served, by the configuration of the process."""

    def __init__(self, config: ApiConfig) -> None:
        known = [(key, False) for key in config.keys]
        if config.admin_key is not None:
            known.append((config.admin_key, True))
        self._known = [
            (bytes.fromhex(key.sha256), Caller(key.name, is_admin)) for key, is_admin in known
        ]
        self._has_keys, self._has_admin = bool(config.keys), config.admin_key is not None
        self._any_host = "*" in config.allowed_hosts
        self._hosts = {name.lower() for name in (*LOCAL_NAMES, *config.allowed_hosts)}
        self._rl_address = config.rl_address
        if self._rl_address is not None:
            host = self._rl_address[0]
            self._hosts.add(f"[{host}]" if ":" in host else host)

    def check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse (421) a request that was meant for another name: a page on the web can point a
        name of its own at this host, and would then be the server's own page to a browser (DNS
        rebinding)."""
        if self._any_host:
            return
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name.rstrip(".") not in self._hosts:
            raise Refusal(
                f"this server does not answer to the name {name[:100]!r}: call it by its address, "
                "or start it with --allowed-host NAME.", 421, code="unknown_host",
            )  # fmt: skip

    def caller(
        self,
        headers: Mapping[bytes, bytes],
        needs_admin: bool,
        note: RequestNote | None = None,
        came_to: tuple[str, int] | None = None,
    ) -> Caller:
        """The sender of a request, by the key in its headers, or by the address that it `came_to`.
        `note` gets the name of the key, also where the key is not enough.

        Raises:
            Refusal: 401 without a valid key where one is needed; 403 where the admin key is, or for
                a browser at the address without keys: a page of any site can send to it.
        """
        if came_to is not None and came_to == self._rl_address:
            if b"origin" in headers or b"sec-fetch-site" in headers:
                raise Refusal("this address is for trainers: browsers are not served here.", 403)
            return TRAINER
        caller, given = self._given(headers)
        if note is not None and caller is not None:
            note.owner = caller.owner
        if needs_admin and not (caller is not None and caller.is_admin):
            if not self._has_admin:
                why = "this server was started without --admin-key, so its control is closed."
            else:
                why = "this path needs the admin key, as `Authorization: Bearer KEY`."
            is_known = caller is not None or not self._has_admin
            raise Refusal(why, 403 if is_known else 401, code="admin_key_required")
        if self._has_keys and caller is None:
            why = "is not valid" if given else "is missing"
            raise Refusal(
                f"the API key {why}: send one as `Authorization: Bearer KEY` or `x-api-key: KEY`.",
                401,
                code="invalid_api_key",
            )  # fmt: skip
        return caller or NOBODY

    def _given(self, headers: Mapping[bytes, bytes]) -> tuple[Caller | None, bool]:
        """Whose key was given, None for an unknown one, and whether any was."""
        value = headers.get(b"authorization", b"")
        scheme, _, key = value.partition(b" ")
        if scheme.lower() != b"bearer" or not key:
            key = headers.get(b"x-api-key", b"")  # Anthropic's clients
        if not key:
            return None, bool(value)
        digest = hashlib.sha256(key.strip()).digest()
        found = None
        for known, caller in self._known:  # all of them: how long it takes tells nothing
            if hmac.compare_digest(known, digest):
                found = caller
        return found, True


def request_id(headers: Mapping[bytes, bytes]) -> bytes:
    """The id of a request: its headers', or a new one where they have none that may be
    repeated in the answer's headers."""
    given = headers.get(REQUEST_ID, b"")
    return given if _ID.fullmatch(given) else os.urandom(ID_BYTES).hex().encode()
