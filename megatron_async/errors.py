"""Errors that a user can meet. Each message names the value and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class RequestError(ValueError):
    """A request that cannot be served as asked; only this request fails."""


class SequenceTooLong(RequestError):
    """A prompt, or the length that was asked for, leaves no room for a generated token."""


class PromptTooLong(RequestError):
    """A prompt is longer than a step's token budget, and chunked prefill is off."""


class PoolTooSmall(RequestError):
    """The whole KV pool does not hold the sequence that a request may reach."""


class RequestAborted(RuntimeError):
    """The request was aborted by its owner before it finished."""


class NoTokenToChoose(RuntimeError):
    """A request's logits left no token to choose: what it asked for bans all tokens together, or a
    logit was NaN or infinite; only this request fails.

    Args:
        request_id: of the request.
        position: in its sequence, of the token that could not be chosen.
        generated: tokens that it has generated before.
        bans: names of what it asked for that may ban tokens there, as "bad_words".
        grammar_failure: why its grammar allowed nothing at all, if it gave up.

    Attributes:
        position: the argument.
    """

    def __init__(
        self,
        request_id: int,
        position: int,
        generated: int,
        bans: Sequence[str] = (),
        grammar_failure: Exception | str | None = None,
    ) -> None:
        broken = (
            "a logit there is NaN or infinite: check the model's weights and params_dtype (float16 "
            "overflows where bfloat16 does not)"
        )
        reason = broken
        if len(bans) == 1:
            reason = f"{bans[0]} leaves none: relax it; or, if it should leave one, {broken}"
        elif bans:
            reason = (
                f"{', '.join(bans[:-1])} and {bans[-1]} leave none together: relax one of them "
                "(where they leave one, a logit was not finite)"
            )
        if grammar_failure is not None:
            reason = f"its grammar gave up, {grammar_failure!r}: give a simpler one"
        super().__init__(
            f"request {request_id}: no token can be chosen at position {position} of its sequence: "
            f"{reason}. The {generated} tokens generated before are kept."
        )
        self.position = position


class StepFailed(RuntimeError):
    """A step's forward pass or sampling raised; its requests fail, the engine goes on.

    `__cause__` is the exception itself.
    """


class StageFailed(RuntimeError):
    """A step failed on another pipeline stage; the rank there has the cause."""


class EngineStopped(RuntimeError):
    """The engine is paused, suspended or closed, and the call needs a running engine."""


class WrongThread(RuntimeError):
    """An engine that is at work on one thread was called on another."""


class Overloaded(RuntimeError):
    """The queue for replicas is full: send this request again later."""


class ReplicaLost(RuntimeError):
    """The replica that served a request died, hung or left, and no other was to serve it again."""


class CoordinatorLost(RuntimeError):
    """The coordinator died, hung or cannot be reached."""


class ConfigurationError(ValueError):
    """A configuration value that cannot work, alone or together with another."""


class UnknownReplica(ValueError):
    """No replica of the service has that name."""


class UpdateError(RuntimeError):
    """New weights that cannot be taken: a name, shape or dtype that is not the model's, a round
    that is not whole, or no memory for it. The old weights serve on."""


class OutOfMemoryError(ConfigurationError):
    """Weights, KV pool or states do not fit into the device's memory."""


class JobFailed(RuntimeError):
    """The ranks of a job can no longer work together; it has to be started again."""


class RanksDisagree(JobFailed):
    """Ranks that must do the same have done different things."""


class RankLost(JobFailed):
    """A rank died, was stopped, was cut off from the network, or left while others waited for it.

    Attributes:
        ranks: the lost ones, in the order in which their loss was noticed; empty if unknown.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class CommunicationTimeout(JobFailed):
    """A rank did not join a meeting of ranks, or a message did not arrive, in time.

    Attributes:
        missing: the ranks that were waited for; empty where that is not known.
    """

    def __init__(self, message: str, missing: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class RecordingError(ValueError):
    """A file that cannot be replayed, or a replay that went another way; the message says why."""
