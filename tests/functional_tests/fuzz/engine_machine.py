"""`EngineMachine`: random calls of an engine's methods, and what must hold after each of them.

A new event is one rule. A failure is shrunk, and printed as a script of the calls that lead to it.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Coroutine
from concurrent.futures import wait
from typing import Any, ClassVar

import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from megatron_async import DynamicInferenceRequest, SamplingParams
from megatron_async.engine.late_launch import LateLaunch
from megatron_async.errors import EngineStopped, RequestError
from megatron_async.ops.sampling.slot_records import Header
from tests.functional_tests.fuzz.fuzz_requests import (
    MAX_SEQUENCE,
    Ask,
    SerialAnswers,
    TrackedRequest,
    asks,
    engine_settings,
    score_of,
    snapshot_settings,
)
from tests.support.attention_model import VOCABULARY, AttentionModel
from tests.support.draft_watches import MtpWatch, NgramWatch, WholeSequences
from tests.support.drafters import DRAFTERS
from tests.support.harness import assert_all_is_back, make_engine
from tests.support.hybrid_model import HYBRID_MODELS
from tests.support.late_device import LateDevice
from tests.support.letter_tokenizers import Pieces
from tests.support.mtp_model import MTP_MODELS, MtpModel
from tests.support.patience import PATIENCE_S
from tests.support.poison import poison_blocks, poison_states
from tests.support.shared_checkers import lend_checkers
from tests.support.step_watch import StepWatch
from tests.support.tiny_launches import StepLimits, TickingLaunches, watch_state_plans

MAX_STEPS = 1000
"""More than any schedule takes to its end; beyond it an engine is stuck."""
PREAMBLE = """\
import asyncio
from tests.support.attention_model import VOCABULARY, AttentionModel
from tests.support.drafters import DRAFTERS
from tests.support.letter_tokenizers import Pieces
from tests.support.harness import make_engine
from tests.support.hybrid_model import DeltaAttentionModel, HybridAttentionModel
from tests.support.hybrid_model import MixedAttentionModel
from tests.support.late_device import LateDevice
from tests.support.mtp_model import MtpHybridModel, MtpModel
from tests.support.poison import poison_blocks
from tests.support.poison import poison_states
from tests.support.tiny_launches import use_small_grid
from tests.support.tiny_launches import StepLimits
from tests.support.tiny_launches import TickingLaunches
from megatron_async import SamplingParams
use_small_grid()
device, loop = LateDevice(), asyncio.new_event_loop()"""
NGRAM = "ngram"
"""The drafter that needs no answers: the engine's own. In half of all cases the model has an MTP
layer, and that drafts."""
ROOM = (8, MAX_SEQUENCE)
"""Room of a drafter: answers, and tokens of one."""
COUNTED = (
    "steps", "pauses", "evictions", "zombie_rows", "discarded_steps", "accepted_tokens",
    "prefix_cache_hits", "prefix_cache_evictions", "prefix_cache_snapshot_hits",
)  # fmt: skip
"""Names of an engine's statistics."""
some_request = st.integers(0, 5)
"""Which of the unfinished requests, counted round and round in the order of their ids."""
needs_a_request = precondition(lambda machine: machine.unfinished)
runs = precondition(lambda machine: not machine.engine.is_stopped)


