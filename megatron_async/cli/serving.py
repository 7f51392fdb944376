"""The commands `coordinator`, `replica` and `replicas`: data-parallel serving."""

from __future__ import annotations

import argparse
import os
import signal
from typing import TYPE_CHECKING, Any

from megatron_async.cli.early_checks import check_early
from megatron_async.cli.options import (
    JSON,
    MODEL_HELP,
    NO_PROGRESS,
    ON_REPLICA_DEATH,
    PROGRAM,
    Rows,
    add_engine_options,
    add_parallel,
    add_rows,
    engine_options,
    metrics_server,
    parallel_sizes,
    port,
)
from megatron_async.cli.output import print_json
from megatron_async.cli.ranks import is_first_rank
from megatron_async.cli.terminal import importing_engine

if TYPE_CHECKING:
    from megatron_async.llm import LLM

ADDRESS = "tcp://127.0.0.1:9500"
COLUMNS = {
    "state": "state",
    "unfinished_requests": "unfinished",
    "unfinished_tokens": "tokens to do",
    "free_blocks": "free blocks",
    "completed_requests": "completed",
}
OF_COORDINATOR = ("--coordinator", str, "ADDRESS", ADDRESS, "its address")
COMMANDS = ("pause", "drain", "move", "resume", "remove")


COORDINATOR: Rows = (
    ON_REPLICA_DEATH,
    ("--policy", str, "NAME", "prefix",
     "which replica serves a request: prefix (one that has served its beginning),\n"
     "least-loaded, or round-robin"),
    ("--max-retries", int, "N", 2, "times that one is served again"),
    ("--max-unfinished", int, "N", 4096, "requests queued and served; further ones are refused"),
    ("--silence-s", float, "S", 8.0, "a replica that answers nothing for so long is lost"),
    ("--stall-s", float, "S", 60.0, "so is one that has work and finishes no step for so long"),
    ("--metrics-port", port, "PORT", None,
     "serve Prometheus metrics at http://127.0.0.1:PORT/metrics"),
)  # fmt: skip


def add_serving(commands: Any, common: argparse.ArgumentParser) -> None:
    """Options of all three."""
    _add_coordinator(commands, common)
    _add_replica(commands, common)
    _add_replicas(commands, common)


def _add_coordinator(commands: Any, common: argparse.ArgumentParser) -> None:
    coordinator = commands.add_parser(
        "coordinator",
        run=run_coordinator,
        parents=[common],
        help="divide requests between replicas",
        description="Take requests of `CoordinatorClient`s and give them to replicas, by load and\n"
        "by shared prefix. Replicas may join and leave at any time. Ctrl-C stops it.",
        epilog=f"""examples:
  {PROGRAM} coordinator
  {PROGRAM} coordinator --bind tcp://0.0.0.0:9500 --on-replica-death fail --metrics-port 9401""",
    )
    coordinator.add_argument(
        "--bind", default=ADDRESS, metavar="ADDRESS",
        help="tcp://HOST:PORT, or ipc://FILE for this host alone. Without a secret every\n"
        "peer that reaches it is served: bind public interfaces only inside a trusted network",
    )  # fmt: skip
    _add_secret(coordinator, "that all peers must have")
    add_rows(coordinator, COORDINATOR)


def _add_replica(commands: Any, common: argparse.ArgumentParser) -> None:
    replica = commands.add_parser(
        "replica",
        run=run_replica,
        parents=[common],
        help="serve what a coordinator sends",
        description="Load a model and serve a coordinator's requests with it. One SIGTERM or\n"
        "Ctrl-C: finish them and end; two: end at once, others serve them again.",
        epilog=f"""examples:
  {PROGRAM} replica smollm2 --name first
  torchrun --nproc-per-node 2 -m megatron_async replica dummy:llama-3.1-8b \\
      --tensor-model-parallel-size 2 --coordinator tcp://head:9500""",
    )
    replica.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_rows(replica, [OF_COORDINATOR])
    _add_secret(replica, "of the coordinator")
    replica.add_argument("--name", help="unique among the replicas (default: host and process id)")
    add_engine_options(replica)
    add_parallel(replica, "replica")
    metrics = (
        "--metrics-port", port, "PORT", None,
        "serve this engine's Prometheus metrics at http://127.0.0.1:PORT/metrics\n"
        "(several replicas in one job: replica 1 at PORT+1, and so on)",
    )  # fmt: skip
    add_rows(replica, [metrics, NO_PROGRESS])


