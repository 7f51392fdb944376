"""Serve one seeded trace by several engines, in process and over HTTP, and print one table.

    python scripts/benchmarks/compare_engines.py --model dummy:llama-3.1-8b --rate 16 48 inf \\
        --engines ours ours-http vllm vllm-http --vllm-python /path/to/vllm/bin/python

Requests have the same prompts, lengths and arrival times for every engine (lognormal lengths,
Poisson arrivals; `inf`: all at once), are greedy and run to their full length; prefix caches are
off. Each engine serves all rates and seeds in a row, after a warm-up, then goes; rounds of engines
alternate (`--rounds`). TTFT is from a request's arrival by the trace to its first token at the
client, TPOT the mean of a request's later intervals, tokens/s from the trace's start to its end.

| engine | what it is |
| --- | --- |
| ours | `DynamicInferenceEngine.step_modern` in this process' child, tokens read on the host |
| ours-http | `megatron-async serve`, asked by processes of plain sockets |
| vllm | vLLM's AsyncLLM, each request read by a coroutine (`vllm_trace.py`) |
| vllm-http, sglang-http | their servers of OpenAI's protocol |
| NAME=URL | a server that runs already, URL up to and with /v1, asked for --served-model-name |

vLLM and SGLang run in environments of their own (`--vllm-python`, `--sglang-python`). For dummy
models they are given the same shape with random weights, as a folder with `config.json` and the
demo model's tokenizer (or --tokenizer's), of which nothing but its presence matters.
"""

import argparse
import gc
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from child_processes import spawn
from engine_servers import COMMANDS, EngineSettings, model_folder, serving

from megatron_async import LLM
from megatron_async.errors import ConfigurationError
from megatron_async.lab.arrival_trace import LengthDistribution, TraceRequest, poisson_trace
from megatron_async.lab.benchmark_record import distribution, write_record
from megatron_async.lab.http_trace import HttpReaders, HttpServer, TimedRequest
from megatron_async.lab.trace_server import serve_trace

ENGINES = ("ours", "ours-http", "vllm", "vllm-http", "sglang-http")
Served = tuple[list[TimedRequest], float]
BLOCK_SIZE = 64


def traces_of(args: argparse.Namespace, vocab_size: int) -> dict[tuple[float, int], list[Any]]:
    """By rate and seed; the key (0, -1) is the warm-up's."""
    prompts = LengthDistribution(args.prompt_mean, args.max_prompt_tokens)
    outputs = LengthDistribution(args.output_mean, args.max_output_tokens)

    def trace(rate: float, count: int, seed: int) -> list[TraceRequest]:
        return poisson_trace(rate, count, prompts, outputs, vocab_size, seed)

    found = {(0.0, -1): trace(math.inf, args.warmup_requests, max(args.seeds) + 1)}
    for rate in args.rate:
        found |= {(rate, seed): trace(rate, args.num_requests, seed) for seed in args.seeds}
    return found


def serve_ours(args: argparse.Namespace, pipe: Any) -> None:
    """All traces by this engine, in a process of its own."""
    with LLM(args.model, enable_prefix_caching=False, dtype=args.dtype, **_ours(args)) as llm:
        vocabulary = llm.engine.controller.vocab_size
        for key, trace in traces_of(args, vocabulary).items():
            served = serve_trace(llm.engine, trace)
            requests = [
                TimedRequest(r.ttft_s, r.latency_s, r.prompt_tokens, len(r.tokens), 0)
                for r in served.requests
            ]
            pipe.send((key, (requests, served.duration_s)))
    gc.collect()
    pipe.send(None)


