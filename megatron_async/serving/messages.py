"""Messages of clients, coordinator and replicas: msgpack, one a frame of a `Link`. Every
connection begins with a hello, and the coordinator's answer to it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from megatron_async import errors
from megatron_async.device_state.cache_layout import MOST_TABLES

TOKEN_BYTES = 4
"""Bytes of a token id."""
PROTOCOL = 16
"""Raised when messages change: both ends must have the same."""
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises: no message, no UTF-8, nested too deeply."""
UNSENDABLE = (TypeError, ValueError, OverflowError, RecursionError)
"""What encoding raises."""
MOST_BYTES = 256 << 20
"""Most bytes of a message: prompts and answers, log probs included, are far smaller."""


# ---- Types of fields, with their ranges: what is out of range is not read, so that neither a table
# nor a sum is ever given a number that it cannot hold.

Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Number of a request or a question."""
Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""Tokens of one request, or as many; their sums can be sent, too."""
Difference = Annotated[int, msgspec.Meta(ge=-(2**48), le=2**48)]
"""Difference of sizes of a replica, or a size."""
Seconds = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
"""Below 0, or of decades, where a clock was set; never NaN."""
Name = Annotated[str, msgspec.Meta(max_length=256)]
"""A name or label that is shown."""
Version = Name | Number
"""What a trainer calls its weights."""
Trace = Annotated[
    str, msgspec.Meta(pattern=r"\A(00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})?\Z")
]  # fmt: skip
"""What `traces.read_traceparent` gives."""


class RemoteError(RuntimeError):
    """A request failed on a replica with an exception that has no class here; the message begins
    with its name."""


def kind_of(error: Exception) -> str:
    """What is sent of the class of a refusal, for `exception_of`."""
    return "UnknownReplica" if isinstance(error, errors.UnknownReplica) else "ValueError"


def exception_of(kind: str, message: str) -> Exception:
    """The exception of a failure."""
    known = ValueError if kind == "ValueError" else getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, Exception):
        return known(message)
    return RemoteError(f"{kind}: {message}")


class Message(msgspec.Struct, tag=True):
    """Base of all messages between clients, coordinator and replicas."""


class Ping(Message):
    """From the coordinator: are you alive? A peer without pings for long has lost it."""


class Pong(Message):
    """A client's answer."""


class Refused(Message):
    """The coordinator does not take this peer."""

    reason: str


class Welcome(Message):
    """The coordinator takes this peer.

    Attributes:
        silence_s: seconds without a ping after which the coordinator counts as lost.
        wants_card: of a replica: the coordinator does not have its model card.
    """

    silence_s: float
    wants_card: bool = False


# ---- Tokens --------------------------------------------------------------------------------------


class LogProbRows(msgspec.Struct, frozen=True):
    """Log probs of the tokens of those rows of a `StepTokens` that asked for them.

    Attributes:
        rows: int32 `[asking]`, rising: places in `StepTokens.numbers`.
        top_n: alternatives at each token, as many as the row that wants most of them does.
        words: int32 `[tokens of these rows, 1 + 2 * top_n]`: float32 log prob of the token, ids of
            the likeliest tokens, their float32 log probs (-inf: there are fewer).
    """

    rows: bytes
    top_n: Tokens
    words: bytes


class PromptLogProbs(msgspec.Struct, frozen=True):
    """Log probs of a prompt's tokens but the first; `words` as in `LogProbRows`."""

    top_n: Tokens
    words: bytes


class RoutingRows(msgspec.Struct, frozen=True):
    """The experts of a request's tokens but the last, as its `routing_indices` has them.

    Attributes:
        shape: tokens - 1, layers with experts, experts of a token.
        dtype: NumPy's name of the ids' type.
        ids: of that type and shape.
    """

    shape: tuple[Tokens, Tokens, Tokens]
    dtype: Literal["uint8", "uint16"]
    ids: bytes


Span = tuple[Version | None, Tokens, Tokens]
"""A version, and of what it holds: the first, and the one after the last."""


