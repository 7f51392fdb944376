"""`Family`: what the paths of both families have in common: how a call is read, how an error is
told, and how calls become rounds of the service's verbs (`serving.weight_rounds`).

A family's clients know no rounds. Buckets of a session are one round. So are buckets that come
while the service is paused: it ends when the service goes on, and must then be whole, or the
weights before serve on. A bucket beside both is a round of its own, which may be part of the
weights.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Annotated, Any, Literal, get_type_hints

import msgspec

from megatron_async.server.api_config import ApiConfig
from megatron_async.server.fields.json_body import Limits
from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.http.app import Route
from megatron_async.server.http.exchange import Exchange
from megatron_async.server.http.replies import reply_json
from megatron_async.server.http.service_routes import ask_service, read_command
from megatron_async.server.rl.torch_pickle import Named, NotData, dtype_named
from megatron_async.serving.token_client import RequestClient
from megatron_async.serving.weight_sources import check_trainer, name_below

Selector = Literal["target", "draft", "all"]
Backend = Literal["nccl", "gloo"]
Text = Annotated[str, msgspec.Meta(max_length=256)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
GROUP = "weight_update_group"
"""The process group of a call that does not name it (SGLang's default)."""
STANDING = ("paused", "draining", "sleeping")
LOOK_EVERY_S = 0.05


def path(*names: str, in_turn: bool = True) -> Callable[[Any], Any]:
    """Mark a method as the handler of paths, as "POST /pause". Its parameters are the fields of the
    body, each by type and default; any other field is refused by name. What it returns is the
    JSON of the answer. `in_turn`: not while another one is under way."""

    def mark(method: Any) -> Any:
        method.paths, method.in_turn = names, in_turn
        return method

    return mark


class Family:
    """Paths of one family in one API process, which alone serves them: it knows how the service was
    paused, and whether a session is open. All paths need the admin key."""

    def __init__(self, client: RequestClient, config: ApiConfig) -> None:
        self._client, self._config = client, config
        self._limits = Limits(body_bytes=config.max_body_bytes)
        self._round = {"round": config.rl_round}
        self._policy = "keep"
        self._session: int | None = None
        """Number of the round of a session."""
        self._turn = asyncio.Lock()

    def routes(self) -> list[Route]:
        """The methods marked by `path`."""
        found: list[Route] = []
        for _, method in inspect.getmembers(self, lambda member: hasattr(member, "paths")):
            kind = _fields_of(method)
            for name in method.paths:
                verb, place = name.split()
                answer = partial(self._answer, place, kind, method)
                found.append(
                    Route(verb, place, answer, needs_admin=True, error_body=self.error_body,
                          is_logged=verb == "POST")
                )  # fmt: skip
        return found

    def error_body(self, refusal: Refusal) -> bytes:
        """An error as the family tells it."""
        return refusal.body()

    async def _answer(
        self, place: str, kind: type[msgspec.Struct], method: Any, exchange: Exchange, _: str
    ) -> None:
        given = await read_command(exchange, place, kind, self._limits)
        fields = {name: getattr(given, name) for name in kind.__struct_fields__}
        try:
            async with self._turn if method.in_turn else nullcontext():
                answer = await method(**fields)
        except NotData as error:
            raise Refusal(f"a tensor is refused: {error}") from error
        await reply_json(exchange.send, {} if answer is None else answer)

    # ---- Verbs ---------------------------------------------------------------------------------

    async def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """Ask the service, or tell it what to do; raises a `Refusal` (409: not now; 500: a replica
        failed)."""
        return await ask_service(self._client, what, **fields)

    async def info(self) -> dict[str, Any]:
        """What the service tells of its weights."""
        return await self.ask("weights_info")

    async def state(self) -> str:
        """The state of the service."""
        return str((await self.ask("health"))["state"])

    async def checksums(self) -> dict[str, str]:
        """Sums of all weights, by replica."""
        told = (await self.ask("weights_check"))["replicas"]
        return {name: str(each["checksum"]) for name, each in told.items()}

    @path("POST /drop_weight_update", in_turn=False)
    async def drop_update(self) -> dict[str, Any]:
        """Drop the update that is open, and call back a thread that waits for its trainer; neither
        vLLM nor SGLang has it."""
        await self.ask("weights_drop", **self._round)
        return {"success": True, "message": "The update is dropped: the weights before serve on."}

    async def abort_all(self) -> int:
        """End all requests; returns how many."""
        return int((await self.ask("abort", all=True))["aborted"])

    async def pause(self, mode: str) -> None:
        """Stand still; new requests wait. "abort" ends the others, "keep" keeps them, "recompute"
        too, but an update's weights read their prompts and answers so far again. Of a pause before,
        whose trainer is gone, nothing is left."""
        if (round := (await self.info())["round"]) and round["number"] != self._session:
            await self._drop()
        self._policy = "recompute" if mode == "recompute" else "keep"
        if await self.state() != "sleeping":
            await self.ask("pause", mode="abort" if mode == "abort" else "keep")
        elif mode == "abort":
            await self.abort_all()

    async def refuse_new(self, aborts: bool) -> None:
        """Refuse new requests, and wait until all others have ended; `aborts` ends them. Where the
        service stands still already, new ones wait as they did."""
        if aborts and await self.state() in ("paused", "sleeping"):
            await self.abort_all()
            return
        while (await self.ask("drain"))["unfinished_requests"]:
            if aborts:
                await self.abort_all()
            await asyncio.sleep(LOOK_EVERY_S)

    async def go_on(self) -> None:
        """Commit the round of the pause, if there is one, and serve again."""
        round = (await self.info())["round"]
        if round is not None and round["number"] != self._session:
            await self.ask("weights_finish", **self._round)
        self._policy = "keep"
        if await self.state() != "sleeping":  # it serves when all of its memory is back
            await self.ask("resume")

    async def connect(
        self, name: str, host: str, port: int, rank_offset: int, world_size: int, backend: Backend
    ) -> None:
        """Join the trainer's process group; its rank 0 waits at this address."""
        try:
            check_trainer(host, port, self._config.trainers)
        except ValueError as error:
            raise Refusal(f"{error}", 403, param="master_address") from error
        await self.ask(
            "weights_group", name=name, address=f"{host}:{port}", rank_offset=rank_offset,
            world_size=world_size, backend=backend,
        )  # fmt: skip

    # ---- Rounds --------------------------------------------------------------------------------

    async def begin_session(self, selector: Selector) -> None:
        """Open a round that `end_session` commits; a session that nobody has ended is dropped."""
        info = await self.info()
        if info["round"] is not None:
            await self._drop()
        told = await self._begin(info["version"], selector=selector)
        self._session = told["number"]

    async def end_session(self, version: str | None = None) -> None:
        """Commit a session's round."""
        self._session = None
        named = {} if version is None else {"version": version}
        await self.ask("weights_finish", **self._round, **named)

    async def folder(self, given: str, version: str | None, policy: str = "") -> None:
        """A round of the weights in a folder, which are all."""
        try:
            name = name_below(self._config.weights_dir, given)
        except ValueError as error:
            raise Refusal(f"{error}", 403, param="model_path") from error
        label = version or (await self.info())["version"]
        await self._begin(label, policy, source={"kind": "folder"})
        await self._load({"folder": name}, ends=True)

    async def group(
        self,
        name: str,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        packed: bool = False,
        **how: Any,
    ) -> None:
        """A bucket that the trainer broadcasts in a process group, tensor by tensor or (`packed`)
        as one of bytes; `how` is for `bucket`."""
        if not names or not len(names) == len(dtypes) == len(shapes):
            raise Refusal(
                f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes were given: "
                "give one of each for a tensor, and one tensor at least.", param="names",
            )  # fmt: skip
        kinds = list(map(dtype_named, dtypes))
        sent = {"name": name, "names": names, "dtypes": kinds, "shapes": shapes, "packed": packed}
        await self.bucket({"group": sent}, {"kind": "group", "name": name}, **how)

    async def handles(self, of_ranks: Sequence[Named], **how: Any) -> None:
        """A bucket in a GPU's memory of the trainer: of each rank of a replica, or one for all."""
        sent = list(map(_plain, of_ranks))
        ranks = {replica["ranks"] for replica in (await self.info())["replicas"].values()}
        if len(sent) > 1 and ranks != {len(sent)}:
            raise Refusal(
                f"tensors of {len(sent)} ranks were sent, and the replicas have "
                f"{' or '.join(map(str, ranks))}: send those of each rank, or the same for all."
            )
        if any(each["tensors"] for each in sent):
            await self.bucket({"handles": sent}, {"kind": "ipc"}, **how)

    async def bucket(
        self,
        load: dict[str, Any],
        source: dict[str, str],
        version: str | None = None,
        selector: Selector = "all",
        policy: str = "",
    ) -> None:
        """Load tensors into the round that is open, or into a new one."""
        info, ends = await self.info(), False
        is_left = info["round"] is not None and info["round"]["partial"]
        if is_left:  # by an API process that has died
            await self._drop()
        if is_left or info["round"] is None:
            ends, label = await self.state() not in STANDING, version or info["version"]
            await self._begin(label, policy, selector=selector, source=source, partial=ends)
        if version is not None:
            load = {**load, "version": version}
        await self._load(load, ends)

    async def _begin(self, version: Any, policy: str = "", **fields: Any) -> dict[str, Any]:
        return await self.ask(
            "weights_begin", **self._round, version=version, policy=policy or self._policy,
            checks_finite=self._config.checks_finite, **fields,
        )  # fmt: skip

    async def _load(self, load: dict[str, Any], ends: bool) -> None:
        """Load; `ends`: the round has nothing else, and does not outlive a failure."""
        try:
            await self.ask("weights_load", **self._round, **load)
            if ends:
                await self.ask("weights_finish", **self._round)
        except Refusal:
            if ends:
                await self._drop()
            raise

    async def _drop(self) -> None:
        with suppress(Refusal):  # it may have ended by itself
            await self.ask("weights_drop", **self._round)


def refuse(**given: Any) -> None:
    """Refuse fields that ask for what is not served."""
    for name, value in given.items():
        if value:
            raise Refusal(f"{name}={value!r:.100} is not served: leave it out.", param=name)


def decoded(texts: Sequence[str], field: str) -> list[bytes]:
    """What texts in base64 stand for."""
    try:
        return [base64.b64decode(text, validate=True) for text in texts]
    except (binascii.Error, ValueError) as error:
        raise Refusal(f"{field} is not in base64: {error}.", param=field) from error


def _fields_of(method: Any) -> type[msgspec.Struct]:
    """A struct with the parameters of a method."""
    types = get_type_hints(method, include_extras=True)
    fields: list[Any] = [
        (name, types[name]) if one.default is one.empty else (name, types[name], one.default)
        for name, one in inspect.signature(method).parameters.items()
    ]
    return msgspec.defstruct("Fields", fields, kw_only=True, forbid_unknown_fields=True)


def _plain(tensors: Named) -> dict[str, Any]:
    """Tensors of one rank as the verb takes them: each memory once."""
    memories = list(dict.fromkeys(tensor.memory for _, tensor in tensors))
    places = {memory: place for place, memory in enumerate(memories)}
    return {
        "memories": [list(memory) for memory in memories],
        "tensors": [
            [name, t.dtype, list(t.shape), list(t.stride), places[t.memory], t.offset]
            for name, t in tensors
        ],
    }
