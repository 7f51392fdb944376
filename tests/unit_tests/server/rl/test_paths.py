"""Paths of vLLM and SGLang for trainers: which verbs of the service each call becomes, and what is
refused by name. The service is a recorder here; tests/functional_tests/server/test_trainers.py has
a real one."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from megatron_async.cli.main import build_parser
from megatron_async.cli.serve import read_settings
from megatron_async.errors import ConfigurationError
from megatron_async.ray.fleet_settings import FleetSettings
from megatron_async.server.answer_stream import StreamHub
from megatron_async.server.api_config import ApiConfig, KeyDigest
from megatron_async.server.http.asgi_app import make_app
from megatron_async.server.supervisor.serve_settings import trainers_address
from megatron_async.updates.transports import open_handles
from tests.support.served_demo import demo_card
from tests.unit_tests.server.rl.test_torch_pickle import OnGpu, arguments, dumped

TRAINER = ("127.0.0.1", 9600)
CONFIG = ApiConfig(
    coordinator="", admin_key=KeyDigest("admin", hashlib.sha256(b"boss").hexdigest()),
    keys=(KeyDigest("user", hashlib.sha256(b"user").hexdigest()),), trainers=("10.0.0.5:29500",),
    rl_round="secret", rl_address=TRAINER, checks_finite=True,
)  # fmt: skip


class Service:
    """Answers verbs as a service of two replicas does, and notes those that change something."""

    after_message = None

    def __init__(self) -> None:
        self.state, self.version, self.round = "running", None, None
        self.unfinished, self.begun, self.told = 0, 0, list[tuple[str, dict[str, Any]]]()

    async def card(self) -> Any:
        return demo_card()

    async def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        if what == "health":
            return {"state": self.state, "replicas": 2}
        if what == "weights_info":
            replicas = {"a": {"ranks": 2}, "b": {"ranks": 2}}
            return {"version": self.version, "round": self.round, "replicas": replicas}
        self.told.append((what, fields))
        match what:
            case "pause" | "drain" | "sleep" | "resume" | "wake":
                self.state = {"pause": "paused", "drain": "draining", "sleep": "sleeping"}.get(
                    what, "running"
                )
            case "weights_begin":
                self.begun += 1
                self.round = {"version": fields["version"], "number": self.begun,
                              "partial": fields.get("partial", False)}  # fmt: skip
                return {"number": self.begun}
            case "weights_drop":
                self.round = None
            case "weights_load" if fields.get("folder") == "torn":
                self.round = None
                raise ValueError("the round is dropped.")
            case "weights_load" if self.round is not None:
                self.round |= {"version": fields.get("version", self.round["version"])}
            case "weights_finish" if self.round is None:
                raise ValueError("there is no round: begin one.")
            case "weights_finish":
                self.version = fields.get("version", self.round["version"])
                self.round = None
            case "weights_check":
                return {"replicas": {"a": {"checksum": "1f"}, "b": {"checksum": "1f"}}}
        unfinished, self.unfinished = self.unfinished, 0
        return {"aborted": 3, "unfinished_requests": unfinished, "replicas": {}}


class Trainer:
    """Calls paths of one family."""

    def __init__(self, family: str, **changes: Any) -> None:
        self.service = Service()
        config = msgspec.structs.replace(CONFIG, rl_api=family, **changes)
        self._app = make_app(self.service, config, StreamHub())  # type: ignore[arg-type]

    def call(
        self,
        path: str,
        body: Any = None,
        method: str = "POST",
        came_to: tuple[str, int] = ("127.0.0.1", 8000),
        **headers: str,
    ) -> tuple[int, Any]:
        """Status and JSON of an answer; by default with the admin key."""
        path, _, query = path.partition("?")
        given = {"host": "localhost", "content-type": "application/json",
                 "authorization": "Bearer boss", **headers}  # fmt: skip
        pairs = [(name.replace("_", "-").encode(), text.encode()) for name, text in given.items()]
        scope = {"type": "http", "method": method, "path": path, "headers": pairs, "state": {},
                 "query_string": query.encode(), "http_version": "1.1",
                 "server": came_to}  # fmt: skip
        sent: list[Any] = []

        async def receive() -> Any:
            return {
                "type": "http.request",
                "body": b"" if body is None else json.dumps(body).encode(),
            }

        async def send(message: Any) -> None:
            sent.append(message)

        asyncio.run(self._app(scope, receive, send))
        return sent[0]["status"], json.loads(sent[1]["body"])

    def done(self, path: str, body: Any = None, method: str = "POST") -> list[Any]:
        """What the service was told by a call that succeeds."""
        self.service.told.clear()
        status, answer = self.call(path, body, method)
        assert status == 200, answer
        return [(what, {name: value for name, value in fields.items() if name != "round"})
                for what, fields in self.service.told]  # fmt: skip


BUCKET = {"names": ["a"], "dtypes": ["torch.bfloat16"], "shapes": [[2, 3]]}
SENT = {"name": "weight_update_group", "names": ["a"], "dtypes": ["BF16"], "shapes": [[2, 3]],
        "packed": False}  # fmt: skip
BEGIN = {"policy": "keep", "checks_finite": True, "selector": "all",
         "source": {"kind": "group", "name": "weight_update_group"}}  # fmt: skip


def test_slimes_calls_are_one_round_of_the_pause() -> None:
    """`update_weight_from_distributed.py` of slime 624b824a, and what it asks beside it."""
    slime = Trainer("sglang")
    group = {"master_address": "10.0.0.5", "master_port": 29500, "rank_offset": 1, "world_size": 5,
             "group_name": "slime-pp_0", "backend": "nccl"}  # fmt: skip
    assert slime.call("/health_generate", method="GET")[0] == 200
    assert slime.done("/init_weights_update_group", group) == [
        ("weights_group", {"name": "slime-pp_0", "address": "10.0.0.5:29500", "rank_offset": 1,
                           "world_size": 5, "backend": "nccl"})
    ]  # fmt: skip
    assert slime.done("/pause_generation", {}) == [("pause", {"mode": "abort"})]
    assert slime.done("/flush_cache", method="GET") == [("reset_prefix_cache", {})]
    bucket = {**BUCKET, "group_name": "slime-pp_0", "flush_cache": False, "weight_version": "7"}
    sent, source = SENT | {"name": "slime-pp_0"}, {"kind": "group", "name": "slime-pp_0"}
    begin = BEGIN | {"version": "7", "partial": False, "source": source}
    load = ("weights_load", {"group": sent, "version": "7"})
    assert slime.done("/update_weights_from_distributed", bucket) == [
        ("weights_begin", begin),
        load,
    ]
    assert slime.done("/update_weights_from_distributed", bucket) == [load]
    message = slime.call("/update_weights_from_distributed", bucket)[1]["message"]
    assert "flush_cache=false has no effect" in message
    assert slime.call("/get_weight_version", method="GET")[1]["weight_version"] == "default"
    assert slime.done("/continue_generation", {}) == [("weights_finish", {}), ("resume", {})]
    assert slime.call("/get_weight_version", method="GET")[1]["weight_version"] == "7"
    assert slime.done("/destroy_weights_update_group", {"group_name": "slime-pp_0"})
    assert slime.done("/abort_request", {"abort_all": True}) == [("abort", {"all": True})]
    assert slime.done("/abort_request", {"rid": "x"}) == [("abort", {"label": "x"})]


def test_slimes_colocated_engine_gives_its_memory_to_the_trainer() -> None:
    slime, both = Trainer("sglang"), {"tags": ["weights", "kv_cache"]}
    assert slime.done("/release_memory_occupation", {}) == [("sleep", both)]
    assert slime.done("/resume_memory_occupation", {"tags": ["cuda_graph"]}) == []
    slime.service.state = "sleeping"
    assert slime.done("/pause_generation", {}) == [("abort", {"all": True})]
    sent = base64.b64encode(dumped([("a", OnGpu(*arguments((2, 3))))])).decode()
    body = {"serialized_named_tensors": [sent, sent], "weight_version": "8"}
    (_, begin), (what, load) = slime.done("/update_weights_from_tensor", body)
    assert begin["source"] == {"kind": "ipc"}
    assert what == "weights_load"
    tensor = ["a", "BF16", [2, 3], [3, 1], 0, 0]
    assert [each["tensors"] for each in load["handles"]] == [[tensor], [tensor]]
    assert load["handles"][0]["memories"][0][:4] == [3, b"h" * 64, 4096, 512]
    body["serialized_named_tensors"] = [sent] * 3
    assert "tensors of 3 ranks" in slime.call("/update_weights_from_tensor", body)[1]["message"]
    assert slime.done("/continue_generation", {}) == [("weights_finish", {})]  # and sleeps on
    assert slime.done("/resume_memory_occupation", both) == [("wake", both)]
    assert slime.done("/resume_memory_occupation", {}) == [("wake", {})]


def test_handles_are_opened_as_they_were_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the pickle to tensors, where memory of this process stands for a GPU's."""
    values = torch.arange(64, dtype=torch.float32)
    opened: list[Any] = []

    def open_memory(*fields: Any) -> Any:
        opened.append(fields)
        return values.untyped_storage()

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_memory)
    sglang, other = Trainer("sglang"), (1, 4)
    tensors = [
        ("a", OnGpu(*arguments((3, 4), torch.float32, offset=8))),
        ("b", OnGpu(*arguments(**{"shape": (4, 3), "stride": other, "dtype": torch.float32}))),
    ]
    body = {"serialized_named_tensors": [base64.b64encode(dumped(tensors)).decode()]}
    sglang.service.state = "paused"
    load = sglang.done("/update_weights_from_tensor", body)[1][1]
    found = dict(open_handles(load["handles"][0], torch.device("cuda")))
    assert opened == [(3, b"h" * 64, 4096, 512, b"/torch_1_2_3", 7, b"e" * 64, True)]
    assert found["a"].tolist() == values[8:20].view(3, 4).tolist()
    assert found["b"].tolist() == values[:12].view(3, 4).T.tolist()


