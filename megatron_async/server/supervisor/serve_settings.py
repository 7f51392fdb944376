"""`ServeSettings`: what `megatron-async serve` was asked for, checked before anything starts,
and what its child processes are told of it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import ssl
from pathlib import Path

import msgspec
import psutil

from megatron_async.communication.host import is_loopback
from megatron_async.errors import ConfigurationError
from megatron_async.server.api_config import ApiConfig, HttpSettings, TlsFiles, check_keys
from megatron_async.server.chat.call_formats import check_parsers
from megatron_async.server.supervisor.keys import OPEN_VARIABLE
from megatron_async.server.supervisor.listener import address_of, resolve
from megatron_async.server.tracing import check_endpoint
from megatron_async.serving.records import CoordinatorConfig

MOST_API_PROCESSES = 64
MOST_REPLICAS = 64
METRICS_NAMES = ("own", "vllm")
RL_APIS = ("none", "vllm", "sglang")
RL_OPTIONS = {"trainers": "trainer", "checks_finite": "weights_finite"}
"""Names of options that are not those of their fields."""


class ServeSettings(HttpSettings, frozen=True, kw_only=True):
    """Settings of a service: model, address, limits. `secret_file` is for a coordinator elsewhere.

    Attributes:
        model: as the command line names it; None: replicas are elsewhere (`coordinator`).
        replica_arguments: further arguments of the command `replica`.
        replicas: how many engines this service starts.
        ranks: processes of each.
        device: as given; None: a GPU where there is one.
        coordinator: address of one that is there already; None: this service has its own.
        dispatch: limits and policies of the own coordinator.
        host, port: where HTTP is served; port 0 takes a free one.
        api_processes: how many share the listener.
        listener_fds: bound sockets that this process has inherited; they are served in place of
            host and port.
        needs_key: whether other hosts need a key.
        certificate, certificate_key, certificate_password: files and password for TLS.
        profile_folder: where profiles of the engine are written; None: nowhere.
        log_requests: whether each request has a line of log.
        rl_socket: HOST:PORT where trainers need no key, of loopback or of a network interface by
            its name; None: nowhere.
    """

    model: str | None
    replica_arguments: tuple[str, ...] = ()
    replicas: int = 1
    ranks: int = 1
    device: str | None = None
    coordinator: str | None = None
    dispatch: CoordinatorConfig = msgspec.field(default_factory=CoordinatorConfig)
    host: str = "127.0.0.1"
    port: int = 8000
    api_processes: int = 1
    listener_fds: tuple[int, ...] = ()
    needs_key: bool = True
    certificate: str | None = None
    certificate_key: str | None = None
    certificate_password: str | None = None
    profile_folder: str | None = None
    log_requests: bool = True
    rl_socket: str | None = None

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
        for name, value, least, most, unit in (
            ("replicas", self.replicas, 1, MOST_REPLICAS, ""),
            ("api-processes", self.api_processes, 1, MOST_API_PROCESSES, ""),
            ("port", self.port, 0, 65535, ""),
            ("shutdown-timeout", self.shutdown_timeout_s, 0, 86400, " seconds"),
        ):
            if not least <= value <= most:
                raise ConfigurationError(f"--{name} {value} must be from {least} to {most}{unit}.")
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
        check_parsers(self.tool_parser, self.reasoning_parser)
        self._check_exposure()
        self._check_certificate()
        self._check_trainers()
        if self.profile_folder is not None and not os.path.isdir(self.profile_folder):
            raise ConfigurationError(f"--profile-dir {self.profile_folder}: no such folder.")

    @property
    def is_exposed(self) -> bool:
        """Whether other hosts reach the server."""
        if self.listener_fds:
            return not all(is_loopback(address_of(fd)) for fd in self.listener_fds)
        return not is_loopback(resolve(self.host, self.port)[1][0])

    @property
    def has_tls(self) -> bool:
        """Whether HTTP is encrypted."""
        return self.certificate is not None

    def _check_exposure(self) -> None:
        if self.is_exposed and self.needs_key and not self.keys:
            fds = " ".join(map(str, self.listener_fds))
            what = f"--fd {fds}" if fds else f"--host {self.host}"
            further = f" Or set {OPEN_VARIABLE}=1: everybody may." if self.as_megatron else ""
            raise ConfigurationError(
                f"{what} is reached from other hosts, and without a key everybody "
                "there could use the model: give --api-key-file FILE (or --api-key, or the "
                f"environment variable MEGATRON_ASYNC_API_KEY), or --host 127.0.0.1.{further}"
            )
        check_keys(self.keys, self.admin_key)

    def _check_trainers(self) -> None:
        if self.rl_api not in RL_APIS:
            raise ConfigurationError(
                f"--rl-api {self.rl_api!r} must be one of {', '.join(RL_APIS)}."
            )
        if self.rl_api == "none":
            for name in ("rl_socket", "weights_dir", "trainers", "checks_finite"):
                if getattr(self, name):
                    option = RL_OPTIONS.get(name, name).replace("_", "-")
                    raise ConfigurationError(f"--{option} needs --rl-api vllm or sglang.")
            return
        if self.admin_key is None and self.rl_socket is None:
            raise ConfigurationError(
                f"--rl-api {self.rl_api} replaces weights: give --admin-key (or the variable "
                "MEGATRON_ASYNC_ADMIN_KEY), or --rl-socket HOST:PORT for trainers without keys."
            )
        if self.api_processes != 1:
            raise ConfigurationError(
                f"--api-processes {self.api_processes}: with --rl-api one process serves HTTP, "
                "which knows a trainer's session; leave it out."
            )
        if self.weights_dir is not None and not os.path.isdir(self.weights_dir):
            raise ConfigurationError(f"--weights-dir {self.weights_dir}: no such folder.")
        for trainer in self.trainers:
            if not re.fullmatch(r"[^\s,:]+(:\d{1,5})?|\[[0-9a-fA-F:.]+\](:\d{1,5})?", trainer):
                raise ConfigurationError(f"--trainer {trainer!r} must be HOST or HOST:PORT.")
        if self.rl_socket is not None:
            trainers_address(self.rl_socket)

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


def trainers_address(given: str) -> tuple[str, int]:
    """Address and port of `--rl-socket`, which has no key: so it is only one of loopback, or of a
    network interface that is called by its name.

    Raises:
        ConfigurationError: it is none of both.
    """
    host, _, port = given.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigurationError(f"--rl-socket {given!r} must be HOST:PORT.")
    of_interface = psutil.net_if_addrs().get(host, [])
    found = [each.address for each in of_interface if each.family == socket.AF_INET]
    if not found:
        found = [resolve(host.strip("[]"), int(port))[1][0]]
        if not is_loopback(found[0]):
            raise ConfigurationError(
                f"--rl-socket {given}: {host!r} is neither loopback nor the name of a network "
                "interface with an IPv4 address, and who reaches it replaces weights without a "
                f"key; there are {', '.join(psutil.net_if_addrs())}."
            )
    return found[0], int(port)


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
    """Arguments of the child module for a replica. Several ranks meet in `folder`, which other
    users do not reach."""
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
    """The configuration of API processes."""
    tls = None
    if settings.certificate is not None:
        tls = TlsFiles(
            settings.certificate, settings.certificate_key, settings.certificate_password
        )
    hosts = settings.allowed_hosts or (("*",) if settings.is_exposed else ())
    shared = {name: getattr(settings, name) for name in HttpSettings.__struct_fields__}
    shared |= {"served_names": names_of(settings), "allowed_hosts": hosts}
    return ApiConfig(
        coordinator=coordinator, tls=tls, log_requests=settings.log_requests,
        rl_round=secrets.token_hex(16), **shared,
    )  # fmt: skip


def curl_line(settings: ServeSettings, url: str) -> str:
    """A command that asks a service one question, to be copied to a shell. The answer comes token
    by token, and has an end."""
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
