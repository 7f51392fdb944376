"""Updates of the weights as a coordinator decides on them: rounds, torn ones, stale replicas."""

from typing import Any

import msgspec
import pytest

from megatron_async.serving.messages import Answer, Ask, Do, Done, Helping, Weights
from megatron_async.serving.weight_fields import MOST_LOAD_BYTES
from tests.unit_tests.serving.told_service import Service, status

COMMITTED = {"step": 3, "epoch": 1}
TENSOR = ["w", "F32", [2], b"\0" * 8]


class Fleet(Service):
    """A service whose replicas do commands when a test says so."""

    def say_verb(self, what: str, **fields: Any) -> list[Answer]:
        self.hear("client", Ask(5, f"weights_{what}", fields=fields))
        return self.answers()

    def answers(self) -> list[Answer]:
        return [m for m in self.take("client") if isinstance(m, Answer)]

    def told(self, name: str) -> list[Do]:
        return [m for m in self.take(name) if isinstance(m, Do)]

    def does(self, what: str, *names: str, value: Any = None, failure: Any = None) -> None:
        """The replicas of `names` were told this alone, and do it."""
        for name in names:
            (do,) = self.told(name)
            assert do.what == f"weights_{what}"
            self.last = do
            self.hear(name, Done(do.number, value or {}, failure))

    def begins(self, *names: str, **fields: Any) -> str:
        assert self.say_verb("begin", version="v1", **fields) == []
        self.does("begin", *names, value={"bytes": 8})
        (answer,) = self.answers()
        assert answer.failure is None
        assert answer.value["replicas"] == {key: {"bytes": 8} for key in names}
        return str(answer.value["round"])

    def loads(self, key: str, *names: str, **fields: Any) -> None:
        self.say_verb("load", round=key, **(fields or {"tensors": [TENSOR]}))
        self.does("load", *names)
        assert self.answers() == [Answer(5, {"replicas": {name: {} for name in names}})]

    def updated(self, *names: str, **fields: Any) -> Answer:
        """A whole round, of a folder."""
        key = self.begins(*names, **fields)
        self.loads(key, *names, folder="step-1")
        self.say_verb("finish", round=key)
        self.does("finish", *names)
        self.does("commit", *names, value=COMMITTED)
        (answer,) = self.answers()
        return answer

    def refused(self, what: str, **fields: Any) -> str:
        (answer,) = self.say_verb(what, **fields)
        assert answer.failure is not None
        assert answer.failure[0] == "ValueError"
        return answer.failure[1]

    def health(self) -> dict[str, Any]:
        self.hear("client", Ask(6, "health"))
        return self.answers()[0].value


def test_a_round_is_staged_everywhere_before_it_is_committed() -> None:
    fleet = Fleet("a", "b")
    key = fleet.begins("a", "b")
    fleet.loads(key, "a", "b")
    assert fleet.say_verb("finish", round=key, version=7) == []
    fleet.does("finish", "a")
    assert fleet.told("a") == [], "b has not staged"
    fleet.does("finish", "b")
    assert fleet.health() == {"state": "running", "replicas": 2}
    fleet.does("commit", "a", "b", value=COMMITTED)
    assert fleet.last.fields["weights"] == {"number": 1, "version": 7}
    assert fleet.last.fields["policy"] == "keep"
    both = {"a": COMMITTED, "b": COMMITTED}
    told = {"version": 7, "number": 1, "replicas": both, "stale": {}}
    assert fleet.answers() == [Answer(5, told)]
    assert fleet.health() == {"state": "running", "replicas": 2, "weight_version": 7}
    assert "no update" in fleet.refused("load", round=key, tensors=[TENSOR])


def test_rolling_commits_one_after_the_other() -> None:
    fleet = Fleet("b", "a")
    key = fleet.begins("a", "b", way="rolling")
    fleet.say_verb("finish", round=key)
    fleet.does("finish", "a", "b")
    fleet.does("commit", "a", value=COMMITTED)
    assert fleet.health()["replicas"] == 2, "the other one serves on with the weights before"
    fleet.does("commit", "b", value=COMMITTED)
    assert fleet.answers()[0].value["stale"] == {}


