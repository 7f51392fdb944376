"""How an engine of `compat` comes behind a coordinator: its address, its replica (whose requests
and answers are of Megatron's classes), its task.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, override

import msgspec
from megatron.core.inference.sampling_params import SamplingParams as MegatronParams

from megatron_async.communication.bootstrap import LOOPBACK, join_job
from megatron_async.compat.conversions.coordinated_states import CoordinatedStates, Signal
from megatron_async.compat.conversions.engine_control import EngineControl
from megatron_async.compat.conversions.errors import refuse
from megatron_async.compat.conversions.requests import RequestEntry, finished_record
from megatron_async.compat.conversions.sampling import SamplingSeed
from megatron_async.compat.conversions.service_ranks import (
    CONFIRM,
    FollowerTask,
    ServiceRanks,
    all_there,
    place_in_job,
    tell_cuda_profiler,
)
from megatron_async.compat.inference.data_parallel_inference_coordinator.coordinator import (
    DataParallelInferenceCoordinator,
)
from megatron_async.errors import ConfigurationError, JobFailed
from megatron_async.ranks.finishing import finish_together
from megatron_async.ranks.rank_group import RankGroup
from megatron_async.requests.inference_request import DynamicInferenceRequest
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.serving.messages import Ended, Run, StepTokens, encode
from megatron_async.serving.replica import Replica
from megatron_async.text.tokenizer import Tokenizer


class MegatronParamsMessage(msgspec.Struct):
    """Parameters of a request as `InferenceClient` sends them: what `SamplingParams.serialize`
    gives (None: another client's request), and the number of tokens for the coordinator's
    estimates."""

    megatron: dict[str, Any] | None = None
    num_tokens_to_generate: int | None = None


_read = msgspec.msgpack.Decoder(MegatronParamsMessage).decode
OF_PROMPT = "\0prompt "
"""Begins what a streamed request is told of its prompt's log probs, as JSON in place of a text."""


class MegatronReplica(Replica):
    """Serves a coordinator's requests with an engine of `compat`, whose `add_for` queues them.

    Requests of `InferenceClient` come with Megatron's parameters, and their ends carry Megatron's
    whole request; those of other clients (HTTP) are served as by any replica, and their ends carry
    what Megatron's `FinishedRequestRecord` has.
    """

    moves_requests = False

    def __init__(
        self,
        engine: EngineControl,
        add_for: Callable[..., RequestEntry],
        address: str,
        model: str,
        name: str,
        states: CoordinatedStates,
        finish_together: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        tokenizer = tokenizer_for_clients(engine.controller.tokenizer)
        super().__init__(engine, address, model, name, finish_together, tokenizer=tokenizer)
        self._served, self._add_for = engine, add_for
        self._states = states
        self._entries: dict[int, tuple[RequestEntry, str | None]] = {}
        """Unfinished requests by number, those of HTTP with their label."""
        self._of_prompts: dict[int, DynamicInferenceRequest] = {}
        """Streamed ones that are to be told of their prompts."""

    @override
    def add(self, run: Run) -> tuple[SamplingParams, asyncio.Future[DynamicInferenceRequest]]:
        given = _read(run.params).megatron
        if given is None:
            theirs: Any = msgspec.msgpack.decode(run.params, type=SamplingParams)
            params = theirs
        else:
            theirs = MegatronParams.deserialize(given)
            params = SamplingParams()  # log probs go with the record
        entry = self._add_for(run.number, run.prompt, theirs, run.priority, run.traceparent)
        future = entry.own_future
        assert future is not None
        if entry.own is not None and getattr(theirs, "streaming", False):
            params = entry.own.sampling_params
            if params.return_log_probs and not params.skip_prompt_log_probs:
                self._of_prompts[run.number] = entry.own
        self._entries[run.number] = entry, run.label if given is None else None
        # Behind the callback of `Replica`, which tells the end.
        soon = partial(future.get_loop().call_soon, self._entries.pop, run.number, None)
        future.add_done_callback(lambda _: soon())
        return params, future

    def ended(self, request: DynamicInferenceRequest, tells_prompt: bool) -> Ended:
        """A request's end, with the record that Megatron's client reads: Python for each token,
        once."""
        told = super().ended(request, tells_prompt)
        if request.request_id not in self._entries:
            return told
        entry, label = self._entries[request.request_id]
        if self._served.local_metadata_ledger_enabled and not request.failed():
            self._note(entry, label)
        if label is None:
            whole = entry.record.merge().serialize()
        else:
            whole = dict(vars(finished_record(entry.request)))
            if (rows := entry.request.routing_indices) is not None:
                whole["moe_topk_indices"] = rows.tolist()  # sync-ok: NumPy
        return msgspec.structs.replace(told, record=encode(whole))

    def _tell(self, news: StepTokens) -> None:
        if self._of_prompts:
            for number in set(memoryview(news.numbers).cast("q")) & self._of_prompts.keys():
                request = self._of_prompts.pop(number)
                told = {
                    "prompt_log_probs": request.prompt_log_probs or [],
                    "prompt_top_n_logprobs": request.prompt_top_n_logprobs or [],
                }
                news.texts.append((number, OF_PROMPT + msgspec.json.encode(told).decode()))
            for ended in news.ends:
                self._of_prompts.pop(ended.number, None)
        super()._tell(news)

    def _note(self, entry: RequestEntry, label: str | None) -> None:
        """Enter a request into the ledger; of several choices of one answer, the first to end has
        its id."""
        ledger = self._served.local_metadata_ledger
        uid = label or getattr(entry.request, "uid", None)
        if uid is None or uid in ledger:
            uid = f"chatcmpl-{uuid.uuid4().hex}"
        ledger[uid] = finished_record(entry.request)

    @override
    async def update(
        self, what: str, fields: Mapping[str, Any]
    ) -> tuple[dict[str, Any], tuple[str, str] | None]:
        """Refuse it: the weights are a module's of the caller."""
        why = "engines of Megatron's callers get new weights in place: pause, write, resume."
        return {}, ("ValueError", f"{what} is not served here: {why}")

    def do(
        self, what: str, fields: Mapping[str, Any]
    ) -> tuple[dict[str, Any], tuple[str, str] | None]:
        """Do what the coordinator asks; "signal" and "confirm" are Megatron's words."""
        if what == "confirm":
            signal = Signal(fields["signal"])
            self._states.confirm(signal)
            self._served.group.tell(CONFIRM, signal.value)
            if self._states.state.name == "STOPPED":
                self.leave()
                self.leave()  # at once: what is unfinished is the stopped engine's no more
            return {}, None
        if what != "signal":
            return super().do(what, fields)
        try:
            self._follow(Signal(fields.get("signal")), fields.get("value"))
        except JobFailed:
            raise
        except Exception as error:  # whatever it is, it is this command's alone
            return {}, (type(error).__name__, str(error))
        return {}, None

    def _follow(self, signal: Signal, value: Any) -> None:
        engine = self._served
        match signal:
            case Signal.SET_GENERATION_EPOCH:
                engine.set_generation_epoch(value)
                engine.group.tell(signal.value, value)
                return
            case Signal.START_CUDA_PROFILER | Signal.STOP_CUDA_PROFILER:
                tell_cuda_profiler(starts=signal is Signal.START_CUDA_PROFILER)
                engine.group.tell(signal.value)
                return
        if not self._states.begin(signal):
            return
        match signal:
            case Signal.PAUSE:
                engine.pause()
            case Signal.UNPAUSE:
                engine.unpause()
            case Signal.SUSPEND:
                engine.suspend()
            case Signal.RESUME:
                engine.resume()
        engine.group.tell(signal.value)  # after the engine: so followers have done it, too


def tokenizer_for_clients(tokenizer: Any) -> Tokenizer | None:
    """Megatron's tokenizer of transformers' library, or an adapter that keeps one where Megatron's
    server looks for it, as one that HTTP processes can read; None for other kinds, whose texts the
    replica makes."""
    path = getattr(tokenizer, "path", None)
    if getattr(tokenizer, "library", None) == "huggingface" and isinstance(path, str):
        folder = Path(path)
        if Tokenizer.is_in(folder):  # and else a name in a hub
            return Tokenizer.from_folder(folder)
    inner = getattr(getattr(tokenizer, "_tokenizer", None), "tokenizer", None)
    if inner is None or not getattr(inner, "is_fast", False):
        return None
    with TemporaryDirectory(prefix="megatron-async-tokenizer-") as place:
        inner.save_pretrained(place)
        return Tokenizer.from_folder(place)


logger = logging.getLogger("megatron_async")


class CoordinatorService:
    """One rank's part. The first rank of each model is a replica; the others follow it, and never
    see the coordinator. On the first rank of all there is the coordinator, too, in a thread."""

    def __init__(
        self,
        engine: EngineControl,
        add_for: Callable[..., RequestEntry],
        address: str,
        states: CoordinatedStates,
        ranks: ServiceRanks,
    ) -> None:
        self._engine = engine
        self._states = states
        self._ranks = ranks
        self._replica: MegatronReplica | None = None
        self._follower: FollowerTask | None = None
        place = ranks.place
        if not place.is_primary:
            self._follower = FollowerTask(engine, states)
            return
        finish = None
        if ranks.shares_experts:
            finish = partial(finish_together, engine.has_unfinished_requests, place, None)
        name = f"dp-{place.data_parallel_rank}"
        self._replica = MegatronReplica(engine, add_for, address, "megatron", name, states, finish)

    async def joined(self, task: asyncio.Task[None]) -> None:
        """Wait until the coordinator has taken all replicas of the job, where a model is spread
        over ranks; else this one. What ends the task of `run` early is raised."""
        failure = None
        try:
            await self._joined(task)
        except Exception as error:
            failure = error
        await all_there(self._ranks, failure)

    async def _joined(self, task: asyncio.Task[None]) -> None:
        if self._replica is None:
            return
        waiting = asyncio.ensure_future(self._replica.joined.wait())
        await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            await task
            raise RuntimeError("the engine left its coordinator before it had joined")

    async def run(self) -> None:
        """Serve until the engines are told to stop."""
        error: BaseException | None = None
        engine = self._engine
        engine.loop.join(self._ranks.group)
        if self._ranks.is_spread:
            # Others serve the requests of a lost replica that this one does not need.
            join_job().watch.needed = self._ranks.place.needed_ranks
        try:
            if self._follower is not None:
                await self._follower.run()
            elif self._replica is not None:
                await self._replica.run()
        except asyncio.CancelledError:
            raise
        except BaseException as raised:
            error = raised
            raise
        finally:
            engine.group.release()
            if not isinstance(error, JobFailed):  # or the engine is lost with the ranks
                engine.loop.join(RankGroup())
            self._states.stop(error)


def share_seed(rng: SamplingSeed) -> None:
    """Give all ranks' engines the first one's seed; collective. A request has its random numbers
    from the seed and its own number, wherever it is served, and again after a replica is lost; so
    `offset_sampling_seed_by_dp_rank` has no effect behind a coordinator."""
    if place_in_job()[1] > 1:
        seeds = join_job().exchange("the sampling seed", str(rng.initial_seed()))
        rng.manual_seed(int(seeds[0]))


def find_address(port: int | None, launches: bool, hostname: str | None) -> str:
    """The coordinator's address, on all ranks; collective. The first rank starts the coordinator,
    unless one is there already, at `port` (None: any that is free). Without `hostname` this host
    alone can reach it, or where ranks are on other hosts, the network that they are on.

    Raises:
        ConfigurationError: the address cannot be bound, or no port was given for one that is there.
    """
    if not launches:
        if port is None:
            refuse(
                "launch_inference_coordinator=False without inference_coordinator_port",
                "say at which port the coordinator is",
            )
        return f"tcp://{hostname or LOOPBACK}:{port}"
    rank, ranks = place_in_job()
    address, text, failure = "", "", None
    if rank == 0:
        try:
            address = _start(hostname or _own_host(ranks), port)
        except Exception as error:  # the others wait for the address, and must not for ever
            failure, text = error, str(error) or repr(error)
    if ranks > 1:
        said = msgspec.json.encode((address, text)).decode()
        told = join_job().exchange("the coordinator's address", said)[0]
        address, text = msgspec.json.decode(told, type=tuple[str, str])
        if text and failure is None:
            raise ConfigurationError(text)
    if failure is not None:
        raise failure
    return address


def _own_host(ranks: int) -> str:
    if ranks > 1:
        job = join_job()
        if not all(record.on_host_of(job.me) for record in job.records):
            return job.address()
    return LOOPBACK


def _start(host: str, port: int | None) -> str:
    coordinator = DataParallelInferenceCoordinator.bound(host, port)
    threading.Thread(target=coordinator.run, name="coordinator", daemon=True).start()
    return coordinator.address
