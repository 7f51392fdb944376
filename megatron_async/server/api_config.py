"""`ApiConfig`: what an API process is told by the process that starts it."""

from __future__ import annotations

import msgspec


class KeyDigest(msgspec.Struct, frozen=True):
    """The stored form of a key.

    Attributes:
        name: whose it is; requests are counted by it.
        sha256: hexadecimal digest of the key.
    """

    name: str
    sha256: str


class TlsFiles(msgspec.Struct, frozen=True):
    """A certificate for HTTPS.

    Attributes:
        certificate: file with the chain, PEM.
        key: file with its private key, PEM; None: it is in the same file.
        password: of the key; None: it has none.
    """

    certificate: str
    key: str | None = None
    password: str | None = None


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of an API process. It has digests of keys, never keys.

    Attributes:
        coordinator: its address.
        secret_file: of the coordinator, where it asks for one.
        served_names: names that requests may call the model by, the first is told; empty: by what
            the model card says.
        keys: of the API; none: whoever reaches the address is served.
        admin_key: of control endpoints; None: they are refused.
        allowed_hosts: names in Host headers beside those of this host; "*": any.
        root_path: where a proxy has mounted the server, as "/llm"; "" at its root.
        tls: certificate; None: no encryption.
        metrics_names: "own", or "vllm": the names of vLLM's boards beside them.
        tool_parser: its name; None: by the chat template.
        max_body_bytes: of a request.
        one_event_a_token: never join tokens in one event.
        page: whether there is a page for people at "/".
        shutdown_timeout_s: how long requests may go on after SIGTERM.
        otlp_endpoint: URL that spans are sent to; None: what OpenTelemetry's variables say.
    """

    coordinator: str
    secret_file: str | None = None
    served_names: tuple[str, ...] = ()
    keys: tuple[KeyDigest, ...] = ()
    admin_key: KeyDigest | None = None
    allowed_hosts: tuple[str, ...] = ()
    root_path: str = ""
    tls: TlsFiles | None = None
    metrics_names: str = "own"
    tool_parser: str | None = None
    max_body_bytes: int = 32 << 20
    one_event_a_token: bool = False
    page: bool = True
    shutdown_timeout_s: float = 30.0
    otlp_endpoint: str | None = None
