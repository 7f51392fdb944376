"""Settings of Ray and Ray Serve, all of them environment variables, that cost requests less time.

What they save was measured on two CPU cores (docs/records/ray.md). A variable that is set already
stays as it is.
"""

from __future__ import annotations

import os

PROCESSES = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_FREEZE_GC_ON_STARTUP": "1",
}
"""Variables of replicas and ingresses, set by `ray_app.build`: as RAY_SERVE_THROUGHPUT_OPTIMIZED
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
