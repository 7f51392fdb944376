"""Trainers call a real service, by the paths of SGLang and of vLLM: what slime does for a step of
training, versions in answers, torn rounds, and strangers."""

from __future__ import annotations

import base64
import http.client
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from tests.support.patience import PATIENCE_S, eventually
from tests.support.ranks import free_port
from tests.support.served import ADMIN, ENGINE, Served
from tests.support.trained_weights import train

MODEL = "dummy:tiny-gated-delta"
SAMPLED = {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True, "sampling_seed": 5}


@dataclass
class Trainer:
    """Calls a service at the address without keys."""

    port: int

    def call(
        self,
        path: str,
        body: Any = None,
        method: str = "POST",
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Status and JSON of an answer, as `requests` of slime gets them: without a key."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        data = None if body is None else json.dumps(body)
        more = {"Content-Type": "application/json", "Authorization": "Bearer None"}
        connection.request(method, path, data, more | (headers or {}))
        answer = connection.getresponse()
        status, text = answer.status, answer.read()
        connection.close()
        return status, json.loads(text)

    def done(self, path: str, body: Any = None, method: str = "POST") -> Any:
        """The JSON of an answer to a call that succeeds."""
        status, told = self.call(path, body, method)
        assert status == 200, told
        return told

    def generate(self, **body: Any) -> Any:
        """An answer of eight tokens with their log probs."""
        wants = {"input_ids": [1, 2, 3], "sampling_params": SAMPLED, "return_logprob": True}
        return self.done("/generate", wants | body)

    def log_probs(self) -> list[Any]:
        """Log probs and ids of an answer, which tell weights apart."""
        return list(self.generate()["meta_info"]["output_token_logprobs"])

    def version(self) -> str:
        return str(self.done("/get_weight_version", method="GET")["weight_version"])


def address_of(service: Served) -> int:
    """The port without keys."""
    eventually(lambda: any("trainers" in line for line in service.lines), "the address")
    (line,) = (line for line in service.lines if "trainers" in line)
    return int(re.findall(r":(\d+)", line)[-1])


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the folders "step-0" and "step-1"."""
    root = tmp_path_factory.mktemp("weights")
    for step in range(2):
        train(root / f"step-{step}", step, MODEL)
    return root


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("serve") / "log"
    with Served(
        log, MODEL, *ENGINE, "--rl-api", "sglang", "--rl-socket", "localhost:0", "--weights-dir",
        str(weights), "--trainer", "127.0.0.1", "--no-page", "--enable-routing-replay",
        "--enable-sleep-mode", "--weights-finite",
    ) as served:  # fmt: skip
        served.wait_until_ready()
        yield served


@pytest.fixture(scope="module")
def slime(service: Served) -> Trainer:
    return Trainer(address_of(service))


class Group:
    """The trainer's end of a process group: its rank 0, with gloo."""

    def __init__(self, name: str, join: Callable[[int], Any]) -> None:
        port = free_port()
        with ThreadPoolExecutor() as threads:
            joining = threads.submit(join, port)
            limit = timedelta(seconds=PATIENCE_S)
            store, *_ = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=limit))
            self._group, _ = c10d._new_process_group_helper(
                2, 0, [], dist.Backend("gloo"), dist.PrefixStore(name, store),
                group_name=c10d.GroupName(name), timeout=limit,
            )  # fmt: skip
            c10d._world.pg_group_ranks[self._group] = {0: 0, 1: 1}
            joining.result()
        self._store = store

    def send(self, tensors: dict[str, torch.Tensor], call: Callable[[dict[str, Any]], Any]) -> Any:
        """Broadcast tensors while a call with their names waits for them; its answer."""
        named = {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype) for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
        with ThreadPoolExecutor() as threads:
            calling = threads.submit(call, named)
            for tensor in tensors.values():
                dist.broadcast(tensor, group=self._group, group_src=0)
            return calling.result()

    def close(self) -> None:
        dist.destroy_process_group(self._group)


def read(weights: Path, step: int) -> dict[str, torch.Tensor]:
    (file,) = (weights / f"step-{step}").glob("*.safetensors")
    return load_file(file)


