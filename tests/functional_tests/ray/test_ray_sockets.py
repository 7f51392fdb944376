"""Under Ray, which listens everywhere itself, a fleet adds no socket that others reach."""

import os
import urllib.request

import psutil
import pytest

from tests.support.open_sockets import listening, reachable
from tests.support.patience import eventually
from tests.support.ranks import free_port

ray = pytest.importorskip("ray", reason="the extra [ray] is not installed")

OF_RAY = {"ray::ServeReplica:sockets:engine": 2, "ray::ServeReplica:sockets:ingress": 2,
          "ray::RankActor": 1}  # fmt: skip
"""Ports of Ray's own in these processes: one of each worker, and one for calls of Ray Serve."""


def test_a_replica_of_two_ranks_and_an_ingress() -> None:
    from ray import serve

    from megatron_async.ray.app import FleetSettings, build
    from megatron_async.ray.fleet_settings import set_for_cluster

    port = free_port()
    engine = {"device": "cpu", "num_kv_blocks": 64, "tensor_model_parallel_size": 2}
    settings = FleetSettings(
        model="dummy:tiny", engine=engine, name="sockets", min_replicas=1, max_replicas=1, port=port
    )
    set_for_cluster()
    ray.init(num_cpus=6, include_dashboard=False, object_store_memory=100 << 20)
    try:
        serve.start(proxy_location="Disabled")
        serve.run(build(settings), name=settings.name)

        def is_ready() -> bool:
            try:
                return urllib.request.urlopen(f"http://127.0.0.1:{port}/ready").status == 200
            except OSError:
                return False

        eventually(is_ready, "the fleet", 0.3)
        # The cluster's processes are the raylet's children, not ours.
        ours = {}
        for process in psutil.process_iter(["cmdline", "uids"]):
            title = " ".join(process.info["cmdline"] or [])
            for name in OF_RAY:  # a method's name may follow, while it runs
                if title.startswith(name) and process.info["uids"].real == os.getuid():
                    ours[name] = process
        assert ours.keys() == OF_RAY.keys()
        for name, process in ours.items():
            found = listening(process)
            assert len(reachable(found)) == OF_RAY[name], (name, found)
    finally:
        serve.shutdown()
        ray.shutdown()
