"""The command `serve`: a model over HTTP, in OpenAI's protocol."""

from __future__ import annotations

import argparse
import os
from typing import Any

from megatron_async.cli.early_checks import check_early
from megatron_async.cli.fields import flag
from megatron_async.cli.options import (
    MODEL_HELP,
    PROGRAM,
    HelpFormatter,
    add_dtype,
    add_engine_options,
    add_parallel,
    engine_fields,
    engine_options,
    parallel_sizes,
    port,
)

FORWARDED_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
)  # fmt: skip
SUPERVISOR = "supervisor"
"""What this process is called in lines of log."""


def add_serve(commands: Any, common: argparse.ArgumentParser) -> None:
    """Options of `serve`."""
    serve = commands.add_parser(
        "serve",
        parents=[common],
        help="serve a model over HTTP, in OpenAI's protocol",
        description="Load a model and serve it over HTTP to OpenAI's clients. One SIGTERM or\n"
        "Ctrl-C: finish what is under way and end; two: end at once.",
        formatter_class=HelpFormatter,
        epilog=f"""examples:
  {PROGRAM} serve smollm2
  {PROGRAM} serve ./my-llama --host 0.0.0.0 --api-key-file keys.txt --api-processes 2
  {PROGRAM} serve ./my-llama --replicas 4 --served-model-name my-llama gpt-4o
  {PROGRAM} serve --coordinator tcp://10.0.0.5:9500 --secret-file secret
docs/server.md has all of it.""",
    )
    serve.set_defaults(run=run_serve)
    serve.add_argument("model", metavar="MODEL", nargs="?", help=MODEL_HELP)
    serve.add_argument(
        "--replicas", type=int, default=1, metavar="N",
        help="engines that serve it, each on a GPU (or GPUs) of its own",
    )  # fmt: skip
    serve.add_argument(
        "--coordinator", metavar="ADDRESS",
        help="serve what replicas of this coordinator serve, instead of a MODEL",
    )  # fmt: skip
    serve.add_argument("--secret-file", metavar="FILE", help="the secret of that coordinator")
    _add_http(serve.add_argument_group("HTTP"))
    _add_access(serve.add_argument_group("who may use it"))
    _add_limits(serve.add_argument_group("limits"))
    engine = serve.add_argument_group("engine")
    add_engine_options(engine)
    add_dtype(engine)
    add_parallel(serve, "serve")
    serve.add_argument("--no-progress", action="store_true", help="no progress bar")


def _add_http(group: Any) -> None:
    group.add_argument(
        "--host", default="127.0.0.1", metavar="HOST",
        help="name or address to listen at; 0.0.0.0 is all networks, and needs a key",
    )  # fmt: skip
    group.add_argument(
        "--port", type=port, default=8000, metavar="PORT", help="0 takes any that is free"
    )
    group.add_argument(
        "--api-processes", type=int, default=default_api_processes(), metavar="N",
        help="processes that speak HTTP; one for about 100,000 tokens/s",
    )  # fmt: skip
    group.add_argument(
        "--served-model-name", nargs="+", default=[], metavar="NAME",
        help="names that requests may call the model by (default: its own)",
    )  # fmt: skip
    group.add_argument(
        "--root-path", default="", metavar="PATH", help="where a proxy has mounted it, as /llm"
    )
    group.add_argument("--ssl-certfile", metavar="FILE", help="certificate for HTTPS, PEM")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="its private key, PEM")
    group.add_argument(
        "--ssl-keyfile-password", metavar="TEXT",
        help="password of the key; other users of this host can read it here, but not in the "
        "environment variable MEGATRON_ASYNC_SSL_KEYFILE_PASSWORD",
    )  # fmt: skip
    group.add_argument(
        "--allowed-host", action="append", default=[], metavar="NAME",
        help="a further name in Host headers; may be repeated, * is any\n"
        "(default: localhost and its addresses; any with a --host that others reach)",
    )  # fmt: skip
    group.add_argument(
        "--tool-parser", metavar="NAME",
        help="form of the model's tool calls: qwen3_coder, hermes, mistral, deepseek_v3,\n"
        "deepseek_v31, llama3_json, nemotron_json, or other servers' names of them\n"
        "(default: by its chat template)",
    )  # fmt: skip
    group.add_argument(
        "--one-event-a-token", action="store_true",
        help="never join tokens of a stream in one event, for clients that count events",
    )  # fmt: skip
    group.add_argument(
        "--no-request-log", action="store_true", help="no line of log for each request"
    )
    group.add_argument("--no-page", action="store_true", help="no page for people at /")
    group.add_argument(
        "--metrics-names", choices=("own", "vllm"), default="own",
        help="names in /metrics: our own, or vLLM's beside them",
    )  # fmt: skip
    group.add_argument(
        "--otlp-endpoint", metavar="URL",
        help="collector of OpenTelemetry that spans of requests are sent to, as\n"
        "http://127.0.0.1:4318 (default: OTEL_EXPORTER_OTLP_ENDPOINT, if it is set)",
    )  # fmt: skip