def _add_replicas(commands: Any, common: argparse.ArgumentParser) -> None:
    replicas = commands.add_parser(
        "replicas",
        run=run_replicas,
        parents=[common],
        help="show a coordinator's replicas; pause, drain or remove one",
        description="Show what a coordinator's replicas do, or tell one of them what to do.",
        epilog=f"""examples:
  {PROGRAM} replicas
  {PROGRAM} replicas drain first     # finish what it has, take nothing more
  {PROGRAM} replicas move first      # others go on with what it has
  {PROGRAM} replicas resume first""",
    )
    replicas.add_argument("what", nargs="?", choices=COMMANDS, help="what the replica shall do")
    replicas.add_argument("name", nargs="?", metavar="NAME", help="of the replica")
    add_rows(replicas, [OF_COORDINATOR])
    _add_secret(replicas, "of the coordinator")
    add_rows(replicas, [JSON])


def run_coordinator(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    from megatron_async.observe.log_lines import log_to_stderr
    from megatron_async.serving.coordinator import Coordinator
    from megatron_async.serving.records import CoordinatorConfig
    from megatron_async.serving.routing import make_policy

    config = CoordinatorConfig(
        on_replica_death=arguments.on_replica_death,
        max_retries=arguments.max_retries,
        max_unfinished=arguments.max_unfinished,
        silence_s=arguments.silence_s,
        stall_s=arguments.stall_s,
        policy=make_policy(arguments.policy),
    )
    log_to_stderr("coordinator")
    coordinator = Coordinator(arguments.bind, config, _secret(arguments))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: coordinator.stop())
    print(f"coordinator at {coordinator.address}", flush=True)
    if arguments.metrics_port is None:
        coordinator.run()
    else:
        from megatron_async.serving.metrics import serve_coordinator_metrics

        with serve_coordinator_metrics(coordinator, arguments.metrics_port):
            coordinator.run()
    return 0


def run_replica(arguments: argparse.Namespace) -> int:
    """Serve until the coordinator or a signal ends it."""
    from megatron_async.serving.address import check_address

    options, secret = engine_options(arguments), _secret(arguments)
    check_address(arguments.coordinator)
    check_early(arguments.model, options, parallel_sizes(arguments))

    with importing_engine(says=False):
        from megatron_async.llm import LLM
        from megatron_async.observe.log_lines import log_to_stderr
        from megatron_async.serving.replica import serve_replica

    name, rank = arguments.name or "replica", os.environ.get("RANK")  # torchrun's
    log_to_stderr(name if rank is None else f"{name} rank {rank}")
    options |= parallel_sizes(arguments)
    progress, port = not arguments.no_progress and is_first_rank(), arguments.metrics_port
    with (
        LLM(arguments.model, dtype=arguments.dtype, progress=progress, **options) as llm,
        metrics_server(llm, port),
    ):
        model = _model_name(arguments, llm)
        serve_replica(llm, arguments.coordinator, model, arguments.name, secret)
    return 0


def run_replicas(arguments: argparse.Namespace) -> int:
    """Tell a replica, or show all."""
    from megatron_async.serving.client import CoordinatorClient

    if (arguments.what is None) != (arguments.name is None):
        raise ValueError(f"give both what to do ({', '.join(COMMANDS)}) and a replica's name.")
    with CoordinatorClient(arguments.coordinator, secret=_secret(arguments)) as client:
        if arguments.what is not None:
            getattr(client, f"{arguments.what}_replica")(arguments.name)
        stats = client.stats()
    if arguments.json:
        print_json(stats)
        return 0
    rows = [("replica", *COLUMNS.values())]
    for name, replica in sorted(stats["replicas"].items()):
        rows.append((name, *(str(replica[key]) for key in COLUMNS)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)))
    print(f"{stats['queued_requests']} queued, {stats['retried_requests']} served again so far")
    return 0


def _model_name(arguments: argparse.Namespace, llm: LLM) -> str:
    from megatron_async.models.linear import bits_of_weights

    bits = bits_of_weights(llm.engine.controller.inference_wrapped_model.model)
    kept = f", weights of {' and '.join(map(str, bits))} bits" if bits else ""
    return f"{arguments.model} in {str(llm.dtype).removeprefix('torch.')}{kept}"


def _add_secret(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--secret-file", metavar="FILE",
        help=f"holds the secret {what}; connections are encrypted then",
    )  # fmt: skip


def _secret(arguments: argparse.Namespace) -> bytes | None:
    from megatron_async.serving.secret import read_secret

    return None if arguments.secret_file is None else read_secret(arguments.secret_file)
