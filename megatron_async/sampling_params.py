"""`SamplingParams` at Megatron-Core's path."""

from megatron_async.requests.sampling_params import SamplingParams

__all__ = ["SamplingParams"]
