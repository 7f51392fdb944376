"""`MegatronReplica`: a replica whose requests and answers are of Megatron's classes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, override

import msgspec
from megatron.core.inference.sampling_params import SamplingParams as MegatronParams

from megatron_async.compat.conversions.coordinated_states import CoordinatedStates, Signal
from megatron_async.compat.conversions.engine_control import EngineControl
from megatron_async.compat.conversions.requests import RequestEntry
from megatron_async.compat.conversions.service_ranks import CONFIRM, tell_cuda_profiler
from megatron_async.errors import JobFailed
from megatron_async.requests.inference_request import DynamicInferenceRequest
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.serving.messages import Ended, Run, encode
from megatron_async.serving.replica import Replica
from megatron_async.text.tokenizer import Tokenizer


class MegatronParamsMessage(msgspec.Struct):
    """Parameters of a request as `InferenceClient` sends them.

    Attributes:
        megatron: of Megatron's `SamplingParams.serialize`; None: another client's request.
        num_tokens_to_generate: for the coordinator's estimates.
    """

    megatron: dict[str, Any] | None = None
    num_tokens_to_generate: int | None = None


_read = msgspec.msgpack.Decoder(MegatronParamsMessage).decode


class MegatronReplica(Replica):
    """Serves a coordinator's requests with an engine of `compat`.

    Requests of `InferenceClient` come with Megatron's parameters, and their ends carry Megatron's
    whole request; those of other clients (HTTP) are served as by any replica.

    Args:
        engine: idle.
        add_for: the engine's, which queues a request of Megatron's.
        address: of the coordinator.
        model: what is served.
        name: unique among the replicas.
        states: of the engine.
        finish_together: as of `Replica`.
    """

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
        self._entries: dict[int, RequestEntry] = {}
        """Unfinished requests whose ends carry a record, by number."""

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
        if given is not None:
            self._entries[run.number] = entry
            # Behind the callback of `Replica`, which tells the end.
            soon = partial(future.get_loop().call_soon, self._entries.pop, run.number, None)
            future.add_done_callback(lambda _: soon())
        return params, future

    def ended(self, request: DynamicInferenceRequest, tells_prompt: bool) -> Ended:
        """A request's end, with the record that Megatron's client reads: Python for each token,
        once."""
        told = super().ended(request, tells_prompt)
        entry = self._entries.get(request.request_id)
        if entry is None:
            return told
        whole = encode(entry.record.merge().serialize())
        return msgspec.structs.replace(told, record=whole)

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
    """Megatron's tokenizer of transformers' library as one that HTTP processes can read; None for
    other kinds, whose texts the replica makes."""
    path = getattr(tokenizer, "path", None)
    if getattr(tokenizer, "library", None) != "huggingface" or not isinstance(path, str):
        return None
    folder = Path(path)
    return Tokenizer.from_folder(folder) if Tokenizer.is_in(folder) else None
