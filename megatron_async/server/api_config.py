"""`ApiConfig`: what an API process gets from its parent process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from megatron_async.errors import ConfigurationError

ADMIN = "admin"
"""The name of the admin key."""


class KeyDigest(msgspec.Struct, frozen=True):
    """The stored form of a key.

    Attributes:
        name: whose it is; requests are counted by it, and it is mixed into cache salts. It gives
            no rights.
        sha256: hexadecimal digest of the key.
    """

    name: str
    sha256: str


class TlsFiles(msgspec.Struct, frozen=True):
    """A certificate for HTTPS. Both files are PEM, the first with the whole chain; without `key`
    the private key is in it too."""

    certificate: str
    key: str | None = None
    password: str | None = None


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How HTTP is served, as the command line and each API process get it.

    Attributes:
        secret_file: of the coordinator, where it asks for one.
        served_names: names that requests may call the model by, the first is told; empty: by its
            own.
        keys: of the API; none: every caller that reaches the address is served.
        admin_key: of control endpoints; None: they are refused.
        allowed_hosts: names in Host headers beside those of this host; "*": any.
        root_path: where a proxy has mounted the server, as "/llm"; "" at its root.
        metrics_names: "own", or "vllm": the names of vLLM's boards beside them.
        tool_parser, reasoning_parser: their names; None: by the chat template.
        chat_template: in place of the model's own; None: that.
        as_megatron: answer as Megatron-Core's server does (`ServedModel.as_megatron`).
        max_body_bytes: of a request.
        default_max_tokens: of an answer whose request gives no limit; None: the model decides.
        one_event_a_token: never join tokens in one event.
        page: whether there is a page for people at "/".
        shutdown_timeout_s: how long requests may go on after SIGTERM.
        otlp_endpoint: URL that spans are sent to; None: what OpenTelemetry's variables say.
        rl_api: the family whose paths for trainers are served, "vllm" or "sglang", or "none".
        weights_dir: new weights are read from folders below it; None: from no folder.
        trainers: hosts, or HOST:PORT, whose process groups may be joined.
        checks_finite: new weights with NaN or infinity are refused.
    """

    secret_file: str | None = None
    served_names: tuple[str, ...] = ()
    keys: tuple[KeyDigest, ...] = ()
    admin_key: KeyDigest | None = None
    allowed_hosts: tuple[str, ...] = ()
    root_path: str = ""
    metrics_names: str = "own"
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    chat_template: str | None = None
    as_megatron: bool = False
    max_body_bytes: int = 32 << 20
    default_max_tokens: int | None = None
    one_event_a_token: bool = False
    page: bool = True
    shutdown_timeout_s: float = 30.0
    otlp_endpoint: str | None = None
    rl_api: str = "none"
    weights_dir: str | None = None
    trainers: tuple[str, ...] = ()
    checks_finite: bool = False


class ApiConfig(HttpSettings, frozen=True, kw_only=True):
    """Configuration of an API process. It has digests of keys, never keys.

    Attributes:
        name: of the process, for its lines of log.
        rl_round: key of the rounds that paths for trainers begin; other clients do not know it.
        rl_address: where callers need no key, and are the administrator; None: nowhere.
    """

    coordinator: str
    tls: TlsFiles | None = None
    log_requests: bool = False
    name: str = "api"
    rl_round: str = ""
    rl_address: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        check_keys(self.keys, self.admin_key)


def check_keys(keys: Sequence[KeyDigest], admin_key: KeyDigest | None) -> None:
    """Raise ConfigurationError if a key has the rights, the limits or the cache of another one: two
    keys have one name, or one is called as the admin key is, or is it."""
    names = Counter(key.name for key in keys)
    for name, count in names.items():
        if count > 1:
            raise ConfigurationError(
                f"{count} API keys are named {name!r}, and would share limits and caches: give "
                "each key a name of its own (keys without a name are called key-1, key-2 and so "
                "on)."
            )
        if name.casefold() == ADMIN or (admin_key is not None and name == admin_key.name):
            raise ConfigurationError(
                f"an API key is named {name!r}, which is the admin key's name: call it otherwise."
            )
    if admin_key is not None and admin_key.sha256 in {key.sha256 for key in keys}:
        raise ConfigurationError(
            "the admin key is an API key too: every user of the model could stop it. Give "
            "--admin-key a value of its own."
        )
