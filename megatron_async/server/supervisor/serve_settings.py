"""`ServeSettings`: what `megatron-async serve` was asked for, checked before anything starts,
and what its child processes are told of it.
"""

from __future__ import annotations

import json
import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from megatron_async.errors import ConfigurationError
from megatron_async.server.api_config import ApiConfig, KeyDigest, TlsFiles, check_keys
from megatron_async.server.chat.call_formats import format_of_template
from megatron_async.server.supervisor.listener import is_loopback, resolve
from megatron_async.server.tracing import check_endpoint
from megatron_async.serving.records import CoordinatorConfig

MOST_API_PROCESSES = 64
MOST_REPLICAS = 64
METRICS_NAMES = ("own", "vllm")


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Settings of a service: model, address, limits.

    Attributes:
        model: as the command line names it; None: replicas are elsewhere (`coordinator`).
        replica_arguments: further arguments of the command `replica`.
        replicas: how many engines this service starts.
        ranks: processes of each.
        device: as given; None: a GPU where there is one.
        coordinator: address of one that is there already; None: this service has its own.
        secret_file: of that coordinator; None: it asks for none.
        dispatch: limits and policies of the own coordinator.
        host, port: where HTTP is served; port 0 takes a free one.
        api_processes: how many share the listener.
        keys: of the API; none: everybody who reaches the address is served.
        admin_key: of control endpoints; None: there are none.
        served_names: names that requests may call the model by; empty: by its own.
        allowed_hosts: further names in Host headers.
        root_path: where a proxy has mounted the server, as "/llm".
        certificate, certificate_key, certificate_password: files and password for TLS.
        metrics_names: "own", or "vllm" for the names of vLLM's boards beside them.
        shutdown_timeout_s: how long requests may go on after SIGTERM.
        profile_folder: where profiles of the engine are written; None: nowhere.
        tool_parser: name, or None: by the chat template.
        one_event_a_token: never join tokens in one event.
        log_requests: whether each request has a line of log.
        default_max_tokens: of an answer whose request gives no limit; None: the model decides.
        max_body_bytes: of an HTTP request.
        page: whether there is a page for people at "/".
        otlp_endpoint: URL that spans are sent to; None: what OpenTelemetry's variables say.
    """

    model: str | None
    replica_arguments: tuple[str, ...] = ()
    replicas: int = 1
    ranks: int = 1
    device: str | None = None
    coordinator: str | None = None
    secret_file: str | None = None
    dispatch: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    host: str = "127.0.0.1"
    port: int = 8000
    api_processes: int = 1
    keys: tuple[KeyDigest, ...] = ()
    admin_key: KeyDigest | None = None
    served_names: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    root_path: str = ""
    certificate: str | None = None
    certificate_key: str | None = None
    certificate_password: str | None = None
    metrics_names: str = "own"
    shutdown_timeout_s: float = 30.0
    profile_folder: str | None = None
    tool_parser: str | None = None
    one_event_a_token: bool = False
    log_requests: bool = True
    default_max_tokens: int | None = None
    max_body_bytes: int = 32 << 20
    page: bool = True
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        if self.model is None and self.coordinator is None:
            raise ConfigurationError(
                "no model was given: `megatron-async serve smollm2`, or --coordinator ADDRESS to "
                "serve what its replicas do."
            )
        if self.model is not None and self.coordinator is not None:
            raise ConfigurationError(
                f"MODEL {self.model} and --coordinator {self.coordinator} exclude each other: its "
                "replicas have the model; leave one out."
            )
        for name, value, most in (
            ("replicas", self.replicas, MOST_REPLICAS),
            ("api-processes", self.api_processes, MOST_API_PROCESSES),
        ):
            if not 1 <= value <= most:
                raise ConfigurationError(f"--{name} {value} must be from 1 to {most}.")
        if not 0 <= self.port <= 65535:
            raise ConfigurationError(f"--port {self.port} must be from 0 to 65535.")
        if not 0 <= self.shutdown_timeout_s <= 86400:
            raise ConfigurationError(
                f"--shutdown-timeout {self.shutdown_timeout_s} must be from 0 to 86400 seconds."
            )
        if self.default_max_tokens is not None and self.default_max_tokens < 1:
            raise ConfigurationError(
                f"--default-max-tokens {self.default_max_tokens} must be 1 or more."
            )
        if self.metrics_names not in METRICS_NAMES:
            raise ConfigurationError(
                f"--metrics-names {self.metrics_names!r} must be one of {', '.join(METRICS_NAMES)}."
            )
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigurationError(
                f"--root-path {self.root_path!r} must begin with a slash and not end with one."
            )
        for name in self.served_names:
            if not name or len(name) > 256 or not name.isprintable():
                raise ConfigurationError(
                    f"--served-model-name {name!r} must have 1 to 256 printable characters."
                )
        check_endpoint(self.otlp_endpoint)
        if self.tool_parser is not None:
            format_of_template("", self.tool_parser)
        self._check_exposure()
        self._check_certificate()
        if self.profile_folder is not None and not os.path.isdir(self.profile_folder):
            raise ConfigurationError(f"--profile-dir {self.profile_folder}: no such folder.")

    @property
    def is_exposed(self) -> bool:
        """Whether other hosts reach the server."""
        return not is_loopback(resolve(self.host, self.port)[1][0])

    @property
    def has_tls(self) -> bool:
        """Whether HTTP is encrypted."""
        return self.certificate is not None

    def _check_exposure(self) -> None:
        if self.is_exposed and not self.keys:
            raise ConfigurationError(
                f"--host {self.host} is reached from other hosts, and without a key everybody "
                "there could use the model: give --api-key-file FILE (or --api-key, or the "
                "environment variable MEGATRON_ASYNC_API_KEY), or --host 127.0.0.1."
            )
        check_keys(self.keys, self.admin_key)

    def _check_certificate(self) -> None:
        if self.certificate is None:
            if self.certificate_key is not None or self.certificate_password is not None:
                raise ConfigurationError("TLS needs --ssl-certfile, the certificate, as well.")
            return
        for flag, file in (("certfile", self.certificate), ("keyfile", self.certificate_key)):
            if file is not None and not Path(file).is_file():
                raise ConfigurationError(f"--ssl-{flag} {file}: no such file.")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # A password of "" lets an encrypted key fail, where None would ask at the terminal.
            context.load_cert_chain(
                self.certificate, self.certificate_key, self.certificate_password or ""
            )
        except (ssl.SSLError, OSError) as error:
            raise ConfigurationError(
                f"--ssl-certfile {self.certificate} and --ssl-keyfile {self.certificate_key} "
                f"cannot be used ({error}): give a certificate and its own key, both in PEM form, "
                "and the key's password where it has one (--ssl-keyfile-password)."
            ) from error


def served_name(model: str) -> str:
    """What a model is called without --served-model-name: of a file or folder its last part, so
    that nobody learns where on this host models lie."""
    if os.sep not in model and not Path(model).exists():
        return model
    path = Path(model)
    name = path.name or path.resolve().name
    return name.removesuffix(".gguf") if path.is_file() else name


CURL_TOKENS = 200
"""Most tokens of the answer to the line that people are shown."""


def replica_command(
    settings: ServeSettings, name: str, coordinator: str, folder: Path
) -> tuple[str, ...]:
    """Arguments of the child module for a replica.

    Args:
        settings: of the service, with a model.
        name: of the replica.
        coordinator: address of the service's own.
        folder: of the service, which other users do not reach: several ranks meet in it.
    """
    assert settings.model is not None
    what = ("replica",) if settings.ranks == 1 else ("ranks", str(settings.ranks), str(folder))
    device = () if settings.device is None else ("--device", settings.device)
    return (
        *what, settings.model, "--name", name, "--coordinator", coordinator, *device,
        *settings.replica_arguments,
    )  # fmt: skip


def names_of(settings: ServeSettings) -> tuple[str, ...]:
    """Names that requests may call the model by; none where only its replicas know them."""
    if settings.served_names or settings.model is None:
        return settings.served_names
    return (served_name(settings.model),)


def api_config(settings: ServeSettings, coordinator: str) -> ApiConfig:
    """The configuration of API processes.

    Args:
        settings: of the service.
        coordinator: address of its own, or of that which was there.
    """
    tls = None
    if settings.certificate is not None:
        tls = TlsFiles(
            settings.certificate, settings.certificate_key, settings.certificate_password
        )
    hosts = settings.allowed_hosts or (("*",) if settings.is_exposed else ())
    return ApiConfig(
        coordinator=coordinator,
        secret_file=settings.secret_file,
        served_names=names_of(settings),
        keys=settings.keys,
        admin_key=settings.admin_key,
        allowed_hosts=hosts,
        root_path=settings.root_path,
        tls=tls,
        metrics_names=settings.metrics_names,
        tool_parser=settings.tool_parser,
        max_body_bytes=settings.max_body_bytes,
        one_event_a_token=settings.one_event_a_token,
        log_requests=settings.log_requests,
        default_max_tokens=settings.default_max_tokens,
        page=settings.page,
        shutdown_timeout_s=settings.shutdown_timeout_s,
        otlp_endpoint=settings.otlp_endpoint,
    )


def curl_line(settings: ServeSettings, url: str) -> str:
    """A command that asks a service one question, to be copied to a shell. The answer comes token
    by token, and has an end.

    Args:
        settings: of the service.
        url: where it is found.
    """
    model = (*names_of(settings), "MODEL")[0]
    path, limits = "chat/completions", {"stream": True, "max_tokens": CURL_TOKENS}
    body: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        **limits,
    }
    if settings.model is not None and settings.model.startswith("dummy:"):
        # It has no tokenizer: prompts are token ids.
        path, body = "completions", {"model": model, "prompt": [1, 2, 3], **limits}
    parts = [f"curl -N {url}{settings.root_path}/v1/{path}"]
    if settings.has_tls:
        parts[0] += " --insecure"
    if settings.keys:
        parts.append("-H 'Authorization: Bearer KEY'")
    parts.append("-H 'Content-Type: application/json'")
    text = json.dumps(body).replace("'", "'\\''")
    parts.append(f"-d '{text}'")
    return "  " + " \\\n    ".join(parts)
