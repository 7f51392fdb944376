"""What clients, coordinator and replicas tell each other: msgpack, one message a ZMQ frame.

Every connection begins with a hello, and the coordinator's answer to it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from megatron_async.requests.inference_request import DynamicInferenceRequest

PROTOCOL = 4
"""Raised when messages change: both ends must have the same."""
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises: no message, no UTF-8, nested too deeply."""
UNSENDABLE = (TypeError, ValueError, OverflowError, RecursionError)
"""What encoding raises."""
MOST_BYTES = 256 << 20
"""Of a message: prompts and answers, log probs included, are far smaller, and a stranger must not
fill the coordinator's memory with one."""


class Message(msgspec.Struct, tag=True):
    """Of all messages."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended; the fields are those of `DynamicInferenceRequest`.

    Attributes:
        failure: kind (name of an exception) and message, or None.
        replica: the name of who served it last; "" if nobody did.
        attempts: replicas that it was given to.
    """

    prompt_tokens: list[int] = []
    generated_tokens: list[int] = []
    generated_text: str | None = None
    finish_reason: str | None = None
    generated_log_probs: list[float] | None = None
    prompt_log_probs: list[float] | None = None
    generated_top_n_logprobs: list[dict[str, float]] | None = None
    prompt_top_n_logprobs: list[dict[str, float]] | None = None
    ttft: float | None = None
    latency: float | None = None
    failure: tuple[str, str] | None = None
    replica: str = ""
    attempts: int = 0

    @property
    def error(self) -> Exception | None:
        """Why it failed, as an exception of `megatron_async.errors` where there is one."""
        from megatron_async.serving.failures import exception_of

        return None if self.failure is None else exception_of(*self.failure)


class TokenChunk(msgspec.Struct, frozen=True):
    """What is new of a request: token ids, and text that nothing can change any more (None without
    a tokenizer)."""

    tokens: list[int]
    text: str | None


class Ping(Message):
    """From the coordinator: are you alive? Whoever hears none for long has lost it."""


class Pong(Message):
    """A client's answer."""


class Refused(Message):
    """The coordinator does not take this peer."""

    reason: str


class Welcome(Message):
    """The coordinator takes this peer.

    Attributes:
        silence_s: seconds without a ping after which the coordinator counts as lost.
    """

    silence_s: float


# ---- Clients -------------------------------------------------------------------------------------


class ClientHello(Message):
    """A client's first message."""

    protocol: int


class Generate(Message):
    """A request.

    Attributes:
        number: the client's own, for what follows.
        prompt: text or token ids.
        params: `SamplingParams`, encoded; only the replica reads them.
        max_new_tokens: of the sampling parameters, for estimates; None: no limit.
        priority: higher goes first, here and in the replica.
        stream: send chunks.
        label: the name that people know it by, at most 128 characters; several may share one.
    """

    number: int
    prompt: str | list[int]
    params: msgspec.Raw
    max_new_tokens: int | None
    priority: int
    stream: bool
    label: str = ""


class Abort(Message):
    """End a request; the number is the client's own, or to a replica, the coordinator's."""

    number: int


class Ask(Message):
    """Something about the service.

    Attributes:
        number: the client's own.
        what: "stats"; of one replica "pause", "drain", "resume" or "remove"; of the whole service
            one of `service_verbs.VERBS`.
        replica: whom it concerns; "": the service.
        fields: what else the verb takes.
    """

    number: int
    what: str
    replica: str = ""
    fields: dict[str, Any] = {}


class Chunk(Message):
    """New tokens of a streamed request.

    Attributes:
        number: the client's own, or from a replica, the coordinator's.
    """

    number: int
    tokens: list[int]
    text: str | None


class Started(Message):
    """A suspect has its first token: it is not what kills replicas at its beginning.

    Attributes:
        number: the coordinator's.
    """

    number: int


class Ended(Message):
    """A request has ended; numbers as in `Chunk`."""

    number: int
    completion: Completion


class Answer(Message):
    """To an `Ask`: what was asked for, or an error's kind and message."""

    number: int
    value: dict[str, Any] = {}
    failure: tuple[str, str] | None = None