def test_a_bucket_beside_pause_and_session_is_a_round_of_its_own() -> None:
    sglang = Trainer("sglang")
    sglang.service.version = "1"
    told = sglang.done("/update_weights_from_distributed", BUCKET | {"abort_all_requests": True})
    begin = BEGIN | {"version": "1", "partial": True, "policy": "abort"}
    load = ("weights_load", {"group": SENT})
    assert told == [("weights_begin", begin), load, ("weights_finish", {})]
    sglang.service.round = {"version": "1", "number": 1, "partial": True}
    told = sglang.done("/update_weights_from_distributed", BUCKET | {"abort_all_requests": True})
    assert told == [  # after a process that has died in the middle of one
        ("weights_drop", {}), ("weights_begin", begin), load, ("weights_finish", {}),
    ]  # fmt: skip
    assert sglang.done("/pause_generation", {"mode": "retract"}) == [("pause", {"mode": "keep"})]
    told = sglang.done("/update_weights_from_distributed", BUCKET)
    assert told[0][1]["policy"] == "recompute"
    sglang.done("/continue_generation", {})
    told = sglang.done("/begin_weight_update", {"selector": "target"})
    assert told[0][1] == {"version": "1", "policy": "keep", "checks_finite": True,
                          "selector": "target"}  # fmt: skip
    assert sglang.done("/update_weights_from_distributed", BUCKET) == [load]
    sglang.done("/pause_generation", {"mode": "in_place"})
    assert sglang.done("/continue_generation") == [("resume", {})]  # the session goes on
    assert sglang.done("/end_weight_update", {}) == [("weights_finish", {})]


