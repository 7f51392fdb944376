"""The log that a leader sends its followers: everything that changes an engine, in order.

An engine's plans are a pure function of this log, so ranks that replay it hold the same requests in
the same slots and blocks, launch the same steps, and need not agree on anything else.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from megatron_async.requests.moved_request import MovedRequest
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.requests.weight_versions import Version


class Compile(msgspec.Struct, tag="compile", array_like=True):
    """The grammar of a request will be needed; it may prove invalid."""

    params: SamplingParams


class Add(msgspec.Struct, tag="add", array_like=True):
    """A servable request was queued."""

    request_id: int
    prompt: bytes
    """int32 token ids."""
    params: SamplingParams
    """Complete: values that follow from the tokenizer are filled in."""
    priority: int
    traceparent: str = ""

    @property
    def tokens(self) -> np.ndarray:
        """int32 `[prompt tokens]`."""
        return np.frombuffer(self.prompt, dtype=np.int32)


class Import(msgspec.Struct, tag="import", array_like=True):
    """A request was queued that has begun on another engine."""

    request_id: int
    moved: MovedRequest


class Abort(msgspec.Struct, tag="abort", array_like=True):
    """An unfinished request is aborted."""

    request_id: int


class Launch(msgspec.Struct, tag="launch", array_like=True):
    """A step is planned and, if there is one, launched."""

    step: int
    shape: tuple[int, ...] | None = None
    """The shape on which ranks with other requests agreed; None: there are no such ranks."""
    is_dummy: bool = False
    """No request of this replica runs, but other replicas need its experts."""
    prefill_limit: int = 0
    """Most prompt tokens beside decode rows, decided by the leader's clock."""


class Resolve(msgspec.Struct, tag="resolve", array_like=True):
    """The oldest step in flight is booked."""

    step: int


class Control(msgspec.Struct, tag="control", array_like=True):
    """A method that stops an engine, or lets it continue, is called."""

    method: str
    arguments: list[Any] = []
    """What msgpack can hold."""


class Update(msgspec.Struct, tag="update", array_like=True):
    """The weights of round `number` are committed before plan `step`."""

    number: int
    """0: no weights come, the version alone is another."""
    step: int
    version: Version
    policy: str
    failure: str = ""
    """Why the round is dropped instead, on all ranks."""


class Tell(msgspec.Struct, tag="tell", array_like=True):
    """News for the service that a follower belongs to, beside steps: the states of Megatron's
    engines. A follower reports `Told`."""

    number: int
    what: str
    value: Any = None
    """What msgpack can hold."""


class Release(msgspec.Struct, tag="release", array_like=True):
    """The leader's `generate`, or its service, has ended: `follow` returns too."""


class Close(msgspec.Struct, tag="close", array_like=True):
    """The leader's engine was closed, or gave up."""

    error: str | None = None
    """The error for which it gave up; None: it was closed in order."""


Action = (
    Compile | Add | Import | Abort | Launch | Resolve | Control | Update | Tell | Release | Close
)


class Turn(msgspec.Struct, array_like=True):
    """Actions in the order in which they are to be replayed: one message."""

    actions: list[Action]


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """A follower's step raised."""

    step: int
    error: str


class Digests(msgspec.Struct, tag="digests", array_like=True):
    """Digests of a follower's plan or samples, for `check_ranks_agree`."""

    step: int
    fields: dict[str, int]


class Staged(msgspec.Struct, tag="staged", array_like=True):
    """A follower has the weights of a round ready to be committed, or cannot have them."""

    number: int
    failure: str = ""
    """Why it cannot."""


class Told(msgspec.Struct, tag="told", array_like=True):
    """A follower has taken in a `Tell`, and replayed all actions before it."""

    number: int


Report = Failed | Digests | Staged | Told
"""What a follower tells its leader."""


def to_builtin(value: Any) -> Any:
    """Hook of msgspec for what it does not know: NumPy's and torch's numbers among parameters."""
    return value.item()  # sync-ok: host memory
