"""The command `serve`: a model over HTTP, in OpenAI's protocol."""

from __future__ import annotations

import argparse
import os
from typing import Any

from megatron_async.cli.early_checks import check_early
from megatron_async.cli.fields import flag
from megatron_async.cli.options import (
    MODEL_HELP,
    NO_PROGRESS,
    ON_REPLICA_DEATH,
    PROGRAM,
    Rows,
    add_engine_options,
    add_parallel,
    add_rows,
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


API_PROCESSES = 1 if len(os.sched_getaffinity(0)) < 8 else 2
"""Two where there are cores for them: the service goes on when one dies."""

WHAT: Rows = (
    ("--replicas", int, "N", 1, "engines that serve it, each on a GPU (or GPUs) of its own"),
    ("--coordinator", str, "ADDRESS", None,
     "serve what replicas of this coordinator serve, instead of a MODEL"),
    ("--secret-file", str, "FILE", None, "the secret of that coordinator"),
)  # fmt: skip
HTTP: Rows = (
    ("--host", str, "HOST", "127.0.0.1",
     "name or address to listen at; 0.0.0.0 is all networks, and needs a key"),
    ("--port", port, "PORT", 8000, "0 takes any that is free"),
    ("--fd", [int], "N", [], "bound sockets that it inherits, in place of host and port"),
    ("--api-processes", int, "N", None,
     "processes that speak HTTP; one for about 100,000 tokens/s\n"
     f"(default: {API_PROCESSES}; 1 with --rl-api)"),
    ("--served-model-name", [str], "NAME", [],
     "names that requests may call the model by (default: its own)"),
    ("--root-path", str, "PATH", "", "where a proxy has mounted it, as /llm"),
    ("--ssl-certfile", str, "FILE", None, "certificate for HTTPS, PEM"),
    ("--ssl-keyfile", str, "FILE", None, "its private key, PEM"),
    ("--ssl-keyfile-password", str, "TEXT", None,
     "password of the key; other users of this host can read it here, but not in the "
     "environment variable MEGATRON_ASYNC_SSL_KEYFILE_PASSWORD"),
    ("--allowed-host", list, "NAME", None,
     "a further name in Host headers; may be repeated, * is any\n"
     "(default: localhost and its addresses; any with a --host that others reach)"),
    ("--tool-parser", str, "NAME", None,
     "form of the model's tool calls: qwen3_coder, hermes, mistral, deepseek_v3,\n"
     "deepseek_v31, llama3_json, nemotron_json, harmony, or other servers' names of them\n"
     "(default: by its chat template)"),
    ("--reasoning-parser", str, "NAME", None,
     "the model thinks first, in <think> ... </think>, whatever its template says:\n"
     "deepseek_r1, or nemotron_v3, which may give a thought without content as content;\n"
     "or in harmony's messages (calls, too): harmony"),
    ("--chat-template", str, "TEXT", None, "Jinja text, or @FILE, in place of the model's own"),
    ("--as-megatron", bool, None, False,
     "paths, fields and values of Megatron-Core's server beside ours (docs/megatron.md)"),
    ("--one-event-a-token", bool, None, False,
     "never join tokens of a stream in one event, for clients that count events"),
    ("--no-request-log", bool, None, False, "no line of log for each request"),
    ("--no-page", bool, None, False, "no page for people at /"),
    ("--metrics-names", ("own", "vllm"), None, "own",
     "names in /metrics: our own, or vLLM's beside them"),
    ("--otlp-endpoint", str, "URL", None,
     "collector of OpenTelemetry that spans of requests are sent to, as\n"
     "http://127.0.0.1:4318 (default: OTEL_EXPORTER_OTLP_ENDPOINT, if it is set)"),
)  # fmt: skip
ACCESS: Rows = (
    ("--api-key", list, "KEY", None,
     "a key that requests must have; may be repeated. Other users of this host see it in\n"
     "lists of processes: a file or MEGATRON_ASYNC_API_KEY (keys, with commas) is better"),
    ("--api-key-file", str, "FILE", None,
     "keys, one a line, or NAME KEY; not readable by others (chmod 600)"),
    ("--admin-key", str, "KEY", None,
     "key of control endpoints (pause, drain, sleep, abort, profile), or the variable\n"
     "MEGATRON_ASYNC_ADMIN_KEY; without one they are refused"),
)  # fmt: skip
RL: Rows = (
    ("--rl-api", ("none", "vllm", "sglang"), None, "none",
     "paths of that server by which trainers replace weights, pause and\n"
     "take memory (docs/rl.md)"),
    ("--rl-socket", str, "HOST:PORT", None,
     "a further address, where nobody needs a key and all is allowed: of loopback, or of\n"
     "the network interface of that name, as eth1:9600"),
    ("--weights-dir", str, "FOLDER", None,
     "new weights come from folders below it; replicas of a --coordinator read it in\n"
     "MEGATRON_ASYNC_WEIGHTS_DIR, and trainers, with commas, in MEGATRON_ASYNC_TRAINERS"),
    ("--trainer", list, "HOST[:PORT]", None,
     "a trainer whose process group may be joined; may be repeated"),
    ("--weights-finite", bool, None, False, "refuse new weights with NaN or infinity"),
)  # fmt: skip
LIMITS: Rows = (
    ("--max-unfinished", int, "N", 4096,
     "requests queued and served; further ones are told to come back later (503)"),
    ("--max-tokens-in-flight", int, "N", None,
     "tokens that they may take together, prompts and answers (default: no limit)"),
    ("--max-unfinished-per-key", int, "N", None, "requests of one API key (default: no limit)"),
    ("--max-tokens-per-key", int, "N", None, "tokens in flight of one API key (default: no limit)"),
    ("--default-max-tokens", int, "N", None,
     "most tokens of a chat's answer whose request gives no limit; if the model's\n"
     "max_new_tokens is less, that counts (default: as many as fit; on a CPU 1024)"),
    ("--max-body-mb", float, "MB", 32.0, "of an HTTP request"),
    ON_REPLICA_DEATH,
    ("--policy", str, "NAME", "prefix",
     "which replica serves a request: prefix, least-loaded or round-robin"),
    ("--shutdown-timeout", float, "S", 30.0,
     "how long requests may go on after SIGTERM; 0 aborts them"),
    ("--profile-dir", str, "FOLDER", None, "where profiles go that an administrator asks for"),
)  # fmt: skip


def add_serve(commands: Any, common: argparse.ArgumentParser) -> None:
    """Options of `serve`."""
    serve = commands.add_parser(
        "serve",
        run=run_serve,
        parents=[common],
        help="serve a model over HTTP, in OpenAI's protocol",
        description="Load a model and serve it over HTTP to OpenAI's clients. One SIGTERM or\n"
        "Ctrl-C: finish what is under way and end; two: end at once.",
        epilog=f"""examples:
  {PROGRAM} serve smollm2
  {PROGRAM} serve ./my-llama --host 0.0.0.0 --api-key-file keys.txt --api-processes 2
  {PROGRAM} serve ./my-llama --replicas 4 --served-model-name my-llama gpt-4o
  {PROGRAM} serve --coordinator tcp://10.0.0.5:9500 --secret-file secret
docs/server.md has all of it.""",
    )
    serve.add_argument("model", metavar="MODEL", nargs="?", help=MODEL_HELP)
    add_rows(serve, WHAT)
    add_rows(serve.add_argument_group("HTTP"), HTTP)
    add_rows(serve.add_argument_group("who may use it"), ACCESS)
    add_rows(serve.add_argument_group("trainers"), RL)
    add_rows(serve.add_argument_group("limits"), LIMITS)
    add_engine_options(serve)
    add_parallel(serve, "serve")
    add_rows(serve, [NO_PROGRESS])


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    from megatron_async.observe.log_lines import log_to_stderr, said_line
    from megatron_async.server.supervisor.serve_settings import ServeSettings
    from megatron_async.server.supervisor.service import Supervisor

    # Told here, and not by a replica or an API process after the address is announced.
    check_early(arguments.model, engine_options(arguments), parallel_sizes(arguments))
    settings: ServeSettings = read_settings(arguments)
    log_to_stderr(SUPERVISOR)

    def say(text: str) -> None:
        print(said_line(SUPERVISOR, text), flush=True)

    return Supervisor(settings, say).run()


def read_settings(arguments: argparse.Namespace) -> Any:
    """The `ServeSettings` of a command line.

    Raises:
        ConfigurationError: a value, or two together, cannot work.
    """
    from megatron_async.errors import ConfigurationError
    from megatron_async.server.supervisor.keys import (
        is_open_server,
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
        listener_fds=tuple(arguments.fd),
        needs_key=not (arguments.as_megatron and is_open_server(os.environ)),
        api_processes=_api_processes(arguments),
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
        reasoning_parser=arguments.reasoning_parser,
        chat_template=_template(arguments.chat_template),
        as_megatron=arguments.as_megatron,
        one_event_a_token=arguments.one_event_a_token,
        default_max_tokens=arguments.default_max_tokens,
        page=not arguments.no_page,
        log_requests=not arguments.no_request_log,
        otlp_endpoint=arguments.otlp_endpoint,
        rl_api=arguments.rl_api,
        rl_socket=arguments.rl_socket,
        weights_dir=arguments.weights_dir,
        trainers=tuple(arguments.trainer),
        checks_finite=arguments.weights_finite,
        max_body_bytes=int(arguments.max_body_mb * 2**20),
    )


def _api_processes(arguments: argparse.Namespace) -> int:
    if arguments.api_processes is not None:
        return int(arguments.api_processes)
    return API_PROCESSES if arguments.rl_api == "none" else 1


def _template(given: str | None) -> str | None:
    """A chat template as it was given, or from its file."""
    if given is None or not given.startswith("@"):
        return given
    from pathlib import Path

    from megatron_async.errors import ConfigurationError

    try:
        return Path(given[1:]).read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(f"--chat-template {given} cannot be read: {error}.") from error


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
