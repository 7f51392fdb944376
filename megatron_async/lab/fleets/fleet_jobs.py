"""`FleetJob`: one fleet and one trace to be simulated, small enough to be sent to a process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_async.config import InferenceConfig
from megatron_async.errors import ConfigurationError
from megatron_async.lab.device_times import Machine
from megatron_async.lab.fleets.fleet import simulate_fleet
from megatron_async.lab.fleets.session_traces import KINDS, SessionTrace
from megatron_async.lab.fleets.trace_files import TraceFile
from megatron_async.lab.fleets.traced_requests import Trace
from megatron_async.lab.model_shape import ModelShape
from megatron_async.serving.routing import POLICIES


@dataclass(frozen=True)
class TraceSource:
    """Where a trace comes from.

    Attributes:
        name: a file, or one of `KINDS`.
        rate: of sessions that are made up, requests a second.
        num_requests: of these.
        seed: of these.
    """

    name: str
    rate: float
    num_requests: int
    seed: int

    def open(self) -> Trace:
        """The trace.

        Raises:
            ConfigurationError: neither a file nor a kind of sessions.
        """
        if self.name in KINDS:
            return SessionTrace(KINDS[self.name], self.rate, self.num_requests, self.seed)
        if not Path(self.name).is_file():
            raise ConfigurationError(
                f"trace {self.name} is neither a file nor one of {', '.join(KINDS)}: give JSON "
                "lines as Mooncake's traces are, or one of these kinds."
            )
        return TraceFile(self.name)


@dataclass(frozen=True)
class FleetJob:
    """What `simulate_fleet` is to be called with.

    Attributes:
        source: of the trace.
        shape: of the model.
        machine: how long everything takes.
        config: of each engine.
        replicas: how many.
        policy: one of `POLICIES`.
    """

    source: TraceSource
    shape: ModelShape
    machine: Machine
    config: InferenceConfig
    replicas: int
    policy: str

    def run(self) -> dict[str, Any]:
        """Figures, with what they are of."""
        policy, config = POLICIES[self.policy](), self.config
        run = simulate_fleet(
            self.source.open(), self.shape, config, self.machine, self.replicas, policy
        )
        return {
            "trace": self.source.name,
            "replicas": self.replicas,
            "policy": self.policy,
            "kv_gb": config.buffer_size_gb,
            "block_size_tokens": config.block_size_tokens,
            "enable_prefix_caching": config.enable_prefix_caching,
            "prefix_caching_mamba_gb": config.prefix_caching_mamba_gb,
            "snapshot_interval": config.prefix_caching_mamba_interval,
            **run.figures(),
        }


def run_jobs(jobs: Sequence[FleetJob], processes: int = 1) -> Iterator[dict[str, Any]]:
    """Figures of each job, in order, as they are there."""
    if processes == 1:
        yield from (job.run() for job in jobs)
        return
    # Not forked: a child of a process with torch's threads may wait for one that it has not.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from pool.map(FleetJob.run, jobs)
