"""`FleetSettings`: what a fleet's application is made of."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from megatron_async.communication.host import is_loopback
from megatron_async.errors import ConfigurationError
from megatron_async.server.api_config import ApiConfig
from megatron_async.server.supervisor.listener import resolve
from megatron_async.serving.routing import make_policy

SMALLEST_BATCH_S = 0.005


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an application is made of.

    Attributes:
        model: as `LLM` takes it.
        engine: further arguments of `LLM`: device, dtype, fields of `InferenceConfig`, and
            `tensor_model_parallel_size` or others that make a replica a job of several ranks.
        name: of the application.
        min_replicas, max_replicas: Ray starts so many, by the queue's length.
        target_ongoing_requests: unfinished requests of a replica that Ray aims at: with more on
            average it starts replicas, with fewer it ends some.
        upscale_delay_s, downscale_delay_s: how long the average must hold.
        max_ongoing_requests: of a replica; what is more waits in the ingress' router.
        shutdown_timeout_s: how long a replica that is to end may finish what it has; what is left
            then is served again by others.
        gpus: of a rank.
        cpus: of a rank, which Ray gives as many OpenMP threads.
        ingresses: HTTP processes.
        port: where each ingress serves HTTP itself, without the manager's proxy; None: only behind
            the proxy. Ingresses on one host share it.
        host: of that port; other hosts reach it only if `api` has keys.
        batch_s: seconds from one batch of a replica's news for one ingress to the next at least.
        policy: which replica serves a request, by a name of `routing.POLICIES`.
        api: keys, names and limits of the HTTP routes. `coordinator` is not used.
        max_retries: times that a request is served again.
        max_unfinished: requests of one ingress; further ones are refused.
    """

    model: str
    engine: dict[str, Any] = {}
    name: str = "megatron-async"
    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: float = 8.0
    upscale_delay_s: float = 5.0
    downscale_delay_s: float = 60.0
    max_ongoing_requests: int = 256
    shutdown_timeout_s: float = 60.0
    gpus: float = 0.0
    cpus: float = 1.0
    ingresses: int = 1
    port: int | None = None
    host: str = "127.0.0.1"
    batch_s: float = 0.005
    policy: str = "prefix"
    api: ApiConfig = ApiConfig(coordinator="")
    max_retries: int = 2
    max_unfinished: int = 4096

    @property
    def ranks(self) -> int:
        """Processes of one replica."""
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
        ranks = 1
        for name in names:
            ranks *= int(self.engine.get(name, 1))
        return ranks

    def check(self) -> None:
        """Raise ConfigurationError for what cannot work."""
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ConfigurationError(
                f"min_replicas={self.min_replicas} must be from 1 to max_replicas="
                f"{self.max_replicas}: the ingress learns of a replica what it serves."
            )
        if self.engine.get("expert_model_parallel_size", 1) != 1:
            raise ConfigurationError(
                "expert_model_parallel_size is not served under Ray: replicas that share experts "
                "need each other, and Ray ends them one by one. Use `megatron-async serve`."
            )
        if self.api.rl_api != "none":
            raise ConfigurationError(
                f"rl_api={self.api.rl_api!r} is not served under Ray, where nobody updates the "
                "weights of all replicas together. Use `megatron-async serve`."
            )
        if self.batch_s < SMALLEST_BATCH_S:
            raise ConfigurationError(
                f"batch_s={self.batch_s} must be {SMALLEST_BATCH_S} or more: a batch costs what "
                "carries it far more than the tokens in it."
            )
        if self.port is not None:
            self._check_port(self.port)
        make_policy(self.policy)

    def _check_port(self, port: int) -> None:
        if not 1 <= port <= 65535:
            raise ConfigurationError(
                f"port={port} must be from 1 to 65535, the same for all ingresses, or None for the "
                "proxy's alone."
            )
        is_exposed = not is_loopback(resolve(self.host, port)[1][0])
        if is_exposed and not self.api.keys:
            raise ConfigurationError(
                f"host={self.host!r} is reached from other hosts, and without a key all of them "
                'could use the model: give api=ApiConfig(keys=...), or host="127.0.0.1".'
            )


# ---- Environment variables of Ray and Ray Serve that cost requests less time (measured on two CPU
# cores, docs/records/ray.md). A variable that is set already stays as it is.

PROCESSES = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_FREEZE_GC_ON_STARTUP": "1",
}
"""Variables of replicas and ingresses, set by `app.build`: as RAY_SERVE_THROUGHPUT_OPTIMIZED
sets them, but its HTTP port. Calls go by gRPC, there are no threads between Ray's code and ours,
and Python's garbage collector leaves the model alone."""

CLUSTER = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1.0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_worker_niceness": "0",
}
"""Variables of Ray's own processes: Serve's controller looks once a second (0.1 s is its default),
Ray's dashboard gets nothing of single calls and processes, and replicas have other processes'
priority (with the niceness of 15 that Ray gives them, a CPU engine's prefill of 150 ms took 7 to 16
ms longer)."""


def process_environment() -> dict[str, str]:
    """Variables of `PROCESSES`, as this process' environment says where it does."""
    return {name: os.environ.get(name, value) for name, value in PROCESSES.items()}


def set_for_cluster() -> None:
    """Set the variables of `CLUSTER` for a Ray that this process starts. Call it before `ray.init`.
    A cluster that is there already must be started with them (`ray start`)."""
    for name, value in CLUSTER.items():
        os.environ.setdefault(name, value)
