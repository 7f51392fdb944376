"""Serve a model by Ray Serve: OpenAI's protocol at http://127.0.0.1:8000, until Ctrl-C.

    pip install 'megatron_async[ray]'
    python examples/ray_serve.py smollm2 --replicas 2
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 16}'

The ingress listens there itself, so Ray's HTTP proxy is not started: without it a token is cheaper.
On a cluster: `ray.init(address="auto")`, and gpus=1 of FleetSettings. docs/serving.md: the rest.
"""

import argparse
import logging
import time

import ray
from ray import serve

from megatron_async.ray.app import FleetSettings, build
from megatron_async.ray.fleet_settings import set_for_cluster


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--replicas", type=int, default=1, help="at least so many")
    parser.add_argument("--max-replicas", type=int, help="at most (default: as --replicas)")
    parser.add_argument("--gpus", type=float, default=0.0, help="of each replica")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    settings = FleetSettings(
        model=arguments.model,
        engine={"device": "cuda" if arguments.gpus else "cpu"},
        min_replicas=arguments.replicas,
        max_replicas=arguments.max_replicas or arguments.replicas,
        gpus=arguments.gpus,
        port=arguments.port,
    )
    # Ray's own ports are open to the network, its jobs' too: its token keeps others out, which is
    # on unless RAY_AUTH_MODE says otherwise.
    set_for_cluster()
    ray.init(include_dashboard=False)
    serve.start(proxy_location="Disabled")
    # Ray says that the application is ready at its own proxy's address, and there is no proxy.
    logging.getLogger("ray.serve").addFilter(lambda line: " is ready at " not in line.getMessage())
    serve.run(build(settings), name=settings.name)
    print(f"Serving at http://127.0.0.1:{arguments.port}/v1 (Ctrl-C ends it)", flush=True)
    try:
        while True:
            time.sleep(1)
    except KeyboardInterrupt:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
