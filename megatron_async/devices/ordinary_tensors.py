"""Tensors that may be changed in every autograd mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch


def makes_ordinary_tensors[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of what allocates memory that outlives its call: neither the memory nor what is
    done to it there depends on the caller's autograd mode.

    Tensors made under `torch.inference_mode()` may be changed under it only, and it is a mode of
    the thread. What steps write is written by a stream's own thread on a CPU, by the caller's on a
    GPU, and an engine may be made in one mode and run in another: all of that is allowed for
    ordinary tensors, at no cost in a step.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return call
