"""An application of Ray Serve: our engines as replicas, our HTTP routes as its ingress.

docs/serving.md tells how to run one, and which users may reach what.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from megatron_async.errors import ConfigurationError
from megatron_async.ray.fleet_settings import FleetSettings, process_environment
from megatron_async.serving.records import MOST_SILENCE_S, CoordinatorConfig
from megatron_async.serving.routing import make_policy

try:
    from ray import serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig
    from ray.serve.handle import DeploymentHandle
except ImportError as error:  # pragma: no cover - without the extra there is nothing to test
    raise ConfigurationError(
        f"Ray Serve is missing ({error}): run `pip install 'megatron_async[ray]'`. (Not "
        "ray[llm], which brings another torch.)"
    ) from error

__all__ = ["FleetSettings", "build"]

STATUS_EVERY_S = 1.0
"""How often a replica tells Ray how much it has to do."""


class EngineDeployment:
    """One replica: an engine, and the ranks beside it.

    The last argument of a call names the replica that it is for; "": any."""

    def __init__(self, settings: FleetSettings) -> None:
        from megatron_async.ray.ranks import RayRanks

        self._settings = settings
        context = serve.get_replica_context()
        self._ranks = RayRanks(
            settings.model, settings.engine, settings.ranks, settings.cpus, settings.gpus
        )
        llm = self._ranks.llm
        from megatron_async.ray.replica import FleetReplica

        model = f"{settings.model} in {str(llm.dtype).removeprefix('torch.')}"
        name = context.replica_id.unique_id
        self._replica = FleetReplica(llm.engine, model, name, settings.batch_s)
        info = self._replica.info
        self._replica.info = msgspec.structs.replace(info, ranks=settings.ranks)
        self._running: asyncio.Task[None] | None = None

    def _run(self) -> None:
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._replica.run())

    async def serve(self, data: bytes, _: str) -> AsyncIterator[bytes]:
        """Serve one request of an ingress; see `FleetReplica.serve`."""
        self._run()
        calls = self._replica.serve(data)
        try:
            async for batch in calls:
                yield batch
        finally:
            await calls.aclose()  # type: ignore[attr-defined]

    async def abort(self, number: int, _: str) -> None:
        """End a request."""
        self._replica.abort(number)

    async def update(self, data: bytes, _: str) -> bytes:
        """Do a command of an update of the weights; see `FleetReplica.updated`."""
        self._run()
        return await self._replica.updated(data)

    async def hello(self, _: str) -> bytes:
        """What this replica says of itself, encoded."""
        return self._replica.hello

    async def card(self, _: str) -> bytes:
        """The model card, encoded."""
        return self._replica.card

    async def check_health(self) -> None:
        """Ray asks now and then, and ends a replica that raises."""
        self._run()
        self._ranks.check()
        if self._running is not None and self._running.done():
            await self._running
            raise RuntimeError("the engine's loop has ended")

    async def record_routing_stats(self) -> dict[str, Any]:
        """What Ray hands on to all routers."""
        self._run()
        return self._replica.status()


class _Ingress:
    """The HTTP routes, built in the process that serves them."""

    def __init__(self, settings: FleetSettings) -> None:
        self._settings = settings
        self._app: Any = None
        self._first_card: asyncio.Task[Any] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request of ASGI."""
        if self._app is None:
            self._app = self._make()
        await self._app(scope, receive, send)

    def _make(self) -> Any:
        from megatron_async.ray.client import FleetClient
        from megatron_async.ray.fleet import RayFleet
        from megatron_async.server.answer_stream import StreamHub
        from megatron_async.server.http.asgi_app import AsgiApp, OwnPort, make_app

        settings = self._settings
        handle: DeploymentHandle[Any] = serve.get_deployment_handle("engine", settings.name)
        config = CoordinatorConfig(
            max_retries=settings.max_retries,
            max_unfinished=settings.max_unfinished,
            no_replica_timeout_s=MOST_SILENCE_S,  # Ray starts another one, whatever that takes
            policy=make_policy(settings.policy),
        )
        client, hub = FleetClient(RayFleet(handle, settings.name), config), StreamHub()
        client.after_message = hub.flush
        # Ray's router learns of replicas from its first call on.
        self._first_card = asyncio.get_running_loop().create_task(client.card())
        names = settings.api.served_names or (settings.model,)
        api = msgspec.structs.replace(settings.api, served_names=names)
        app = make_app(client, api, hub)
        if settings.port is None:
            return AsgiApp(app)
        return AsgiApp(app, OwnPort(app, api, settings.host, settings.port))


def build(settings: FleetSettings) -> Any:
    """The application, for `serve.run(build(settings), name=settings.name)`.

    Raises:
        ConfigurationError: the settings cannot work.
    """
    settings.check()
    environment = {"env_vars": process_environment()}
    engine: Any = serve.deployment(
        EngineDeployment,
        name="engine",
        autoscaling_config=AutoscalingConfig(
            min_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            target_ongoing_requests=settings.target_ongoing_requests,
            upscale_delay_s=settings.upscale_delay_s,
            downscale_delay_s=settings.downscale_delay_s,
            metrics_interval_s=1.0,
            look_back_period_s=max(2.0, settings.upscale_delay_s),
        ),
        placement_group_bundles=[{"CPU": settings.cpus, "GPU": settings.gpus}] * settings.ranks,
        placement_group_strategy="PACK",
        ray_actor_options={
            "num_cpus": settings.cpus,
            "num_gpus": settings.gpus,
            "runtime_env": environment,
        },
        max_ongoing_requests=settings.max_ongoing_requests,
        graceful_shutdown_timeout_s=settings.shutdown_timeout_s,
        health_check_period_s=2.0,
        request_router_config=RequestRouterConfig(
            request_router_class="megatron_async.ray.router.NamedRouter",
            request_routing_stats_period_s=STATUS_EVERY_S,
        ),
    )
    ingress: Any = serve.deployment(
        serve.ingress(_Ingress(settings))(),
        name="ingress",
        num_replicas=settings.ingresses,
        ray_actor_options={"num_cpus": 0, "runtime_env": environment},
        max_ongoing_requests=settings.max_unfinished,
        # Streams of its own port may go on so long; by default Ray ends it after 20 s.
        graceful_shutdown_timeout_s=settings.api.shutdown_timeout_s + 5.0,
    )
    return ingress.bind(engine.bind(settings))
