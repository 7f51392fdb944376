"""Paths of SGLang's server for trainers, with their meanings there.

Facts: `srt/entrypoints/http_server.py` and `srt/managers/io_struct.py` of SGLang 0.5.23, and the
calls of slime 624b824a (`sglang_engine.py`). Unlike there, a label that is published ends no
request unless `abort_all_requests` says so. `torch_empty_cache` and `recapture_cuda_graph` are
hints: an update captures again what it must, in any case. An update also forgets the prefix cache
in any case, and its answer says so to `flush_cache=False`, which slime sends.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Literal, override

import msgspec

from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.rl.family import (
    GROUP,
    Backend,
    Family,
    Port,
    Selector,
    Text,
    decoded,
    path,
    refuse,
)
from megatron_async.server.rl.sglang_generate import shown_version
from megatron_async.server.rl.torch_pickle import read_named_tensors

MEMORY = ("weights", "kv_cache")
PAUSES = {"abort": "abort", "retract": "recompute", "in_place": "keep"}
Tags = list[Literal["weights", "kv_cache", "cuda_graph"]] | None


class SglangPaths(Family):
    """The paths of SGLang."""

    @override
    def error_body(self, refusal: Refusal) -> bytes:
        told = msgspec.json.decode(refusal.body())
        return msgspec.json.encode({"success": False, "message": refusal.message, **told})

    @path("GET /health_generate", in_turn=False)
    async def _health(self) -> None:
        """Whether the service would generate; a pause is no illness. What SGLang finds out by a
        request, the coordinator watches: replicas that finish no step are lost."""
        health = await self.ask("health")
        is_well = health["replicas"] if health["state"] == "running" else None
        if not is_well and health["state"] not in ("paused", "sleeping"):
            why = f"the service is {health['state']}, with {health['replicas']} ready replicas."
            raise Refusal(why, 503, code="not_ready")

    @path("GET /get_weight_version", "GET /model_info", "GET /get_model_info", in_turn=False)
    async def _version(self) -> dict[str, Any]:
        version, card = (await self.info())["version"], await self._client.card()
        shown = {"weight_version": shown_version(version), "is_generation": True}
        return {**shown, "model_path": card.model}

    @path("POST /pause_generation")
    async def _pause(
        self, mode: Literal["abort", "retract", "in_place"] = "abort"
    ) -> dict[str, Any]:
        await self.pause(PAUSES[mode])
        return {"status": "ok", "message": "Generation paused."}

    @path("POST /continue_generation")
    async def _continue(self, torch_empty_cache: bool = True) -> dict[str, Any]:
        await self.go_on()
        return {"status": "ok", "message": "Generation continued."}

    @path("GET /flush_cache", "POST /flush_cache", in_turn=False)
    async def _flush(self, timeout: float = 0.0) -> dict[str, Any]:
        """Forget the prefix cache; for this no request has to end, so nothing waits."""
        await self.ask("reset_prefix_cache")
        return _done("Cache flushed.")

    @path("POST /abort_request", in_turn=False)
    async def _abort(self, rid: Text = "", abort_all: bool = False) -> None:
        if not abort_all and not rid:
            raise Refusal("give rid, or abort_all.", param="rid")
        await self.ask("abort", **({"all": True} if abort_all else {"label": rid}))

    @path("POST /init_weights_update_group", in_turn=False)
    async def _init_group(
        self,
        master_address: Text,
        master_port: Port,
        rank_offset: int,
        world_size: int,
        group_name: Text = GROUP,
        backend: Backend = "nccl",
    ) -> dict[str, Any]:
        await self.connect(
            group_name, master_address, master_port, rank_offset, world_size, backend
        )
        return _done("The group is there.")

    @path("POST /destroy_weights_update_group", in_turn=False)
    async def _end_group(self, group_name: Text = GROUP) -> dict[str, Any]:
        await self.ask("weights_group", name=group_name, destroy=True)
        return _done("The group is left.")

    @path("POST /begin_weight_update")
    async def _begin_update(self, selector: Selector = "all") -> dict[str, Any]:
        await self.begin_session(selector)
        return _done("The session is open.")

    @path("POST /end_weight_update")
    async def _end_update(self) -> dict[str, Any]:
        await self.end_session()
        return _done("The session's weights serve.")

    @path("POST /update_weights_from_tensor")
    async def _from_tensor(
        self,
        serialized_named_tensors: list[str],
        load_format: Literal["flattened_bucket"] | None = None,
        weight_version: Text | None = None,
        selector: Selector = "all",
        abort_all_requests: bool = False,
        flush_cache: bool = True,
        torch_empty_cache: bool = False,
    ) -> dict[str, Any]:
        """A bucket in a GPU's memory, one text for each rank of a replica."""
        sent = decoded(serialized_named_tensors, "serialized_named_tensors")
        read = partial(read_named_tensors, is_flattened=load_format is not None)
        tensors = await asyncio.to_thread(list, map(read, sent))
        policy = _policy(abort_all_requests)
        await self.handles(tensors, version=weight_version, selector=selector, policy=policy)
        return _done("The tensors are there.", flush_cache)

    @path("POST /update_weights_from_distributed")
    async def _distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: Text = GROUP,
        load_format: Literal["flattened_bucket"] | None = None,
        weight_version: Text | None = None,
        selector: Selector = "all",
        abort_all_requests: bool = False,
        flush_cache: bool = True,
        torch_empty_cache: bool = False,
    ) -> dict[str, Any]:
        """A bucket that the trainer broadcasts."""
        await self.group(
            group_name, names, dtypes, shapes, load_format is not None, version=weight_version,
            selector=selector, policy=_policy(abort_all_requests),
        )  # fmt: skip
        return _done("The tensors are there.", flush_cache)

    @path("POST /update_weights_from_disk")
    async def _from_disk(
        self,
        model_path: str,
        load_format: Literal["auto", "safetensors"] | None = None,
        weight_version: Text | None = None,
        abort_all_requests: bool = False,
        is_async: bool = False,
        keep_pause: bool = False,
        token_step: int = 0,
        manifest: dict[str, Any] | None = None,
        recapture_cuda_graph: bool = False,
        flush_cache: bool = True,
        torch_empty_cache: bool = False,
    ) -> dict[str, Any]:
        """All weights, from a folder."""
        refuse(is_async=is_async, keep_pause=keep_pause, token_step=token_step, manifest=manifest)
        await self.folder(model_path, weight_version, _policy(abort_all_requests))
        return _done("The folder's weights serve.", flush_cache) | {"num_paused_requests": 0}

    @path("POST /update_weight_version")
    async def _label(self, new_version: Text, abort_all_requests: bool = False) -> dict[str, Any]:
        if abort_all_requests:
            await self.abort_all()
        await self.ask("weights_label", version=new_version)
        return _done("The version is published.") | {"new_version": new_version}

    @path("POST /weights_checker")
    async def _check(self, action: Literal["checksum"] = "checksum") -> dict[str, Any]:
        sums = await self.checksums()
        return _done("Checksums of all weights.") | {"per_engine_checksum": sums}

    @path("POST /release_memory_occupation")
    async def _release(self, tags: Tags = None) -> None:
        if found := [tag for tag in tags or MEMORY if tag in MEMORY]:  # graphs stay
            await self.ask("sleep", tags=found)

    @path("POST /resume_memory_occupation")
    async def _take_again(self, tags: Tags = None) -> None:
        if tags is None:  # all that is away
            await self.ask("wake")
        elif found := [tag for tag in tags if tag in MEMORY]:
            await self.ask("wake", tags=found)


def _policy(aborts: bool) -> str:
    """What becomes of running requests; "": as the pause has said."""
    return "abort" if aborts else ""


def _done(message: str, flush_cache: bool = True) -> dict[str, Any]:
    kept = "" if flush_cache else " flush_cache=false has no effect: new weights empty the cache."
    return {"success": True, "message": message + kept}
