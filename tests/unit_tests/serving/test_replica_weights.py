"""What a rank takes of an update's messages, and what it refuses."""

import asyncio
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_async import LLM
from megatron_async.checkpoints.source import named_tensors
from megatron_async.serving import replica_weights
from megatron_async.serving.replica_weights import ReplicaWeights
from megatron_async.serving.weight_sources import FOLDER_VARIABLE, TRAINERS_VARIABLE
from megatron_async.updates.weight_round import WeightRound
from tests.support.serving_processes import ENGINE

BEGIN = {"number": 1, "version": "v"}
NAME, OTHER = "model.norm.weight", "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("dummy:tiny", **ENGINE) as llm:
        yield llm


@pytest.fixture
def rank(llm: LLM) -> Iterator[ReplicaWeights]:
    found = ReplicaWeights(llm.engine)
    yield found
    told(found, "drop")


NUMBERS = iter(range(1, 1000))


def told(rank: ReplicaWeights, what: str, **fields: Any) -> dict[str, Any]:
    value, failure = asyncio.run(rank.do(f"weights_{what}", fields))
    assert failure is None, failure
    return value


def refused(rank: ReplicaWeights, what: str, **fields: Any) -> str:
    _, failure = asyncio.run(rank.do(f"weights_{what}", fields))
    assert failure is not None
    return failure[1]


def begin(rank: ReplicaWeights, **fields: Any) -> dict[str, Any]:
    return told(rank, "begin", number=next(NUMBERS), round="k", **fields)


def piece(data: int, offset: int = 0, name: str = NAME, dtype: str = "F32", size: int = 64) -> Any:
    return [name, dtype, [size], bytes(data), offset]


def test_what_a_round_takes_is_told_first(rank: ReplicaWeights) -> None:
    plan = begin(rank)
    assert plan["num_bytes"] == plan["spare_bytes"] > 0
    assert "open already" in refused(rank, "begin", number=next(NUMBERS), round="k")


@pytest.mark.parametrize(
    ("messages", "part"),
    [
        ([[piece(100, 0), piece(100, 100)]], "only 200 bytes"),
        ([[piece(100, 0)], [piece(100, 50)]], "in order"),
        ([[piece(100, 8)]], "in order"),
        ([[piece(100, 0), piece(256, 0, OTHER)]], "no other tensor"),
        ([[piece(200, 0), piece(57, 200)]], "in order"),
        ([[piece(0, 0)]], "in order"),
        ([[piece(4, 0, dtype="F8_E4M3")]], "F8_E4M3"),
        ([[piece(4, 0, "model.unheard_of", size=1)]], "unheard_of"),
        ([[piece(4, 0, size=1)]], "shape"),
        ([[piece(4, 0, size=2**47)]], "shape"),
        ([[piece(4, 0, "model.layers.0.self_attn.rotary_emb.inv_freq", size=2**40)]], "larger"),
    ],
)
def test_pieces_that_are_no_tensor_are_refused(
    rank: ReplicaWeights, messages: list[Any], part: str
) -> None:
    begin(rank)
    for message in messages[:-1]:
        told(rank, "load", round="k", tensors=message)
    value, failure = asyncio.run(rank.do("weights_load", {"round": "k", "tensors": messages[-1]}))
    text = failure[1] if failure is not None else refused(rank, "finish", round="k")
    assert part in text
    assert value == {}


