"""`UpdatingMachine`: the weights of its engine change under way. Each request says what an engine
without lookahead says that stops, changes its weights and goes on where this one did.
`MovingMachine`: two such engines, and requests go to and fro."""

import json
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from megatron_async import DynamicInferenceRequest, SamplingParams, Status
from megatron_async.engine.listener import EngineListener
from megatron_async.errors import UpdateError
from megatron_async.ops.sampling.slot_records import Header
from megatron_async.planning.step_output import StepOutput
from tests.functional_tests.fuzz.engine_machine import (
    EngineMachine,
    runs,
)
from tests.functional_tests.fuzz.fuzz_requests import (
    COMPARED,
    CUT_SHORT,
    Ask,
    SerialAnswers,
    TrackedRequest,
    asks,
    engine_settings,
    equal,
    snapshot_settings,
)
from tests.support.attention_model import AttentionModel
from tests.support.drafters import DRAFTERS
from tests.support.harness import drain
from tests.support.hybrid_model import HYBRID_MODELS
from tests.support.staged_weights import StagedWeights, by_token, copy_weights

KINDS: dict[str, Callable[[int], AttentionModel]] = {
    kind.__name__: kind for kind in (AttentionModel, *HYBRID_MODELS)
}
SEEDS = (0, 5, 7)
"""By which weights are drawn; an engine begins with the first."""
FIRST = "0.0"
"""Versions are the index of a seed, and a label."""


weights = st.sampled_from([1, 2, 0])


def weights_of(version: Any) -> int:
    """The index of a version's seed; engines begin without a version."""
    return int((version or FIRST).split(".")[0])


@dataclass
class History:
    """What has become of one request: the version of the step that each of its tokens comes from,
    and how many it had when its cache was taken from it."""

    versions: list[Any] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)


