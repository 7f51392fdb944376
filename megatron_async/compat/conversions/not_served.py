"""A clear word about the names of Megatron's classes that have no counterpart here."""

from __future__ import annotations

from typing import Any, NoReturn

from megatron_async.errors import ConfigurationError

SCHEDULING = (
    "the coordinator's messages are taken in by `start_listening_to_data_parallel_coordinator` "
    "itself; requests of this process are given by add_request"
)


class NamesOfMegatron:
    """Says of a missing attribute whether Megatron's class of the same name has it.

    Attributes:
        megatron_class: of the class attribute's owner.
    """

    megatron_class: type

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        message = f"{kind!r} object has no attribute {name!r}"
        if not name.startswith("_") and hasattr(type(self).megatron_class, name):
            message += (
                f": Megatron's {kind}.{name} is part of its own machinery, and has no counterpart "
                "here (docs/megatron_requests.md)"
            )
        raise AttributeError(message)


def refuse(name: str, reason: str) -> NoReturn:
    """Raise ConfigurationError: what is called `name` is not served."""
    raise ConfigurationError(f"{name} is not served: {reason}.")
