"""`RayRanks`: the ranks of one replica, each in a bundle of the replica's placement group."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

if TYPE_CHECKING:
    from megatron_async.llm import LLM


def _environment(rank: int, ranks: int, address: str, port: int) -> dict[str, str]:
    """What torchrun would tell a rank. Ray shows each rank its own GPU alone, as number 0."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0",
        "MASTER_ADDR": address, "MASTER_PORT": str(port),
    }  # fmt: skip


class RankActor:
    """A rank that is not the first: it does what the first one does."""

    def follow(
        self, environment: Mapping[str, str], model: str, options: Mapping[str, Any]
    ) -> None:
        """Load the model, and serve the first rank until it ends."""
        os.environ.update(environment)
        from megatron_async.llm import LLM

        with LLM(model, **options) as llm:
            llm.follow()


class RayRanks:
    """Starts the other ranks, then loads the model on this one, the first.

    Args:
        model: as `LLM` takes it.
        options: of `LLM`.
        ranks: processes, this one included.
        cpus, gpus: of each.

    Attributes:
        llm: of this rank.
    """

    def __init__(
        self, model: str, options: Mapping[str, Any], ranks: int, cpus: float, gpus: float
    ) -> None:
        self._others: list[Any] = []
        if ranks > 1:
            group = ray.util.get_current_placement_group()
            address, port = ray.util.get_node_ip_address(), _free_port()
            for rank in range(1, ranks):
                actor = _start(group, rank, cpus, gpus)
                told = _environment(rank, ranks, address, port)
                self._others.append(actor.follow.remote(told, model, dict(options)))
                _kept.append(actor)
            os.environ.update(_environment(0, ranks, address, port))
        from megatron_async.llm import LLM

        self.llm: LLM = LLM(model, **options)

    def check(self) -> None:
        """Raise what ended another rank.

        Raises:
            RayError: a rank has died.
            RuntimeError: a rank has ended.
        """
        if self._others:
            ended, _ = ray.wait(self._others, timeout=0)
            if ended:
                ray.get(ended)
                raise RuntimeError("a rank of this replica has ended: the replica ends too.")


_kept: list[Any] = []
"""Handles: an actor ends when nobody has one."""


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
