"""`megatron-async bench serve`: a server of OpenAI's protocol, whosever it is."""

from __future__ import annotations

import argparse
import http.client
import json
import math
import sys
import time
from typing import Any
from urllib.parse import urlsplit

from megatron_async.cli.options import PROGRAM

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

    from megatron_async.profiling.arrival_trace import LengthDistribution, poisson_trace
    from megatron_async.profiling.http_trace import AnswerError, HttpReaders, HttpServer

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

    from megatron_async.profiling.benchmark_record import distribution

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
