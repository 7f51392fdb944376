"""The tiny model in `transformers`, and a token-by-token loop with every processor spelt out: what
the engine's log probs, penalties, biases and bans are compared with."""

import math
from collections import Counter
from typing import Any

import torch

from megatron_async import SamplingParams
from tests.support.harness import TINY, make_model
from tests.unit_tests.checkpoints.hybrid_families import huggingface_state


class PlainModel:
    """Logits of whole sequences, nothing cached."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=TINY.vocab_size,
            hidden_size=TINY.hidden_size,
            intermediate_size=TINY.ffn_hidden_size,
            num_hidden_layers=TINY.num_layers,
            num_attention_heads=TINY.num_attention_heads,
            num_key_value_heads=TINY.num_query_groups,
            head_dim=TINY.kv_channels,
            max_position_embeddings=TINY.max_position_embeddings,
            rms_norm_eps=TINY.layernorm_epsilon,
            rope_theta=TINY.rotary_base,
            tie_word_embeddings=False,
        )
        self.model: Any = LlamaForCausalLM(config).eval()
        self.model.load_state_dict(huggingface_state(make_model(), TINY))

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """float32 `[tokens, vocabulary]`."""
        return self.model(torch.tensor([tokens])).logits[0]

    def greedy(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """Tokens of a greedy request, with its penalties, biases and bans."""
        generated: list[int] = []
        while len(generated) < params.num_tokens_to_generate:
            logits = process(self.logits(prompt + generated)[-1], prompt, generated, params)
            generated.append(int(logits.argmax()))
            if generated[-1] in {params.termination_id, *(params.stop_token_ids or ())}:
                break
        return generated


def process(
    logits: torch.Tensor, prompt: list[int], generated: list[int], params: SamplingParams
) -> torch.Tensor:
    """One token's logits, `[vocabulary]`, processed as the documentation of the fields says."""
    logits = logits.clone()
    for token in {*prompt, *generated}:
        value = logits[token]
        rate = params.repetition_penalty
        logits[token] = value / rate if value > 0 else value * rate
    for token, count in Counter(generated).items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    if len(generated) < params.min_tokens:
        for token in {params.termination_id, *(params.stop_token_ids or ())} - {-1, None}:
            logits[token] = -math.inf
    for word in params.bad_words or ():
        before = word[:-1]
        if generated[len(generated) - len(before) :] == before and len(generated) >= len(before):
            logits[word[-1]] = -math.inf
    return logits
