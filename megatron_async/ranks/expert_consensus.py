"""`ExpertConsensus`: what ranks agree on before each step that share experts, but not requests.

Attention is data-parallel inside an expert-parallel group: each rank schedules its own requests,
but the experts of one serve the tokens of all, so all launch each step together, padded to one
shape. Megatron-LM #4306 and #4558 replaced an all-reduce on the GPU (100 microseconds, a barrier
on the compute stream besides) by a maximum over ZMQ that the CPUs take while the GPU runs the step
before; so does this.
"""

from __future__ import annotations

import time
from typing import Protocol

from megatron_async.contexts.step_shape import StepShape


class Communicator(Protocol):
    """What it needs of `communication.communicator.AsyncZMQCommunicator`."""

    def sync_all_reduce_max(self, *values: int) -> list[int]:
        """The largest of each over the members; every member must call it."""
        ...

    def has_started(self) -> bool:
        """Whether another member waits in a call that this one has not made yet."""
        ...

    async def started(self) -> None:
        """Until one does; raises RankLost if one died."""
        ...


class ExpertConsensus:
    """One round before each step.

    Args:
        communicator: between the leaders of the group's ranks.

    Attributes:
        any_work: whether a rank had an unfinished request in the last round.
        any_running: whether a rank's engine was neither paused nor suspended in the last round.
        is_stopping: whether this rank's engine is to stop.
        wait_ns: nanoseconds spent in rounds so far.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.any_work = False
        self.any_running = True
        self.is_stopping = False
        self.wait_ns = 0

    def agree(self, wanted: StepShape, has_work: bool) -> StepShape:
        """The shape in which all launch their next step; empty if none has anything to launch.

        Args:
            wanted: of this rank's step; empty if it can launch none of its own.
            has_work: whether it has an unfinished request.

        Raises:
            CommunicationTimeout: a rank did not come.
            RankLost: one died.
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
        """Sleep until one does.

        Raises:
            RankLost: one died.
        """
        await self._communicator.started()
