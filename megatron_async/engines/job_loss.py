"""`JobLoss`: an engine gives up when the other ranks of its model are lost."""

from __future__ import annotations

from copy import copy
from types import TracebackType

from megatron_async.contexts.request_slots import RequestSlots
from megatron_async.errors import JobFailed
from megatron_async.ranks.rank_group import RankGroup
from megatron_async.requests.request_registry import RequestRegistry


class JobLoss:
    """The error for which an engine gave up, if it has.

    Args:
        slots: the state of requests by slot; requests keep their booked tokens.
        requests: the unfinished requests, which fail with the error.
    """

    def __init__(self, slots: RequestSlots, requests: RequestRegistry) -> None:
        self._slots = slots
        self._requests = requests
        self._error: JobFailed | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the engine has given up."""
        return self._error is not None

    def check(self) -> None:
        """Raise what it gave up for, if it has."""
        if self._error is not None:
            raise copy(self._error) from self._error

    def giving_up(self, group: RankGroup) -> _GivingUp:
        """`with` it around work with the ranks of `group`. If they are lost, all requests fail, and
        the followers are informed.

        Raises:
            JobFailed: the ranks are lost, or were before.
        """
        return _GivingUp(self, group)

    def give_up(self, group: RankGroup, error: JobFailed) -> None:
        """Fail all requests with `error`, and inform the followers."""
        self._error = error
        self._requests.fail_all(error, self._slots)
        group.close(error)


class _GivingUp:
    """No generator of `contextlib`, which takes a microsecond more in each step."""

    __slots__ = ("_group", "_loss")

    def __init__(self, loss: JobLoss, group: RankGroup) -> None:
        self._loss, self._group = loss, group

    def __enter__(self) -> None:
        self._loss.check()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, JobFailed):
            self._loss.give_up(self._group, error)
