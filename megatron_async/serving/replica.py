"""`Replica`: an engine that serves the requests of a coordinator; `serve_replica`: what each
rank of a job does."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from megatron_async.communication.bootstrap import join_job
from megatron_async.engine.dynamic_engine import DynamicInferenceEngine
from megatron_async.errors import ConfigurationError, CoordinatorLost, JobFailed
from megatron_async.ops.sampling.slot_records import MAX_TOP_N
from megatron_async.requests.inference_request import DynamicInferenceRequest
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.requests.traces import named
from megatron_async.serving.connection import Connection, Outlet
from megatron_async.serving.engine_verbs import StepWatch, do_verb
from megatron_async.serving.messages import (
    PROTOCOL,
    UNSENDABLE,
    Abort,
    Card,
    Do,
    Done,
    Ended,
    Goodbye,
    Helping,
    Leave,
    Leaving,
    Moved,
    ReplicaHello,
    ReplicaStatus,
    Run,
    SetPaused,
    StepTokens,
    ToReplica,
    decode_for_replica,
)
from megatron_async.serving.replica_status import (
    card_of,
    describe,
    ended_of,
    failed_of,
    send_news,
    status_of,
)
from megatron_async.serving.replica_texts import ReplicaTexts
from megatron_async.serving.replica_weights import ReplicaWeights, follow_weights
from megatron_async.serving.token_emitter import TokenEmitter

if TYPE_CHECKING:
    from megatron_async.llm import LLM
    from megatron_async.text.tokenizer import Tokenizer

logger = logging.getLogger("megatron_async")

LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGINT)
RETRY_EVERY_S = LOOK_EVERY_S = 0.2
LOOK_FOR_ROUTING_S = 0.001
WARN_AFTER_S = 5.0
"""A replica without a coordinator logs a warning after these seconds, and at each doubling."""
Told = tuple[dict[str, Any], tuple[str, str] | None]
"""What a command has told, and the kind and text of its failure."""
_read_params = msgspec.msgpack.Decoder(SamplingParams).decode


class Replica:
    """Serves a coordinator's requests with one engine; no other code may step the engine.

    Args:
        model: what is served; the coordinator takes replicas of one model only.
        name: unique among the replicas; None: host and process id.
        finish_together: waits until all replicas of the job have left; for a replica whose experts
            others need.
        tokenizer: for clients; None: the engine's, if it can be sent.

    Attributes:
        joined: whether a coordinator has accepted it at least once.
        moves_requests: whether another replica can go on with its requests.
    """

    moves_requests = True

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        address: str,
        model: str,
        name: str | None = None,
        finish_together: Callable[[], Coroutine[Any, Any, None]] | None = None,
        secret: bytes | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._engine = engine
        self._address = address
        self._secret = secret
        self._finish_together = finish_together
        self._helping: asyncio.Task[None] | None = None
        self._card = card_of(engine, model, tokenizer)
        self.info = describe(engine, model, name, finish_together is not None, self._card.digest)
        self._connection: Outlet | None = None
        self._requests: dict[int, str | list[int]] = {}
        """Prompts of unfinished ones, by number."""
        self._emitter = TokenEmitter(self._tell)
        self._watch = StepWatch(engine)
        self._texts: ReplicaTexts | None = None
        """Where clients cannot have the tokenizer."""
        self._runs_seen = 0
        self._answering: set[asyncio.Task[Told]] = set()
        """Commands that this or other ranks of the model have yet to do."""
        self.weights = ReplicaWeights(engine)
        self.joined = asyncio.Event()
        self._is_leaving = self._must_go = False
        self._failure: JobFailed | None = None
        self._news = asyncio.Event()
        self._error: Exception | None = None
        """What has ended the connection."""

    async def run(self) -> None:
        """Serve until the coordinator removes this replica, `leave` is called, or the engine fails.
        After the loss of a coordinator, it waits for the next one. A replica whose experts others
        need ends together with them.

        Raises:
            ConfigurationError: the coordinator refuses this replica for good.
            Exception: the error that ended the engine.
        """
        runner = asyncio.create_task(self._engine.run_engine())
        self._engine.listeners.append(self._emitter)
        if self._card.replica_makes_text:
            self._texts = ReplicaTexts(self._engine.controller.tokenizer, self._send)
        try:
            await self._stay_connected(runner)
            if self._finish_together is not None:
                await asyncio.wait(
                    [runner, self._help(runner)], return_when=asyncio.FIRST_COMPLETED
                )
                await self._check(runner)
        finally:
            self._forget_all()
            self._engine.listeners.remove(self._emitter)
            if self._texts is not None:
                self._texts.close()
            ending = [runner] if self._helping is None else [runner, self._helping]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    async def _stay_connected(self, runner: asyncio.Task[None]) -> None:
        lost_at = time.monotonic()
        warn_after = WARN_AFTER_S
        while not self._must_go:
            try:
                await self._serve(runner)
                return
            except CoordinatorLost as error:
                if (self._requests or self._runs_seen) and not self._must_go:
                    logger.warning("%s Waiting for it.", error)
                    lost_at, warn_after = time.monotonic(), WARN_AFTER_S
                self._forget_all()
                await self._check(runner)
                if self._is_leaving:
                    return
                waited = time.monotonic() - lost_at
                if waited >= warn_after:
                    warn_after = 2 * waited
                    logger.warning("Since %.0f s: %s", waited, error)
                await asyncio.sleep(RETRY_EVERY_S)

    def leave(self) -> None:
        """Finish the requests and leave. At the second call: leave at once, and let other replicas
        serve the requests. A replica that is leaving already continues to do so."""
        if self._must_go:
            return
        self._must_go = self._is_leaving or self._connection is None
        self._is_leaving = True
        self._news.set()
        if self._connection is not None and not self._must_go:
            self._connection.send(Leaving())

    async def _serve(self, runner: asyncio.Task[None]) -> None:
        """One connection, from its beginning to an end in order."""
        connection = Connection(self._address, decode_for_replica, self._status, self._secret)
        self._runs_seen = 0
        self._error = None
        try:
            hello = ReplicaHello(PROTOCOL, self.info, self.weights.weights)
            welcome = await connection.open(hello, WARN_AFTER_S)
            self._connection = connection
            self.joined.set()
            if welcome.wants_card:
                connection.send(Card(self._card.digest, self._card.encode()))
            if self._is_leaving:
                connection.send(Leaving())
            logger.info("Replica %s serves the coordinator at %s.", self.info.name, self._address)
            connection.listen(self._hear, lambda: None, self._end_connection)
            while not self._is_over:
                await self._wait_for_news(runner)
                if self._must_go and self._finish_together is not None and self._helping is None:
                    self._hand_over()
                    connection.send(Helping())
                    self._help(runner)
            self._hand_over()
            connection.send(Goodbye())
        except BaseException as error:
            if not isinstance(error, CoordinatorLost | ConfigurationError):
                connection.send(Goodbye(f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._connection = None
            connection.close()

    def _hear(self, message: ToReplica) -> None:
        """Follow a message at once: a request that waited for a turn of the loop could miss the
        next step."""
        if isinstance(message, Leave):
            self._must_go = True
            self._news.set()
            return
        try:
            self._take(message)
        except Exception as error:
            self._end_connection(error)

    def _end_connection(self, error: Exception) -> None:
        self._error = self._error or error
        self._news.set()

    async def _wait_for_news(self, runner: asyncio.Task[None]) -> None:
        """Until there may be a reason to do something else than to serve; raises what ended the
        engine or the connection."""
        timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._news.set)
        try:
            await self._news.wait()
        finally:
            timer.cancel()
        self._news.clear()
        await self._check(runner)
        if self._error is not None:
            raise self._error

    @property
    def _is_over(self) -> bool:
        """Whether this replica may end."""
        helped = self._helping is not None and self._helping.done()
        return self._must_go and (helped or self._finish_together is None)

    def _help(self, runner: asyncio.Task[None]) -> asyncio.Task[None]:
        """Serve nobody any more, but step on until those that share the experts have left too."""
        if self._helping is None:
            logger.info(
                "Replica %s has left, and steps on for the experts that others of its job need, "
                "until they have left too.", self.info.name,
            )  # fmt: skip
            self._must_go = True
            self._forget_all()
            assert self._finish_together is not None
            self._helping = asyncio.create_task(self._finish_together())
            # Without delay: a rank that is still there when another ends takes it for lost.
            self._helping.add_done_callback(lambda _: runner.cancel())
        return self._helping

    async def _check(self, runner: asyncio.Task[None]) -> None:
        """Raise what ended the engine, if it has ended before its time. An idle engine waits for
        no rank: whether its ranks are alive is asked here, at each ping."""
        if self._failure is not None:
            raise self._failure
        with self._engine.loop.giving_up():
            self._engine.group.check_alive()
        if self._helping is not None and self._helping.done():
            await self._helping
        elif runner.done():
            await runner
            raise RuntimeError("the engine's loop has ended")

    def _take(self, message: ToReplica) -> None:
        match message:
            case Run():
                self._runs_seen += 1
                self._begin(message)
            case Abort():
                with contextlib.suppress(KeyError):
                    self._engine.abort_request(message.number)
            case SetPaused(paused=True):
                # Those that share experts stop together: once more would wait for the others.
                if not self._engine.loop.is_paused:
                    self._engine.pause()
            case SetPaused():
                if self._engine.loop.is_paused:
                    self._engine.unpause()
            case Do() if message.what.startswith("weights_"):
                self._later(message.number, self.update(message.what, message.fields))
            case Do():
                value, failure = self.do(message.what, message.fields)
                self._done(Done(message.number, value, failure))

    # ---- What replicas of another kind do otherwise --------------------------------------------

    def do(self, what: str, fields: Mapping[str, Any]) -> Told:
        """Follow a command to the service; see `do_verb`."""
        if what == "watch":
            return self._watch.look(), None
        if what == "move" and self.moves_requests:
            return {"moved": sum(map(self._move, fields["numbers"]))}, None
        return do_verb(self._engine, self.info.name, what, fields)

    async def update(self, what: str, fields: Mapping[str, Any]) -> Told:
        """Do a command of an update of the weights; see `ReplicaWeights.do`."""
        return await self.weights.do(what, fields)

    async def until_done(self) -> None:
        """Wait until the other ranks of the model have done what `do` did, too.

        Raises:
            JobFailed: a rank is lost.
        """
        await self._engine.group.until_told()

    def add(self, run: Run) -> tuple[SamplingParams, asyncio.Future[DynamicInferenceRequest]]:
        """Give the engine a request.

        Returns:
            its parameters, and the future of its end.

        Raises:
            ValueError, one of `UNREADABLE`: it cannot be given.
        """
        params, engine = _read_params(run.params), self._engine
        if run.moved:
            return params, engine.import_request(run.number, run.moved, run.traceparent)
        future = engine.add_request(
            run.number, run.prompt, params, run.priority, traceparent=run.traceparent
        )
        return params, future

    def ended(self, request: DynamicInferenceRequest, tells_prompt: bool) -> Ended:
        """What is told of a request that has ended; see `ended_of`."""
        return ended_of(request, self.info.name, tells_prompt)

    def _done(self, done: Done) -> None:
        """Answer a command, once all ranks of the model have done it."""

        async def told() -> Told:
            await self.until_done()
            return done.value, done.failure

        self._later(done.number, told())

    def _later(self, number: int, work: Coroutine[Any, Any, Told]) -> None:
        """Answer a command with what `work` returns."""
        task, connection = asyncio.ensure_future(work), self._connection
        self._answering.add(task)

        def answer(task: asyncio.Task[Told]) -> None:
            self._answering.discard(task)
            if task.cancelled():
                return
            error = task.exception()
            failure: tuple[str, str] | None = (type(error).__name__, str(error))
            value, failure = task.result() if error is None else ({}, failure)
            if connection is not None and connection is self._connection:
                connection.send(Done(number, value, failure))

        task.add_done_callback(answer)

    def _begin(self, run: Run) -> None:
        number = run.number
        try:
            params, future = self.add(run)
        except JobFailed:
            raise
        except Exception as error:  # whatever it is, it is this request's alone
            if run.traceparent:
                logger.warning("%s is refused: %s", named(number, run.traceparent), error)
            self._emitter.end(failed_of(number, error, self.info.name))
            return
        if params.return_log_probs:
            self._emitter.wants_log_probs(number, min(params.top_n_logprobs, MAX_TOP_N))
        if self._texts is not None:
            self._texts.begin(number, run.prompt, params, run.moved.get("generated", ()))
        self._requests[number] = run.prompt
        future.add_done_callback(lambda done: self._end(number, done))

    def _end(self, number: int, future: asyncio.Future[DynamicInferenceRequest]) -> None:
        if number in self._requests and _waits_for_routing(future):
            asyncio.get_running_loop().call_later(LOOK_FOR_ROUTING_S, self._end, number, future)
            return
        prompt = self._requests.pop(number, None)
        if self._connection is None or future.cancelled():
            return
        error = future.result().error
        if isinstance(error, JobFailed):  # this replica's end, not the request's
            self._failure = error
            return
        if prompt is None:  # another replica goes on
            return
        try:
            told = self.ended(future.result(), isinstance(prompt, str))
        except Exception as error:  # its answer cannot be written: it must end all the same
            told = failed_of(number, error, self.info.name)
        self._emitter.end(told)

    def _move(self, number: int) -> bool:
        """Let another replica go on with a request, unless it has ended."""
        try:
            data = self._engine.export_request(number)
        except KeyError:
            return False
        self._requests.pop(number, None)
        self._emitter.moved(number)

        def send() -> None:
            try:
                if self._connection is not None:
                    self._connection.send(Moved(number, data))
            except UNSENDABLE as error:
                self._emitter.end(failed_of(number, error, self.info.name))

        send() if self._texts is None else self._texts.move(number, send)
        return True

    def _hand_over(self) -> None:
        """What is unfinished goes on elsewhere, or where it cannot, begins again there."""
        self._emitter.flush()
        if self.moves_requests and self._texts is None:
            for number in list(self._requests):
                self._move(number)

    def _tell(self, news: StepTokens) -> None:
        if self._texts is None:
            self._send(news)
        else:
            self._texts.tell(news)

    def _send(self, news: StepTokens) -> None:
        if self._connection is not None:
            send_news(self._connection, news, self.info.name)

    def _forget_all(self) -> None:
        """Abort all requests, and drop an update: their coordinator is lost, or has given them to
        other replicas."""
        self.weights.forget()
        self._emitter.forget()
        if self._texts is not None:
            self._texts.forget()
        for number in list(self._requests):
            with contextlib.suppress(KeyError):
                self._engine.abort_request(number)
        self._requests.clear()
        if self._engine.is_stopped and not self.info.shares_experts:  # those go on together
            self._engine.unpause()

    def _status(self) -> ReplicaStatus:
        return status_of(self._engine, self._runs_seen, dict(self._engine.stats()))


def _waits_for_routing(future: asyncio.Future[DynamicInferenceRequest]) -> bool:
    """Whether a request has asked for records that are still on their way from the device."""
    if future.cancelled() or not future.result().sampling_params.return_routing:
        return False
    routing = future.result().routing
    return routing is not None and not routing.is_ready


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Keep the garbage collector from scanning objects that exist at the start.

    Now and then the collector scans every object of the process, and no step is prepared meanwhile.
    With torch, Megatron-Core and a model there are some 400,000 objects, which takes 0.19 s (one
    core of a server; a decode step takes milliseconds). Objects made later take 4.5 ms after 9,600
    requests. Other servers do the same (vLLM's `freeze_gc_heap`).

    For processes that serve one engine until they end. An older object that is dropped inside the
    `with` block is freed as usual, unless it is part of a cycle, which then stays until the end.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def serve_replica(
    llm: LLM, address: str, model: str, name: str | None = None, secret: bytes | None = None
) -> None:
    """Serve a coordinator with an LLM until it removes the replica; SIGTERM and Ctrl-C make the
    replica leave in order.

    Every rank of the job calls this function. Each primary rank is a replica; if there are several,
    their names get a number as suffix.

    Args:
        llm: idle.
        address: of the coordinator.
        model: what is served, with its dtype: the coordinator takes replicas of one model only.
        name: unique among the replicas; None: host and process id.
        secret: the coordinator's, if it asks for one.

    Raises:
        ConfigurationError: the coordinator refuses the replica.
    """
    llm.engine.grammars.prepare()  # now it holds up nobody
    # Replicas of the job that this one does not need may be lost: others serve their requests.
    join_job().watch.needed = llm.needed_ranks
    if not llm.is_primary_rank:
        # The end of a job is signalled to all its ranks; when to end, the primary rank says.
        for number in LEAVE_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        follow_weights(llm.engine)
        with frozen_heap():
            llm.follow()
        return
    if name is not None and llm.data_parallel_size > 1:
        name = f"{name}-{llm.data_parallel_rank}"
    finish = partial(llm.finish_together, timeout_s=None) if llm.shares_experts else None
    replica = Replica(llm.engine, address, model, name, finish, secret)
    ranks = join_job().world_size // llm.data_parallel_size
    sharers = len(llm.needed_ranks) // ranks
    replica.info = msgspec.structs.replace(replica.info, sharers=sharers, ranks=ranks)

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        for number in LEAVE_SIGNALS:
            loop.add_signal_handler(number, replica.leave)
        await replica.run()

    with frozen_heap():
        asyncio.run(serve())
