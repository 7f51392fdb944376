"""Keys of a model's `generation_config.json` (or of sampling metadata in a GGUF file) which are not
honoured: the log names them, once for each model.

Honoured are those of `requests/defaults.py`, and the tokens that begin and end a text. A key of
`NEUTRAL` changes nothing at these values, one of `_HARMLESS` at none.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from megatron_async.requests.defaults import LIMITS, MAX_NEW_TOKENS

logger = logging.getLogger("megatron_async")
HONOURED = {
    *LIMITS,
    MAX_NEW_TOKENS,
    "do_sample",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",  # of batches with padding, which do not exist here
}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "typical_p": (1,),
    "length_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "guidance_scale": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "diversity_penalty": (0,),
    "penalty_alpha": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "early_stopping": (False,),
    "renormalize_logits": (False, True),  # greedy and sampled tokens are the same
    "token_healing": (False,),
    "stop_strings": ([],),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
}
"""Keys that change answers, and the values at which they do not; null never does."""
_HARMLESS = frozenset({
    "transformers_version", "_from_model_config", "_commit_hash", "trust_remote_code",
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory",
    "prefill_chunk_size", "compile_config", "disable_compile", "continuous_batching_config",
    "return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores",
    "output_logits", "remove_invalid_values", "decoder_start_token_id",
    # Drafts of other engines; here a draft never changes a token.
    "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight",
    "assistant_lookbehind", "target_lookbehind", "prompt_lookup_num_tokens",
    "max_matching_ngram_size", "speculation_type", "use_mtp",
})  # fmt: skip


def passed_over(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that change answers elsewhere and not here, or that nobody knows.

    Args:
        fields: content of a `generation_config.json`.
    """
    return {
        key: value
        for key, value in fields.items()
        if value is not None
        and key not in HONOURED | _HARMLESS
        and value not in NEUTRAL.get(key, ())
    }


def tell_passed_over(fields: Mapping[str, Any], where: str) -> None:
    """Log the keys that are passed over, once for a model.

    Args:
        fields: content of a `generation_config.json`.
        where: name of the model.
    """
    said = ", ".join(f"{key} = {value!r}" for key, value in sorted(passed_over(fields).items()))
    if said:
        _tell(where, said)


@lru_cache(maxsize=64)
def _tell(where: str, said: str) -> None:
    logger.warning("%s: its generation_config has %s: not honoured here.", where, said[:1000])