class Chronicle(EngineListener):
    """Writes histories, by id of the request, from the numbers of steps alone."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._changes: list[tuple[int, Any]] = [(0, None)]
        self.of: dict[int, History] = {}
        self.by_number: dict[int, History] = {}
        """Histories of the unfinished requests by their numbers."""
        self._ending: list[DynamicInferenceRequest] = []
        engine.listeners.append(self)
        scheduler = engine.context.scheduler
        self._requeue = scheduler.requeue
        scheduler.requeue = self._note_eviction

    def added(self, request: DynamicInferenceRequest) -> None:
        self.of[id(request)] = History()

    def updated(self, step: int, version: Any, policy: str) -> None:
        self._changes.append((step, version))

    def _note_eviction(self, slot: int) -> None:
        slots = self._engine.context.slots
        self.of[id(slots.request_at(slot))].evicted.append(len(slots.generated(slot)))
        self._requeue(slot)

    def ended(self, request: DynamicInferenceRequest, reason: str) -> None:
        self._ending.append(request)

    def booked(self, output: StepOutput) -> None:
        """What ended with the step has its tokens already. A score has none: all of its prompt is
        of the weights of its last step."""
        version = [version for first, version in self._changes if first <= output.step][-1]
        for request_id in output.token_request_ids.tolist():
            self.by_number[request_id].versions.append(version)
        for request in self._ending:
            if not self.of[id(request)].versions:
                self.of[id(request)].versions.append(version)
        self._ending.clear()


class ChangingAnswers(SerialAnswers):
    """Answers of an engine without lookahead whose weights change where `histories` say, by id of
    the question."""

    def __init__(self, kind: Callable[[int], AttentionModel]) -> None:
        self._model, self._sources = kind(SEEDS[0]), [kind(seed) for seed in SEEDS]
        super().__init__(self._model)
        self.histories: dict[int, tuple[Ask, History]] = {}

    def answer(self, ask: Ask, tokens: int | None = None) -> DynamicInferenceRequest:
        _, history = self.histories.get(id(ask), (ask, History()))
        versions = [weights_of(version) for version in history.versions] or [0]
        evicted = [e for e in history.evicted if 0 < e < len(versions)]
        changes = [n for n in range(1, len(versions)) if versions[n] != versions[n - 1]]
        copy_weights(self._model, self._sources[versions[0]])
        if not changes and not versions[0]:
            return super().answer(ask, tokens)
        found = self._changing(ask, tokens, versions, {*changes, *evicted}, evicted)
        copy_weights(self._model, self._sources[0])
        return found

    def _changing(
        self,
        ask: Ask,
        tokens: int | None,
        versions: list[int],
        stops: set[int],
        evicted: list[int],
    ) -> DynamicInferenceRequest:
        engine, params = self._engine, SamplingParams(**ask.sampling)
        future = engine.add_request(ask.request_id, ask.prompt, params)
        request = engine.get_request(ask.request_id)
        slots, known = engine.context.slots, 0
        while not future.done() and (tokens is None or known < tokens):
            if known in stops:
                stops.discard(known)
                engine.suspend(free_kv_cache=known in evicted)
                copy_weights(self._model, self._sources[versions[known]])
                engine.resume()
            engine.step_modern()
            known = len(slots.tokens_since(ask.request_id, 0) or request.generated_tokens)
        if not future.done():
            engine.abort_request(ask.request_id)
        drain(engine)
        return request


class UpdatingMachine(EngineMachine):
    """Three sets of weights follow each other under all policies; rounds are torn, and labels
    published."""

    models: ClassVar[dict[str, AttentionModel]] = {n: kind(SEEDS[0]) for n, kind in KINDS.items()}
    sources: ClassVar = {n: [kind(seed) for seed in SEEDS] for n, kind in KINDS.items()}
    answers: ClassVar[dict[str, SerialAnswers]] = {}

    @initialize(
        settings=engine_settings(),
        drafter=st.sampled_from([*DRAFTERS, "ngram"]),
        sharing=st.booleans(),
        snapshots=snapshot_settings,
        model=st.sampled_from(["AttentionModel", *KINDS]),
        requests=st.lists(asks, min_size=3, max_size=3),  # with three, no MTP layer drafts
    )
    def new_engine(
        self, settings: dict[str, Any], model: str, requests: list[Ask], **drawn: Any
    ) -> None:
        self._kind, self._number, self._labels, self._torn = model, 0, 0, []
        copy_weights(self.models[model], self.sources[model][0])
        if model not in self.answers:
            self.answers[model] = ChangingAnswers(KINDS[model])
        self.chronicle: Chronicle | None = None
        # Of a position that was computed for nothing before an eviction the record is that one's.
        settings = {**settings, "enable_routing_replay": False}
        super().new_engine(settings=settings, model=model, requests=requests, **drawn)

    def add_requests(self, requests: list[Ask]) -> None:
        if self.chronicle is None:  # the first ones come with a new engine
            self.chronicle = Chronicle(self.engine)
        for ask in requests:
            super().add_requests([ask])
            tracked = self.unfinished.get(ask.request_id)
            if tracked is not None and tracked._ask is ask:
                history = self.chronicle.of[id(tracked.request)]
                self.chronicle.by_number[ask.request_id] = history
                self.serial.histories[id(ask)] = ask, history

    @rule(
        index=weights,
        policy=st.sampled_from(["recompute", "keep", "abort"]),
        ask=asks,
        steps=st.sampled_from([3, 4, 2, 6, 1, 0]),
    )
    def update(self, index: int, policy: str, ask: Ask, steps: int) -> None:
        """New weights, most times while requests run."""
        if not self.engine.is_stopped:
            self.add_requests([ask])
            self.step_modern(steps)
        self._number += 1
        self.script.append(f"# weights {index} come, policy {policy}")
        self._stage(index)
        version = f"{index}.{self._labels}"
        self.engine.updating.commit(self._number, version, policy)
        self.counts[f"update: {policy}"] += 1

    @runs
    @rule(
        index=weights, policies=st.sampled_from(["kr", "ka", "kk", "rk"]), steps=st.integers(1, 3)
    )
    def updates_in_a_row(self, index: int, policies: str, steps: int) -> None:
        """The second comes while steps of the weights before the first are in flight."""
        ask = Ask(4, [1, 2, 3], {"num_tokens_to_generate": 20}, 0)
        names = {name[0]: name for name in ("keep", "recompute", "abort")}
        self.update(index, names[policies[0]], ask, 4)
        self.step_modern(steps)
        self.update((index + 1) % len(SEEDS), names[policies[1]], ask, 0)
        self.step_modern(3)

    @rule(index=weights, is_late=st.booleans())
    def torn_round(self, index: int, is_late: bool) -> None:
        self._number += 1
        self.script.append(f"# weights {index} come, and are dropped")
        self._stage(index)
        if is_late:
            self._torn.append(self.engine.updating.commit(self._number, "torn"))
        self.engine.updating.fail(self._number, "torn")
        self.counts["torn"] += 1

    @rule()
    def label(self) -> None:
        if self.engine.context.config.invalidation == "rollback":
            return  # steps that are taken back have lower numbers than the label's again
        self._labels += 1
        index = weights_of(self.engine.weight_version)
        self.script.append(f"engine.updating.label('{index}.{self._labels}')")
        self.engine.updating.label(f"{index}.{self._labels}")

    def _stage(self, index: int) -> None:
        stage = StagedWeights(self.engine, self.sources[self._kind][index])
        self.engine.updating.stage(self._number, stage)

    def _deliver(self) -> None:
        if self.engine.updating.is_due:  # a stopped engine commits, too
            self.engine.loop.tend_updates()
        super()._deliver()

    def _book(self, report: dict[str, Any]) -> None:
        for tracked in self.unfinished.values():
            if tracked.request.finish_reason == "weight_update":
                tracked.check_end = partial(self._check_cut, tracked)  # type: ignore[method-assign]
        ending = [*self._unreported, *self.unfinished.values()]
        super()._book(report)
        for tracked in ending:
            if tracked.request.finish_reason is not None and not tracked._is_refused:
                self._check_versions(tracked)

    def _check_cut(self, tracked: TrackedRequest, serial: SerialAnswers) -> None:
        """A request that an update has ended has the beginning of its answer."""
        request = tracked.request
        assert (request.status, request.error) == (Status.COMPLETED, None)
        assert request.generated_tokens == tracked.emitted
        answer = serial.answer(tracked._ask, len(tracked.emitted))
        for name in CUT_SHORT:
            found, expected = COMPARED[name](request), COMPARED[name](answer)
            if found is not None and expected is not None:
                assert equal(found, expected[: len(tracked.emitted)]), (name, found, expected)

    def _check_versions(self, tracked: TrackedRequest) -> None:
        assert self.chronicle is not None
        request, history = tracked.request, self.chronicle.of[id(tracked.request)]
        versions, count = history.versions, len(request.generated_tokens)
        if not request.sampling_params.is_score:
            assert by_token(request.weight_versions) == versions[:count]
        elif request.succeeded():
            ((version, *_),) = request.weight_versions
            assert [weights_of(version)] == list(map(weights_of, versions))  # labels come between
        self.counts["requests of several versions"] += len(set(versions[:count])) > 1
        again = max([0, *history.evicted])
        if again >= count:
            return
        prompt = len(request.prompt_tokens)
        cache = [versions[again]] * (prompt + again) + versions[again + 1 : count]
        found = by_token(request.kv_versions)
        # Chunks of a prompt may have several labels.
        assert list(map(weights_of, found)) == list(map(weights_of, cache))

    def _finish(self) -> None:
        super()._finish()
        for future in self._torn:
            assert isinstance(future.exception(0), UpdateError)


class MovingMachine(UpdatingMachine):
    """Two engines of one kind of model, with other settings and weights that change on their own.
    The rules are of one of them, until `switch`; a request that moves goes to the other one, where
    its history goes on as after an eviction."""

    seconds: ClassVar = {name: kind(SEEDS[0]) for name, kind in KINDS.items()}
    PARTS = (
        "engine", "device", "drafter", "blocks", "watch", "launches", "ngrams", "mtp", "chronicle",
        "unfinished", "_unreported", "_number", "_torn",
    )  # fmt: skip

    @initialize(
        settings=engine_settings(),
        others=engine_settings(),
        drafter=st.sampled_from([*DRAFTERS, "ngram"]),
        sharing=st.booleans(),
        snapshots=snapshot_settings,
        model=st.sampled_from(["AttentionModel", *KINDS]),
        requests=st.lists(asks, min_size=6, max_size=6),
    )
    def new_engine(
        self, settings: dict[str, Any], others: dict[str, Any], requests: list[Ask], **drawn: Any
    ) -> None:
        self._moves = 40
        self.models = self.seconds  # type: ignore[misc]
        super().new_engine(settings=others, requests=requests[:3], **drawn)
        self._resting = {part: getattr(self, part) for part in self.PARTS}
        del self.models
        self.unfinished, self._unreported = {}, []
        self.script.append("other = engine")
        super().new_engine(settings=settings, requests=requests[3:], **drawn)

    @rule()
    def switch(self) -> None:
        self.script.append("engine, other = other, engine")
        for part, resting in self._resting.items():
            self._resting[part] = getattr(self, part)
            setattr(self, part, resting)

    @rule(ask=asks, steps=st.sampled_from([6, 4, 9, 3]), comes_back=st.booleans())
    def move(self, ask: Ask, steps: int, comes_back: bool) -> None:
        """The request with most tokens goes to the other engine, as JSON, and perhaps back."""
        ask = ask._replace(sampling=ask.sampling | {"num_tokens_to_generate": 20})
        if not self.engine.is_stopped:
            self.add_requests([ask])
        for _ in range(1 + comes_back):
            if not self.engine.is_stopped:
                self.step_modern(steps)
            if self.unfinished:
                tokens_of = self.engine.context.slots.tokens_since
                self._move(max((len(tokens_of(n, 0) or ()), n) for n in self.unfinished)[1])

    def _move(self, request_id: int) -> None:
        assert self.chronicle is not None
        left, self._moves = self.unfinished.pop(request_id), self._moves + 1
        self.script.append(f"data = engine.export_request({request_id})")
        data = json.loads(json.dumps(self.engine.export_request(request_id)))
        left.check_end = partial(self._check_left, left, data["generated"])  # type: ignore[method-assign]
        self._unreported.append(left)
        before = self.chronicle.of.get(id(left.request), History())
        self.switch()
        self.script.append(f"engine.import_request({self._moves}, data)")
        if (grammar := left.request.sampling_params.structured_output) is not None:
            wait([self.engine.grammars.begin(grammar)])
        future = self.engine.import_request(self._moves, data)
        moved = TrackedRequest(self.engine, left._ask._replace(request_id=self._moves), future)
        moved._ask, moved.emitted = left._ask, [*data["generated"]]
        if moved.future.done():
            self._unreported.append(moved)
        else:
            self.unfinished[self._moves] = moved
        count = moved.moved = len(moved.emitted)
        history = History(before.versions[:count], [*before.evicted, count])
        self.chronicle.of[id(moved.request)] = self.chronicle.by_number[self._moves] = history
        self.serial.histories[id(left._ask)] = left._ask, history
        if self.drafter is not None and moved.request.record is not None:
            self._teach(left._ask, int(moved.request.record.words[Header.SEED_LOW]))
        self.counts["moved"] += not moved._is_refused
        self.counts["moved with tokens"] += count > 0

    def _check_left(self, left: TrackedRequest, tokens: list[int], serial: SerialAnswers) -> None:
        request = left.request
        assert (request.status, request.finish_reason) == (Status.COMPLETED, "moved")
        assert request.generated_tokens == left.emitted == tokens

    def _check_versions(self, tracked: TrackedRequest) -> None:
        if tracked.request.finish_reason != "moved":
            super()._check_versions(tracked)

    def _finish(self) -> None:
        for _ in range(2):
            self.unpause()
            self.resume()
            self._run_to_the_end()
            self.switch()
        super()._finish()
        self.switch()
        super()._finish()
