"""`megatron-async bench`: how fast a model is served, in this process or by a server."""

from __future__ import annotations

import argparse
import http.client
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from megatron_async.cli.early_checks import check_early
from megatron_async.cli.fields import flag
from megatron_async.cli.files import check_writable
from megatron_async.cli.options import (
    MODEL_HELP,
    NO_PROGRESS,
    PROGRAM,
    Rows,
    add_engine_options,
    add_rows,
    engine_options,
)
from megatron_async.cli.ranks import has_other_ranks
from megatron_async.cli.terminal import importing_engine, raise_interrupts

if TYPE_CHECKING:
    from megatron_async.lab.arrival_trace import TraceRequest
    from megatron_async.lab.trace_server import ServedTrace
    from megatron_async.llm import LLM


def measure_engine(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Serve batches, or many requests at once, by an engine of this process.

    Returns:
        what was measured, in words, and its figures; units stand in the names.
    """
    is_latency = arguments.kind == "latency"
    sigma = 0.0 if is_latency else arguments.length_sigma
    longest_in, longest_out = (
        length if sigma == 0 else 4 * length
        for length in (arguments.input_len, arguments.output_len)
    )
    options = engine_options(arguments)
    check_early(arguments.model, options)

    with importing_engine():
        from megatron_async.lab.arrival_trace import LengthDistribution, poisson_trace
        from megatron_async.llm import LLM

    options.setdefault("max_sequence_length", longest_in + longest_out)
    progress = not arguments.no_progress and sys.stderr.isatty()
    with LLM(arguments.model, dtype=arguments.dtype, progress=progress, **options) as llm:
        raise_interrupts()
        count = arguments.batch_size if is_latency else arguments.num_prompts

        def trace(seed: int, count: int = count) -> list[TraceRequest]:
            return poisson_trace(
                math.inf, count, LengthDistribution(arguments.input_len, longest_in, sigma),
                LengthDistribution(arguments.output_len, longest_out, sigma),
                llm.engine.controller.vocab_size, seed,
            )  # fmt: skip

        where = f"{arguments.model} on {llm.engine.context.device.torch_device}"
        if is_latency:
            served = [_served(llm, trace(arguments.seed), progress, "warm-up")]
            served = [
                _served(llm, trace(arguments.seed + 1 + number), progress, f"batch {number + 1}")
                for number in range(arguments.repeats)
            ]
            title = (
                f"{where}: batches of {count}, {arguments.input_len} tokens in, "
                f"{arguments.output_len} out, {arguments.repeats} times"
            )
        else:
            warm_up = trace(arguments.seed + 1, min(count, 8))
            _served(llm, warm_up, progress, "warm-up")
            served = [_served(llm, trace(arguments.seed), progress, "requests")]
            title = f"{where}: {count} requests at once"
    return title, _figures(served)


def _served(llm: LLM, trace: Sequence[TraceRequest], progress: bool, what: str) -> ServedTrace:
    from tqdm import tqdm

    from megatron_async.lab.trace_server import serve_trace

    with tqdm(
        total=len(trace), unit="request", desc=what, disable=None if progress else True, leave=False
    ) as bar:

        def show(finished: int, tokens: int) -> None:
            bar.set_postfix_str(f"{tokens} tokens", refresh=False)
            bar.update(finished)

        return serve_trace(llm.engine, trace, show)


def _figures(runs: Sequence[ServedTrace]) -> dict[str, Any]:
    from megatron_async.lab.benchmark_record import distribution

    requests = [request for run in runs for request in run.requests]
    seconds = sum(run.duration_s for run in runs)
    steps = sum(run.steps for run in runs)
    return {
        "ttft_ms": distribution(1e3 * r.ttft_s for r in requests),
        "tpot_ms": distribution(1e3 * r.tpot_s for r in requests if r.tpot_s is not None),
        "latency_ms": distribution(1e3 * r.latency_s for r in requests),
        "duration_s": seconds,
        "requests_per_second": len(requests) / seconds,
        "tokens_in_per_second": sum(r.prompt_tokens for r in requests) / seconds,
        "tokens_out_per_second": sum(len(r.tokens) for r in requests) / seconds,
        "overlap_ratio": sum(run.overlap_ratio * run.steps for run in runs) / max(steps, 1),
    }


READY_S = 1800.0
"""A server that loads a large model is waited for so long."""
PROMPT_IDS = 100
"""Prompts are random token ids below it, which every vocabulary has."""


def measure_server(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Send requests to a server, and time what comes back.

    Returns:
        what was measured, in words, and its figures; units stand in the names.

    Raises:
        ValueError: the server does not answer, or not as it should.
    """
    limits = [_limit(text) for text in arguments.goodput]
    url = arguments.url.rstrip("/")
    url = url if url.endswith("/v1") else f"{url}/v1"
    try:
        parts = urlsplit(url)
        is_asked = parts.scheme == "http" and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port, or of brackets
        is_asked = False
    if not is_asked:
        raise ValueError(
            f"URL {arguments.url!r} is not asked: write it as http://HOST:PORT, without a proxy or "
            "TLS between."
        )
    if not (arguments.api_key.isascii() and arguments.api_key.isprintable()):
        raise ValueError("--api-key has what no header may have: give printable ASCII.")
    name = _served_name(url, arguments.api_key, arguments.model)

    from megatron_async.lab.arrival_trace import LengthDistribution, poisson_trace
    from megatron_async.lab.http_trace import AnswerError, HttpReaders, HttpServer

    prompts, outputs = (
        LengthDistribution(mean, 4 * mean, arguments.length_sigma)
        for mean in (arguments.input_len, arguments.output_len)
    )
    seed, count = arguments.seed, arguments.num_prompts
    trace = poisson_trace(arguments.request_rate, count, prompts, outputs, PROMPT_IDS, seed)
    warm_up = poisson_trace(math.inf, min(4, count), prompts, outputs, PROMPT_IDS, seed + 1)
    server = HttpServer(url, name, arguments.api_key, not arguments.new_connections)
    last = trace[-1].arrival_s
    print(f"{len(trace)} requests, the last arrives after {last:.0f} s", file=sys.stderr)
    try:
        with HttpReaders(arguments.client_processes) as readers:
            readers.serve(server, warm_up)
            served, seconds = readers.serve(server, trace, 3600.0 + last, arguments.max_concurrency)
    except AnswerError as error:
        raise ValueError(f"{url}: {error}") from error

    from megatron_async.lab.benchmark_record import distribution

    metrics = {
        "ttft": [1e3 * r.ttft_s for r in served],
        "tpot": [1e3 * (r.tpot_s or 0.0) for r in served],
        "latency": [1e3 * r.latency_s for r in served],
    }
    figures: dict[str, Any] = {
        "ttft_ms": distribution(metrics["ttft"]),
        "tpot_ms": distribution(1e3 * r.tpot_s for r in served if r.tpot_s is not None),
        "itl_ms": distribution(1e3 * gap for r in served for gap in r.gaps_s),
        "latency_ms": distribution(metrics["latency"]),
        "duration_s": seconds,
        "requests_per_second": len(served) / seconds,
        "tokens_in_per_second": sum(r.prompt_tokens for r in served) / seconds,
        "tokens_out_per_second": sum(r.output_tokens for r in served) / seconds,
    }
    if limits:
        good = sum(
            all(metrics[metric][place] <= most for metric, most in limits)
            for place in range(len(served))
        )
        figures["goodput_per_second"] = good / seconds
    rate = "at once" if math.isinf(arguments.request_rate) else f"at {arguments.request_rate:g}/s"
    return f"{name} at {url}: {len(served)} requests {rate}", figures


def _limit(text: str) -> tuple[str, float]:
    """A limit of `--goodput`: metric, and most milliseconds."""
    metric, _, most = text.partition(":")
    try:
        if metric in ("ttft", "tpot", "latency") and float(most) > 0:
            return metric, float(most)
    except ValueError:
        pass
    raise ValueError(
        f"--goodput {text}: write ttft:MS, tpot:MS or latency:MS with a number above 0."
    )


def _served_name(url: str, key: str, wanted: str | None) -> str:
    """The model to ask for: the first that a server names, or the one wanted. A server that loads
    its model (503) is waited for.

    Raises:
        ValueError: the server does not answer, or does not serve the model that is wanted.
    """
    deadline, is_told = time.monotonic() + READY_S, False
    while (answer := _models(url, key))[0] == 503 and time.monotonic() < deadline:
        if not is_told:
            print(f"{url} is not ready yet: waiting", file=sys.stderr, flush=True)
            is_told = True
        time.sleep(1)
    status, body = answer
    try:
        names = [str(each["id"]) for each in json.loads(body)["data"]]
    except (ValueError, LookupError, TypeError):
        names = []
    if status != 200 or not names:
        raise ValueError(
            f"{url}/models was answered with {status} {body[:200].decode(errors='replace')!r}, "
            "not with the models that are served."
        )
    if wanted is not None and wanted not in names:
        raise ValueError(f"--model {wanted}: {url} serves {', '.join(names)}.")
    return wanted or names[0]


def _models(url: str, key: str) -> tuple[int, bytes]:
    """Status and body of a server's list of models."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=10)
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connection.request("GET", f"{parts.path}/models", headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(
            f"{url} does not answer ({error}): is a server there (`{PROGRAM} serve MODEL`)?"
        ) from error
    finally:
        connection.close()


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


PROMPT, ANSWER = "tokens of a prompt, mean", "tokens of an answer, mean"
LATENCY: Rows = (
    ("--batch-size", int, "N", 8, "requests at once"),
    ("--repeats", int, "N", 5, "batches measured"),
    ("--input-len", int, "N", 128, PROMPT),
    ("--output-len", int, "N", 64, ANSWER),
)
MANY: Rows = (
    ("--num-prompts", int, "N", 64, "requests"),
    ("--input-len", int, "N", 256, PROMPT),
    ("--output-len", int, "N", 128, ANSWER),
    (
        "--length-sigma",
        float,
        "X",
        0.6,
        "lengths are lognormal with this deviation; 0 makes all equal",
    ),
)
LOAD: Rows = (
    ("--model", str, "NAME", None, "served name (default: the server's first)"),
    ("--api-key", str, "KEY", "", "if the server wants one"),
    ("--request-rate", float, "R", math.inf,
     "arrivals a second, at random times; inf: all at once"),
    ("--max-concurrency", int, "N", None,
     "no more requests at once; each is timed from when it is sent (default: any)"),
    ("--goodput", [str], "METRIC:MS", [],
     "count requests within limits such as ttft:200 tpot:50 latency:3000"),
    ("--client-processes", int, "N", 1, "that send and read"),
    ("--new-connections", bool, None, False,
     "each request opens a connection (default: they are kept, as OpenAI's client does)"),
)  # fmt: skip
LAST: Rows = (
    ("--seed", int, "N", 0, "of the requests"),
    ("--json", str, "FILE", None, "write all figures, with machine, date and versions"),
)


def add_bench(commands: Any, common: argparse.ArgumentParser) -> None:
    """Options of `bench latency`, `bench throughput` and `bench serve`."""
    bench = commands.add_parser(
        "bench",
        help="how fast a model is served: latency, throughput, load on a server",
        description="Measure how fast a model is served. Requests have random prompts, are greedy\n"
        "and run to their full length. A warm-up comes first and is not counted.",
        epilog=f"""examples:
  {PROGRAM} bench latency smollm2 --batch-size 8 --input-len 128 --output-len 64
  {PROGRAM} bench throughput dummy:llama-3.1-8b --num-prompts 512
  {PROGRAM} bench serve http://127.0.0.1:8000 --request-rate 4 --goodput ttft:200 tpot:50""",
    )
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="KIND")

    def add(kind: str, text: str) -> Any:
        return kinds.add_parser(
            kind,
            parents=[common],
            run=run_bench,
            help=text,
            description=text.capitalize() + ".",
        )

    latency = add("latency", "one batch of equal requests, again and again, in this process")
    throughput = add("throughput", "many requests that all arrive at once, in this process")
    serve = add("serve", "requests that arrive at random at a server of OpenAI's protocol")
    for parser in (latency, throughput):
        parser.add_argument("model", nargs="?", default="smollm2", metavar="MODEL", help=MODEL_HELP)
    serve.add_argument(
        "url", nargs="?", default="http://127.0.0.1:8000", metavar="URL",
        help="of a server: this project's, vLLM's, SGLang's ...",
    )  # fmt: skip
    add_rows(latency, LATENCY)
    add_rows(throughput, MANY)
    add_rows(serve, [*MANY, *LOAD])
    for parser in (latency, throughput, serve):
        add_rows(parser, LAST)
    for parser in (latency, throughput):
        add_engine_options(parser)
        add_rows(parser, [NO_PROGRESS])


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
        from megatron_async.lab.benchmark_record import write_record

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
