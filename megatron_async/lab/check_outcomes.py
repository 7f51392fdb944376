"""What a case of `megatron-async check` has shown, beside the needles served alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_async.lab.check_cases import Answer, Variant
from megatron_async.lab.divergence import Divergence, LogProbDistance, tolerance

FAR = 4.0
"""Times the tolerance of one logit: float32 log probs that are further apart than so differ by more
than rounding (of some hundreds the largest difference is several times the usual one)."""
PROMISES = {
    "bits": "batch_invariant_mode promises equal bits: each difference is a failure",
    "float32": "float32 promises tokens, up to near ties of logits: products may round otherwise "
    "with the rows of a step, so log probs may differ in their last bits",
    "fast": "without batch_invariant_mode products round otherwise with the rows of a step: tokens "
    "are the same up to near ties of logits, log probs are not",
}
"""What an engine promises, by mode."""
COLUMNS = ("tokens", "log probs", "differ", "mean", "largest", "parted", "near ties", "failed")
WIDTH = 18
"""Of a case's label."""


@dataclass(frozen=True)
class Judge:
    """Compares answers by the promise of an engine.

    Attributes:
        mode: of `PROMISES`.
        dtype: of the model.
        num_blocks: of the model, each of which adds to the residual stream.
    """

    mode: str
    dtype: torch.dtype
    num_blocks: int

    def tolerance(self, alone: Answer) -> float:
        """Largest gap of two logits that rounding in two runs may turn around. Log probs stand for
        logits, whose spread they have."""
        values = [*alone.log_probs, *(alone.prompt or ()), *(v for _, v in alone.likeliest[-1])]
        return tolerance(torch.tensor(values), self.dtype, 2 * self.num_blocks)

    def differences(self, alone: Answer, found: Answer) -> Iterator[Difference]:
        """Every difference, in the order of the sequence, up to the first other token."""
        allowed = self.tolerance(alone)
        prompts = zip(alone.prompt or (), found.prompt or (), strict=False)
        for position, pair in enumerate(prompts, 1):
            if pair[0] != pair[1]:
                fails = self._is_far(pair, allowed)
                yield Difference(alone.needle, "prompt token", position, pair, fails)
        whole = max(len(alone.tokens), len(found.tokens))
        for position in range(whole):
            mine, other = (each.tokens[position : position + 1] for each in (alone, found))
            if mine != other:
                yield self._parted(alone, found, position, allowed)
                return
            pair = alone.log_probs[position], found.log_probs[position]
            if pair[0] != pair[1]:
                best = alone.likeliest[position]
                gap = best[0][1] - best[1][1] if len(best) > 1 else float("inf")
                fails = self._is_far(pair, allowed)
                yield Difference(alone.needle, "token", position, pair, fails, gap)

    def _is_far(self, pair: tuple[float, float], allowed: float) -> bool:
        """Whether two log probs of a token differ by more than the mode allows."""
        is_far = not abs(pair[0] - pair[1]) <= FAR * allowed  # NaN too
        return self.mode == "bits" or (self.mode == "float32" and is_far)

    def _parted(self, alone: Answer, found: Answer, at: int, allowed: float) -> Difference:
        needle, pair = alone.needle, [float("nan")] * 2
        if at >= min(len(alone.tokens), len(found.tokens)):
            return Difference(needle, "end", at, (pair[0], pair[1]), True)
        best = alone.likeliest[at]
        others = dict(best)
        own = others[alone.tokens[at]]
        # A token that is not among the likeliest is further away than all of them.
        gap = own - others[found.tokens[at]] if found.tokens[at] in others else float("inf")
        divergence = Divergence(
            needle, at, alone.tokens[at], found.tokens[at], (best[0][1], best[1][1]), gap, allowed
        )
        return Difference(
            needle, "token", at, (alone.log_probs[at], found.log_probs[at]),
            self.mode == "bits" or not divergence.is_near_tie, best[0][1] - best[1][1], divergence,
        )  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """A place of a needle at which a case differs from the needle alone.

    Attributes:
        needle: its number.
        what: "prompt token", "token", or "end" where one of the two has ended.
        position: of the prompt's tokens, or generated tokens before it.
        log_probs: alone, and in the case.
        fails: whether the mode does not allow it.
        gap: distance of the best two logits there; infinite of a prompt's token, which is given.
        divergence: of two tokens.
    """

    needle: int
    what: str
    position: int
    log_probs: tuple[float, float]
    fails: bool
    gap: float = float("inf")
    divergence: Divergence | None = None

    def __str__(self) -> str:
        where = f"needle {self.needle}, {self.what} {self.position}"
        if self.divergence is not None:
            tokens = f"{self.divergence.reference_token} alone, {self.divergence.engine_token} here"
            where += f": {tokens}, {self.divergence.gap:.2g} below it"
            where += f" (rounding explains {self.divergence.tolerance:.2g})"
        where += "; log probs {:.9g} alone, {:.9g} here".format(*self.log_probs)
        near = "" if self.gap == float("inf") else f"; best two logits {self.gap:.2g} apart"
        return where + near