def test_a_trainer_that_comes_again_finds_nothing_of_its_round_before() -> None:
    sglang, vllm = Trainer("sglang"), Trainer("vllm")
    sglang.done("/pause_generation", {})
    sglang.done("/update_weights_from_distributed", BUCKET)
    told = sglang.done("/pause_generation", {})
    assert told == [("weights_drop", {}), ("pause", {"mode": "abort"})]
    assert sglang.done("/update_weights_from_distributed", BUCKET)[0][0] == "weights_begin"
    vllm.done("/start_weight_update")
    told = vllm.done("/start_weight_update")
    assert [what for what, _ in told] == ["weights_drop", "weights_begin"]
    vllm.service.round = None  # its limit of time has ended it
    vllm.done("/pause?mode=keep")
    update = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}
    vllm.done("/update_weights", {"update_info": update})
    assert vllm.done("/resume") == [("weights_finish", {}), ("resume", {})]


def test_a_label_ends_no_request_unless_it_says_so() -> None:
    for family in ("sglang", "vllm"):
        trainer = Trainer(family)
        told = trainer.done("/update_weight_version", {"new_version": "9"})
        assert told == [("weights_label", {"version": "9"})]
    sglang = Trainer("sglang")
    body = {"new_version": "9", "abort_all_requests": True}
    assert sglang.done("/update_weight_version", body)[0] == ("abort", {"all": True})


