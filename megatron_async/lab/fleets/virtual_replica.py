"""`VirtualReplica`: a model-less engine that serves a coordinator on a virtual clock of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_async.config import InferenceConfig
from megatron_async.lab.device_times import Machine
from megatron_async.lab.fleets.traced_requests import PIECE_TOKENS, TracedRequest, tokens_of
from megatron_async.lab.model_less import ModelLessEngine
from megatron_async.lab.model_shape import ModelShape
from megatron_async.lab.workloads import greedy
from megatron_async.planning.dynamic_context import DynamicInferenceContext
from megatron_async.planning.step_plan import IntArray, StepPlan
from megatron_async.serving.messages import Ended, ReplicaStatus
from megatron_async.serving.replica_status import status_of


@dataclass(slots=True)
class Served:
    """What became of one request. Times are seconds of the virtual clock, from the trace's start.

    Attributes:
        arrival_s: at the coordinator.
        input_tokens: of its prompt.
        output_tokens: that it got.
        replica: number of the replica.
        first_launched_s: when the step with its first chunk was launched.
        first_token_s: when its first token was on the host.
        ended_s: when its last one was.
        cached_tokens: of its prompt, found when it was admitted for the first time.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    replica: int = -1
    first_launched_s: float = -1.0
    first_token_s: float = 0.0
    ended_s: float = 0.0
    cached_tokens: int = 0

    @property
    def ttft(self) -> float:
        """Seconds from its arrival to its first token."""
        return self.first_token_s - self.arrival_s

    @property
    def latency(self) -> float:
        """Seconds from its arrival to its last token."""
        return self.ended_s - self.arrival_s


class _TracedTokens:
    """Samples the tokens that the trace's answers have, so that later prompts repeat them."""

    def __init__(self, vocab_size: int, max_requests: int) -> None:
        self._vocab_size = vocab_size
        self._owner = np.full(max_requests, -1, dtype=np.int64)
        """By slot: the request whose piece is noted."""
        self._piece = np.zeros(max_requests, dtype=np.int64)
        self._id = np.zeros(max_requests, dtype=np.int64)
        self.requests: dict[int, tuple[TracedRequest, Served]] = {}
        """Unfinished ones, by number."""

    def sample(self, plan: StepPlan, context: DynamicInferenceContext) -> tuple[IntArray, IntArray]:
        """The token at each row's next position."""
        slots, pieces = plan.slots, plan.kv_at_most.astype(np.int64) // PIECE_TOKENS
        owners = context.slots.request_id[slots]
        now_us = context.device.clock.now_us  # type: ignore[attr-defined]  # a VirtualDevice
        for owner in owners[plan.num_decode :].tolist():
            served = self.requests[owner][1]
            if served.first_launched_s < 0:
                served.first_launched_s = now_us / 1e6
        is_new = (self._owner[slots] != owners) | (self._piece[slots] != pieces)
        for row in np.flatnonzero(is_new).tolist():
            slot, owner, piece = int(slots[row]), int(owners[row]), int(pieces[row])
            ids = self.requests[owner][0].ids
            self._owner[slot], self._piece[slot] = owner, piece
            # A row that was launched for nothing lies behind the end.
            self._id[slot] = ids[min(piece, len(ids) - 1)]
        places = plan.kv_at_most.astype(np.int64) % PIECE_TOKENS
        tokens = tokens_of(self._id[slots], places, self._vocab_size)
        return tokens, np.ones(plan.num_rows, dtype=np.int32)


class VirtualReplica:
    """One replica: what `serving/replica.py` is around an engine with a model.

    Its host takes in what has come between two steps. What a step yields is there at the step's
    end, and `news` and `status` are sent then.

    Args:
        number: of the replica.
        shape: of the model that is not there.
        config: settings of the engine.
        machine: how long everything takes.

    Attributes:
        identity: under which the coordinator knows it.
        engine: the model-less one.
        inbox: requests that were sent and not taken in.
        news: what is to be told to the coordinator when the step under way has ended.
        has_turn: whether the fleet is to call `turn` later on.
        status_is_due: whether a ping came during a step.
    """

    def __init__(
        self, number: int, shape: ModelShape, config: InferenceConfig, machine: Machine
    ) -> None:
        self.number = number
        self.identity = f"replica-{number}".encode()
        self._vocab_size = shape.vocab_size
        self._tokens = _TracedTokens(shape.vocab_size, config.max_requests)
        self.engine = ModelLessEngine(shape, config, self._tokens, machine)
        self.clock = self.engine.virtual_device.clock
        self._add_us = machine.cpu.add_us
        self.inbox: list[tuple[int, TracedRequest, Served]] = []
        self.news: list[Ended] = []
        self.has_turn = self.status_is_due = False
        self._runs_seen = 0
        self._status: ReplicaStatus | None = None

    def status(self) -> ReplicaStatus:
        """The answer to a ping."""
        if self._status is None:
            self._status = status_of(self.engine, self._runs_seen, {})
        return self._status

    def turn(self, now_us: float) -> bool:
        """Take in what has come by now, and run a step, at whose end the clock stands then.

        Returns:
            whether there was anything to run.

        Raises:
            RuntimeError: a request failed; it carries the request's error.
        """
        engine, clock = self.engine, self.clock
        if not engine.has_unfinished_requests():
            if not self.inbox:
                return False
            clock.wait_until(now_us)
            engine.model_less_controller.engine_was_idle = True
        for number, request, served in self.inbox:
            self._runs_seen += 1
            self._tokens.requests[number] = request, served
            served.replica = self.number
            engine.add_request(
                number, request.prompt(self._vocab_size), greedy(request.output_tokens)
            )
            clock.spend(self._add_us)
        self.inbox.clear()
        self._status = None
        report = engine.step_modern()
        now_s = clock.now_us / 1e6
        for output in report["outputs"]:
            for number in output.request_ids[output.is_first].tolist():
                self._tokens.requests[number][1].first_token_s = now_s
        for ended in report["finished_request_records"]:
            if ended.error is not None:
                raise RuntimeError(
                    f"request {ended.request_id} failed: {ended.error}"
                ) from ended.error
            served = self._tokens.requests.pop(ended.request_id)[1]
            served.ended_s, served.cached_tokens = now_s, ended.num_cached_tokens
            name = self.identity.decode()
            self.news.append(Ended(ended.request_id, "length", replica=name))
        return True