def test_those_that_share_experts_commit_together() -> None:
    fleet = Fleet()
    fleet.join("c")
    for name in "ab":
        fleet.join(name, shares_experts=True, sharers=2)
    key = fleet.begins("a", "b", "c", way="rolling")
    fleet.say_verb("finish", round=key)
    fleet.does("finish", "a", "b", "c")
    assert fleet.told("c") == []
    fleet.does("commit", "a", "b", value=COMMITTED)
    fleet.does("commit", "c", value=COMMITTED)


@pytest.mark.parametrize("where", ["begin", "load", "finish"])
def test_a_replica_that_fails_fails_the_round_on_all(where: str) -> None:
    fleet = Fleet("a", "b")
    failure = ("UpdateError", "no room")
    if where == "begin":
        fleet.say_verb("begin")
    else:
        key = fleet.begins("a", "b")
        fields = {"tensors": [TENSOR]} if where == "load" else {}
        fleet.say_verb(where, round=key, **fields)
    fleet.does(where, "a", failure=failure)
    fleet.does(where, "b")
    fleet.does("drop", "a", "b")
    (answer,) = fleet.answers()
    assert answer.failure is not None
    assert "a: UpdateError: no room" in answer.failure[1]
    assert fleet.health() == {"state": "running", "replicas": 2}
    fleet.begins("a", "b")


def test_one_that_cannot_commit_is_stale_and_gets_no_requests() -> None:
    fleet = Fleet("a", "b")
    key = fleet.begins("a", "b")
    fleet.loads(key, "a", "b")
    fleet.say_verb("finish", round=key)
    fleet.does("finish", "a", "b")
    fleet.does("commit", "a", value=COMMITTED)
    fleet.does("commit", "b", failure=("RuntimeError", "broken"))
    assert fleet.answers()[0].value["stale"] == {"b": "RuntimeError: broken"}
    health = fleet.health()
    assert (health["replicas"], health["stale"]) == (1, ["b"])
    for number in range(4):
        fleet.ask(number)
    assert fleet.runs("b") == []
    assert fleet.dispatcher.stats()["replicas"]["b"]["state"] == "stale"


def test_a_dead_sender_is_dropped_in_time() -> None:
    fleet = Fleet("a", "b")
    key = fleet.begins("a", "b", time_limit_s=4.0)
    for _ in range(3):  # each message gives it time
        fleet.wait(3.0, alive="a b client")
        fleet.loads(key, "a", "b")
    fleet.wait(3.0, alive="a b client")
    assert fleet.told("a") == []
    fleet.wait(1.5, alive="a b client")
    fleet.does("drop", "a", "b")
    assert "no update" in fleet.refused("finish", round=key)
    assert fleet.health() == {"state": "running", "replicas": 2}


def test_a_load_without_an_end_ends_with_its_round() -> None:
    fleet = Fleet("a")
    key = fleet.begins("a", time_limit_s=2.0)
    fleet.say_verb("load", round=key, tensors=[TENSOR])
    (load,) = fleet.told("a")
    fleet.wait(3.0, alive="a client")
    assert fleet.answers() == []
    fleet.hear("a", Done(load.number, failure=("UpdateError", "dropped")))
    assert "time_limit_s" in fleet.answers()[0].failure[1]


def test_a_replica_killed_in_mid_round_is_not_waited_for_and_comes_back_stale() -> None:
    fleet = Fleet("a", "b")
    key = fleet.begins("a", "b")
    fleet.loads(key, "a", "b", folder="step-1")
    fleet.say_verb("load", round=key, tensors=[TENSOR])
    fleet.does("load", "a")
    fleet.lose("b")
    assert fleet.answers() == [Answer(5, {"replicas": {"a": {}}})]
    fleet.join("b")
    assert fleet.health()["replicas"] == 2, "the weights before still serve"
    fleet.say_verb("finish", round=key)
    fleet.does("finish", "a")
    fleet.does("commit", "a", value=COMMITTED)
    assert fleet.answers()[0].value["replicas"] == {"a": COMMITTED}
    assert fleet.health()["stale"] == ["b"]
    fleet.wait(1.0, alive="a b client")
    assert fleet.told("b") == [], "tensors are not sent twice"
    assert "a partial update" in Fleet().refused("begin", partial=True)
    fleet.begins("a", partial=True)  # b's other weights would be old
    fleet.lose("a")
    assert fleet.health()["state"] == "stale"
    key = fleet.begins("b")
    assert key


