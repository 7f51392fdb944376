"""`megatron-async bench`: how fast a model is served, in this process or by a server."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import Any

from megatron_async.cli.bench_engine import measure_engine
from megatron_async.cli.bench_server import measure_server
from megatron_async.cli.fields import flag
from megatron_async.cli.files import check_writable
from megatron_async.cli.options import (
    MODEL_HELP,
    PROGRAM,
    add_dtype,
    add_engine_options,
)
from megatron_async.cli.ranks import has_other_ranks

COLUMNS = ("p50", "p90", "p99", "mean")
MOST = {
    "batch_size": 2**20, "repeats": 2**20, "num_prompts": 2**20, "input_len": 2**24,
    "output_len": 2**24, "max_concurrency": 2**20, "client_processes": 256,
}  # fmt: skip
"""Largest values; the smallest is 1."""
TITLES = {
    "ttft_ms": "first token (TTFT), ms",
    "tpot_ms": "each later token (TPOT), ms",
    "itl_ms": "between two events (ITL), ms",
    "latency_ms": "whole answer, ms",
    "tokens_out_per_second": "generated tokens/s",
}
"""Rows of the table, by key of the figures."""


def add_bench(commands: Any, common: argparse.ArgumentParser, formatter: Any) -> None:
    """Options of `bench latency`, `bench throughput` and `bench serve`."""
    bench = commands.add_parser(
        "bench",
        help="how fast a model is served: latency, throughput, load on a server",
        description="Measure how fast a model is served. Requests have random prompts, are greedy\n"
        "and run to their full length. A warm-up comes first and is not counted.",
        formatter_class=formatter,
        epilog=f"""examples:
  {PROGRAM} bench latency smollm2 --batch-size 8 --input-len 128 --output-len 64
  {PROGRAM} bench throughput dummy:llama-3.1-8b --num-prompts 512
  {PROGRAM} bench serve http://127.0.0.1:8000 --request-rate 4 --goodput ttft:200 tpot:50""",
    )
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="KIND")

    def add(kind: str, text: str) -> Any:
        parser = kinds.add_parser(
            kind, parents=[common], help=text, description=text.capitalize() + ".",
            formatter_class=formatter,
        )  # fmt: skip
        parser.set_defaults(run=run_bench)
        return parser

    latency = add("latency", "one batch of equal requests, again and again, in this process")
    throughput = add("throughput", "many requests that all arrive at once, in this process")
    serve = add("serve", "requests that arrive at random at a server of OpenAI's protocol")
    for parser in (latency, throughput):
        parser.add_argument("model", nargs="?", default="smollm2", metavar="MODEL", help=MODEL_HELP)
    serve.add_argument(
        "url", nargs="?", default="http://127.0.0.1:8000", metavar="URL",
        help="of a server: this project's, vLLM's, SGLang's ...",
    )  # fmt: skip
    latency.add_argument("--batch-size", type=int, default=8, metavar="N", help="requests at once")
    latency.add_argument("--repeats", type=int, default=5, metavar="N", help="batches measured")
    _add_lengths(latency, input_len=128, output_len=64)
    for parser, number in ((throughput, 64), (serve, 64)):
        parser.add_argument("--num-prompts", type=int, default=number, metavar="N", help="requests")
        _add_lengths(parser, input_len=256, output_len=128)
        parser.add_argument(
            "--length-sigma", type=float, default=0.6, metavar="X",
            help="lengths are lognormal with this deviation; 0 makes all equal",
        )  # fmt: skip
    _add_load(serve)
    for parser in (latency, throughput, serve):
        parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the requests")
        parser.add_argument(
            "--json", metavar="FILE", help="write all figures, with machine, date and versions"
        )
    for parser in (latency, throughput):
        engine = parser.add_argument_group("engine")
        add_engine_options(engine)
        add_dtype(engine)
        parser.add_argument("--no-progress", action="store_true", help="no progress bar")


def _add_lengths(parser: Any, input_len: int, output_len: int) -> None:
    parser.add_argument(
        "--input-len", type=int, default=input_len, metavar="N", help="tokens of a prompt, mean"
    )
    parser.add_argument(
        "--output-len", type=int, default=output_len, metavar="N", help="tokens of an answer, mean"
    )


def _add_load(serve: Any) -> None:
    serve.add_argument("--model", metavar="NAME", help="served name (default: the server's first)")
    serve.add_argument("--api-key", default="", metavar="KEY", help="if the server wants one")
    serve.add_argument(
        "--request-rate", type=float, default=math.inf, metavar="R",
        help="arrivals a second, at random times; inf: all at once",
    )  # fmt: skip
    serve.add_argument(
        "--max-concurrency", type=int, metavar="N", help="no more requests at once (default: any)"
    )
    serve.add_argument(
        "--goodput", nargs="+", default=[], metavar="METRIC:MS",
        help="count requests within limits such as ttft:200 tpot:50 latency:3000",
    )  # fmt: skip
    serve.add_argument(
        "--client-processes", type=int, default=1, metavar="N", help="that send and read"
    )
    serve.add_argument(
        "--new-connections", action="store_true",
        help="each request opens a connection (default: they are kept, as OpenAI's client does)",
    )  # fmt: skip


def run_bench(arguments: argparse.Namespace) -> int:
    """Measure, and print the table.

    Raises:
        ValueError: a number out of range, several ranks, a server that does not answer as it
            should.
    """
    if has_other_ranks():
        raise ValueError(
            f"bench runs as one process. For a model of several ranks: `{PROGRAM} serve` on them, "
            f"and `{PROGRAM} bench serve`."
        )
    for name, most in MOST.items():
        if (value := getattr(arguments, name, None)) is not None and not 1 <= value <= most:
            raise ValueError(f"{flag(name)} {value} must be from 1 to {most}.")
    if not 0 <= getattr(arguments, "length_sigma", 0) <= 10:
        raise ValueError(f"--length-sigma {arguments.length_sigma:g} must be from 0 to 10.")
    if not getattr(arguments, "request_rate", math.inf) > 0:  # nan too
        rate = arguments.request_rate
        raise ValueError(f"--request-rate {rate:g} must be above 0 (inf: all at once).")
    if arguments.seed < 0:
        raise ValueError(f"--seed {arguments.seed} must be 0 or more.")
    if arguments.json is not None:
        check_writable("--json", arguments.json)
    measure = measure_server if arguments.kind == "serve" else measure_engine
    title, figures = measure(arguments)
    print(title)
    print("\n".join(table(figures)))
    if arguments.json is not None:
        from megatron_async.profiling.benchmark_record import write_record

        settings = {k: v for k, v in vars(arguments).items() if k not in ("run", "api_key")}
        write_record(arguments.json, f"bench {arguments.kind}", settings, [figures])
    return 0


def table(figures: Mapping[str, Any]) -> list[str]:
    """Lines with a row for each distribution in `figures`, and one for each number."""
    width = max(map(len, TITLES.values()))
    lines = [" " * width + "".join(f"{column:>10}" for column in COLUMNS)]
    for key, title in TITLES.items():
        found = figures.get(key)
        if isinstance(found, Mapping) and found["p50"] is not None:
            lines.append(f"{title:<{width}}" + "".join(f"{found[c]:>10.2f}" for c in COLUMNS))
    for key in ("requests_per_second", "tokens_in_per_second", "tokens_out_per_second",
                "goodput_per_second", "overlap_ratio"):  # fmt: skip
        if isinstance(figures.get(key), float):
            name = key.replace("_per_second", "/s").replace("_", " ")
            lines.append(f"{name:<{width}}{figures[key]:>10.2f}")
    return lines