def _ours(args: argparse.Namespace) -> dict[str, Any]:
    longest = args.max_prompt_tokens + args.max_output_tokens
    return {
        "device": args.device,
        "max_requests": args.max_requests,
        "max_tokens": args.max_tokens,
        "max_sequence_length": longest,
        "num_kv_blocks": args.max_requests * -(-longest // BLOCK_SIZE),
        "block_size_tokens": BLOCK_SIZE,
        "target_tpot_ms": args.target_tpot_ms,
        "mixed_step_tokens": args.mixed_step_tokens,
        "late_launch": args.late_launch,
        "progress": not args.no_progress,
    }


def serve_vllm(
    args: argparse.Namespace, settings: EngineSettings, traces: dict[Any, list[TraceRequest]]
) -> dict[Any, Served]:
    """All traces by vLLM's AsyncLLM."""
    plain = [
        [[r.arrival_s, r.prompt.tolist(), r.output_tokens] for r in trace]
        for trace in traces.values()
    ]
    job = {"engine": settings.vllm_arguments(), "traces": plain}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        script = Path(__file__).with_name("vllm_trace.py")
        done = subprocess.run([args.vllm_python, script, path], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"vLLM ended with status {done.returncode}: see above.")
    answers = json.loads(done.stdout.splitlines()[-1])
    found: dict[Any, Served] = {}
    for (key, trace), times in zip(traces.items(), answers, strict=True):
        served = [
            TimedRequest(ttft, latency, len(r.prompt), tokens, 0)
            for r, (ttft, latency, tokens) in zip(trace, times, strict=True)
        ]
        found[key] = served, max(r.arrival_s + t.latency_s for r, t in zip(trace, served))
    return found


@contextmanager
def server_of(
    name: str, args: argparse.Namespace, settings: EngineSettings
) -> Iterator[HttpServer]:
    """The server of an engine's name, started and ended where it is one of ours to start."""
    if "=" in name:
        url = name.partition("=")[2]
        yield HttpServer(url, args.served_model_name, args.api_key, not args.new_connections)
        return
    python = {"vllm-http": args.vllm_python, "sglang-http": args.sglang_python}
    with serving(name, python.get(name, sys.executable), settings) as url:
        yield HttpServer(url, args.served_model_name, "", not args.new_connections)


def serve_by(
    name: str,
    args: argparse.Namespace,
    settings: EngineSettings,
    vocabulary: int,
    readers: HttpReaders,
) -> dict[Any, Served]:
    """All traces by one engine; the warm-up's is left out."""
    found: dict[Any, Served] = {}
    traces = traces_of(args, vocabulary)
    if name == "ours":
        process, pipe = spawn(serve_ours, args)
        while (got := pipe.recv()) is not None:
            found[got[0]] = got[1]
        process.join()
    elif name == "vllm":
        found = serve_vllm(args, settings, traces)
    else:
        with server_of(name, args, settings) as server:
            for key, trace in traces.items():
                found[key] = readers.serve(server, trace)
    del found[0.0, -1]
    return found


def figures_of(served: Served) -> dict[str, Any]:
    """Of one trace, JSON-ready."""
    requests, seconds = served
    tokens = sum(r.output_tokens for r in requests)
    return {
        "ttft_ms": distribution(1e3 * r.ttft_s for r in requests),
        "tpot_ms": distribution(1e3 * r.tpot_s for r in requests if r.tpot_s is not None),
        "latency_ms": distribution(1e3 * r.latency_s for r in requests),
        "duration_s": seconds,
        "tokens_out_per_second": tokens / seconds,
    }


def table(figures: Sequence[dict[str, Any]]) -> list[str]:
    """Medians over rounds and seeds, a line for each rate and engine."""
    columns = [("ttft_ms", "p50"), ("ttft_ms", "p99"), ("tpot_ms", "p50"), ("tpot_ms", "p99")]
    lines = [f"{'rate/s':>8}  {'engine':<14}{'TTFT p50':>10}{'p99':>9}{'TPOT p50':>10}{'p99':>9}"
             f"{'tokens/s':>11}{'runs':>6}"]  # fmt: skip
    for rate, engine in dict.fromkeys((row["rate"], row["engine"]) for row in figures):
        rows = [r for r in figures if (r["rate"], r["engine"]) == (rate, engine)]
        cells = [statistics.median(row[metric][at] for row in rows) for metric, at in columns]
        speed = statistics.median(row["tokens_out_per_second"] for row in rows)
        shown = f"{cells[0]:>10.1f}{cells[1]:>9.1f}{cells[2]:>10.2f}{cells[3]:>9.2f}"
        lines.append(f"{rate:>8g}  {engine:<14}{shown}{speed:>11.0f}{len(rows):>6}")
    return lines


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="dummy:smollm2-135m", help="anything that LLM loads")
    add("--engines", nargs="+", default=["ours", "ours-http"], metavar="ENGINE",
        help=f"of {', '.join(ENGINES)}, NAME=URL (default: ours ours-http)")  # fmt: skip
    add("--device", default=None, help="of ours: cpu, cuda or cuda:N (default: the best)")
    add("--dtype", default=None, help="default: float32 on a CPU, else bfloat16")
    add("--tokenizer", metavar="FOLDER",
        help="of dummy models, with a tokenizer.json (default: the demo model's, whose package "
        "must be installed)")  # fmt: skip
    add("--vllm-python", default=sys.executable, help="of an environment with vLLM")
    add("--sglang-python", default=sys.executable, help="of an environment with SGLang")
    add("--served-model-name", default="model", help="of NAME=URL (default: model)")
    add("--api-key", default="", help="of NAME=URL")
    add("--reader-processes", type=int, default=2, help="that send and read HTTP (default 2)")
    add("--new-connections", action="store_true", help="one for each request (default: kept)")
    add("--rate", type=float, nargs="+", default=[8.0, math.inf], help="arrivals a second")
    add("--num-requests", type=int, default=256, help="of a trace (default 256)")
    add("--seeds", type=int, nargs="+", default=[0], help="a trace each (default 0)")
    add("--rounds", type=int, default=1, help="of all engines in turn (default 1)")
    add("--warmup-requests", type=int, default=64, help="all at once (default 64)")
    add("--prompt-mean", type=float, default=256.0, help="tokens (default 256)")
    add("--output-mean", type=float, default=128.0, help="tokens (default 128)")
    add("--max-prompt-tokens", type=int, default=1024, help="default 1024")
    add("--max-output-tokens", type=int, default=512, help="default 512")
    add("--max-requests", type=int, default=256, help="rows of a step (default 256)")
    add("--max-tokens", type=int, default=2048, help="of a step, ours only (default 2048)")
    add("--target-tpot-ms", type=float, default=None, metavar="N",
        help="between two tokens, ours only (default: no target)")  # fmt: skip
    add("--mixed-step-tokens", type=int, metavar="N",
        help="of a step with running requests, ours only (default: measured at start)")  # fmt: skip
    add("--late-launch", action=argparse.BooleanOptionalAction,
        help="launch a step just before the running one ends, ours only (default: on)")  # fmt: skip
    add("--no-progress", action="store_true", help="no bars")
    add("--json", metavar="FILE", help="write the figures as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and, with --json, write the figures."""
    args = build_parser().parse_args(arguments)
    for name in args.engines:
        if name not in ENGINES and "=http" not in name:
            raise ConfigurationError(
                f"--engines {name} is unknown: use {', '.join(ENGINES)} or NAME=URL."
            )
    figures = []
    with tempfile.TemporaryDirectory() as folder, HttpReaders(args.reader_processes) as readers:
        others = any(name in COMMANDS or name == "vllm" for name in args.engines)
        path, vocabulary = model_folder(args.model, Path(folder), others, args.tokenizer)
        settings = EngineSettings(
            model=args.model, folder=path, name=args.served_model_name, dtype=args.dtype,
            device=args.device, max_requests=args.max_requests, max_tokens=args.max_tokens,
            longest=args.max_prompt_tokens + args.max_output_tokens, block_size=BLOCK_SIZE,
            target_tpot_ms=args.target_tpot_ms, mixed_step_tokens=args.mixed_step_tokens,
            late_launch=args.late_launch,
        )  # fmt: skip
        for round_ in range(args.rounds):
            for engine in args.engines:
                found = serve_by(engine, args, settings, vocabulary, readers)
                for (rate, seed), served in found.items():
                    row = {"engine": engine.partition("=")[0], "model": args.model, "rate": rate}
                    row |= {"seed": seed, "round": round_, "requests": len(served[0])}
                    figures.append(row | figures_of(served))
                    print(table(figures[-1:])[1], file=sys.stderr, flush=True)
    figures.sort(key=lambda row: row["rate"])
    print("\n".join(table(figures)))
    if args.json:
        write_record(args.json, "engines", vars(args), figures)


if __name__ == "__main__":
    main()
