"""`RayRanks`: the ranks of one replica, each in a bundle of the replica's placement group."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatron_async.communication.host import host_identity
from megatron_async.communication.own_folder import FOLDER_VARIABLE, OwnFolder

if TYPE_CHECKING:
    from megatron_async.llm import LLM


def _environment(rank: int, ranks: int, meeting: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would tell a rank. Ray shows each rank its own GPU alone, as number 0."""
    return {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", **meeting}


class RankActor:
    """A rank that is not the first: it does what the first one does."""

    def host(self) -> str:
        """Names this rank's host; see `host_identity`."""
        return host_identity()

    def follow(
        self, environment: Mapping[str, str], model: str, options: Mapping[str, Any]
    ) -> None:
        """Load the model, and serve the first rank until it ends."""
        os.environ.update(environment)
        from megatron_async.llm import LLM
        from megatron_async.serving.replica_weights import follow_weights

        with LLM(model, **options) as llm:
            follow_weights(llm.engine)
            llm.follow()


class RayRanks:
    """Starts the other ranks, then loads the model on this one, the first. `ranks` counts this
    process, too; `cpus` and `gpus` are of each."""

    def __init__(
        self, model: str, options: Mapping[str, Any], ranks: int, cpus: float, gpus: float
    ) -> None:
        self._others: list[Any] = []
        if ranks > 1:
            group = ray.util.get_current_placement_group()
            actors = [_start(group, rank, cpus, gpus) for rank in range(1, ranks)]
            _kept.extend(actors)
            meeting = _meeting(ray.get([actor.host.remote() for actor in actors]))
            for rank, actor in enumerate(actors, 1):
                told = _environment(rank, ranks, meeting)
                self._others.append(actor.follow.remote(told, model, dict(options)))
            os.environ.update(_environment(0, ranks, meeting))
        from megatron_async.llm import LLM

        self.llm: LLM = LLM(model, **options)

    def check(self) -> None:
        """Raise what ended another rank: RayError if it has died, RuntimeError if it has ended."""
        if self._others:
            ended, _ = ray.wait(self._others, timeout=0)
            if ended:
                ray.get(ended)
                raise RuntimeError("a rank of this replica has ended: the replica ends too.")


_kept: list[Any] = []
"""Handles: an actor ends when nobody has one, and so does a folder."""


def _meeting(hosts: list[str]) -> dict[str, str]:
    """Where ranks meet: in a folder if all are on this host, else at a port of it."""
    port = {"MASTER_ADDR": ray.util.get_node_ip_address(), "MASTER_PORT": str(_free_port())}
    if {*hosts} != {host_identity()}:
        return port
    folder = OwnFolder()
    _kept.append(folder)
    atexit.register(folder.close)
    return {**port, FOLDER_VARIABLE: str(folder.path)}


def _start(group: PlacementGroup | None, rank: int, cpus: float, gpus: float) -> Any:
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=rank
    )
    actor: Any = ray.remote(RankActor)
    return actor.options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=strategy).remote()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