def test_vllms_calls() -> None:
    vllm = Trainer("vllm")
    info = {"master_address": "10.0.0.5", "master_port": 29500, "rank_offset": 1, "world_size": 5}
    assert vllm.done("/init_weight_transfer_engine", {"init_info": info})[0][0] == "weights_group"
    assert vllm.done("/init_weight_transfer_engine", {"init_info": {}}) == []
    assert vllm.done("/pause?mode=keep") == [("pause", {"mode": "keep"})]
    assert vllm.call("/is_paused", method="GET")[1] == {"is_paused": True}
    assert vllm.done("/resume") == [("resume", {})]
    vllm.service.unfinished = 2
    told = vllm.done("/pause")  # new requests are refused meanwhile
    assert [what for what, _ in told] == ["drain", "abort", "drain"]
    assert vllm.done("/start_weight_update")[0][1]["version"] is None
    update = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}
    assert vllm.done("/update_weights", {"update_info": update}) == [
        ("weights_load", {"group": SENT})
    ]
    told = vllm.done("/finish_weight_update", {"weight_version": "3"})
    assert told == [("weights_finish", {"version": "3"})]
    assert vllm.call("/weight_info", method="GET")[1] == {"weight_version": "3"}
    assert vllm.done("/start_draft_weight_update")[0][1]["selector"] == "draft"
    vllm.done("/finish_weight_update")
    assert vllm.service.version == "3"
    assert vllm.call("/get_world_size", method="GET")[1] == {"world_size": 4}
    assert vllm.call("/get_world_size?include_dp=false", method="GET")[1] == {"world_size": 2}
    checks = ({"action": "checksum"}, {"action": "compare", "baseline": {"x": "1f"}},
              {"action": "compare", "baseline": {"x": "2f"}})  # fmt: skip
    assert [vllm.call("/weight_checker", body)[1] for body in checks] == [
        {"checksums": {"a": "1f", "b": "1f"}},
        {"match": True, "mismatches": []},
        {"match": False, "mismatches": ["a", "b"]},
    ]
    vllm.done("/resume")
    told = vllm.done("/sleep?level=2&mode=keep")
    assert told == [("sleep", {"tags": ["weights", "kv_cache"]})]
    told = vllm.done("/wake_up?tags=weights&tags=kv_cache")
    assert told == [("wake", {"tags": ["weights", "kv_cache"]})]
    assert vllm.done("/abort_requests", {}) == [("abort", {"all": True})]


def test_a_folder_is_a_round_of_all_weights(tmp_path: Path) -> None:
    sglang = Trainer("sglang", weights_dir=str(tmp_path))
    told = sglang.done(
        "/update_weights_from_disk",
        {"model_path": str(tmp_path / "step_1"), "weight_version": "2", "load_format": "auto"},
    )
    begin = {"version": "2", "policy": "keep", "checks_finite": True, "source": {"kind": "folder"}}
    load = ("weights_load", {"folder": "step_1"})
    assert told == [("weights_begin", begin), load, ("weights_finish", {})]
    status, body = sglang.call("/update_weights_from_disk", {"model_path": "torn"})
    assert (status, body["success"]) == (409, False)
    for path in ("/etc", "../x", "a/../../b"):
        sglang.service.told.clear()
        status, body = sglang.call("/update_weights_from_disk", {"model_path": path})
        assert (status, body["success"]) == (403, False)
        assert "--weights-dir" in body["message"]
        assert not sglang.service.told


@pytest.mark.parametrize(
    ("family", "path", "body", "named"),
    [
        ("sglang", "/pause_generation", {"mode": "soft"}, "mode"),
        ("sglang", "/pause_generation", {"modes": "abort"}, "modes"),
        ("sglang", "/update_weights_from_distributed", BUCKET | {"load_format": "os.system"},
         "load_format"),
        ("sglang", "/update_weights_from_distributed", BUCKET | {"dtypes": ["torch.load"]}, "load"),
        ("sglang", "/update_weights_from_distributed", BUCKET | {"shapes": []}, "0 shapes"),
        ("sglang", "/update_weights_from_tensor",
         {"serialized_named_tensors": ["AAAA"], "load_format": "my.loader"}, "load_format"),
        ("sglang", "/update_weights_from_tensor", {"serialized_named_tensors": ["*"]}, "base64"),
        ("sglang", "/update_weights_from_tensor",
         {"serialized_named_tensors": ["Y29zCnN5c3RlbQou"]}, "os.system"),
        ("sglang", "/update_weights_from_disk", {"model_path": "a", "is_async": True}, "is_async"),
        ("sglang", "/update_weights_from_disk", {"model_path": "a", "load_format": "pt"},
         "load_format"),
        ("sglang", "/release_memory_occupation", {"tags": ["disk"]}, "tags"),
        ("sglang", "/abort_request", {}, "rid"),
        ("sglang", "/update_weight_version", {"new_version": "v" * 300}, "new_version"),
        ("vllm", "/update_weights", {"update_info": {"names": ["a"], "dtype_names": ["int8"],
         "shapes": [[1]], "packed": True}}, "packed"),
        ("vllm", "/update_weights", {"update_info": {}}, "names"),
        ("vllm", "/init_weight_transfer_engine",
         {"init_info": {"nccl_unique_id_b64": "AAAA"}}, "nccl_unique_id_b64"),
        ("vllm", "/sleep?level=3", None, "level"), ("vllm", "/wake_up?tags=x", None, "tags"),
        ("vllm", "/reset_prefix_cache?reset_running_requests=true", None, "reset_running_requests"),
        ("vllm", "/weight_checker", {"action": "reset"}, "action"),
    ],
)  # fmt: skip
def test_what_is_not_honoured_is_refused_by_name(
    family: str, path: str, body: Any, named: str
) -> None:
    trainer = Trainer(family)
    status, told = trainer.call(path, body)
    assert (status, trainer.service.told) == (400, []), told
    assert named in told["error"]["message"]


