"""Paths of vLLM's server for trainers, with their meanings there.

Facts: `vllm/entrypoints/serve/dev/rlhf/api_router.py`, `serve/sleep/api_router.py`, and
`distributed/weight_transfer/` of vLLM's main of autumn 2026 (0.33).
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec

from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.rl.family import (
    GROUP,
    STANDING,
    Backend,
    Family,
    Port,
    Selector,
    Text,
    decoded,
    path,
    refuse,
)
from megatron_async.server.rl.torch_pickle import read_handles

Pausing = Literal["abort", "wait", "keep"]
Tag = Literal["weights", "kv_cache"]
LEVELS: dict[int, dict[str, Any]] = {
    1: {"tags": ["weights", "kv_cache"], "copies": ["weights"]},
    2: {"tags": ["weights", "kv_cache"]},
}
"""Levels of sleep -> what is given back, and what of it is kept in the host's memory."""


class InitInfo(msgspec.Struct, forbid_unknown_fields=True):
    """The trainer's process group; without an address tensors come as handles of a GPU's memory.
    `backend` is not vLLM's."""

    master_address: Text | None = None
    master_port: Port = 1
    rank_offset: int = 1
    world_size: int = 0
    packed: bool = False
    backend: Backend = "nccl"


class UpdateInfo(msgspec.Struct, forbid_unknown_fields=True):
    """Tensors of one call, broadcast in the group or in a GPU's memory."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: bool = False
    ipc_handles_pickled: str | None = None


class VllmPaths(Family):
    """The paths of vLLM."""

    @path("POST /pause")
    async def _pause(
        self,
        mode: Pausing = "abort",
        wait_for_inflight_requests: bool = False,
        clear_cache: bool = True,
    ) -> dict[str, Any]:
        """Pause; new requests are refused, but in mode "keep", where they wait. `clear_cache`: an
        update forgets the prefix cache in any case."""
        if wait_for_inflight_requests:
            mode = "wait"
        await (self.pause(mode) if mode == "keep" else self.refuse_new(aborts=mode == "abort"))
        return {"status": "paused"}

    @path("POST /resume")
    async def _resume(self) -> dict[str, Any]:
        await self.go_on()
        return {"status": "resumed"}

    @path("GET /is_paused", in_turn=False)
    async def _is_paused(self) -> dict[str, Any]:
        return {"is_paused": await self.state() in STANDING}

    @path("POST /abort_requests", in_turn=False)
    async def _abort(self, request_ids: list[str] | None = None) -> dict[str, Any]:
        """End requests by the ids of their answers; none: all."""
        named: list[dict[str, Any]] = [{"label": label} for label in request_ids or ()]
        done = [await self.ask("abort", **each) for each in named or [{"all": True}]]
        return {"status": "aborted", "aborted": sum(each["aborted"] for each in done)}

    @path("POST /init_weight_transfer_engine", in_turn=False)
    async def _init(self, init_info: InitInfo) -> dict[str, Any]:
        info, host = init_info, init_info.master_address
        refuse(packed=info.packed)
        if host is not None:
            await self.connect(
                GROUP, host, info.master_port, info.rank_offset, info.world_size, info.backend
            )
        return {"message": "Weight transfer initialized"}

    @path("POST /start_weight_update")
    async def _start(self, selector: Selector = "all") -> dict[str, Any]:
        await self.begin_session(selector)
        return {"message": "Weight update started"}

    @path("POST /start_draft_weight_update")
    async def _start_draft(self) -> dict[str, Any]:
        return await self._start("draft")

    @path("POST /update_weights")
    async def _update(self, update_info: UpdateInfo) -> dict[str, Any]:
        info, pickled = update_info, update_info.ipc_handles_pickled
        refuse(packed=info.packed)
        if pickled is None:
            await self.group(GROUP, info.names, info.dtype_names, info.shapes)
        else:
            (data,) = decoded([pickled], "ipc_handles_pickled")
            named = info.names, info.dtype_names, info.shapes
            await self.handles([await asyncio.to_thread(read_handles, data, *named)])
        return {"message": "Weights updated"}

    @path("POST /finish_weight_update")
    async def _finish(self, weight_version: Text | None = None) -> dict[str, Any]:
        """Commit; without a version the label stays."""
        await self.end_session(weight_version)
        return {"message": "Weight update finished"}

    @path("POST /update_weight_version")
    async def _label(self, new_version: Text) -> dict[str, Any]:
        await self.ask("weights_label", version=new_version)
        return {"success": True, "new_version": new_version}

    @path("GET /weight_info", in_turn=False)
    async def _version(self) -> dict[str, Any]:
        return {"weight_version": (await self.info())["version"]}

    @path("POST /weight_checker")
    async def _check(
        self, action: Literal["checksum", "compare"], baseline: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """Checksums, or replicas whose one is not in `baseline`. Each is of all weights, where vLLM
        has one for each."""
        if (action == "compare") != (baseline is not None):
            raise Refusal("baseline belongs to compare, and to nothing else.", param="baseline")
        sums = await self.checksums()
        if baseline is None:
            return {"checksums": sums}
        wrong = sorted(name for name in sums if {sums[name]} != set(baseline.values()))
        return {"match": not wrong, "mismatches": wrong}

    @path("GET /get_world_size", in_turn=False)
    async def _world_size(self, include_dp: bool = True) -> dict[str, Any]:
        ranks = [replica["ranks"] for replica in (await self.info())["replicas"].values()]
        return {"world_size": sum(ranks) if include_dp else max(ranks, default=0)}

    @path("POST /sleep")
    async def _sleep(self, level: Literal[0, 1, 2] = 1, mode: Pausing = "abort") -> None:
        if mode != "keep":
            await self.refuse_new(aborts=mode == "abort")
        await (self.ask("sleep", **LEVELS[level]) if level else self.pause("keep"))

    @path("POST /wake_up")
    async def _wake(self, tags: list[Tag] | Tag | None = None) -> None:
        named = [tags] if isinstance(tags, str) else tags
        await self.ask("wake", **({} if named is None else {"tags": named}))

    @path("GET /is_sleeping", in_turn=False)
    async def _is_sleeping(self) -> dict[str, Any]:
        return {"is_sleeping": await self.state() == "sleeping"}

    @path("POST /reset_prefix_cache", in_turn=False)
    async def _reset(
        self, reset_running_requests: bool = False, reset_external: bool = False
    ) -> None:
        refuse(reset_running_requests=reset_running_requests, reset_external=reset_external)
        await self.ask("reset_prefix_cache")