# ---- Replicas ------------------------------------------------------------------------------------


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica is.

    Attributes:
        name: unique among the replicas.
        instance: another one for each process, so that one that connects again is known.
        model: whatever must be equal for the replicas to give the same tokens, by name.
        slots: requests served at once.
        kv_blocks: size of its pool.
        block_size_tokens: tokens in a block.
        shares_experts: other replicas of its job cannot do without it.
    """

    name: str
    instance: str
    model: dict[str, str | int]
    slots: int
    kv_blocks: int
    block_size_tokens: int
    shares_experts: bool = False


class ReplicaHello(Message):
    """A replica's first message."""

    protocol: int
    info: ReplicaInfo


class ReplicaStatus(Message):
    """A replica's answer to a ping.

    Attributes:
        runs_seen: `Run` messages that it had taken in.
        unfinished_tokens: tokens that its unfinished requests may still need, prompts included.
        free_blocks: of its KV pool.
        resolved_steps: so far; while requests are unfinished, it must rise.
        is_stopped: its engine is paused or suspended.
        engine: `engine.stats()`.
        lost_blocks: hashes of KV blocks that its prefix cache has lost since it told this last.
    """

    runs_seen: int
    unfinished_tokens: int
    free_blocks: int
    resolved_steps: int
    is_stopped: bool
    engine: dict[str, float]
    lost_blocks: list[bytes] = []


class Leaving(Message):
    """A replica wants to go: send nothing more, and say `Leave` when its requests are done."""


class Helping(Message):
    """A replica has left, and what it had unfinished is to be served by others; but it steps on
    until those that share its experts leave too."""


class Goodbye(Message):
    """A replica is gone, and what it had unfinished is to be served by others; or a client is, and
    what it had unfinished is aborted.

    Attributes:
        failure: why, or "" if it is in order.
    """

    failure: str = ""


class Batch(Message):
    """All news of one turn of a replica's loop, in order."""

    events: list[Chunk | Started | Ended]


class Run(Message):
    """To a replica: serve this. The same request has the same number wherever it is served, so
    random numbers are the same too.

    Attributes:
        is_suspect: say `Started` when it has its first token, unless it is streamed.
    """

    number: int
    prompt: str | list[int]
    params: msgspec.Raw
    priority: int
    stream: bool
    is_suspect: bool = False


class SetPaused(Message):
    """To a replica: stop stepping its engine, or go on."""

    paused: bool


class Do(Message):
    """To a replica: do what an administrator wants of the service, and say `Done`.

    Attributes:
        number: the coordinator's.
        what: one of `service_verbs.OF_REPLICAS`.
        fields: what else it takes.
    """

    number: int
    what: str
    fields: dict[str, Any] = {}


class Done(Message):
    """A replica has done a `Do`, or could not: an error's kind and message."""

    number: int
    value: dict[str, Any] = {}
    failure: tuple[str, str] | None = None


class Leave(Message):
    """To a replica: you have nothing left; end, or help those that share your experts."""


ToCoordinator = (
    ClientHello | Generate | Abort | Ask | Pong | ReplicaHello | ReplicaStatus | Leaving | Helping
    | Goodbye | Batch | Done
)  # fmt: skip
ToClient = Ping | Welcome | Refused | Chunk | Ended | Answer
ToReplica = Ping | Welcome | Refused | Run | Abort | SetPaused | Leave | Do


def _plain(value: Any) -> Any:
    """NumPy's scalars and arrays as Python's."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()  # sync-ok: NumPy
    raise TypeError(f"{type(value).__name__} cannot be sent")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
encode = _encoder.encode
decode_for_coordinator = msgspec.msgpack.Decoder(ToCoordinator).decode
decode_for_client = msgspec.msgpack.Decoder(ToClient).decode
decode_for_replica = msgspec.msgpack.Decoder(ToReplica).decode


def completion_of(request: DynamicInferenceRequest, replica: str) -> Completion:
    """How an engine's request ended."""
    error = request.error
    return Completion(
        prompt_tokens=request.prompt_tokens.tolist(),  # sync-ok: NumPy
        generated_tokens=request.generated_tokens,
        generated_text=request.generated_text,
        finish_reason=request.finish_reason,
        generated_log_probs=request.generated_log_probs,
        prompt_log_probs=request.prompt_log_probs,
        generated_top_n_logprobs=request.generated_top_n_logprobs,
        prompt_top_n_logprobs=request.prompt_top_n_logprobs,
        ttft=request.ttft,
        latency=request.latency,
        failure=None if error is None else (type(error).__name__, str(error)),
        replica=replica,
    )
