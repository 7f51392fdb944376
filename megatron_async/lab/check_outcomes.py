"""What a case of `megatron-async check` has shown, beside the needles' first answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from megatron_async.lab.check_cases import Answer
from megatron_async.lab.divergence import Divergence, LogProbDistance, tolerance

FAR = 4.0
"""Times the tolerance of one logit: float32 log probs that are further apart than so differ by more
than rounding (of some hundreds the largest difference is several times the usual one)."""
PROMISES = {
    "bits": "batch_invariant_mode promises equal bits: each difference is a failure",
    "float32": "float32 promises tokens, up to near ties of logits; log probs may differ in their\n"
    "last bits, as products may round otherwise with the rows of a step",
    "fast": "without batch_invariant_mode products round otherwise with the rows of a step:\n"
    "tokens are the same up to near ties of logits, log probs are not",
}
"""What an engine promises, by mode."""
COLUMNS = (
    ("tokens", "tokens", ""), ("log_probs", "log probs", ""), ("differ", "differ", ""),
    ("largest", "largest", ".2g"), ("parted", "parted", ""), ("near_ties", "ties", ""),
    ("failed", "failed", ""),
)  # fmt: skip
"""The table's, within 80 characters: a case's value, its title and format."""
HEAD = f"{'case':<16} " + " ".join(title for _, title, _ in COLUMNS)


@dataclass(frozen=True)
class Difference:
    """A place of a needle at which a case differs from the needle alone.

    Attributes:
        needle: its number.
        position: of the prompt's tokens; or after the prompt, generated tokens before it.
        in_prompt: which of the two.
        text: both log probs, in words.
        fails: whether the mode does not allow it.
        parted: whether it is another token, or the end of one of the two.
        is_near_tie: whether rounding explains that.
    """

    needle: int
    position: int
    in_prompt: bool
    text: str
    fails: bool
    parted: bool = False
    is_near_tie: bool = False

    def __str__(self) -> str:
        what = "prompt token" if self.in_prompt else "token"
        return f"needle {self.needle}, {what} {self.position}: {self.text}"


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

    def compare(
        self, firsts: Mapping[int, Answer], found: Iterable[Answer]
    ) -> tuple[dict[str, Any], Difference | None]:
        """Compare answers with the first ones of the same needles, alone or by number: those that
        have none are passed over.

        Returns:
            tokens and log probs that were compared, log probs that differ in their bits, their
            mean, largest and K3 distance, answers that part, near ties of these, answers that
            failed, and in words the first difference, if any fails the first of those; and that
            one.
        """
        pairs, seen, tokens = list[tuple[float, float]](), list[Difference](), 0
        for other in found:
            if (mine := firsts.get(other.needle)) is None:
                continue
            new = list(self.differences(mine, other))
            seen += new
            same = next((each.position for each in new if each.parted), len(mine.tokens))
            tokens += min(same + 1, len(mine.tokens))
            pairs += zip(mine.prompt or (), other.prompt or (), strict=False)
            pairs += zip(mine.log_probs[:same], other.log_probs[:same], strict=True)
        distance = LogProbDistance.of([one for one, _ in pairs], [other for _, other in pairs])
        failure = next((each for each in seen if each.fails), None)
        parted = [each for each in seen if each.parted]
        return {
            "tokens": tokens,
            "log_probs": len(pairs),
            "differ": sum(one != other for one, other in pairs),
            "mean": distance.mean,
            "largest": distance.largest,
            "k3": distance.k3,
            "parted": len(parted),
            "near_ties": sum(each.is_near_tie for each in parted),
            "failed": len({each.needle for each in seen if each.fails}),
            "first": str(failure or next(iter([*parted, *seen]), "")),
        }, failure

    def differences(self, alone: Answer, found: Answer) -> Iterator[Difference]:
        """Every difference, in the order of the sequence, up to the first other token."""
        # Log probs stand for logits, whose spread they have; both runs have rounded.
        values = torch.tensor([*alone.log_probs, *(alone.prompt or ())])
        allowed = tolerance(values, self.dtype, 2 * self.num_blocks)
        count = min(len(alone.tokens), len(found.tokens))
        same = (at for at in range(count) if alone.tokens[at] != found.tokens[at])
        end = next(same, count)
        prompts = list(zip(alone.prompt or (), found.prompt or (), strict=False))
        answers = list(zip(alone.log_probs[:end], found.log_probs[:end], strict=True))
        for number, (mine, other) in enumerate([*prompts, *answers]):
            if mine == other:
                continue
            at, in_prompt = number - len(prompts), number < len(prompts)
            text = f"log probs {mine:.9g} at first, {other:.9g} here"
            if not in_prompt:
                best, second = (value for _, value in alone.likeliest[at][:2])
                text += f"; the best two logits are {best - second:.2g} apart"
            is_far = self.mode == "float32" and not abs(mine - other) <= FAR * allowed  # NaN too
            at = number + 1 if in_prompt else at
            yield Difference(alone.needle, at, in_prompt, text, self.mode == "bits" or is_far)
        if end < max(len(alone.tokens), len(found.tokens)):
            yield self._parted(alone, found, end, allowed)

    def _parted(self, alone: Answer, found: Answer, at: int, allowed: float) -> Difference:
        counts = len(alone.tokens), len(found.tokens)
        if at >= min(counts):
            text = "{} tokens at first, {} here".format(*counts)
            return Difference(alone.needle, at, False, text, True, True)
        one, other, best = alone.tokens[at], found.tokens[at], dict(alone.likeliest[at])
        theirs = dict(found.likeliest[at])
        gap = float("inf")
        if other in best:
            gap = best[one] - best[other]
        elif one in theirs:  # of more equal ones than are listed, each answer lists others
            gap = theirs[other] - theirs[one]
        top, second = list(best.values())[:2]
        parted = Divergence(alone.needle, at, one, other, (top, second), gap, allowed)
        text = (
            f"{one} at first, {other} here; log probs {alone.log_probs[at]:.9g} and "
            f"{found.log_probs[at]:.9g}; the best two logits are {top - second:.2g} apart, these "
            f"two {gap:.2g}, and rounding explains {allowed:.2g}"
        )
        fails = self.mode == "bits" or not parted.is_near_tie
        return Difference(alone.needle, at, False, text, fails, True, parted.is_near_tie)


def digest(answers: Iterable[Answer]) -> str:
    """A hash of tokens and log probs, hexadecimal: equal where all answers have the same bits."""
    found = sha256()
    for each in sorted(answers, key=attrgetter("needle")):
        found.update(np.array([each.needle, *each.tokens], np.int64).tobytes())
        found.update(np.array([*(each.prompt or ()), *each.log_probs], np.float32).tobytes())
    return found.hexdigest()[:32]


def line(case: Mapping[str, Any], with_replica: bool = False) -> str:
    """A case's row of the table."""
    label = f"{case['replica']}: {case['label']}" if with_replica else case["label"]
    cells = [f"{case[key]:>{len(title)}{form}}" for key, title, form in COLUMNS]
    return " ".join([f"{label:<16}", *cells, f" {case['happened']}"]).rstrip()


def explained(case: Mapping[str, Any]) -> str:
    """A case's first difference, in a line, and the layer in another one."""
    kind = "FAIL" if case["failed"] else "near tie" if case["parted"] else "first difference"
    where = f"{case['label']} on replica {case['replica']}" if case["replica"] else case["label"]
    return f"{kind}, {where}: {case['first']}" + (f"\n    {case['layer']}" if case["layer"] else "")
