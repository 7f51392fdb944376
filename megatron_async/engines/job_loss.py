"""`JobLoss`: an engine gives up when the other ranks of its model are lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy

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

    @contextmanager
    def giving_up(self, group: RankGroup) -> Iterator[None]:
        """Work with the ranks of `group`. If they are lost, fail all requests and inform the
        followers.

        Raises:
            JobFailed: the ranks are lost, or were before.
        """
        self.check()
        try:
            yield
        except JobFailed as error:
            self._error = error
            self._requests.fail_all(error, self._slots)
            group.close(error)
            raise
