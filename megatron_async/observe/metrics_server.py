"""`MetricsServer`: metrics over HTTP, for Prometheus."""

from __future__ import annotations

from types import TracebackType

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector

from megatron_async.errors import ConfigurationError


class MetricsServer:
    """Serves metrics over HTTP until it is closed; a context manager.

    Args:
        collector: reads them when they are scraped, from another thread.
        port: 0 takes a free one.
        host: interface to listen on.

    Attributes:
        port: where it listens.

    Raises:
        ConfigurationError: the port is in use.
    """

    def __init__(self, collector: Collector, port: int, host: str) -> None:
        registry = CollectorRegistry()
        registry.register(collector)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"metrics cannot be served at {host}:{port} ({error}): choose a free port from 1 "
                "to 65535, or 0 to be given one."
            ) from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