def test_folders_and_groups_are_the_administrators(
    rank: ReplicaWeights, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv(TRAINERS_VARIABLE, "trainer:29500")
    for root in (None, str(tmp_path)):
        if root is not None:
            monkeypatch.setenv(FOLDER_VARIABLE, root)
        begin(rank)
        assert "--weights-dir" in refused(rank, "load", round="k", folder="../x")
        told(rank, "drop")
    group = {"name": "g", "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    for address in ("127.0.0.1:1", "trainer:1", "trainer", "trainer:-1", ""):
        assert re.search("--trainer|no port", refused(rank, "group", **group, address=address))
    begin(rank)
    sent = {"name": "g", "names": [NAME], "dtypes": ["F32"], "shapes": [[64]]}
    assert "weights_group" in refused(rank, "load", round="k", group=sent)


def test_a_trainer_that_stays_silent_at_its_group_holds_nothing_up(
    rank: ReplicaWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call and what would come by the group are told the group's name; bytes and another
    try go on."""
    monkeypatch.setenv(TRAINERS_VARIABLE, "127.0.0.1")
    sent = {"name": "g", "names": [NAME], "dtypes": ["F32"], "shapes": [[64]]}

    async def play(port: int) -> None:
        address = {"rank_offset": 1, "world_size": 2, "backend": "gloo"}
        address["address"] = f"127.0.0.1:{port}"
        joining = asyncio.create_task(rank.do("weights_group", {"name": "g", **address}))
        await asyncio.sleep(0)
        for what, fields in (
            ("begin", {"number": next(NUMBERS), "round": "k", "partial": True}),
            ("load", {"round": "k", "tensors": [piece(256)]}),
        ):
            assert (await rank.do(f"weights_{what}", fields))[1] is None
        by_group = asyncio.create_task(rank.do("weights_load", {"round": "k", "group": sent}))
        await asyncio.sleep(0)
        assert (await rank.do("weights_drop", {}))[1] is None
        _, failure = await by_group
        assert failure is not None
        assert "'g' has not met" in failure[1]
        assert not joining.done()
        monkeypatch.setattr(replica_weights, "GROUP_LIMIT_S", 0.1)
        for _ in range(2):
            _, failure = await rank.do("weights_group", {"name": "g", **address})
            assert failure is not None
            assert f"process group 'g' at 127.0.0.1:{port}: cannot be joined" in failure[1]
        assert (await rank.do("weights_group", {"name": "g", "destroy": True}))[1] is None
        silent.close()
        joining.cancel()

    with socket.create_server(("127.0.0.1", 0)) as silent:
        asyncio.run(play(silent.getsockname()[1]))


def test_verbs_without_a_round_are_refused(rank: ReplicaWeights) -> None:
    assert "begin one" in refused(rank, "load", round="k", tensors=[piece(256)])
    assert "begin one" in refused(rank, "finish", round="k")
    assert "no command" in refused(rank, "explode")
    assert told(rank, "drop") == {"is_torn": False}


def test_who_shares_its_memory_is_answered_when_all_ranks_have_read_it(
    llm: LLM, rank: ReplicaWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender's own tensors are read where they are, when they come or, with "direct", at the
    commit. Bytes and the copies of them are the rank's own."""
    events: list[str] = []

    async def until_told() -> None:
        events.append("all ranks")

    class Noting(WeightRound):
        def settle(self) -> None:
            super().settle()
            events.append("settled")

    model = llm.engine.controller.inference_wrapped_model.model
    mine = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
    monkeypatch.setattr(llm.engine.loop.group, "until_told", until_told, raising=False)
    shared = list(mine.items())
    monkeypatch.setattr(replica_weights, "open_handles", lambda handles, device: shared)
    monkeypatch.setattr(replica_weights, "WeightRound", Noting)
    begin(rank)
    told(rank, "load", round="k", tensors=[piece(256)])
    assert events == []
    told(rank, "drop")
    begin(rank, names="megatron", staging="direct")
    told(rank, "load", round="k", handles=[{}])
    assert events == ["all ranks"]
    assert not shared, "let go one by one"

    async def do(what: str, **fields: Any) -> Any:
        answer = asyncio.ensure_future(rank.do(what, fields))
        while not answer.done():
            llm.engine.step_modern()
            await asyncio.sleep(0)
        return answer.result()[1]

    assert asyncio.run(do("weights_finish", round="k")) is None
    weights = {"version": "v", "number": rank.weights.begun}
    assert asyncio.run(do("weights_commit", weights=weights, policy="keep")) is None
    assert events == ["all ranks", "settled", "all ranks"]
