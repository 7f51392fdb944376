"""Prometheus metrics of a coordinator; docs/serving.md lists them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megatron_async.observe.metrics_server import MetricsServer
from megatron_async.serving.coordinator import Coordinator
from megatron_async.serving.service_counters import labelled

PREFIX = "megatron_async_coordinator_"
OUTCOMES = ("completed", "failed", "aborted", "retried", "moved", "refused")
TOTALS = {
    "unfinished_requests": "Requests queued or served.",
    "queued_requests": "Requests that no replica has.",
    "clients": "Clients.",
}
OF_REPLICAS = {
    "unfinished_requests": "Requests that a replica has.",
    "unfinished_tokens": "Tokens that they may still need.",
    "free_blocks": "KV blocks that it has left.",
}


class CoordinatorCollector(Collector):
    """All metrics of one coordinator, as they were half a second ago at most."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def collect(self) -> Iterator[Metric]:
        """The metrics."""
        stats: dict[str, Any] = self._coordinator.latest_stats
        yield labelled(
            CounterMetricFamily, PREFIX + "requests", "What became of requests.", ["outcome"],
            [([outcome], stats[f"{outcome}_requests"]) for outcome in OUTCOMES],
        )  # fmt: skip
        yield CounterMetricFamily(
            PREFIX + "prefix_blocks",
            "Blocks of prompts that went to a replica that had served them before.",
            stats["prefix_blocks"],
        )
        for name, text in TOTALS.items():
            yield GaugeMetricFamily(PREFIX + name, text, stats[name])
        replicas = stats["replicas"].items()
        up = [([name, replica["state"]], 1) for name, replica in replicas]
        about = PREFIX + "replica_up", "1 for each replica.", ["replica", "state"]
        yield labelled(GaugeMetricFamily, *about, up)
        for key, text in OF_REPLICAS.items():
            values = [([name], replica[key]) for name, replica in replicas]
            yield labelled(GaugeMetricFamily, PREFIX + "replica_" + key, text, ["replica"], values)


def serve_coordinator_metrics(
    coordinator: Coordinator, port: int, host: str = "127.0.0.1"
) -> MetricsServer:
    """Serve a coordinator's metrics at http://HOST:PORT/metrics, from a thread of its own.

    Raises:
        ConfigurationError: the port is in use.
    """
    return MetricsServer(CoordinatorCollector(coordinator), port, host)
