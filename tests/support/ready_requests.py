"""Requests as an engine queues them."""

from megatron_async.requests.inference_request import DynamicInferenceRequest
from megatron_async.requests.sampling_record import sampling_record


def made_ready(
    request: DynamicInferenceRequest, max_length: int, seed: int = 5
) -> DynamicInferenceRequest:
    """The request, with its record."""
    request.record = sampling_record(
        request.sampling_params,
        seed=seed,
        prompt_length=len(request.prompt_tokens),
        max_length=max_length,
        vocab_size=1000,
    )
    return request
