"""No socket is open to other hosts or users that nobody asked for."""

import os
import socket
from pathlib import Path

import psutil
import pytest

from megatron_async import LLM, SamplingParams
from megatron_async.communication.own_folder import FOLDER_VARIABLE, OwnFolder
from megatron_async.errors import ConfigurationError, RankLost
from megatron_async.models import parallel_state
from megatron_async.models.parallel_state import ParallelSizes, ensure_process_groups
from tests.support.open_sockets import listening, reachable, second_address
from tests.support.patience import PATIENCE_S, eventually
from tests.support.ranks import run_ranks
from tests.support.served import ENGINE, Served

pytestmark = pytest.mark.skipif(
    not Path("/proc/net/tcp").exists(), reason="sockets are listed by Linux's /proc"
)

SIZES = [
    {"tensor_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
    {"expert_model_parallel_size": 2},
]


def open_sockets_of_a_rank(sizes: dict[str, int]) -> tuple[dict[str, list[str]], list[str]]:
    with LLM("dummy:tiny-moe", device="cpu", num_kv_blocks=32, **sizes) as llm:
        params = SamplingParams(num_tokens_to_generate=3, termination_id=-1)
        llm.generate([[1, 2, 3]], params)
        found = listening(psutil.Process())
        return found, reachable(found)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: next(iter(sizes))[:2])
@pytest.mark.parametrize("meets", ["folder", "port"])
def test_ranks_of_one_host_open_nothing_to_others(sizes: dict[str, int], meets: str) -> None:
    if meets == "port" and "tensor_model_parallel_size" not in sizes:
        pytest.skip("the store is the same for all")
    with OwnFolder() as folder:
        environment = {FOLDER_VARIABLE: str(folder.path)} if meets == "folder" else {}
        # As a user's own starter would: a name of this host, which is no loopback address.
        environment |= {"MASTER_ADDR": socket.gethostname()}
        ranks = run_ranks(2, open_sockets_of_a_rank, sizes, environment=environment)
    for found, others in ranks:
        assert others == []
        assert found["tcp"]  # gloo
        assert found["abstract"]  # the bus
        assert found["files"] == found["udp"] == []


def meet_a_stranger() -> str:
    if os.environ["RANK"] == "1":
        parallel_state._word = lambda *_: list(b"a stranger's word")[: parallel_state.WORD_BYTES]
    with pytest.raises((ConfigurationError, RankLost)) as raised:
        ensure_process_groups(ParallelSizes(tensor_model_parallel=2))
    return str(raised.value)


def test_a_stranger_behind_a_connection_of_gloo_is_noticed() -> None:
    texts = run_ranks(2, meet_a_stranger)
    assert "A connection of rank 0 by gloo does not lead to rank 1" in texts[0]


def test_a_model_on_one_rank_opens_nothing() -> None:
    def ports() -> list[str]:
        found = listening(psutil.Process())
        return sorted([*found["tcp"], *found["abstract"]])

    before = ports()
    with LLM("dummy:tiny", device="cpu", num_kv_blocks=32) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(num_tokens_to_generate=2, termination_id=-1))
        assert ports() == before


def test_a_service_of_two_ranks_is_closed_to_others(tmp_path: Path) -> None:
    sizes = ("--tensor-model-parallel-size", "2")
    with Served(tmp_path / "log", "dummy:tiny", *ENGINE, *sizes) as service:
        service.wait_until_ready()
        whole = psutil.Process(service.process.pid)
        found = listening(whole)
        assert reachable(found) == []
        assert f"127.0.0.1:{service.port}" in found["tcp"]
        elsewhere = second_address()
        for place in found["tcp"]:
            port = int(place.rpartition(":")[2])
            if elsewhere is not None:
                with pytest.raises(OSError), socket.create_connection((elsewhere, port), 3):
                    pass
        (starter,) = service.children("ranks")
        ranks = starter.children()
        assert len(ranks) == 2
        ranks[1].kill()
        # Its whole job ends promptly, and another takes its place.
        _, alive = psutil.wait_procs([*ranks, starter], timeout=PATIENCE_S)
        assert not alive
        eventually(lambda: service.children("ranks"), "the replica to be started again")
