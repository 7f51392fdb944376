"""`DataParallelInferenceCoordinator`: this project's coordinator, as Megatron starts one."""

from __future__ import annotations

import logging
import socket
from typing import Any, Self

from megatron_async.errors import ConfigurationError
from megatron_async.serving.coordinator import Coordinator
from megatron_async.serving.records import CoordinatorConfig

logger = logging.getLogger("megatron_async")


class DataParallelInferenceCoordinator(Coordinator):
    """A `Coordinator` that a client may end (`InferenceClient.shutdown_coordinator`).

    Routing is this project's: by load and shared prefixes (docs/serving.md). Messages are too, so a
    client or an engine of Megatron's own cannot speak with it.
    """

    def __init__(self, address: str, config: CoordinatorConfig | None = None) -> None:
        super().__init__(address, config)
        self.dispatcher.verbs.on_shutdown = self.stop

    @classmethod
    def bound(cls, host: str, port: int | None) -> Self:
        """One at a port of this host (its name or IP address), any without `port`; where that is
        taken, at another, and a warning says so.

        Raises:
            ConfigurationError: no port of the host can be bound.
        """
        try:
            address = socket.gethostbyname(host)
        except OSError as error:
            raise ConfigurationError(
                f"hostname={host!r} has no address ({error}): give a name or an IP address of "
                "this host."
            ) from error
        try:
            return cls(f"tcp://{address}:{'*' if port is None else port}")
        except ConfigurationError as error:
            if port is None:
                raise
            found = cls(f"tcp://{address}:*")
            logger.warning("The coordinator is at %s: %s", found.address, error)
            return found

    @classmethod
    def entrypoint(
        cls,
        pipe_connection: Any,
        ready_event: Any,
        data_parallel_size: int = 0,
        tokenizer: Any = None,
        max_requests: int | None = None,
        inference_coordinator_port: int | None = None,
        deterministic_mode: bool = False,
        hostname: str | None = None,
        **settings: Any,
    ) -> None:
        """Run one in this process until a client ends it; the target of a process, as Megatron's.

        Args:
            pipe_connection: is sent the address, and closed.
            ready_event: is set when clients and engines may come.
            data_parallel_size, tokenizer, max_requests, deterministic_mode: no effect: engines join
                and leave at any time, and tell what they are.
            inference_coordinator_port: wanted; None: any.
            hostname: of this host; None: 127.0.0.1.
            settings: of Megatron's routing, without effect; `schedule_output_path` is refused.

        Raises:
            ConfigurationError: no port can be bound, or a schedule is to be written.
        """
        if settings.get("schedule_output_path") is not None:
            raise ConfigurationError(
                "schedule_output_path is not served: leave it out; which replica served a request "
                "is counted by `megatron-async replicas`."
            )
        coordinator = cls.bound(hostname or "127.0.0.1", inference_coordinator_port)
        pipe_connection.send(coordinator.address)
        pipe_connection.close()
        ready_event.set()
        coordinator.run()
