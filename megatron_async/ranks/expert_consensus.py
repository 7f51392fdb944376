"""`SharedExperts`: a group whose engine steps together with ranks that have other requests.

Attention is data-parallel inside an expert-parallel group: each rank schedules its own requests.
But the experts of each rank serve the tokens of all ranks. So all ranks launch each step together,
padded to one shape. As in Megatron-LM #4306 and #4558, the CPUs take a maximum over ZMQ while the
GPU runs the previous step, instead of an all-reduce on the GPU (100 microseconds, and a barrier on
the compute stream).
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol, override

from megatron_async.contexts.step_shape import StepShape
from megatron_async.ranks.rank_group import (
    CONFIRMATION_TIMEOUT_S,
    ConnectedGroup,
    RankGroup,
    failed_alone,
)
from megatron_async.requests.request_registry import RequestRegistry
from megatron_async.text_generation_controllers.text_generation_controller import LaunchedStep


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
        communicator: as given.
        any_work: whether a rank had an unfinished request in the last round.
        any_running: whether a rank's engine was neither paused nor suspended in the last round.
        is_stopping: whether this rank's engine shall stop.
        wait_ns: nanoseconds spent in rounds so far.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
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
        *shape, work, running = self.communicator.sync_all_reduce_max(
            *wanted, int(has_work), int(not self.is_stopping)
        )
        self.wait_ns += time.perf_counter_ns() - start
        self.any_work, self.any_running = bool(work), bool(running)
        return StepShape(*shape)


class SharedExperts(RankGroup):
    """A leader's group, and the leaders with which it shares experts.

    Args:
        group: of this rank's model; what is said of steps goes to it.
        consensus: with the leaders of the other models.
    """

    agrees = True

    def __init__(self, group: ConnectedGroup, consensus: ExpertConsensus) -> None:
        self._group, self._consensus = group, consensus
        self._prefill_limit = 0
        self.is_alone = group.is_alone
        for name in vars(RankGroup).keys() - vars(SharedExperts).keys():
            if not name.startswith("_"):  # bound once: a call costs no frame more
                setattr(self, name, getattr(group, name))

    @property
    @override
    def agreement_ns(self) -> int:
        return self._consensus.wait_ns

    @override
    def launching(
        self,
        step: int,
        prefill_limit: int,
        shape: StepShape | None = None,
        is_dummy: bool = False,
    ) -> int:
        self._prefill_limit = prefill_limit
        return prefill_limit

    @override
    def agree(self, step: int, wanted: StepShape, has_work: bool) -> StepShape:
        shape, is_dummy = self._consensus.agree(wanted, has_work), self._consensus.is_stopping
        self._group.launching(step, self._prefill_limit, shape, is_dummy)
        return shape

    @property
    @override
    def others_work(self) -> bool:
        return self._consensus.any_work

    @property
    @override
    def others_wait(self) -> bool:
        return self._consensus.communicator.has_started()

    @override
    def begin_together(self) -> None:
        self._consensus.any_work = True

    @override
    def stop_together(self, is_stopping: bool) -> None:
        self._consensus.is_stopping = is_stopping
        self._consensus.any_running = True

    @property
    @override
    def must_keep_up(self) -> bool:
        return self._consensus.any_running

    @override
    async def wait_for_work(self, requests: RequestRegistry) -> None:
        """Until there is a request, or another rank waits for this one."""
        communicator = self._consensus.communicator
        if communicator.has_started():
            return
        tasks = [
            asyncio.ensure_future(wait)
            for wait in (requests.wait_for_one(), communicator.started())
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    @override
    def resolving(self, step: LaunchedStep) -> None:
        self._group.resolving(step)
        if step.error is None:
            return
        # The others wait for this rank in the step's collectives; or one of them died.
        deadline = time.monotonic() + CONFIRMATION_TIMEOUT_S
        while time.monotonic() < deadline:
            self._group.check_alive()
            time.sleep(1e-3)
        raise failed_alone(step.plan.step, step.error, "others that share its experts")
