"""Settings by the names that vLLM, Hugging Face and llama.cpp give them, and what to write here."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

ENGINE_NAMES = {
    "max_model_len": "max_sequence_length",
    "max_num_seqs": "max_requests",
    "max_num_batched_tokens": "max_tokens",
    "block_size": "block_size_tokens",
    "tensor_parallel_size": "tensor_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "gpu_memory_utilization": "buffer_size_gb",
    "kv_cache_memory_bytes": "buffer_size_gb",
    "num_gpu_blocks_override": "num_kv_blocks",
    "enforce_eager": "num_cuda_graphs",
    "n_ctx": "max_sequence_length",
    "torch_dtype": "dtype",
    "speculative_config": "speculative_method",
}
"""Settings of an engine: name elsewhere -> name here."""

SAMPLING_NAMES = {
    "max_tokens": "num_tokens_to_generate",
    "max_new_tokens": "num_tokens_to_generate",
    "n_predict": "num_tokens_to_generate",
    "max_length": "num_tokens_total",
    "stop": "stop_words",
    "stop_strings": "stop_words",
    "eos_token_id": "termination_id",
    "logprobs": "return_log_probs=True, top_n_logprobs",
    "prompt_logprobs": "return_log_probs=True, skip_prompt_log_probs=False",
    "include_stop_str_in_output": "detokenize_stop_sequence",
    "structured_outputs": "structured_output",
    "guided_decoding": "structured_output",
    "response_format": "structured_output",
}
"""Parameters of a request: name elsewhere -> what to write here."""

SAMPLING_ADVICE = {
    "n": "give the prompt n times, each with a seed of its own",
    "best_of": "give the prompt several times, each with a seed of its own",
    "do_sample": "temperature=0 takes the likeliest token, temperature=1.0 samples",
    "num_beams": "beam search is not served",
    "use_beam_search": "beam search is not served",
    "ignore_eos": "write termination_id=-1",
    "skip_special_tokens": "generated_text has no special tokens; generated_tokens has all",
}
"""Parameters that exist elsewhere and have no name here, with what to do."""


def meant_by(name: str, known: Iterable[str], elsewhere: Mapping[str, str]) -> str | None:
    """The name here that an unknown name most likely means, or None.

    Args:
        name: as it was written.
        known: names that exist here.
        elsewhere: names of other engines -> names here; they come before a likeness of letters.
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return elsewhere.get(name, near[0] if near else None)


def names_what_is_meant[T: type](made: T) -> T:
    """A decorator of a dataclass of sampling parameters: an unknown keyword raises a TypeError that
    names the right one."""
    init: Callable[..., None] = made.__init__  # type: ignore[misc]
    known = made.__dataclass_fields__.keys()  # type: ignore[attr-defined]

    @wraps(init)
    def checked(self: object, *args: Any, **values: Any) -> None:
        for name in values.keys() - known:
            advice = SAMPLING_ADVICE.get(name)
            if advice is None and (meant := meant_by(name, known, SAMPLING_NAMES)) is not None:
                advice = f"did you mean {meant}={values[name]!r}?"
            raise TypeError(
                f"{made.__name__} has no parameter {name!r}"
                + (f": {advice}" if advice else f". Its parameters are: {', '.join(known)}.")
            )
        init(self, *args, **values)

    made.__init__ = checked  # type: ignore[misc]
    return made