@dataclass
class Outcome:
    """The comparison of one case, of plain values.

    Attributes:
        case, label: of its `Variant`.
        replica: that served it.
        tokens, log_probs: compared, the latter of prompts too.
        differ: log probs whose bits differ.
        mean, largest, k3: distance of the log probs; see `LogProbDistance`.
        parted: answers with another token; what follows it is not compared.
        near_ties: of these, explained by rounding.
        failed: answers with a difference that the mode does not allow.
        happened: what shows that the case took place.
        first: the first difference, in words; "" for none. One that fails comes first.
        layer: where the hidden states part, in words, if that was looked for.
    """

    case: str
    label: str
    replica: int = 0
    tokens: int = 0
    log_probs: int = 0
    differ: int = 0
    mean: float = 0.0
    largest: float = 0.0
    k3: float = 0.0
    parted: int = 0
    near_ties: int = 0
    failed: int = 0
    happened: str = ""
    first: str = ""
    layer: str = ""
    failure: Difference | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        variant: Variant,
        alone: Sequence[Answer],
        found: Sequence[Answer],
        judge: Judge,
        happened: str,
    ) -> Outcome:
        """Compare answers with those of the same needles alone."""
        outcome = cls(variant.case, variant.label, happened=happened)
        pairs, seen = list[tuple[float, float]](), list[Difference]()
        for other in found:
            mine = alone[other.needle]
            differences = list(judge.differences(mine, other))
            ends = [each for each in differences if each.what == "end" or each.divergence]
            count = ends[0].position if ends else len(mine.tokens)
            pairs += zip(mine.prompt or (), other.prompt or (), strict=False)
            pairs += zip(mine.log_probs[:count], other.log_probs[:count], strict=True)
            outcome.tokens += min(count + 1, len(mine.tokens))
            outcome.parted += len(ends)
            outcome.near_ties += sum(
                each.divergence is not None and each.divergence.is_near_tie for each in ends
            )
            outcome.failed += any(each.fails for each in differences)
            seen += differences
        mine_all, others = [one for one, _ in pairs], [other for _, other in pairs]
        distance = LogProbDistance.of(mine_all, others)
        outcome.log_probs, outcome.differ = len(pairs), sum(one != other for one, other in pairs)
        outcome.mean, outcome.largest = distance.mean, distance.largest
        outcome.k3 = distance.k3
        outcome.failure = next((each for each in seen if each.fails), None)
        parted = next((each for each in seen if each.divergence), None)
        first = outcome.failure or parted or next(iter(seen), None)
        outcome.first = "" if first is None else str(first)
        return outcome

    def plain(self) -> dict[str, Any]:
        """Its values but for `failure`, for JSON; `Outcome(**plain)` has them again."""
        return {name: value for name, value in vars(self).items() if name != "failure"}

    def line(self, with_replica: bool = False) -> str:
        """Its row of the table."""
        label = f"{self.replica}: {self.label}" if with_replica else self.label
        return (
            f"{label:<{WIDTH}}{self.tokens:>9}{self.log_probs:>11}{self.differ:>9}"
            f"{self.mean:>10.2g}{self.largest:>10.2g}{self.parted:>9}{self.near_ties:>11}"
            f"{self.failed:>9}  {self.happened}"
        ).rstrip()

    def explained(self) -> str:
        """Its first difference, in a line, and the layer in another one."""
        kind = "FAIL" if self.failed else "near tie" if self.parted else "first difference"
        return f"{kind}, {self.label}: {self.first}" + (f"\n    {self.layer}" if self.layer else "")


def head() -> str:
    """The table's first line."""
    widths = (9, 11, 9, 10, 10, 9, 11, 9)
    cells = (f"{name:>{width}}" for name, width in zip(COLUMNS, widths, strict=True))
    return f"{'case':<{WIDTH}}" + "".join(cells) + "  what happened"
