"""What the fuzzer may ask for: requests and settings of engines, as strategies; and what a request
says when it is alone on a serial engine.

A new sampling parameter is one line of its group; a new output is one line of `COMPARED`.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from megatron_async import (
    DynamicInferenceEngine,
    DynamicInferenceRequest,
    SamplingParams,
    Status,
    StructuredOutput,
)
from megatron_async.errors import RequestAborted, RequestError, StepFailed
from megatron_async.requests.streaming import RequestStream, StreamChunk
from tests.support.attention_model import VOCABULARY
from tests.support.harness import drain, make_engine
from tests.support.late_device import LateDevice
from tests.support.letter_tokenizers import Pieces
from tests.support.shared_checkers import lend_checkers

MAX_PROMPT, MAX_NEW_TOKENS = 20, 24
MAX_SEQUENCE = MAX_PROMPT + MAX_NEW_TOKENS
MAX_DRAFTS = 3

token = st.integers(0, VOCABULARY - 1)

DRAWING: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 0.7, 1.5]),
    "top_k": st.sampled_from([1, 5]),
    "top_p": st.sampled_from([0.5, 0.9]),
    "min_p": st.sampled_from([0.02, 0.3]),
    "seed": st.sampled_from([0, 7, 2**63 - 1]),
}
STOPPING: dict[str, st.SearchStrategy[Any]] = {
    "termination_id": token,
    "stop_token_ids": st.lists(token, min_size=1, max_size=3),
    "stop_words": st.lists(st.sampled_from(["zz", "bd", "abc", "cad"]), min_size=1, max_size=2),
    "detokenize_stop_sequence": st.just(True),
    "min_tokens": st.sampled_from([1, 4]),
}
LOG_PROBS: dict[str, st.SearchStrategy[Any]] = {
    "return_log_probs": st.just(True),
    "top_n_logprobs": st.sampled_from([1, 4]),
    "skip_prompt_log_probs": st.just(True),
    "logprobs_mode": st.sampled_from(["raw", "processed"]),
}
PROCESSORS: dict[str, st.SearchStrategy[Any]] = {
    "logit_bias": st.dictionaries(token, st.sampled_from([-100.0, 3.0]), min_size=1, max_size=2),
    "frequency_penalty": st.sampled_from([1.5, -0.5]),
    "presence_penalty": st.sampled_from([1.0]),
    "repetition_penalty": st.sampled_from([1.4]),
    "bad_words": st.lists(st.lists(token, min_size=1, max_size=2), min_size=1, max_size=2),
}
STRUCTURED: dict[str, st.SearchStrategy[Any]] = {
    "structured_output": st.sampled_from([
        StructuredOutput(regex="[a-d]{3,12}"),
        StructuredOutput(regex="(ab|cd|d)*"),
        StructuredOutput(choice=["ab", "abcd", "dd"]),
    ]),
}  # fmt: skip
"""Fields of `SamplingParams`; each is drawn or left at its default, group by group."""

COMPARED: dict[str, Callable[[DynamicInferenceRequest], Any]] = {
    "tokens": lambda request: request.generated_tokens,
    "text": lambda request: request.generated_text,
    "finish reason": lambda request: request.finish_reason,
    "log probs": lambda request: request.generated_log_probs,
    "log probs of the prompt": lambda request: request.prompt_log_probs,
    "alternatives": lambda request: request.log_probs and request.log_probs.generated_top_n(),
    "alternatives of the prompt": lambda request: (
        request.log_probs and request.log_probs.prompt_top_n()
    ),
    "routing": lambda request: request.routing and request.routing_indices.tolist(),
}
"""Outputs of a finished request that must be what the serial engine gives (numbers with a point,
nearly). Of an aborted one, those in `CUT_SHORT` must be the beginning of it."""
CUT_SHORT = ("tokens", "log probs", "alternatives")


def _prompts() -> st.SearchStrategy[list[int]]:
    # The beginnings of a few texts: a prefix may be shared, or not.
    chooser = random.Random(0)
    texts = [[chooser.randrange(VOCABULARY) for _ in range(MAX_PROMPT)] for _ in range(3)]
    texts[2] = (texts[2][:6] * MAX_PROMPT)[:MAX_PROMPT]  # one that repeats itself
    return st.sampled_from([text[:length] for length in range(1, MAX_PROMPT + 1) for text in texts])


class Ask(NamedTuple):
    """Arguments of `add_request`."""

    request_id: int
    prompt: list[int]
    sampling: dict[str, Any]
    """Fields of `SamplingParams`."""
    priority: int

    def __str__(self) -> str:
        """The arguments in Python."""
        params = ", ".join(f"{name}={value!r}" for name, value in self.sampling.items())
        return f"{self.request_id}, {self.prompt}, SamplingParams({params}), {self.priority}"


GROUPS = [
    st.fixed_dictionaries({}, optional=group)
    for group in (DRAWING, STOPPING, LOG_PROBS, PROCESSORS, STRUCTURED)
]


@st.composite
def sampling(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of `SamplingParams`."""
    most = draw(st.sampled_from([1, 2, 5, 12, 20, MAX_NEW_TOKENS]))
    fields: dict[str, Any] = {"num_tokens_to_generate": most}
    for group in GROUPS:
        if draw(st.booleans()):
            fields |= draw(group)
    # What would be refused.
    if fields.get("min_tokens", 0) > most:
        del fields["min_tokens"]
    if "structured_output" in fields:  # with bans it may leave nothing
        for name in ("bad_words", "min_tokens"):
            fields.pop(name, None)
    if "return_log_probs" not in fields:
        fields.pop("top_n_logprobs", None)
    return fields


