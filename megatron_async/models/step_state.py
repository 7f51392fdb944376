"""`OfThread`: what one module of a model leaves for the next one, during a pass."""

from __future__ import annotations

import threading

from torch import Tensor, nn


class _Values(threading.local):
    def __init__(self) -> None:
        self.of: dict[int, Tensor] = {}


class OfThread:
    """An attribute of a module that each thread has for itself: several engines may run a model at
    once, each on a thread of its own. Not set, it is None."""

    def __init__(self) -> None:
        self._values = _Values()

    def __get__(self, module: nn.Module | None, kind: type | None = None) -> Tensor | None:
        return self._values.of.get(id(module))

    def __set__(self, module: nn.Module, value: Tensor | None) -> None:
        if value is None:
            self._values.of.pop(id(module), None)
        else:
            self._values.of[id(module)] = value
