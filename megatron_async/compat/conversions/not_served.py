"""The one form of a refusal of `compat`."""

from __future__ import annotations

from typing import NoReturn

from megatron_async.errors import ConfigurationError


def refuse(name: str, reason: str) -> NoReturn:
    """Raise ConfigurationError: what is called `name` is not served."""
    raise ConfigurationError(f"{name} is not served: {reason}.")
