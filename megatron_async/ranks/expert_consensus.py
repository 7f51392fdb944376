"""`ExpertConsensus`: the agreement before each step of ranks that share experts, but not requests.

Attention is data-parallel inside an expert-parallel group: each rank schedules its own requests.
But the experts of each rank serve the tokens of all ranks. So all ranks launch each step together,
padded to one shape. As in Megatron-LM #4306 and #4558, the CPUs take a maximum over ZMQ while the
GPU runs the previous step, instead of an all-reduce on the GPU (100 microseconds, and a barrier on
the compute stream).
"""

from __future__ import annotations

import time
from typing import Protocol

from megatron_async.contexts.step_shape import StepShape


class Communicator(Protocol):
    """The methods of `communication.communicator.AsyncZMQCommunicator` that are used here."""

    def sync_all_reduce_max(self, *values: int) -> list[int]:
        """The largest of each over the members; every member must call it."""
        ...

    def has_started(self) -> bool:
        """Whether another member waits in a call that this one has not made yet."""
        ...

    async def started(self) -> None:
        """Wait until another member does; raises RankLost if one died."""
        ...


class ExpertConsensus:
    """One round before each step.

    Args:
        communicator: between the leaders of the group's ranks.

    Attributes:
        any_work: whether a rank had an unfinished request in the last round.
        any_running: whether a rank's engine was neither paused nor suspended in the last round.
        is_stopping: whether this rank's engine shall stop.
        wait_ns: nanoseconds spent in rounds so far.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.any_work = False
        self.any_running = True
        self.is_stopping = False
        self.wait_ns = 0

    def agree(self, wanted: StepShape, has_work: bool) -> StepShape:
        """The shape in which all ranks launch their next step; empty if no rank has a step.

        Args:
            wanted: shape of this rank's step; empty if it has no step to launch.
            has_work: whether this rank has an unfinished request.

        Raises:
            CommunicationTimeout: a rank did not take part in time.
            RankLost: a rank died.
        """
        start = time.perf_counter_ns()
        *shape, work, running = self._communicator.sync_all_reduce_max(
            *wanted, int(has_work), int(not self.is_stopping)
        )
        self.wait_ns += time.perf_counter_ns() - start
        self.any_work, self.any_running = bool(work), bool(running)
        return StepShape(*shape)

    def has_started(self) -> bool:
        """Whether another rank waits for this one."""
        return self._communicator.has_started()

    async def started(self) -> None:
        """Sleep until another rank waits for this one.

        Raises:
            RankLost: a rank died.
        """
        await self._communicator.started()
