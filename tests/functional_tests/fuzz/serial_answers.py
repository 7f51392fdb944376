"""What a request says when it is alone on a serial engine."""

from __future__ import annotations

from megatron_async import SamplingParams
from megatron_async.requests.inference_request import DynamicInferenceRequest
from tests.functional_tests.fuzz.fuzz_requests import MAX_DRAFTS, MAX_SEQUENCE, STOPPING, Ask
from tests.support.attention_model import AttentionModel
from tests.support.harness import drain, make_engine
from tests.support.late_device import LateDevice
from tests.support.letter_tokenizers import Pieces
from tests.support.shared_checkers import lend_checkers


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
        lend_checkers(self._engine)
        self._answers: dict[str, DynamicInferenceRequest] = {}

    def answer(self, ask: Ask, tokens: int | None = None) -> DynamicInferenceRequest:
        """The finished request (its id seeds it, if it brings no seed).

        Args:
            ask: what it asks for.
            tokens: with a number it may be cut short after so many generated tokens.
        """
        owner = None if "seed" in ask.sampling else ask.request_id
        key = repr((owner, ask.prompt, sorted(ask.sampling.items())))
        if key in self._answers:
            return self._answers[key]
        params = SamplingParams(**ask.sampling)
        future = self._engine.add_request(ask.request_id, ask.prompt, params)
        request = self._engine.get_request(ask.request_id)
        while not future.done() and (tokens is None or request.generated_length < tokens):
            self._engine.step_modern()
        if future.done():
            assert request.succeeded(), request.error
            self._answers[key] = request
        else:
            self._engine.abort_request(ask.request_id)
        drain(self._engine)
        return request

    def sequence(self, ask: Ask) -> list[int]:
        """Prompt and answer, as far as drafts may reach: on after what ends the request, other
        than a grammar."""
        most = ask.sampling["num_tokens_to_generate"] + MAX_DRAFTS
        most = min(most, MAX_SEQUENCE - len(ask.prompt))
        endless = {name: value for name, value in ask.sampling.items() if name not in STOPPING}
        endless |= {"num_tokens_to_generate": most, "termination_id": -1}
        return [*ask.prompt, *self.answer(ask._replace(sampling=endless)).generated_tokens]