def test_all_replicas_of_a_round_are_lost() -> None:
    fleet = Fleet("a")
    key = fleet.begins("a")
    fleet.say_verb("finish", round=key)
    fleet.lose("a")
    assert "lost" in fleet.answers()[0].failure[1]
    fleet.join("a")
    fleet.begins("a")


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_a_restarted_replica_is_brought_up_from_the_last_folder(ends: str) -> None:
    fleet = Fleet("a", "b")
    assert fleet.updated("a", "b", policy="abort").failure is None
    fleet.lose("b")
    fleet.join("b")
    fleet.ask(0)
    assert fleet.runs("b") == []
    fleet.wait(0.5)
    fleet.does("begin", "b")
    fleet.does("load", "b")
    assert fleet.last.fields["folder"] == "step-1"
    fleet.does("finish", "b", failure=None if ends == "well" else ("UpdateError", "gone"))
    if ends == "well":
        fleet.does("commit", "b", value=COMMITTED)
        assert fleet.last.fields["weights"] == {"number": 1, "version": "v1"}
        assert fleet.health() == {"state": "running", "replicas": 2, "weight_version": "v1"}
        return
    fleet.does("drop", "b")
    fleet.wait(1.0, alive="a b client")
    assert fleet.told("b") == [], "it is not tried for ever"
    assert fleet.health()["stale"] == ["b"]
    fleet.updated("a", "b")
    assert "stale" not in fleet.health()


def test_those_that_share_experts_are_brought_up_together() -> None:
    fleet = Fleet("c")
    fleet.updated("c")
    fleet.join("a", shares_experts=True, sharers=2)
    fleet.wait(0.5)
    assert fleet.told("a") == []
    fleet.join("b", shares_experts=True, sharers=2)
    fleet.wait(0.5)
    fleet.does("begin", "a", "b")


def test_a_new_coordinator_takes_the_newest_weights() -> None:
    fleet = Fleet()
    fleet.join("a", Weights(2, "old", 3))
    assert "stale" not in fleet.health()
    fleet.join("b", Weights(3, "new", 3))
    assert fleet.health() == {
        "state": "running", "replicas": 1, "stale": ["a"], "weight_version": "new",
    }  # fmt: skip
    assert fleet.say_verb("begin") == []
    (begin,) = fleet.told("a")
    assert begin.fields["number"] == 4, "no number twice"


def test_a_torn_round_without_a_second_memory_leaves_no_weights() -> None:
    fleet = Fleet("a")
    key = fleet.begins("a", staging="none")
    fleet.loads(key, "a")
    assert fleet.say_verb("drop", round=key) == [Answer(5)]
    fleet.does("drop", "a", value={"is_torn": True})
    assert fleet.health()["state"] == "stale"
    fleet.ask(0)
    kind, text = fleet.failure()
    assert kind == "Overloaded", "503"
    assert "send an update of all" in text
    fleet.updated("a")
    assert fleet.health()["state"] == "running"
    fleet.ask(1)
    assert len(fleet.runs("a")) == 1
    fleet.join("b")
    fleet.take("b")
    fleet.lose("a")  # what is left is stale, and is being brought up
    fleet.ask(2)
    assert fleet.ends("client") == []


def test_a_replica_without_weights_gets_no_requests_until_a_whole_round() -> None:
    fleet = Fleet("a", "b")
    fleet.hear("a", msgspec.structs.replace(status(0), is_torn=True))
    assert fleet.health()["stale"] == ["a"]
    fleet.updated("a", "b")
    assert "stale" not in fleet.health()


def test_a_replica_that_helps_gets_the_weights_of_the_others() -> None:
    fleet = Fleet()
    for name in "ab":
        fleet.join(name, shares_experts=True, sharers=2)
    fleet.hear("b", Helping())
    fleet.updated("a", "b", way="rolling")


