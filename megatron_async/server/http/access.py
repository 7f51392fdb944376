"""Access: names of the server in Host headers, keys, and ids of requests."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping

from megatron_async.server.api_config import ApiConfig
from megatron_async.server.fields.asked import Caller
from megatron_async.server.fields.refusal import Refusal

LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class Access:
    """Decides which clients are served, by the configuration of the process.

    Args:
        config: of the process.
    """

    def __init__(self, config: ApiConfig) -> None:
        self._keys = [(key.name, bytes.fromhex(key.sha256)) for key in config.keys]
        admin = config.admin_key
        self._admin = None if admin is None else (admin.name, bytes.fromhex(admin.sha256))
        self._any_host = "*" in config.allowed_hosts
        self._hosts = {name.lower() for name in (*LOCAL_NAMES, *config.allowed_hosts)}

    def check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse a request that was meant for another name: a page on the web can point a name of
        its own at this host, and would then be the server's own page to a browser (DNS rebinding).

        Raises:
            Refusal: 421, the Host header is another's.
        """
        if self._any_host:
            return
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name.rstrip(".") not in self._hosts:
            raise Refusal(
                f"this server does not answer to the name {name[:100]!r}: call it by its address, "
                "or start it with --allowed-host NAME.", 421, code="unknown_host",
            )  # fmt: skip

    def caller(self, headers: Mapping[bytes, bytes], needs_admin: bool) -> Caller:
        """The sender of a request, by the key in its headers.

        Args:
            headers: by lower-case name.
            needs_admin: the path is for administrators.

        Raises:
            Refusal: 401 without a valid key where one is needed; 403 where the admin key is.
        """
        name, given = self._given(headers)
        is_admin = self._admin is not None and name == self._admin[0]
        if needs_admin and not is_admin:
            if self._admin is None:
                why = "this server was started without --admin-key, so its control is closed."
            else:
                why = "this path needs the admin key, as `Authorization: Bearer KEY`."
            is_known = name is not None or self._admin is None
            raise Refusal(why, 403 if is_known else 401, code="admin_key_required")
        if self._keys and not name:
            why = "is not valid" if given else "is missing"
            raise Refusal(
                f"the API key {why}: send one as `Authorization: Bearer KEY` or `x-api-key: KEY`.",
                401,
                code="invalid_api_key",
            )  # fmt: skip
        return Caller(name or "", is_admin)

    def _given(self, headers: Mapping[bytes, bytes]) -> tuple[str | None, bool]:
        """The name of the key that was given, and whether any was."""
        value = headers.get(b"authorization", b"")
        scheme, _, key = value.partition(b" ")
        if scheme.lower() != b"bearer" or not key:
            key = headers.get(b"x-api-key", b"")  # Anthropic's clients
        if not key:
            return None, bool(value)
        digest = hashlib.sha256(key.strip()).digest()
        found = None
        known = [*self._keys, self._admin] if self._admin is not None else self._keys
        for entry in known:  # all of them: how long it takes tells nothing
            assert entry is not None, "checked above"
            if hmac.compare_digest(entry[1], digest):
                found = entry[0]
        return found, True


def request_id(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The id that a client gave its request, if it may be repeated in the answer's headers."""
    given = headers.get(b"x-request-id", b"")
    return given if _ID.fullmatch(given) else None