def _add_access(group: Any) -> None:
    group.add_argument(
        "--api-key", action="append", default=[], metavar="KEY",
        help="a key that requests must have; may be repeated. Other users of this host see it in\n"
        "lists of processes: a file or MEGATRON_ASYNC_API_KEY (keys, with commas) is better",
    )  # fmt: skip
    group.add_argument(
        "--api-key-file", metavar="FILE",
        help="keys, one a line, or NAME KEY; not readable by others (chmod 600)",
    )  # fmt: skip
    group.add_argument(
        "--admin-key", metavar="KEY",
        help="key of control endpoints (pause, drain, sleep, abort, profile), or the variable\n"
        "MEGATRON_ASYNC_ADMIN_KEY; without one they are refused",
    )  # fmt: skip


def _add_limits(group: Any) -> None:
    group.add_argument(
        "--max-unfinished", type=int, default=4096, metavar="N",
        help="requests queued and served; further ones are told to come back later (503)",
    )  # fmt: skip
    group.add_argument(
        "--max-tokens-in-flight", type=int, metavar="N",
        help="tokens that they may take together, prompts and answers (default: no limit)",
    )  # fmt: skip
    group.add_argument(
        "--max-unfinished-per-key", type=int, metavar="N",
        help="requests of one API key (default: no limit)",
    )  # fmt: skip
    group.add_argument(
        "--max-tokens-per-key", type=int, metavar="N",
        help="tokens in flight of one API key (default: no limit)",
    )  # fmt: skip
    group.add_argument(
        "--default-max-tokens", type=int, metavar="N",
        help="most tokens of a chat's answer whose request gives no limit; if the model's\n"
        "max_new_tokens is less, that counts (default: as many as fit; on a CPU 1024)",
    )  # fmt: skip
    group.add_argument(
        "--max-body-mb", type=float, default=32.0, metavar="MB", help="of an HTTP request"
    )
    group.add_argument(
        "--on-replica-death", choices=("retry", "fail"), default="retry",
        help="serve a lost replica's requests again elsewhere, or fail them",
    )  # fmt: skip
    group.add_argument(
        "--policy", default="prefix", metavar="NAME",
        help="which replica serves a request: prefix, least-loaded or round-robin",
    )  # fmt: skip
    group.add_argument(
        "--shutdown-timeout", type=float, default=30.0, metavar="S",
        help="how long requests may go on after SIGTERM; 0 aborts them",
    )  # fmt: skip
    group.add_argument(
        "--profile-dir", metavar="FOLDER", help="where profiles go that an administrator asks for"
    )


def default_api_processes() -> int:
    """Two where there are cores for them: the service goes on when one dies."""
    return 1 if len(os.sched_getaffinity(0)) < 8 else 2


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    from megatron_async.observe.log_lines import log_to_stderr, said_line
    from megatron_async.server.supervisor.serve_settings import ServeSettings
    from megatron_async.server.supervisor.service import serve

    # Told here, and not by a replica or an API process after the address is announced.
    check_early(arguments.model, engine_options(arguments), parallel_sizes(arguments))
    settings: ServeSettings = read_settings(arguments)
    log_to_stderr(SUPERVISOR)

    def say(text: str) -> None:
        print(said_line(SUPERVISOR, text), flush=True)

    return serve(settings, say)