def test_a_label_aborts_nothing() -> None:
    fleet = Fleet("a")
    fleet.ask(0)
    fleet.runs("a")
    assert fleet.say_verb("label", version="x") == []
    fleet.does("label", "a")
    assert fleet.answers() == [Answer(5, {"replicas": {"a": {}}})]
    assert fleet.health()["weight_version"] == "x"


def test_sums_are_compared() -> None:
    fleet = Fleet("a", "b")
    for other, is_equal in (("1", True), ("2", False)):
        fleet.say_verb("check")
        fleet.does("check", "a", value={"checksum": "1"})
        fleet.does("check", "b", value={"checksum": other})
        assert fleet.answers()[0].value["is_equal"] is is_equal


def test_ranks_of_a_group_are_counted() -> None:
    fleet = Fleet()
    for name in "ba":
        fleet.join(name, ranks=2)
    group = {"name": "g", "address": "127.0.0.1:1", "rank_offset": 1}
    assert "must be 5 or more" in fleet.refused("group", **group, world_size=4)
    fleet.say_verb("group", **group, world_size=5)
    fleet.does("group", "a")
    assert fleet.last.fields["rank_offset"] == 1
    fleet.does("group", "b")
    assert fleet.last.fields["rank_offset"] == 3
    fleet.answers()
    fleet.join("c")  # late: it cannot hear what the group is sent
    fleet.begins("a", "b", source={"kind": "group", "name": "g"})


def test_a_round_belongs_to_its_key_and_there_is_one() -> None:
    fleet = Fleet("a")
    assert fleet.begins("a", round="mine") == "mine"
    for what in ("load", "finish", "drop"):
        fields = {"tensors": [TENSOR]} if what == "load" else {}
        assert "no update" in fleet.refused(what, round="yours", **fields)
    for what, fields in (("begin", {}), ("check", {}), ("label", {"version": 1})):
        assert "is under way" in fleet.refused(what, **fields)
    info = fleet.say_verb("info")[0].value
    assert info["round"]["stage"] == "loads"
    assert "mine" not in str(info)


@pytest.mark.parametrize(
    ("what", "fields", "part"),
    [
        ("begin", {"staging": "magic"}, "magic"),
        ("begin", {"verison": "x"}, "verison"),
        ("begin", {"version": 1.5}, "version"),
        ("begin", {"round": "x" * 129}, "128"),
        ("begin", {"time_limit_s": float("nan")}, "time_limit_s"),
        ("begin", {"source": {"kind": "pickle"}}, "pickle"),
        ("load", {}, "one of tensors"),
        ("load", {"tensors": [TENSOR], "folder": "x"}, "one of tensors"),
        ("load", {"tensors": [["w", "F32", [-1], b""]]}, "shape|Expected"),
        ("load", {"tensors": [["w", "F32", [2**60], b""]]}, "Expected"),
        ("load", {"tensors": [["w", "F32", [1], "text"]]}, "bytes|Expected"),
        ("load", {"tensors": [["w", "F32", [1], b"\0" * (MOST_LOAD_BYTES + 1)]]}, "in pieces"),
        ("label", {}, "version"),
    ],
)
def test_fields_are_data_and_checked(what: str, fields: dict[str, Any], part: str) -> None:
    fleet = Fleet("a")
    if what == "load":
        fields = {"round": fleet.begins("a"), **fields}
    text = fleet.refused(what, **fields)
    assert any(each in text for each in part.split("|"))
    assert fleet.told("a") == []


def test_bytes_under_way_are_bounded() -> None:
    fleet = Fleet("a")
    key = fleet.begins("a")
    large = [["w", "U8", [MOST_LOAD_BYTES], b"\0" * MOST_LOAD_BYTES]]
    for _ in range(4):
        assert fleet.say_verb("load", round=key, tensors=large) == []
    assert "wait for an answer" in fleet.refused("load", round=key, tensors=large)
    for load in fleet.told("a"):
        fleet.hear("a", Done(load.number))
    assert len(fleet.answers()) == 4
