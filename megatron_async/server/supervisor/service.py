"""`Supervisor`: start the processes of a service, keep them alive, and end them in order."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec

from megatron_async.cache_folders import SERVICE_VARIABLE
from megatron_async.server.supervisor.devices import share_gpus, visible_gpus
from megatron_async.server.supervisor.keys import without_keys
from megatron_async.server.supervisor.listener import listen, url_of
from megatron_async.server.supervisor.own_coordinator import OwnCoordinator
from megatron_async.server.supervisor.processes import ChildProcess, why_ended
from megatron_async.server.supervisor.serve_settings import (
    ServeSettings,
    api_config,
    curl_line,
    replica_command,
    trainers_address,
)
from megatron_async.server.supervisor.signals import Signals
from megatron_async.serving.engine_verbs import PROFILE_VARIABLE
from megatron_async.serving.weight_sources import FOLDER_VARIABLE, TRAINERS_VARIABLE

logger = logging.getLogger("megatron_async")

TURN_S = 0.25
"""Longest sleep of the loop; signals and ends of children wake it."""
WRITERS_S = 5.0
"""API processes have at most so long to write what is left and end, then they are killed."""
ENDS_S = 6.0
"""Seconds of `--shutdown-timeout`, or a third, for the ends of processes: half of them for
API processes, half for replicas, which have nothing to do by then, to give their devices back."""
OWN_END_S = 1.0
"""Seconds of `--shutdown-timeout`, or a tenth, for this process' own end and its coordinator's."""
SHORTEST_S = 2.0
"""Processes have so long to end, also where requests have no time at all."""
MOST_EARLY_DEATHS = 5
"""An API process that dies as often in a row does not live on this host. Replicas without hope:
each has died as often without having been ready again."""


class Supervisor:
    """A service: one listener, API processes, and, without a coordinator elsewhere, one of its own
    with replicas."""

    def __init__(self, settings: ServeSettings, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._say = say
        self._started = time.monotonic()
        self._stack = ExitStack()
        self._coordinator: OwnCoordinator | None = None
        self._replicas: list[ChildProcess] = []
        self._fronts: list[ChildProcess] = []
        self._vain_starts: Counter[str] = Counter()
        """By replica: starts in a row from which it did not become ready."""
        self._is_announced = False
        self._failure = ""
        self.url = self._rl_url = ""

    def run(self) -> int:
        """Serve until a signal, or until nothing can be served any more.

        Returns:
            the exit status: 0 after SIGTERM or Ctrl-C in order, 1 where something failed for good,
            128 + the signal's number after the second signal.

        Raises:
            ConfigurationError: the address or the devices cannot be had.
        """
        with self._stack, Signals() as signals:
            listeners = self._prepare()
            try:
                for child in (*self._replicas, *self._fronts):
                    child.start()
                settings = self._settings
                what = settings.model or f"the replicas of {settings.coordinator}"
                loading = "" if self._coordinator is None else "; loading the model"
                self._say(f"serving {what} at {self.url}{loading}")
                if self._rl_url:
                    self._say(f"serving trainers, without a key, at {self._rl_url}")
                while not signals.leave and not self._failure:
                    self._turn()
                    signals.wait(self._until_next())
                for listener in listeners:
                    listener.close()  # API processes have it still
                return self._leave(signals)
            finally:
                self._kill_all()

    # ---- Beginning ---------------------------------------------------------------------------

    def _prepare(self) -> list[socket.socket]:
        settings = self._settings
        gpus = visible_gpus(os.environ)
        variables = share_gpus(gpus, settings.replicas, settings.ranks, settings.device)
        listeners = [
            self._stack.enter_context(listen(settings.host, settings.port, fd=fd))
            for fd in settings.listener_fds or (None,)
        ]
        self.url = url_of(listeners[-1], settings.has_tls)
        if settings.is_exposed and not settings.keys:
            logger.warning("Everybody who reaches %s can use the model: no key is set.", self.url)
        if settings.rl_socket is not None:
            host, port = trainers_address(settings.rl_socket)
            listeners.append(self._stack.enter_context(listen(host, port)))
            self._rl_url = url_of(listeners[-1], settings.has_tls)
        # Nobody writes to it: its end tells children that this process has ended.
        pipe, held = os.pipe()
        self._stack.callback(os.close, pipe)
        self._stack.callback(os.close, held)
        environment = without_keys(os.environ)
        if settings.profile_folder is not None:
            environment[PROFILE_VARIABLE] = os.path.abspath(settings.profile_folder)
        if settings.weights_dir is not None:
            environment[FOLDER_VARIABLE] = os.path.abspath(settings.weights_dir)
        if settings.trainers:
            environment[TRAINERS_VARIABLE] = ",".join(settings.trainers)
        address = settings.coordinator
        if address is None:
            self._coordinator = self._stack.enter_context(OwnCoordinator(settings.dispatch))
            address, folder = self._coordinator.address, self._coordinator.folder
            environment[SERVICE_VARIABLE] = str(folder / "choices")
            for number, own in enumerate(variables):
                name = f"replica-{number}"
                arguments = replica_command(settings, name, address, folder)
                self._replicas.append(
                    ChildProcess(
                        name, arguments, pipe, environment={**environment, **own},
                        # A job of ranks has children to end.
                        on_parents_death=signal.SIGTERM if settings.ranks > 1 else signal.SIGKILL,
                    )
                )  # fmt: skip
        config = api_config(settings, address)
        if settings.rl_socket is not None:
            found = listeners[-1].getsockname()[:2]
            config = msgspec.structs.replace(config, rl_address=found)
        for number in range(settings.api_processes):
            fds = [listener.fileno() for listener in listeners]
            arguments = ("api", *map(str, fds))
            named = msgspec.structs.replace(config, name=f"api-{number}")
            given = msgspec.json.encode(named)
            self._fronts.append(
                ChildProcess(f"API process {number}", arguments, pipe, fds, given, environment)
            )
        return listeners

    # ---- Watching ----------------------------------------------------------------------------

    def _turn(self) -> None:
        for child in (*self._fronts, *self._replicas):
            if (status := child.reap()) is not None:
                self._dead(child, status)
            if child.due is not None and time.monotonic() >= child.due:
                child.start()
        if self._coordinator is None:
            return
        if not self._coordinator.is_alive:
            self._failure = "the coordinator has failed"
            return
        there = self._coordinator.ready_replicas()
        for replica in self._replicas:
            # Data-parallel ranks of one job have numbers behind its name.
            joined = replica.name in there or f"{replica.name}-0" in there
            replica.was_ready = replica.was_ready or joined
            if joined and replica.is_alive:
                self._vain_starts[replica.name] = 0
        vain = [self._vain_starts[replica.name] for replica in self._replicas]
        self._coordinator.give_up(min(vain) >= MOST_EARLY_DEATHS)
        if not self._is_announced and all(replica.was_ready for replica in self._replicas):
            self._is_announced = True
            lines = curl_line(self._settings, self.url)
            self._say(f"ready after {time.monotonic() - self._started:.1f} s; try:\n{lines}")

    def _dead(self, child: ChildProcess, status: int) -> None:
        """A child has ended without being asked to."""
        is_front = child in self._fronts
        if not is_front and not child.was_ready:
            # What it could not load it will not load the next time; it has said why.
            self._failure = f"{child.name} cannot be started: {why_ended(status)}"
        elif is_front and child.deaths >= MOST_EARLY_DEATHS:
            self._failure = f"{child.name} has ended {child.deaths} times: {why_ended(status)}"
        else:
            self._vain_starts[child.name] += 1
            delay = child.start_later()
            logger.warning(
                "%s is gone (%s): started again in %.1f s.", child.name, why_ended(status), delay
            )

    def _until_next(self) -> float:
        children = (*self._fronts, *self._replicas)
        due = [child.due for child in children if child.due is not None]
        return min([TURN_S, *(moment - time.monotonic() for moment in due)])

    # ---- Ending ------------------------------------------------------------------------------

    def _leave(self, signals: Signals) -> int:
        """End all in order: nothing new, what is under way, API processes, replicas."""
        if self._failure:
            self._say(f"ended: {self._failure}.")
        else:
            self._say("ending: no new requests; a second signal ends at once.")
        asked, limit_s = signals.leave, self._settings.shutdown_timeout_s
        ends_s = max(min(limit_s / 3, ENDS_S), SHORTEST_S)
        own_s = min(limit_s / 10, OWN_END_S)
        deadline = time.monotonic() + max(limit_s - own_s, ends_s)
        last_of_fronts = deadline - (ends_s / 2 if self._replicas else 0.0)
        if not self._failure and self._coordinator is not None and self._coordinator.drain():
            is_drained = self._wait(signals, asked, deadline - ends_s, self._is_drained)
            if not is_drained and signals.leave == asked:
                self._coordinator.abort_all()  # waiting clients get the reason, and are not cut off
            # What is left is writing.
            last_of_fronts = min(last_of_fronts, time.monotonic() + WRITERS_S)
        # Without an own coordinator it is API processes that refuse what comes.
        self._end(signals, asked, self._fronts, last_of_fronts)
        self._end(signals, asked, self._replicas, deadline)
        if signals.leave > asked:
            return 128 + (signals.last or signal.SIGTERM)
        return 1 if self._failure else 0

    def _is_drained(self) -> bool:
        assert self._coordinator is not None
        stats = self._coordinator.stats
        return stats.get("state") == "draining" and not stats["unfinished_requests"]

    def _end(
        self, signals: Signals, asked: int, children: Sequence[ChildProcess], deadline: float
    ) -> None:
        """Send SIGTERM to these children, and kill those that still run at the deadline."""
        for child in children:
            child.signal(signal.SIGTERM)

        def are_gone() -> bool:
            for child in children:
                child.reap()
            return not any(child.is_alive for child in children)

        if not self._wait(signals, asked, deadline, are_gone):
            why = "a second signal came" if signals.leave > asked else "it has not ended in time"
            for child in children:
                if child.is_alive:
                    logger.warning("%s is killed: %s.", child.name, why)
                    child.signal(signal.SIGKILL)

    def _wait(
        self, signals: Signals, asked: int, deadline: float, is_over: Callable[[], bool]
    ) -> bool:
        """Wait until something is over; False at the deadline, or at a further signal."""
        while not is_over():
            left = deadline - time.monotonic()
            if signals.leave > asked or left <= 0:
                return False
            signals.wait(min(left, 0.1))
        return True

    def _kill_all(self) -> None:
        """End all child processes, whatever happened."""
        children = [child for child in (*self._fronts, *self._replicas) if child.is_alive]
        for child in children:
            child.signal(signal.SIGKILL)
        deadline = time.monotonic() + WRITERS_S
        while any(child.is_alive for child in children) and time.monotonic() < deadline:
            for child in children:
                child.reap()
            time.sleep(0.01)
