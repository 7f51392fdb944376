"""An op of the hot path is one object: what it means, in plain torch, and its implementations.

    @op
    def swiglu(x: Tensor) -> Tensor:        # the reference; its docstring documents the op
        ...

    @swiglu.gpu
    def swiglu_gpu(x: Tensor) -> Tensor: ...

Implementations stand beside the reference, or in other files of `ops`, which `op` then names: they
are imported when the first engine on such a device binds its ops (`all_ops.py`). Of several for
one device, the first that keeps the engine's promises is bound.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Literal, overload

from megatron_async.errors import ConfigurationError

Place = Literal["gpu", "cpu", "torch"]
"""Where an implementation runs: Triton on a GPU, loops that Numba compiles for a CPU, plain torch
anywhere."""

PROMISES: frozenset[str] = frozenset({"invariant"})
"""What an engine may ask of all its ops, by name. "invariant": on a GPU, in 16-bit dtypes, the bits
of a row depend on no other row, and not on the number of rows."""


class Op[**P, R]:
    """A reference in plain torch, and implementations with its signature; `gpu` and `cpu` are
    files below `ops` that register further ones, as "sampling.triton_sampling"."""

    def __init__(self, reference: Callable[P, R], gpu: str | None, cpu: str | None) -> None:
        self.reference = reference
        self.name: str = getattr(reference, "__name__", repr(reference))
        self.__doc__ = reference.__doc__
        self._files = {"gpu": gpu, "cpu": cpu}
        self._found: dict[str, list[Callable[P, R]]] = {"gpu": [], "cpu": [], "torch": [reference]}

    def gpu(self, implementation: Callable[P, R]) -> Callable[P, R]:
        """Register an implementation for a GPU."""
        self._found["gpu"].append(implementation)
        return implementation

    def cpu(self, implementation: Callable[P, R]) -> Callable[P, R]:
        """Register an implementation by loops that Numba compiles. Tensors that it does not take it
        gives to the reference."""
        self._found["cpu"].append(implementation)
        return implementation

    def on(self, place: Place, promises: frozenset[str] = frozenset()) -> Callable[P, R]:
        """`find`, or an error.

        Raises:
            ConfigurationError: there is none, or an unknown promise.
        """
        if (found := self.find(place, promises)) is not None:
            return found
        asked = f" that keeps {sorted(promises)}" if promises else ""
        raise ConfigurationError(
            f"op {self.name!r} has no implementation for {place!r}{asked}: register one beside its "
            f"reference; there are: {', '.join(self.supported())}."
        )

    def find(self, place: Place, promises: frozenset[str]) -> Callable[P, R] | None:
        """The implementation for a place that keeps all promises: the first, or on a CPU without
        one the reference. None: there is none.

        Raises:
            ConfigurationError: an unknown promise.
        """
        if unknown := promises - PROMISES:
            known = ", ".join(sorted(PROMISES))
            raise ConfigurationError(
                f"op {self.name!r}: promises {sorted(unknown)} are unknown: use those there are "
                f"({known})."
            )
        self._import(place)
        found = self._found[place] if place == "gpu" else [*self._found[place], self.reference]
        return next((each for each in found if promises <= _kept(each)), None)

    def supported(self) -> list[str]:
        """All implementations: the place of each, and the promises that it keeps."""
        names = []
        for place, found in self._found.items():
            self._import(place)
            for implementation in found:
                kept = ", ".join(sorted(_kept(implementation)))
                names.append(f"{place} (keeps {kept})" if kept else place)
        return names

    def _import(self, place: str) -> None:
        if file := self._files.get(place):
            import_module(f"megatron_async.ops.{file}")


@overload
def op[**P, R](reference: Callable[P, R]) -> Op[P, R]: ...
@overload
def op[**P, R](
    *, gpu: str | None = None, cpu: str | None = None
) -> Callable[[Callable[P, R]], Op[P, R]]: ...
def op[**P, R](
    reference: Callable[P, R] | None = None, *, gpu: str | None = None, cpu: str | None = None
) -> Op[P, R] | Callable[[Callable[P, R]], Op[P, R]]:
    """Make an op of its reference; `gpu` and `cpu` as for `Op`."""
    if reference is not None:
        return Op(reference, gpu, cpu)
    return lambda given: Op(given, gpu, cpu)


def promising[**P, R](*promises: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare promises of an implementation, below the decorator that registers it."""

    def declare(implementation: Callable[P, R]) -> Callable[P, R]:
        vars(implementation)["promises"] = frozenset(promises)
        return implementation

    return declare


def _kept(implementation: Callable[..., object]) -> frozenset[str]:
    kept: frozenset[str] = getattr(implementation, "promises", frozenset())
    return kept
