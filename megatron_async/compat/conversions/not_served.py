"""A clear word about the names of Megatron's classes that have no counterpart here."""

from __future__ import annotations

from typing import Any, NoReturn

from megatron_async.errors import ConfigurationError

COORDINATOR = (
    "Megatron's coordinator, client and HTTP server are not served by megatron_async.compat: use "
    "the engine itself (add_request with run_engine or step_modern), or `megatron-async replicas` "
    "behind `megatron-async coordinator`, with `megatron_async.serving.client`"
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