@pytest.fixture(scope="module")
def group(slime: Trainer) -> Iterator[Group]:
    def join(port: int) -> Any:
        body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1,
                "world_size": 2, "group_name": "slime-pp_0", "backend": "gloo"}  # fmt: skip
        return slime.done("/init_weights_update_group", body)

    group = Group("slime-pp_0", join)
    yield group
    slime.done("/destroy_weights_update_group", {"group_name": "slime-pp_0"})
    group.close()


def test_slimes_step_of_training(slime: Trainer, weights: Path, group: Group) -> None:
    """In the order of `update_weight_from_distributed.py` of slime 624b824a."""
    slime.done("/health_generate", method="GET")
    before = slime.log_probs()
    told = slime.done("/update_weights_from_disk", {"model_path": "step-0", "weight_version": "0"})
    assert told["success"]
    expected = slime.log_probs()
    assert before != expected
    assert slime.version() == "0"
    slime.done("/update_weights_from_disk", {"model_path": str(weights / "step-1")})
    assert slime.log_probs() != expected
    assert slime.version() == "0", "the label of the weights before"

    tensors = read(weights, 0)
    half = len(tensors) // 2
    slime.done("/pause_generation", {})
    slime.done("/flush_cache", method="GET")
    for names in (list(tensors)[:half], list(tensors)[half:]):
        body = {"group_name": "slime-pp_0", "flush_cache": False, "weight_version": "1"}
        bucket = {name: tensors[name] for name in names}
        group.send(bucket, lambda named, body=body: slime.done(
            "/update_weights_from_distributed", body | named))  # fmt: skip
    slime.done("/continue_generation", {})
    assert slime.version() == "1"
    after = slime.generate()
    meta = after["meta_info"]
    assert meta["output_token_logprobs"] == expected
    assert meta["weight_version"] == "1"
    assert meta["weight_versions"] == [{"version": "1", "start": 0, "end": 8}]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == after["output_ids"]
    assert meta["finish_reason"] == {"type": "length", "length": 8}


def test_a_torn_pause_leaves_the_weights_before(
    slime: Trainer, weights: Path, group: Group
) -> None:
    slime.done("/update_weights_from_disk", {"model_path": "step-1", "weight_version": "whole"})
    before = slime.log_probs()
    tensors = read(weights, 0)
    few = dict(list(tensors.items())[:2])
    slime.done("/pause_generation", {"mode": "in_place"})
    body = {"group_name": "slime-pp_0", "weight_version": "torn"}
    group.send(few, lambda named: slime.done("/update_weights_from_distributed", body | named))
    status, told = slime.call("/continue_generation", {})
    assert (status, told["success"]) == (409, False)
    assert "was not sent in this round" in told["message"]
    slime.done("/continue_generation", {})
    assert slime.log_probs() == before
    assert slime.version() == "whole"
    name, tensor = next(iter(tensors.items()))
    status, told = group.send(
        {name: torch.full_like(tensor, torch.nan)},
        lambda named: slime.call("/update_weights_from_distributed", body | named),
    )
    assert (status, name in told["message"]) == (409, True)
    body["weight_version"] = "a part"
    group.send(
        {name: tensor}, lambda named: slime.done("/update_weights_from_distributed", body | named)
    )
    assert slime.version() == "a part"
    assert slime.log_probs() != before


