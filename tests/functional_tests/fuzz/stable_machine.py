"""`StableMachine`: the fuzzer in the bit-stable mode, on models of the engine's own layers."""

from operator import eq
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.functional_tests.fuzz.engine_machine import NGRAM, EngineMachine
from tests.functional_tests.fuzz.fuzz_requests import (
    Ask,
    SerialAnswers,
    asks,
    engine_settings,
    snapshot_settings,
)
from tests.support.drafters import DRAFTERS

IN_THE_MODE = {"batch_invariant_mode": True, "enable_routing_replay": False}


class ExactAnswers(SerialAnswers):
    """Answers to the bit."""

    equal = staticmethod(eq)


class StableMachine(EngineMachine):
    """Answers have the bits of the serial ones. A test fills `models`, and makes their engines
    GPUs'."""

    models: ClassVar[dict[str, torch.nn.Module]] = {}  # type: ignore[assignment]
    answers: ClassVar[dict[str, SerialAnswers]] = {}

    @initialize(
        settings=engine_settings(),
        drafter=st.sampled_from([*DRAFTERS, NGRAM]),
        sharing=st.booleans(),
        snapshots=snapshot_settings,
        model=st.integers(0, 5),
        requests=st.lists(asks, min_size=3, max_size=3),  # with three, no MTP layer drafts
    )
    def new_engine(self, model: Any, requests: list[Ask], **drawn: Any) -> None:
        name = [*self.models][model % len(self.models)]
        if name not in self.answers:
            self.answers[name] = ExactAnswers(self.models[name], **IN_THE_MODE)
        super().new_engine(model=name, requests=requests, **drawn)

    def _settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {**settings, **IN_THE_MODE}