class Ended(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request has ended; its tokens were told before.

    Attributes:
        number: from a replica the coordinator's, to a client the client's own.
        failure: kind (name of an exception) and message, or None.
        num_cached_tokens: of its prompt, those that were found in the replica's cache; None: it was
            never admitted.
        prompt_tokens: int32, where the prompt was a text.
        ttft, latency: seconds at the replica, to the first token and to the end.
        queue_s: seconds at the replica before it had a slot; None: it had none.
        text, stop_word: where the replica makes texts: the last part, and the word that ended it.
        replica: name of the replica that served it last; "" if none did.
        attempts: replicas that it was given to.
        weight_versions, kv_versions: spans [version, first, end) of its generated (a score: its
            scored) tokens, by the weights that made them, and of its cache's places, by those that
            filled them; None: the weights were never named.
        record: in a form that only clients of such replicas read (Megatron's, as msgpack): the
            whole request (`compat.inference.inference_client`), or what HTTP tells beside ours.
        routing: where the request asked for it (`return_routing`) and a token was computed.
    """

    number: Number
    finish_reason: str | None = None
    failure: tuple[str, str] | None = None
    stop_words_from: Tokens = 0
    num_prompt_tokens: Tokens = 0
    num_cached_tokens: Tokens | None = None
    num_generated_tokens: Tokens = 0
    prompt_tokens: bytes | None = None
    prompt_log_probs: PromptLogProbs | None = None
    ttft: Seconds | None = None
    latency: Seconds | None = None
    queue_s: Seconds | None = None
    text: str | None = None
    stop_word: str | None = None
    replica: str = ""
    attempts: Tokens = 0
    weight_versions: list[Span] | None = None
    kv_versions: list[Span] | None = None
    record: bytes | None = None
    routing: RoutingRows | None = None

    @property
    def error(self) -> Exception | None:
        """Why it failed, as an exception of `megatron_async.errors` where there is one."""
        return None if self.failure is None else exception_of(*self.failure)


class StepTokens(Message, omit_defaults=True):
    """The tokens of one or several steps. A replica sends one message for all requests of its
    steps; the coordinator divides it by client and sends each client its part. Tokens come before
    ends.

    Attributes:
        numbers: int64 `[rows]`: requests, from a replica by the coordinator's numbers, to a client
            by its own numbers. A request may occur twice, with its tokens in order.
        counts: int32 `[rows]`: new tokens of each row.
        tokens: int32 `[sum of counts]`: row by row.
        texts: number and new text, where the replica makes texts.
        steps: from a replica, so many steps of the same requests, one token of each request a step:
            `tokens` are int32 `[steps, rows]` and `counts` is empty. 0: as above.
    """

    numbers: bytes = b""
    counts: bytes = b""
    tokens: bytes = b""
    log_probs: LogProbRows | None = None
    texts: list[tuple[Number, str]] = []
    ends: list[Ended] = []
    steps: Tokens = 0


class NewModel(Message):
    """To a client: the served model has changed; the new card describes it."""


class Again(Message):
    """To a client: another replica serves the request. Its tokens follow from the first on, and are
    the same as before."""

    number: Number


# ---- Clients -------------------------------------------------------------------------------------


class ClientHello(Message):
    """A client's first message."""

    protocol: int


class Generate(Message, omit_defaults=True):
    """A request.

    Attributes:
        number: the client's own, for what follows.
        params: `SamplingParams`, encoded; only the replica reads them.
        max_new_tokens: of the sampling parameters, for estimates; None: no limit.
        label: the name that people know it by, at most 128 characters; several may share one.
        owner: the owner whose limits count the request; "": none.
        traceparent: of the trace that it belongs to, as `traces.read_traceparent` gives it;
            "": none, and nothing is sent of it.
    """

    number: Number
    prompt: str | list[int]
    params: msgspec.Raw
    max_new_tokens: int | None
    priority: Number
    label: Name = ""
    owner: Name = ""
    traceparent: Trace = ""


class Abort(Message):
    """End a request; the number is the client's own, or to a replica, the coordinator's."""

    number: Number


class Ask(Message):
    """A question or a command about the service.

    Attributes:
        what: "stats", or "card" (field `digest`: of the card that the client has); of one replica
            "pause", "drain", "resume" or "remove"; of the whole service one of
            `service_verbs.VERBS`.
        replica: name of the replica concerned; "": the whole service.
    """

    number: Number
    what: str
    replica: str = ""
    fields: dict[str, Any] = {}


class Answer(Message):
    """To an `Ask`: the answer, or an error's kind and message."""

    number: Number
    value: dict[str, Any] = {}
    failure: tuple[str, str] | None = None


# ---- Replicas ------------------------------------------------------------------------------------


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a replica.

    Attributes:
        name: unique among the replicas.
        instance: different for each process, to recognise a replica that connects again.
        model: all settings that must be equal for replicas to give the same tokens, by name.
        windows: of the block tables of its requests: the keys that a token sees, 0 for all.
        shares_experts: whether other replicas of its job need its experts.
        sharers: replicas of its job that share experts, this one too; 1: it shares none.
        ranks: processes of this replica.
    """

    name: Name
    instance: str
    model: dict[str, str | int]
    slots: Difference
    kv_blocks: Difference
    block_size_tokens: Difference
    windows: Annotated[tuple[Tokens, ...], msgspec.Meta(min_length=1, max_length=MOST_TABLES)] = (
        0,
    )
    shares_experts: bool = False
    card: str = ""
    sharers: Tokens = 1
    ranks: Tokens = 1


class Weights(msgspec.Struct, frozen=True, omit_defaults=True):
    """The weights that a replica, or a service, has.

    Attributes:
        number: rises with each update of the service; 0: those it started with.
        version: what the trainer calls them; None: it has said nothing.
        begun: highest number of an update that was begun here.
        is_torn: an update without a second memory was not finished, so they are no weights.
    """

    number: Tokens = 0
    version: Version | None = None
    begun: Tokens = 0
    is_torn: bool = False


class ReplicaHello(Message):
    """A replica's first message."""

    protocol: int
    info: ReplicaInfo
    weights: Weights = Weights()


class Card(Message):
    """A replica's `ModelCard`, which the coordinator wants and does not read."""

    digest: str
    data: bytes


class ReplicaStatus(Message):
    """A replica's answer to a ping.

    Attributes:
        runs_seen: number of `Run` messages that it has received.
        unfinished_tokens: tokens that its unfinished requests may still need, prompts included.
        free_blocks: of its KV pool.
        resolved_steps: so far; while requests are unfinished, it must rise.
        is_stopped: its engine is paused or suspended.
        engine: `engine.stats()`.
        is_torn: its weights are of two versions, or away.
        lost_blocks: hashes of KV blocks that its prefix cache has lost since the last status.
    """

    runs_seen: Number
    unfinished_tokens: Difference
    free_blocks: Difference
    resolved_steps: Number
    is_stopped: bool
    engine: dict[str, float]
    lost_blocks: list[bytes] = []
    is_torn: bool = False


class Leaving(Message):
    """A replica wants to leave: send no more requests, and `Leave` when its requests are done."""


class Helping(Message):
    """A replica has left, and others must serve its unfinished requests. It continues to step until
    the replicas that share its experts leave too."""


class Moved(Message):
    """A replica has told all tokens of a request so far, and goes on with it no more: another one
    does, with `data` (`engine.export_request`)."""

    number: Number
    data: dict[str, Any]


class Goodbye(Message):
    """A replica has gone, and others must serve its unfinished requests; or a client has gone, and
    its unfinished requests are aborted. `failure` is the reason, "" if it left in order."""

    failure: str = ""


class Run(Message, omit_defaults=True):
    """To a replica: serve this. Its number, and so its random numbers, are the same on every
    replica. `traceparent` and `label` are as in `Generate`; `moved` is what it had on a replica
    that it left (`engine.export_request`), and its tokens go on behind it."""

    number: Number
    prompt: str | list[int]
    params: msgspec.Raw
    priority: Number
    traceparent: Trace = ""
    label: Name = ""
    moved: dict[str, Any] = {}


class SetPaused(Message):
    """To a replica: stop stepping its engine, or continue."""

    paused: bool


class Do(Message):
    """To a replica: follow an administrator's command, and answer `Done`."""

    number: Number
    what: str
    fields: dict[str, Any] = {}


class Done(Message):
    """A replica has done a `Do`, or has failed: an error's kind and message."""

    number: Number
    value: dict[str, Any] = {}
    failure: tuple[str, str] | None = None


class Leave(Message):
    """To a replica that has no requests left: end, or help replicas that share your experts."""


ToCoordinator = (
    ClientHello | Generate | Abort | Ask | Pong | ReplicaHello | ReplicaStatus | Leaving | Helping
    | Moved | Goodbye | StepTokens | Card | Done
)  # fmt: skip
ToClient = Ping | Welcome | Refused | StepTokens | Again | NewModel | Answer
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
