"""Values that all ranks of a job exchange, through the store in which they met."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NoReturn

import msgspec
import torch.distributed as dist

from megatron_async.communication.host import list_ranks
from megatron_async.communication.waiting import Wait
from megatron_async.errors import ConfigurationError, RankLost

FAREWELL_S = 1.0
"""Seconds that the process with the store gives the others to read an error before it fails."""

LOOK_EVERY_S = 0.02
"""Seconds between two reads of the store."""
LOOK_RARELY_S = 0.1
"""Seconds between two reads in a long wait: some last as long as another rank serves."""
LONG_S = 10.0
"""Seconds after which a wait counts as long."""


class Failure(msgspec.Struct, frozen=True):
    """Why the job cannot start: one rank found it, all raise it."""

    message: str
    lost: list[int] = []

    def error(self) -> ConfigurationError | RankLost:
        """The exception to raise."""
        return RankLost(self.message, self.lost) if self.lost else ConfigurationError(self.message)


class StoreExchange:
    """All-gathers among ranks, for the start of a job: some 10 ms each, from one thread.

    Args:
        store: which all ranks share; the keys that are used begin with "exchange/".
        rank: this process.
        hosts_store: this process keeps the store, so that it must be the last to go.
    """

    def __init__(self, store: dist.Store, rank: int, hosts_store: bool) -> None:
        self._store = store
        self._rank = rank
        self._hosts_store = hosts_store

    def claim(self, name: str, value: str) -> str:
        """Set this rank's value, unless another process has done so under the same rank.

        Returns:
            the value that is there now.

        Raises:
            RankLost: the store is gone.
        """
        try:
            return str(self._store.compare_set(f"exchange/{name}/{self._rank}", "", value).decode())
        except dist.DistNetworkError as error:
            self._store_is_gone(error)

    def tell(self, name: str, value: str) -> None:
        """Set this rank's value for ranks that look for it with `told`."""
        try:
            self._store.set(f"exchange/{name}/{self._rank}", value)
        except dist.DistNetworkError as error:
            self._store_is_gone(error)

    def told(self, name: str, rank: int) -> str | None:
        """The value of a rank; None where it has told none yet."""
        try:
            is_there = self._store.check([f"exchange/{name}/{rank}"])
            return self.peek(name, rank) if is_there else None
        except dist.DistNetworkError as error:
            self._store_is_gone(error)

    def peek(self, name: str, rank: int) -> str:
        """The value of a rank that is there already."""
        return str(self._store.get(f"exchange/{name}/{rank}").decode())

    def gather(
        self,
        name: str,
        value: str | None,
        ranks: Sequence[int],
        wait: Wait,
        look: Callable[[Collection[int]], None] | None = None,
    ) -> dict[int, str]:
        """Tell `value` (None: it is told already) and wait for the others'.

        Args:
            name: of this exchange; used once.
            value: of this rank.
            ranks: those that take part; all of them call.
            wait: bounds it.
            look: called with the ranks that are there, at each look at the store.

        Returns:
            rank -> value.

        Raises:
            RankLost: the store is gone, or see `Wait`.
            CommunicationTimeout: see `Wait`.
            ConfigurationError: another rank has found that the job cannot start.
        """
        try:
            if value is not None:
                self._store.set(f"exchange/{name}/{self._rank}", value)
            keys = {rank: f"exchange/{name}/{rank}" for rank in ranks}
            self._wait_for(name, keys, wait, look)
            values = self._store.multi_get(list(keys.values()))
            self._store.add(f"exchange/{name}/read", 1)
            while self._hosts_store and self._store.add(f"exchange/{name}/read", 0) < len(ranks):
                # The store ends with this process, which may have nothing else to do.
                time.sleep(min(LOOK_EVERY_S, wait.seconds_to_sleep([])))
        except dist.DistNetworkError as error:
            self._store_is_gone(error)
        return {rank: value.decode() for rank, value in zip(ranks, values)}

    def require_same(self, what: str, values: Mapping[int, Mapping[str, str]]) -> str:
        """The first difference between what ranks say, as a message; "" where there is none."""
        names = list(dict.fromkeys(name for fields in values.values() for name in fields))
        for name in names:
            ranks_by_value: dict[str, list[int]] = {}
            for rank, fields in values.items():
                ranks_by_value.setdefault(fields.get(name, "(not there)"), []).append(rank)
            if len(ranks_by_value) > 1:
                said = ", ".join(
                    f"{value} on {list_ranks(ranks)}" for value, ranks in ranks_by_value.items()
                )
                return (
                    f"The ranks of this job disagree about {what}: {name} is {said}. Start all "
                    "ranks with the same."
                )
        return ""

    def fail(self, failure: Failure, name: str, others: int) -> NoReturn:
        """Raise a failure that the others find by themselves too, or in the store.

        Args:
            failure: of the whole job.
            name: exchange that failed.
            others: ranks that may still want to read it.
        """
        try:
            # The first failure stands: what others see of it is a rank that ends.
            mine = msgspec.json.encode(failure).decode()
            stands = self._store.compare_set("exchange/failure", "", mine)
            failure = msgspec.json.decode(stands, type=Failure)
            self._let_others_read(name, others)
        except dist.DistNetworkError:
            pass  # nobody is left to tell
        raise failure.error()

    def _let_others_read(self, name: str, others: int) -> None:
        until = time.monotonic() + FAREWELL_S
        while self._hosts_store and time.monotonic() < until:
            if self._store.add(f"exchange/{name}/read", 0) >= others:
                return
            time.sleep(0.02)

    def _wait_for(
        self,
        name: str,
        keys: Mapping[int, str],
        wait: Wait,
        look: Callable[[Collection[int]], None] | None,
    ) -> None:
        there: set[int] = set()
        long_from = time.monotonic() + LONG_S
        while True:
            # Not the store's own wait, which prints a warning whenever its time is up.
            if self._store.check(list(keys.values())):
                there.update(keys)
            else:
                there.update(r for r in keys if r not in there and self._store.check([keys[r]]))
            if look is not None:
                look(there)
            if len(there) == len(keys):
                return
            if self._store.check(["exchange/failure"]):
                failure = msgspec.json.decode(self._store.get("exchange/failure"), type=Failure)
                self._store.add(f"exchange/{name}/read", 1)
                self._let_others_read(name, len(keys))
                raise failure.error()
            pause = LOOK_EVERY_S if time.monotonic() < long_from else LOOK_RARELY_S
            time.sleep(min(pause, wait.seconds_to_sleep(keys.keys() - there)))

    def _store_is_gone(self, error: Exception) -> NoReturn:
        raise RankLost(
            f"Rank {self._rank} lost the store of the job's start, which rank 0 (or torchrun on "
            f"its host) keeps: rank 0 has ended. See its output. ({str(error).split(chr(10))[0]})",
            [0],
        ) from error
