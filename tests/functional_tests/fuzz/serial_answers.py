"""What a request says when it is alone on a serial engine."""

from __future__ import annotations

from attention_model import AttentionModel
from fuzz_requests import MAX_SEQUENCE, Ask, Pieces
from harness import drain, make_engine
from late_device import LateDevice

from megatron_async import SamplingParams
from megatron_async.inference_request import DynamicInferenceRequest


class SerialAnswers:
    """Answers of one engine without lookahead, with room for any request; kept once known.

    Args:
        model: of the engines under test too.
    """

    def __init__(self, model: AttentionModel) -> None:
        self._engine = make_engine(
            model,
            tokenizer=Pieces(),
            device=LateDevice(),
            lookahead=0,
            max_requests=1,
            max_sequence_length=MAX_SEQUENCE,
            num_kv_blocks=1,
            block_size_tokens=MAX_SEQUENCE,
            check_integrity=False,
        )
        self._answers: dict[str, DynamicInferenceRequest] = {}

    def answer(self, ask: Ask) -> DynamicInferenceRequest:
        """The finished request (its id seeds it, if it brings no seed)."""
        owner = None if "seed" in ask.sampling else ask.request_id
        key = repr((owner, ask.prompt, sorted(ask.sampling.items())))
        if key not in self._answers:
            params = SamplingParams(**ask.sampling)
            future = self._engine.add_request(ask.request_id, ask.prompt, params)
            drain(self._engine)
            self._answers[key] = future.result()
            assert self._answers[key].succeeded(), self._answers[key].error
        return self._answers[key]