def test_slimes_colocated_step_has_the_engines_memory(
    slime: Trainer, weights: Path, group: Group
) -> None:
    """The calls of slime's colocated actor: memory for weights comes back before they do, and the
    KV cache's memory behind them; requests wait meanwhile."""
    slime.done("/update_weights_from_disk", {"model_path": "step-1", "weight_version": "c"})
    expected = slime.log_probs()
    slime.done("/update_weights_from_disk", {"model_path": "step-0", "weight_version": "d"})
    slime.done("/flush_cache", method="GET")
    slime.done("/release_memory_occupation", {})
    slime.done("/health_generate", method="GET")
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(slime.log_probs)
        slime.done("/resume_memory_occupation", {"tags": ["weights"]})
        slime.done("/pause_generation", {"mode": "in_place"})
        body = {"group_name": "slime-pp_0", "weight_version": "e"}
        group.send(read(weights, 1), lambda named: slime.done(
            "/update_weights_from_distributed", body | named))  # fmt: skip
        slime.done("/continue_generation", {})
        assert not waiting.done()
        slime.done("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
        assert waiting.result() == expected
    assert slime.version() == "e"


def test_an_aborted_request_gives_its_tokens_so_far(slime: Trainer) -> None:
    long = {"temperature": 0.0, "max_new_tokens": 3500, "ignore_eos": True}
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(slime.generate, sampling_params=long, rid="roll-out")
        eventually(lambda: is_busy(slime), "the request to run")
        slime.done("/abort_request", {"rid": "roll-out"})
        told = answer.result()
    assert told["meta_info"]["finish_reason"]["type"] == "abort"
    assert told["meta_info"]["id"] == "roll-out"
    assert len(told["output_ids"]) < 3500


def test_an_answer_ends_before_its_weights_are_too_old(slime: Trainer, service: Served) -> None:
    """Break it: leave `max_version_lag` out of the parameters."""
    body = {"prompt": [1, 2, 3], "max_tokens": 3500, "ignore_eos": True, "max_version_lag": 0}
    stream = service.stream("/v1/completions", body | {"return_token_ids": True})
    first = next(stream)
    slime.done("/update_weights_from_disk", {"model_path": "step-0", "weight_version": "new"})
    choices = [event["choices"][0] for event in (first, *stream)]
    assert choices[-1]["finish_reason"] == "stale"
    assert 0 < sum(len(choice["token_ids"]) for choice in choices) < 3500


def test_streams_of_several_answers_grow_to_the_whole_ones(slime: Trainer, service: Served) -> None:
    body = {"input_ids": [1, 2, 3], "sampling_params": SAMPLED | {"n": 2}}
    events = list(service.stream("/generate", body))
    for index, whole in enumerate(slime.done("/generate", body)):
        mine = [event for event in events if event["index"] == index]
        lengths = [len(event["output_ids"]) for event in mine]
        assert len(lengths) > 1
        assert lengths == sorted(lengths)
        assert mine[-1]["output_ids"] == whole["output_ids"]
        assert mine[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


def is_busy(trainer: Trainer) -> bool:
    """Whether an engine has tokens of a request."""
    engines = trainer.done("/live", method="GET")["replicas"].values()
    return any(engine["slots_in_use"] for engine in engines)


def test_an_answer_has_the_experts_of_its_tokens(slime: Trainer) -> None:
    told = slime.generate(return_routed_experts=True, logprob_start_len=0, top_logprobs_num=1)
    meta = told["meta_info"]
    rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
    shape = DUMMY_SHAPES[MODEL.removeprefix("dummy:")]
    assert rows.size == (3 + 8 - 1) * shape.pattern.count("E") * shape.moe_router_topk
    assert rows.max() < shape.num_moe_experts
    assert rows.min() == 0
    later = slime.generate(return_routed_experts=True, routed_experts_start_len=4)
    part = np.frombuffer(base64.b64decode(later["meta_info"]["routed_experts"]), np.int32)
    assert part.tolist() == rows[rows.size * 4 // 10 :].tolist()
    of_prompt = meta["input_token_logprobs"]
    assert [token for _, token, _ in of_prompt] == [1, 2, 3]
    assert of_prompt[0][0] is None
    end = slime.generate(logprob_start_len=1)["meta_info"]["input_token_logprobs"]
    assert end == [[None, 2, None], of_prompt[2]]
    assert "routed_experts" not in slime.generate()["meta_info"]


def test_a_trainer_that_never_sends_holds_nothing_up_for_long(
    slime: Trainer, weights: Path
) -> None:
    """A drop calls back the replica's thread, which waits for the trainer. Break `_submit`: do not
    set `_over`."""

    def join(port: int) -> Any:
        body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1,
                "world_size": 2, "group_name": "silent", "backend": "gloo"}  # fmt: skip
        return slime.done("/init_weights_update_group", body)

    group = Group("silent", join)
    version = slime.version()
    (name, tensor), *_ = read(weights, 0).items()
    body = {"names": [name], "dtypes": ["float32"], "shapes": [list(tensor.shape)],
            "group_name": "silent"}  # fmt: skip
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(slime.call, "/update_weights_from_distributed", body)
        eventually(lambda: slime.call("/drop_weight_update", {})[0] == 200, "the round")
        status, told = waiting.result()
    assert (status, "it was dropped by its sender" in told["message"]) == (409, True)
    assert slime.call("/drop_weight_update", {})[0] == 409
    slime.done("/destroy_weights_update_group", {"group_name": "silent"})
    group.close()
    assert slime.version() == version
    slime.done("/update_weights_from_disk", {"model_path": "step-1", "weight_version": "after"})
    assert slime.version() == "after"


def test_strangers_change_nothing(slime: Trainer, service: Served) -> None:
    label = {"new_version": "mine"}
    browser = {"Origin": "http://evil.example"}
    assert slime.call("/update_weight_version", label, headers=browser)[0] == 403
    assert service.request("/update_weight_version", label)[0] == 403, "not by a user's key"
    assert slime.version() != "mine"
    assert service.request("/update_weight_version", label, key=ADMIN)[0] == 200
    assert slime.version() == "mine"


def test_vllms_paths_before_the_same_replicas(
    slime: Trainer, service: Served, weights: Path, group: Group, tmp_path: Path
) -> None:
    (replica,) = service.children("replica")
    words = replica.cmdline()
    address = words[words.index("--coordinator") + 1]
    slime.done("/update_weights_from_disk", {"model_path": "step-0", "weight_version": "a"})
    expected = slime.log_probs()
    slime.done("/update_weights_from_disk", {"model_path": "step-1", "weight_version": "b"})
    with Served(
        tmp_path / "log", "--coordinator", address, "--rl-api", "vllm", "--rl-socket",
        "localhost:0", "--trainer", "127.0.0.1", "--no-page",
    ) as second:  # fmt: skip
        vllm = Trainer(address_of(second))
        eventually(lambda: vllm.call("/health", method="GET")[0] == 200, "the second service")
        assert vllm.done("/get_world_size", method="GET") == {"world_size": 1}

        def join(port: int) -> Any:
            info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1,
                    "world_size": 2, "backend": "gloo"}  # fmt: skip
            return vllm.done("/init_weight_transfer_engine", {"init_info": info})

        long = {"prompt": [1, 2, 3], "max_tokens": 3500, "ignore_eos": True}
        with ThreadPoolExecutor() as threads:
            answer = threads.submit(vllm.call, "/v1/completions", long)
            eventually(lambda: is_busy(vllm), "the request to run")
            vllm.done("/pause")  # mode abort
            status, told = answer.result()
        assert (status, told["choices"][0]["finish_reason"]) == (200, "abort")
        assert told["usage"]["completion_tokens"] < 3500
        assert vllm.call("/v1/completions", long)[0] == 503
        vllm.done("/resume")

        trainer = Group("weight_update_group", join)
        vllm.done("/pause?mode=keep")
        assert vllm.done("/is_paused", method="GET") == {"is_paused": True}
        vllm.done("/start_weight_update")

        def update(named: dict[str, Any]) -> Any:
            info = {"dtype_names": named.pop("dtypes"), **named}
            return vllm.done("/update_weights", {"update_info": info})

        trainer.send(read(weights, 0), update)
        vllm.done("/finish_weight_update", {"weight_version": "c"})
        vllm.done("/resume")
        assert vllm.done("/weight_info", method="GET") == {"weight_version": "c"}
        checksums = vllm.done("/weight_checker", {"action": "checksum"})["checksums"]
        compare = {"action": "compare", "baseline": checksums}
        assert vllm.done("/weight_checker", compare) == {"match": True, "mismatches": []}
        trainer.close()
    assert slime.log_probs() == expected
