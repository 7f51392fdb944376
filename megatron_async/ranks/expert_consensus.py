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

from megatron_async.planning.step_plan import StepShape
from megatron_async.ranks.actions import Launch
from megatron_async.ranks.leader import CONFIRMATION_TIMEOUT_S, Leader, failed_alone
from megatron_async.ranks.rank_group import RankGroup
from megatron_async.requests.request_registry import RequestRegistry
from megatron_async.step.text_generation_controller import LaunchedStep


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


class SharedExperts(RankGroup):
    """A leader, and the leaders of other models with which it shares experts: one round of them
    before each step. What this class does not override is the leader's."""

    agrees = True

    def __init__(self, leader: Leader, communicator: Communicator) -> None:
        for name in vars(RankGroup).keys() - vars(SharedExperts).keys():
            if not name.startswith("_"):  # bound once: a call costs no frame more
                setattr(self, name, getattr(leader, name))
        self._leader, self._communicator = leader, communicator
        self._prefill_limit = 0
        self._is_stopping = False
        self.must_keep_up = True

    @override
    def launching(self, step: int, prefill_limit: int) -> int:
        self._prefill_limit = prefill_limit
        return prefill_limit

    @override
    def agree(self, step: int, wanted: StepShape, has_work: bool) -> StepShape:
        start = time.perf_counter_ns()
        *sizes, work, running, self.agreed = self._communicator.sync_all_reduce_max(
            *wanted, int(has_work), int(not self._is_stopping), self.vote
        )
        self.agreement_ns += time.perf_counter_ns() - start
        self.others_work, self.must_keep_up = bool(work), bool(running)
        shape = StepShape(*sizes)
        self._leader.log(Launch(step, shape, self._is_stopping, self._prefill_limit))
        return shape

    @property
    @override
    def others_wait(self) -> bool:
        return self._communicator.has_started()

    @override
    def begin_together(self) -> None:
        self.others_work = True

    @override
    def stop_together(self, is_stopping: bool) -> None:
        self._is_stopping, self.must_keep_up = is_stopping, True

    @override
    async def wait_for_work(self, requests: RequestRegistry) -> None:
        if self._communicator.has_started():
            return
        waits = requests.wait_for_one(), self._communicator.started()
        tasks = [asyncio.ensure_future(wait) for wait in waits]
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
        self._leader.resolving(step)
        if step.error is None:
            return
        # The others wait for this rank in the step's collectives; or one of them died.
        deadline = time.monotonic() + CONFIRMATION_TIMEOUT_S
        while time.monotonic() < deadline:
            self.check_alive()
            time.sleep(1e-3)
        raise failed_alone(step.plan.step, step.error, "others that share its experts")