def read_settings(arguments: argparse.Namespace) -> Any:
    """The `ServeSettings` of a command line.

    Raises:
        ConfigurationError: a value, or two together, cannot work.
    """
    from megatron_async.errors import ConfigurationError
    from megatron_async.server.supervisor.keys import (
        read_admin_key,
        read_keys,
        read_password,
    )
    from megatron_async.server.supervisor.serve_settings import ServeSettings
    from megatron_async.serving.address import check_address
    from megatron_async.serving.records import CoordinatorConfig
    from megatron_async.serving.routing import make_policy
    from megatron_async.serving.secret import read_secret

    if arguments.model is None and arguments.coordinator is not None:
        given = [flag(name) for name in _engine_fields() if getattr(arguments, name) is not None]
        if given:
            raise ConfigurationError(
                f"{given[0]} is for engines, and with --coordinator this service starts none: "
                "give it to the replicas."
            )
    if arguments.coordinator is not None:
        check_address(arguments.coordinator)
        if arguments.secret_file is not None:
            read_secret(arguments.secret_file)
    if arguments.secret_file is not None and arguments.coordinator is None:
        raise ConfigurationError("--secret-file is for --coordinator ADDRESS, which is missing.")
    if not 0 < arguments.max_body_mb <= 1024:
        raise ConfigurationError(
            f"--max-body-mb {arguments.max_body_mb} must be above 0, at most 1024."
        )
    return ServeSettings(
        model=arguments.model,
        replica_arguments=replica_arguments(arguments),
        replicas=arguments.replicas,
        ranks=_ranks(arguments),
        device=arguments.device,
        coordinator=arguments.coordinator,
        secret_file=arguments.secret_file,
        dispatch=CoordinatorConfig(
            on_replica_death=arguments.on_replica_death,
            max_unfinished=arguments.max_unfinished,
            max_tokens_in_flight=arguments.max_tokens_in_flight,
            max_unfinished_of_owner=arguments.max_unfinished_per_key,
            max_tokens_of_owner=arguments.max_tokens_per_key,
            policy=make_policy(arguments.policy),
        ),
        host=arguments.host,
        port=arguments.port,
        api_processes=arguments.api_processes,
        keys=read_keys(arguments.api_key, arguments.api_key_file, os.environ),
        admin_key=read_admin_key(arguments.admin_key, os.environ),
        served_names=tuple(arguments.served_model_name),
        allowed_hosts=tuple(arguments.allowed_host),
        root_path=arguments.root_path,
        certificate=arguments.ssl_certfile,
        certificate_key=arguments.ssl_keyfile,
        certificate_password=read_password(arguments.ssl_keyfile_password, os.environ),
        metrics_names=arguments.metrics_names,
        shutdown_timeout_s=arguments.shutdown_timeout,
        profile_folder=arguments.profile_dir,
        tool_parser=arguments.tool_parser,
        one_event_a_token=arguments.one_event_a_token,
        default_max_tokens=arguments.default_max_tokens,
        page=not arguments.no_page,
        log_requests=not arguments.no_request_log,
        otlp_endpoint=arguments.otlp_endpoint,
        max_body_bytes=int(arguments.max_body_mb * 2**20),
    )


def replica_arguments(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Options that `serve` hands on to the command `replica`, as its command line has them."""
    words: list[str] = []
    for name in _engine_fields():
        value = getattr(arguments, name)
        if value is None or name == "device":
            continue
        if isinstance(value, bool):
            words.append(flag(name) if value else f"--no-{flag(name).removeprefix('--')}")
        else:
            words.append(f"{flag(name)}={value}")
    words += [f"{flag(name)}={getattr(arguments, name)}" for name in FORWARDED_SIZES]
    if arguments.sequence_parallel:
        words.append("--sequence-parallel")
    if arguments.no_progress:
        words.append("--no-progress")
    return tuple(words)


def _engine_fields() -> list[str]:
    return [*engine_fields(), "dtype"]


def _ranks(arguments: argparse.Namespace) -> int:
    """Processes of one replica. With experts split, a "replica" here is the job of all that do."""
    ranks = 1
    for name in FORWARDED_SIZES:
        ranks *= max(getattr(arguments, name), 1)
    return ranks
