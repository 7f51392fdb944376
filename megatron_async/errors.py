"""Errors that a user can meet. Each message names the value and the remedy."""

from __future__ import annotations


class RequestError(ValueError):
    """A request that cannot be served as asked; only this request fails."""


class RequestAborted(RuntimeError):
    """The request was aborted by its owner before it finished."""


class StepFailed(RuntimeError):
    """A step's forward pass or sampling raised; its requests fail, the engine goes on.

    `__cause__` is the exception itself.
    """


class EngineStopped(RuntimeError):
    """The engine is paused or suspended, and was asked for what only a running one can do."""


class ConfigurationError(ValueError):
    """A configuration value that cannot work, alone or together with another."""


class OutOfMemoryError(ConfigurationError):
    """The KV pool that was asked for does not fit into the device's memory."""


class JobFailed(RuntimeError):
    """The ranks of a job can no longer work together; it has to be started again."""


class RanksDisagree(JobFailed):
    """Ranks that must do the same have done different things."""


class RankLost(JobFailed):
    """A rank died, was stopped, or was cut off from the network."""


class CommunicationTimeout(JobFailed):
    """A rank did not come to where others waited for it, or nothing came, in time."""
