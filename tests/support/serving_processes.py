"""Processes of a service for tests: replicas of the tiny model, a coordinator, a client."""

import asyncio
import os
import signal
import threading
import time

from megatron_async import LLM, SamplingParams
from megatron_async.serving.client import CoordinatorClient
from megatron_async.serving.coordinator import Coordinator
from megatron_async.serving.messages import Ended
from megatron_async.serving.readers import TokenLogProbs, TokenReader
from megatron_async.serving.records import CoordinatorConfig
from megatron_async.serving.replica import serve_replica
from tests.support.patience import PATIENCE_S, eventually
from tests.support.ranks import Ranks

ENGINE = {
    "device": "cpu",
    "dtype": "float32",
    "block_size_tokens": 16,
    "num_kv_blocks": 128,
    "max_requests": 8,
}
CONFIG = CoordinatorConfig(ping_interval_s=0.1, silence_s=4.0)
LONG = 400
"""Tokens of a request that is still under way when something happens to its replica."""


def long_sampling(seed: int = 3) -> SamplingParams:
    return SamplingParams(num_tokens_to_generate=LONG, termination_id=-1, seed=seed)


def replica_process(
    address: str, name: str, tensor_model_parallel_size: int = 1, device: str = "cpu"
) -> None:
    options = {"tensor_model_parallel_size": tensor_model_parallel_size, "device": device}
    with LLM("dummy:tiny", **{**ENGINE, **options}) as llm:
        serve_replica(llm, address, "tiny", name)


def coordinator_process(address: str) -> None:
    Coordinator(address, CONFIG).run()


def client_process(address: str, marker: str) -> None:
    """Begin a long stream and never come to its end."""
    with CoordinatorClient(address) as client:
        stream = client.stream([1, 2, 3], long_sampling())
        next(stream)
        with open(marker, "w") as file:
            file.write("streaming")
        time.sleep(60)


class Service:
    """A coordinator in a thread, replicas in processes (each with a GPU of its own if `on_gpus`),
    and a client."""

    def __init__(self, address: str, on_gpus: bool = False) -> None:
        self._on_gpus = on_gpus
        self.coordinator = Coordinator(address, CONFIG)
        self._thread = threading.Thread(target=self.coordinator.run)
        self._thread.start()
        self.address = self.coordinator.address
        self.client = CoordinatorClient(self.address)
        self.processes: dict[str, Ranks] = {}
        self._started = 0

    def names(self) -> set[str]:
        return set(self.client.stats()["replicas"])

    def start(self, ranks: int = 1) -> str:
        """Start a replica of so many tensor-parallel ranks; returns its name when it is there."""
        name = self._begin(ranks)
        eventually(lambda: name in self.names(), f"replica {name}")
        return name

    def _begin(self, ranks: int = 1) -> str:
        name, device = f"r{self._started}", f"cuda:{self._started}" if self._on_gpus else "cpu"
        self._started += 1
        self.processes[name] = Ranks(ranks, replica_process, self.address, name, ranks, device)
        return name

    def have(self, count: int) -> list[str]:
        """Names of exactly so many replicas, started or removed as need be."""
        while len(self.names()) > count:
            self.client.remove_replica(name := min(self.names()))
            self.processes.pop(name).join()
        for _ in range(count - len(self.names())):
            self._begin()
        eventually(lambda: len(self.names()) >= count, f"{count} replicas")
        return sorted(self.names())

    def signal(self, name: str, number: signal.Signals, rank: int = 0) -> None:
        pid = self.processes[name].processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def serving(self) -> str:
        """The replica that has an unfinished request."""
        found = self.client.stats()["replicas"].items()
        return next(name for name, replica in found if replica["unfinished_requests"])

    def close(self) -> None:
        self.client.close()
        for process in self.processes.values():
            for rank in range(process.world_size):
                process.kill(rank)
        self.coordinator.stop()
        self._thread.join(PATIENCE_S)


class KeepingReader(TokenReader):
    """Keeps the tokens and the end that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.got: list[int] = []
        self.end: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()

    def tokens(self, tokens: memoryview, log_probs: TokenLogProbs | None) -> None:
        assert not self.end.done()
        self.got += tokens.tolist()

    def text(self, text: str) -> None:
        raise AssertionError("nobody makes texts here")

    def ended(self, end: Ended) -> None:
        self.end.set_result(end)