def test_only_a_named_trainer_is_met() -> None:
    for host, port in (("10.0.0.5", 29501), ("10.0.0.6", 29500), ("0.0.0.0", 29500)):
        sglang = Trainer("sglang")
        body = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": 5}
        status, told = sglang.call("/init_weights_update_group", body)
        assert (status, sglang.service.told) == (403, [])
        assert "--trainer" in told["message"]


def test_a_body_beyond_the_limit_is_not_read() -> None:
    sglang = Trainer("sglang", max_body_bytes=1000)
    body = {"serialized_named_tensors": ["A" * 2000]}
    assert sglang.call("/update_weights_from_tensor", body)[0] == 413


def test_all_paths_need_the_admin_key_or_the_trainers_address() -> None:
    for family in ("vllm", "sglang"):
        trainer = Trainer(family)
        table = [route for routes in trainer._app._exact.values() for route in routes.values()]
        paths = [route for route in table if "Paths._" in str(route.handler)]
        assert len(paths) > 15
        for route in paths:
            for headers in ({"authorization": "Bearer user"}, {"authorization": ""}):
                status, _ = trainer.call(route.path, {}, route.method, **headers)
                assert status in (401, 403), route
        assert not trainer.service.told
        for headers in ({}, {"authorization": "Bearer None"}):  # as slime sends it
            trainer.service.told.clear()
            status, _ = trainer.call(
                "/update_weight_version", {"new_version": "1"}, came_to=TRAINER, **headers
            )
            assert status == 200
        for header in ({"origin": "http://evil.example"}, {"sec_fetch_site": "cross-site"}):
            status, _ = trainer.call("/update_weight_version", None, came_to=TRAINER, **header)
            assert status == 403
        status, _ = trainer.call("/weight_info", method="GET", came_to=TRAINER, host="evil.example")
        assert status == 421
    assert Trainer("none").call("/weight_info", method="GET")[0] == 404


def test_under_ray_there_are_none() -> None:
    with pytest.raises(ConfigurationError, match="not served under Ray"):
        FleetSettings(model="dummy:tiny", api=ApiConfig(coordinator="", rl_api="vllm")).check()


def settings(*words: str) -> Any:
    return read_settings(build_parser().parse_args(["serve", "dummy:tiny", *words]))


def test_options_for_trainers_are_checked_before_anything_starts(tmp_path: Path) -> None:
    found = settings("--rl-api", "vllm", "--admin-key", "a", "--trainer", "h:1", "--trainer", "b")
    assert (found.api_processes, found.trainers) == (1, ("h:1", "b"))
    assert settings("--rl-api", "sglang", "--rl-socket", "localhost:0").admin_key is None
    assert trainers_address("lo:9600") == ("127.0.0.1", 9600)
    for words, named in (
        (["--rl-api", "vllm"], "--admin-key"),
        (["--rl-api", "vllm", "--admin-key", "a", "--api-processes", "2"], "--api-processes 2"),
        (["--rl-socket", "lo:1"], "--rl-socket needs"),
        (["--trainer", "a"], "--trainer needs"),
        (["--weights-finite"], "--weights-finite needs"),
        (["--rl-api", "vllm", "--rl-socket", "0.0.0.0:1"], "neither loopback nor the name"),
        (["--rl-api", "vllm", "--rl-socket", "9600"], "must be HOST:PORT"),
        (["--rl-api", "vllm", "--rl-socket", "lo:1", "--weights-dir", str(tmp_path / "no")],
         "no such folder"),
        (["--rl-api", "vllm", "--rl-socket", "lo:1", "--trainer", "a b"], "--trainer 'a b'"),
    ):  # fmt: skip
        with pytest.raises(ConfigurationError, match=named):
            settings(*words)
