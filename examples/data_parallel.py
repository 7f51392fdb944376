"""A coordinator, replicas, and a client that asks them: data-parallel serving on one machine.

    python examples/data_parallel.py --model dummy:tiny --replicas 2

On several machines each part is a command: `megatron-async coordinator --bind tcp://0.0.0.0:9500`
on one, `megatron-async replica MODEL --coordinator tcp://HOST:9500` on each (under torchrun, if a
replica takes several GPUs), and the client below anywhere.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter

from megatron_async import SamplingParams
from megatron_async.serving.client import CoordinatorClient

MEGATRON_ASYNC = [sys.executable, "-m", "megatron_async"]


def main() -> None:
    """Start the processes, ask, and end them in order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--address", default="tcp://127.0.0.1:9500")
    parser.add_argument("--prompt", action="append", help="may be repeated")
    arguments = parser.parse_args()
    coordinator = subprocess.Popen([*MEGATRON_ASYNC, "coordinator", "--bind", arguments.address])
    names = [f"replica-{number}" for number in range(arguments.replicas)]
    serve = ["replica", arguments.model, "--no-progress", "--coordinator", arguments.address]
    replicas = [subprocess.Popen([*MEGATRON_ASYNC, *serve, "--name", name]) for name in names]
    try:
        with CoordinatorClient(arguments.address, connect_timeout_s=60) as client:
            while len(client.stats()["replicas"]) < len(names):
                time.sleep(0.2)
            ask(client, arguments.prompt, is_text=not arguments.model.startswith("dummy:"))
            for name in names:
                client.remove_replica(name)
        for replica in replicas:
            replica.wait(60)
    finally:
        for process in (*replicas, coordinator):
            process.terminate()
            process.wait(60)


def ask(client: CoordinatorClient, given: list[str] | None, is_text: bool) -> None:
    """Several prompts at once, and one as a stream."""
    texts = given or ["Once upon a time", "The capital of France is", "The sea is", "One, two,"]
    # A dummy model has no tokenizer: its prompts are token ids.
    prompts = texts if is_text else [[len(text), 7, 9] for text in texts]
    sampling = SamplingParams(temperature=0.0, num_tokens_to_generate=24)
    answers = client.generate(prompts * 2, sampling)
    for prompt, answer in zip(prompts, answers, strict=False):
        print(f"{answer.replica}: {prompt!r} -> {answer.generated_text or answer.generated_tokens}")
    print(f"answers by replica: {dict(Counter(answer.replica for answer in answers))}")
    print("as a stream:", end=" ")
    for chunk in client.stream(prompts[0], sampling):
        print(chunk.text if is_text else chunk.tokens, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