asks = st.builds(
    Ask,
    request_id=st.integers(0, 5),  # few, so that they are used again
    prompt=_prompts(),
    sampling=sampling(),
    priority=st.sampled_from([0, 0, 0, 1, -1]),
)


def score_of(ask: Ask) -> Ask | None:
    """A score of a prompt, for a request that asks for alternatives. Not drawn: so all schedules
    stay what they were before there were scores."""
    fields = ask.sampling
    is_score = fields["num_tokens_to_generate"] == 0
    if "top_n_logprobs" not in fields or len(ask.prompt) < 2 or is_score:
        return None
    kept = (*DRAWING, "logit_bias", "logprobs_mode", "top_n_logprobs", "return_log_probs")
    fields = {name: value for name, value in fields.items() if name in kept}
    fields |= {"num_tokens_to_generate": 0, "prompt_log_probs_from": len(ask.prompt) // 2}
    return ask._replace(request_id=ask.request_id + 20, sampling=fields)


@st.composite
def engine_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of `InferenceConfig`."""
    max_requests = draw(st.sampled_from([3, 4, 5, 2, 1]))
    block_size = draw(st.sampled_from([1, 2, 3, 5]))
    # Room for the longest request and little more, for all together, or not even for the longest.
    room = st.sampled_from([MAX_SEQUENCE, MAX_SEQUENCE, MAX_SEQUENCE + 10, 400, MAX_SEQUENCE - 6])
    pool_tokens = draw(room)
    chunked = draw(st.sampled_from([True, True, True, False]))
    spares = [0, 1, 5, MAX_PROMPT] if chunked else [MAX_PROMPT // 2, MAX_PROMPT]
    invalidation = draw(st.sampled_from(["reconcile", "reconcile", "rollback"]))
    drafts = draw(st.sampled_from([0, MAX_DRAFTS, 1])) if invalidation == "reconcile" else 0
    lookahead = draw(st.sampled_from([1, 2, 0, 3]))
    return {
        "lookahead": lookahead,
        # Not drawn: so all schedules stay what they were before there were such settings.
        "late_launch": lookahead == 1 and block_size > 1,
        "mixed_step_tokens": 4 if block_size == 5 else None,
        "max_requests": max_requests,
        "max_tokens": max_requests * (1 + drafts) + draw(st.sampled_from(spares)),
        "block_size_tokens": block_size,
        "num_kv_blocks": -(-pool_tokens // block_size),
        "enable_chunked_prefill": chunked,
        # No limit, or less than a block: only a standstill evicts, or every pause does.
        "paused_buffer_size_gb": draw(st.sampled_from([None, 1e-9])),
        "max_sequence_length": MAX_SEQUENCE,
        "invalidation": invalidation,
        "num_speculative_tokens": drafts,
        "enable_routing_replay": True,
    }


snapshot_settings = st.fixed_dictionaries({
    # Rows that no request needs, or a few more; inside prompts often, seldom, or never.
    "num_state_snapshots": st.sampled_from([None, None, 1, 3]),
    "prefix_caching_mamba_interval": st.sampled_from([None, 0, 4, 8]),
})  # fmt: skip
"""Fields of `InferenceConfig` for prefix caching; without recurrent layers nothing reads them."""


def equal(found: Any, expected: Any) -> bool:
    """Whether two outputs are the same, numbers with a point up to rounding."""
    if isinstance(found, float) and isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=1e-5, abs_tol=1e-4)
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(equal, found, expected))
    return type(found) is type(expected) and found == expected


class TrackedRequest:
    """A request from its `add_request` to its end: what was asked, the tokens that steps have
    reported, whether its owner has aborted it, whether it may end with a step that fails, and how
    many tokens it had where it moved from."""

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        ask: Ask,
        future: asyncio.Future[DynamicInferenceRequest],
    ) -> None:
        self._ask = ask
        new_tokens = ask.sampling["num_tokens_to_generate"]
        self._is_refused = not _fits(engine, len(ask.prompt), new_tokens)
        self.request = future.result() if future.done() else engine.get_request(ask.request_id)
        self.future = future
        self.emitted: list[int] = []
        self.is_aborted = self.may_fail = False
        self.moved = 0
        self._readers: list[tuple[list[StreamChunk], asyncio.Task[None]]] = []

    def read(self, stream: RequestStream, loop: asyncio.AbstractEventLoop) -> None:
        """Read `stream` whenever `loop` runs."""
        chunks: list[StreamChunk] = []
        self._readers.append((chunks, loop.create_task(_read(stream, chunks))))

    @property
    def readers(self) -> list[asyncio.Task[None]]:
        """Tasks that read its streams."""
        return [task for _, task in self._readers]

    def check_end(self, serial: SerialAnswers) -> None:
        """Check the request and its future, when it is reported as ended."""
        request = self.request
        assert self.future.done(), f"nobody was told of {request}"
        assert self.future.cancelled() or self.future.result() is request
        if self._is_refused:
            assert isinstance(request.error, RequestError), request
            assert request.finish_reason == "error"
            return
        assert request.generated_tokens == self.emitted
        if self.may_fail and isinstance(request.error, StepFailed):
            assert (request.status, request.finish_reason) == (Status.FAILED, "error")
            answer = serial.answer(self._ask)
            assert self.emitted == answer.generated_tokens[: len(self.emitted)]
            return
        if self.is_aborted:
            answer = serial.answer(self._ask, len(self.emitted))
            assert request.finish_reason == "aborted"
            assert isinstance(request.error, RequestAborted)
            for name in CUT_SHORT:
                found, expected = COMPARED[name](request), COMPARED[name](answer)
                if found is not None and expected is not None:
                    expected = expected[: len(request.generated_tokens)]
                assert serial.equal(found, expected), (name, found, expected)
            rows, wanted = request.routing_indices, answer.routing_indices
            if rows is not None and wanted is not None:  # the serial one may be cut sooner
                assert len(rows) < request.num_known
                least = min(len(rows), len(wanted))
                assert rows[:least].tolist() == wanted[:least].tolist()
            return
        answer = serial.answer(self._ask)
        assert request.error is None, request.error
        assert request.status == Status.COMPLETED
        for name, output in COMPARED.items():
            if name == "routing" and request.routing is None:
                continue
            found, expected = output(request), output(answer)
            assert serial.equal(found, expected), (name, found, expected)

    def check_readers(self) -> None:
        """Check what the readers got, when the event loop has run."""
        for chunks, task in self._readers:
            assert task.done(), f"a reader still waits for {self.request}"
            if self.is_aborted:
                assert isinstance(task.exception(), RequestAborted)
            elif isinstance(self.request.error, StepFailed):
                assert isinstance(task.exception(), StepFailed)
            else:
                assert task.exception() is None, task.exception()
            tokens = [token for chunk in chunks for token in chunk.tokens]
            assert tokens == self.request.generated_tokens[self.moved :]
            text, whole = "".join(chunk.text or "" for chunk in chunks), self.request.generated_text
            assert whole.endswith(text) if self.moved else text == whole


async def _read(stream: RequestStream, chunks: list[StreamChunk]) -> None:
    async for chunk in stream:
        chunks.append(chunk)


def _fits(engine: DynamicInferenceEngine, prompt: int, new_tokens: int) -> bool:
    """Whether the engine must serve a request of this size: it may split the prompt, or a step
    holds it; and it may end alone in the pool. (Its last token needs no place in the cache.)"""
    config, blocks = engine.context.config, engine.context.blocks.total
    splits = config.enable_chunked_prefill or prompt <= config.max_tokens
    needed = -(-(prompt + new_tokens - 1) // config.block_size_tokens)
    return splits and engine.context.slots.needs.of(needed) <= blocks


class SerialAnswers:
    """Answers of one engine without lookahead, with room for any request and `settings` besides;
    kept once known."""

    equal = staticmethod(equal)
    """Whether an output is the answer's."""

    def __init__(self, model: torch.nn.Module, **settings: Any) -> None:
        own: dict[str, Any] = {
            "lookahead": 0,
            "max_requests": 1,
            "max_sequence_length": MAX_SEQUENCE,
            "num_kv_blocks": 1,
            "block_size_tokens": MAX_SEQUENCE,
            "enable_routing_replay": True,
            "check_integrity": False,
        }
        self._engine = make_engine(
            model, tokenizer=Pieces(), device=LateDevice(), **{**own, **settings}
        )
        lend_checkers(self._engine)
        self._answers: dict[str, DynamicInferenceRequest] = {}

    def answer(self, ask: Ask, tokens: int | None = None) -> DynamicInferenceRequest:
        """The finished request (its id seeds it, if it brings no seed); it may be cut short after
        `tokens`."""
        owner = None if "seed" in ask.sampling else ask.request_id
        key = repr((owner, ask.prompt, sorted(ask.sampling.items())))
        if key in self._answers:
            return self._answers[key]
        params = SamplingParams(**ask.sampling)
        future = self._engine.add_request(ask.request_id, ask.prompt, params)
        request = future.result() if future.done() else self._engine.get_request(ask.request_id)
        while not future.done() and (tokens is None or request.generated_length < tokens):
            self._engine.step_modern()
        if future.done():
            assert request.succeeded(), request.error
            self._answers[key] = request
        else:
            self._engine.abort_request(ask.request_id)
        drain(self._engine)
        return request

    def sequence(self, ask: Ask) -> list[int]:
        """Prompt and answer, as far as drafts may reach: on after what ends the request, other
        than a grammar."""
        most = ask.sampling["num_tokens_to_generate"] + MAX_DRAFTS
        most = min(most, MAX_SEQUENCE - len(ask.prompt))
        endless = {name: value for name, value in ask.sampling.items() if name not in STOPPING}
        endless |= {"num_tokens_to_generate": most, "termination_id": -1}
        return [*ask.prompt, *self.answer(ask._replace(sampling=endless)).generated_tokens]
