"""`PrefillChoice`: which prefill backend serves a step, by the class of the step."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_async.ops.attention.backends.base import PrefillBackend

DECODE_ROWS = 32
DECODE_KEYS = 512
"""Decode rows of a mixed step, and keys of each: some 28 of 450 with 48 arrivals a second on the 8B
shape."""


@dataclass(frozen=True)
class StepClass:
    """A class of steps, and the rows that are timed for it."""

    name: str
    least_query: int
    """Steps whose longest chunk has at least so many tokens belong to it."""
    query: int
    kv: int
    decode_rows: int = 0
    """Decode rows of `DECODE_KEYS` keys; 0: steps without decode rows belong to it."""


STEP_CLASSES = (
    StepClass("chunks", 512, 2048, 2048),
    StepClass("short chunks", 192, 256, 2048),
    StepClass("short prompts", 0, 128, 128),
    StepClass("chunks", 512, 2048, 2048, DECODE_ROWS),
    StepClass("short chunks", 192, 256, 2048, DECODE_ROWS),
    StepClass("short prompts", 0, 128, 128, DECODE_ROWS),
)
"""By falling `least_query`: the first that fits counts. A captured step may also have few tokens
over a long sequence, but the host does not know; short prompts are the usual case. Steps with
decode rows have classes of their own, as some backends leave room for their attention beside the
prompts': with programs that fill a processor a mixed step of the 8B shape is up to 2.5 % longer
(docs/records/prefill_attention.md)."""


@dataclass(frozen=True)
class PrefillChoice:
    """A backend for each of `STEP_CLASSES`.

    Attributes:
        backends: in the order of the classes.
        microseconds: of a layer, by class and backend; 0 if it could not be timed. Empty where
            there was one backend alone.
        dropped: backends that were at hand but failed when they were timed, and why.
    """

    backends: tuple[PrefillBackend, ...]
    microseconds: tuple[dict[str, float], ...] = ()
    dropped: tuple[str, ...] = ()

    @classmethod
    def of_one(cls, backend: PrefillBackend) -> PrefillChoice:
        """A choice of this backend for all steps."""
        return cls((backend,) * len(STEP_CLASSES))

    @property
    def captures(self) -> bool:
        """Whether steps with prefill chunks can be captured."""
        return all(backend.captures for backend in self.backends)

    def pick(self, max_query_length: int, has_decode_rows: bool) -> PrefillBackend:
        """The backend for a step whose longest chunk has at most so many tokens."""
        for step_class, backend in zip(STEP_CLASSES, self.backends, strict=True):
            fits = max_query_length >= step_class.least_query
            if fits and has_decode_rows == (step_class.decode_rows > 0):
                return backend
        raise AssertionError("the last class of each kind takes every step")

    def __str__(self) -> str:
        names = [backend.name for backend in self.backends]
        if not self.microseconds:
            text = f"prefill {names[0]}"
        else:
            parts: dict[bool, list[str]] = {False: [], True: []}
            for step_class, name, times in zip(STEP_CLASSES, names, self.microseconds, strict=True):
                found = [f"{times[name]:.0f} us a layer" if times[name] else "not timed"]
                others = [f"{o} {t:.0f}" for o, t in sorted(times.items()) if o != name]
                found += [", ".join(others)] if others else []
                parts[step_class.decode_rows > 0].append(
                    f"{step_class.name} {name} ({'; '.join(found)})"
                )
            text = "prefill " + ", ".join(parts[False])
            text += "; beside decode rows " + ", ".join(parts[True])
        return "attention: " + "; ".join((text, *self.dropped))