class EngineMachine(RuleBasedStateMachine):
    """One engine on a late device, the requests that it serves (`unfinished`, by id), and their
    readers. `counts` is what happened in all schedules of this process, `script` the calls so far,
    in Python."""

    counts: ClassVar[Counter[str]] = Counter()
    models: ClassVar[dict[str, AttentionModel]] = {
        "AttentionModel": AttentionModel(), **{kind.__name__: kind() for kind in HYBRID_MODELS},
        **{name: kind() for name, kind in MTP_MODELS.items()},
    }  # fmt: skip
    whole: ClassVar[dict[str, WholeSequences]] = {}
    answers: ClassVar[dict[str, SerialAnswers]] = {}
    loop: ClassVar[asyncio.AbstractEventLoop] = asyncio.new_event_loop()
    watches_mtp = True
    """Whether drafts are those of a whole sequence in the model's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.counts["schedules"] += 1
        self.unfinished: dict[int, TrackedRequest] = {}
        self.ended: list[DynamicInferenceRequest] = []
        """Some that came to their ends."""
        self.streamed: list[TrackedRequest] = []
        self._unreported: list[TrackedRequest] = []
        """Ended between two steps: the next report must have them."""
        self.script = [PREAMBLE]

    @initialize(
        settings=engine_settings(),
        drafter=st.sampled_from([*DRAFTERS, NGRAM]),
        sharing=st.booleans(),
        snapshots=snapshot_settings,
        model=st.sampled_from(["AttentionModel"] * 3 + [kind.__name__ for kind in HYBRID_MODELS]),
        requests=st.lists(asks, min_size=2, max_size=4),
    )
    def new_engine(
        self,
        settings: dict[str, Any],
        drafter: str,
        sharing: bool,
        snapshots: dict[str, Any],
        model: str,
        requests: list[Ask],
    ) -> None:
        settings = self._settings(settings)
        drafts = bool(settings["num_speculative_tokens"]) and drafter == NGRAM
        if drafts and len(requests) != 3:
            model = "MtpModel" if model == "AttentionModel" else "MtpHybridModel"
            settings = {**settings, "speculative_method": "mtp"}
        elif drafts:
            settings = {**settings, "speculative_method": NGRAM}
        if model not in self.answers:
            self.answers[model] = SerialAnswers(self.models[model])
        self.serial = self.answers[model]
        self.counts[model] += 1
        if sharing and settings["invalidation"] == "reconcile":
            settings = {**settings, **snapshots, "enable_prefix_caching": True}
        self.drafter = None
        if settings["num_speculative_tokens"] and not drafts:
            self.drafter = DRAFTERS[drafter]([], VOCABULARY, ROOM)
        made = self.drafter and f"DRAFTERS[{drafter!r}]([], VOCABULARY, {ROOM})"
        arguments = "".join(f", {name}={value!r}" for name, value in settings.items())
        self.script.append(f"drafter = {made}")
        self.script.append(
            f"engine = make_engine({model}(), device=device, tokenizer=Pieces(), "
            f"drafter=drafter{arguments})"
        )
        self.script.append("poison_blocks(engine); poison_states(engine); StepLimits(engine)")
        self.device = LateDevice()
        self.engine = make_engine(
            self.models[model],
            device=self.device,
            tokenizer=Pieces(),
            drafter=self.drafter,
            **settings,
        )
        lend_checkers(self.engine)
        self.blocks = poison_blocks(self.engine)
        poison_states(self.engine)
        StepLimits(self.engine)
        watch_state_plans(self.engine)
        self.watch = StepWatch(self.engine)
        self.launches: TickingLaunches | None = None
        if isinstance(self.engine.launching, LateLaunch):
            self.script.append("TickingLaunches(engine.launching)")
            self.launches = TickingLaunches(self.engine.launching)
        self.ngrams, self.mtp = None, None
        if settings.get("speculative_method") == NGRAM:
            self.ngrams = NgramWatch(self.engine)
        if settings.get("speculative_method") == "mtp" and self.watches_mtp:
            if model not in self.whole:
                mtp_model = self.models[model]
                assert isinstance(mtp_model, MtpModel)
                self.whole[model] = WholeSequences(mtp_model)
            self.mtp = MtpWatch(self.engine, self.whole[model])
        self.add_requests(requests)

    def _settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        return settings

    # ---- Requests ----------------------------------------------------------------------------

    @rule(requests=st.lists(asks, min_size=1, max_size=3))
    def add_requests(self, requests: list[Ask]) -> None:
        for ask in requests:
            self.script.append(f"engine.add_request({ask})")
            params = SamplingParams(**ask.sampling)
            arguments = (ask.request_id, ask.prompt, params, ask.priority)
            if params.structured_output is not None:
                # Compiled by now: what follows must not depend on how long a thread takes.
                wait([self.engine.grammars.begin(params.structured_output)])
            if ask.request_id in self.unfinished:
                with pytest.raises(RequestError, match="in use"):
                    self.engine.add_request(*arguments)
                continue
            tracked = TrackedRequest(self.engine, ask, self.engine.add_request(*arguments))
            if self.drafter is not None and tracked.request.record is not None:
                self._teach(ask, int(tracked.request.record.words[Header.SEED_LOW]))
            if tracked.future.done():
                self._unreported.append(tracked)
            else:
                self.unfinished[ask.request_id] = tracked
            if (score := score_of(ask)) is not None and score.request_id not in self.unfinished:
                self.add_requests([score])

    @precondition(lambda machine: machine.ended)
    @rule(which=some_request, ask=asks)
    def next_turn(self, which: int, ask: Ask) -> None:
        """A prompt that goes on with what an earlier request has said."""
        self.add_requests([ask._replace(prompt=self._said(which, ask))])

    def whole_blocks(self, which: int, ask: Ask) -> None:
        """A prompt whose tokens fill blocks that an earlier request has left."""
        size = self.engine.context.block_size_tokens
        known = self._said(which, ask)[:-1]
        if len(known) >= size:
            self.add_requests([ask._replace(prompt=known[: len(known) // size * size])])

    def _said(self, which: int, ask: Ask) -> list[int]:
        """What an ended request leaves for a prompt: its own one, and its answer."""
        earlier = self.ended[which % len(self.ended)]
        known = [*map(int, earlier.prompt_tokens), *earlier.generated_tokens]
        return known[: MAX_SEQUENCE - ask.sampling["num_tokens_to_generate"]]

    def _teach(self, ask: Ask, seed: int) -> None:
        """Tell the drafter the answer. Requests of one seed are taken for each other."""
        answer = self.serial.sequence(ask)
        self.script.append(f"drafter.teach({seed}, {answer})")
        self.drafter.teach(seed, answer)

    @needs_a_request
    @rule(which=some_request)
    def abort_request(self, which: int) -> None:
        self._abort(self._pick(which))

    @needs_a_request
    @rule(which=some_request)
    def cancel_future(self, which: int) -> None:
        self.unfinished[self._pick(which)].future.cancel()

    @needs_a_request
    @rule(which=some_request)
    def stream(self, which: int) -> None:
        request_id = self._pick(which)
        self.script.append(f"engine.stream({request_id})")
        tracked = self.unfinished[request_id]
        tracked.read(self.engine.stream(request_id), self.loop)
        self.streamed.append(tracked)

    @precondition(lambda machine: machine.streamed)
    @rule()
    def readers_run(self) -> None:
        self._run(asyncio.sleep(0))

    # ---- Stops -------------------------------------------------------------------------------

    @rule()
    def pause(self) -> None:
        self.script.append("engine.pause()")
        self.engine.pause()
        self._deliver()

    @rule()
    def unpause(self) -> None:
        self.script.append("engine.unpause()")
        self.engine.unpause()

    @rule(free_kv_cache=st.booleans())
    def suspend(self, free_kv_cache: bool) -> None:
        self.script.append(f"engine.suspend({free_kv_cache})")
        self.engine.suspend(free_kv_cache)
        self._deliver()

    @rule()
    def resume(self) -> None:
        self.script.append("engine.resume()")
        is_fresh = self.engine.context.gpu_view.kv_cache._data is None
        self.engine.resume()
        if is_fresh:
            self.blocks.poison_free_blocks()

    def _deliver(self) -> None:
        """A stop books the steps in flight; the next step reports what they gave."""
        assert not self.engine.in_flight
        if self.engine.booking.undelivered or self.engine.requests.has_ended:
            self._step()
        with pytest.raises(EngineStopped):
            self.engine.step_modern()

    # ---- Steps -------------------------------------------------------------------------------

    @runs
    @rule(times=st.integers(1, 8))
    def step_modern(self, times: int) -> None:
        self.script.append(f"for _ in range({times}): engine.step_modern()")
        for _ in range(times):
            self._step()

    @runs
    @rule()
    def async_step(self) -> None:
        self.script.append("loop.run_until_complete(engine.async_step())")
        self.watch.before_step()
        self._book(self._run(self.engine.async_step()))

    @runs
    @needs_a_request
    @rule(which=some_request)
    def abort_request_during_async_step(self, which: int) -> None:
        request_id = self._pick(which)
        self.script.append("step = loop.create_task(engine.async_step())")
        self.script.append("loop.run_until_complete(asyncio.sleep(0))")

        async def both() -> dict[str, Any]:
            step = asyncio.create_task(self.engine.async_step())
            await asyncio.sleep(0)  # it launches, unless that has to wait, and waits if it has to
            if not step.done():
                self._abort(request_id)
            if self.launches is not None and self.launches.is_waiting:
                self.watch.before_step()  # it launches without the request
                self.counts["aborts_before_a_launch"] += 1
            return await step

        self.watch.before_step()
        self._book(self._run(both()))
        self.script.append("loop.run_until_complete(step)")

    @rule(stream=st.sampled_from(["upload", "compute", "copy"]), items=st.integers(1, 9))
    def device_runs(self, stream: str, items: int) -> None:
        self.script.append(f"device.run(device.{stream}, {items})")
        self.device.run(getattr(self.device, stream), items)

    # ---- What must hold ----------------------------------------------------------------------

    def _step(self) -> None:
        self.watch.before_step()
        self._book(self.engine.step_modern())

    def _pick(self, which: int) -> int:
        return sorted(self.unfinished)[which % len(self.unfinished)]

    def _abort(self, request_id: int) -> None:
        self.script.append(f"engine.abort_request({request_id})")
        self.engine.abort_request(request_id)
        tracked = self.unfinished.pop(request_id)
        tracked.is_aborted = True
        self._unreported.append(tracked)

    def _book(self, report: dict[str, Any]) -> None:
        """Check a step's report, and the requests that ended with it."""
        # A step that resolves several may have booked a token of a request just before its abort.
        known = {tracked.request.request_id: tracked for tracked in self._unreported}
        known |= self.unfinished
        for output in report["outputs"]:
            for request_id, token in zip(output.token_request_ids, output.tokens, strict=True):
                known[int(request_id)].emitted.append(int(token))
        ended, self._unreported = self._unreported, []
        for number, tracked in list(self.unfinished.items()):
            if tracked.request.finish_reason is not None:
                ended.append(self.unfinished.pop(number))
        reported = report["finished_request_records"]
        assert sorted(map(id, reported)) == sorted(id(tracked.request) for tracked in ended)
        for tracked in ended:
            tracked.check_end(self.serial)
            self.counts[str(tracked.request.finish_reason)] += 1
            if tracked.request.succeeded():
                self.ended = [tracked.request, *self.ended[:2]]
        self.watch.after_step()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    def teardown(self) -> None:
        try:
            if sys.exception() is None and hasattr(self, "watch"):
                self._finish()
        finally:
            if sys.exception() is not None:
                note("\n".join(["As a script:", *self.script]))
            for tracked in self.streamed:  # after a failure they would wait for ever
                for reader in tracked.readers:
                    reader.cancel()
            self._run(asyncio.sleep(0))

    def _run_to_the_end(self) -> None:
        self.script.append("while engine.has_unfinished_requests(): engine.step_modern()")
        steps = 0
        while self.engine.has_unfinished_requests():
            steps += 1
            assert steps < MAX_STEPS, "the engine is stuck"
            self._step()
        assert not self.unfinished, "a request is forgotten"

    def _finish(self) -> None:
        """Run all requests to their ends; nothing may be left behind. Where prompts are shared,
        some of them come back before that, for another turn, and as far as they fill blocks."""
        self.unpause()
        self.resume()
        self._run_to_the_end()
        if self.engine.context.prefix_cache is not None:
            for which in range(len(self.ended)):
                self.next_turn(which, Ask(which, [], {"num_tokens_to_generate": 3}, 0))
                self.whole_blocks(which, Ask(which + 3, [], {"num_tokens_to_generate": 3}, 0))
            self._run_to_the_end()
        readers = [reader for tracked in self.streamed for reader in tracked.readers]
        if readers:
            self._run(asyncio.wait(readers, timeout=PATIENCE_S))
        for tracked in self.streamed:
            tracked.check_readers()
        assert_all_is_back(self.engine)
        self.engine.reset_prefix_cache()
        self.blocks.check_free_blocks()
        self.engine.close()
        stats = self.engine.stats()
        for event in COUNTED:
            self.counts[event] += int(stats[event])
        self.counts["ngram_drafts"] += self.ngrams.found if self.ngrams else 0
        self.counts["mtp_drafts"] += self.mtp.rows if self.mtp else 0
        self.counts["overlapped_steps"] += self.engine.statistics.overlapped_steps
        self.counts["readers"] += len(readers)
