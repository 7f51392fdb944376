"""Command lines of child processes, and the lines printed for users."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_async.server.api_config import ApiConfig, TlsFiles
from megatron_async.server.supervisor.settings import ServeSettings, served_name

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
