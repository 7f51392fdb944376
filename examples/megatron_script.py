"""A Megatron script on a CPU: a small `GPTModel` answers, is trained by a step, answers again.

    .venv/bin/python examples/megatron_script.py

Only the two imports of `megatron.core.inference` name `megatron_async.compat.inference` instead.
With Megatron's own names it runs by the hook, `python -m megatron_async.compat --cpu SCRIPT`.
"""

from types import SimpleNamespace

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_async.compat.cpu_stand_ins import stand_in
from megatron_async.compat.inference.apis import MegatronLLM, SamplingParams
from megatron_async.compat.inference.config import InferenceConfig

LETTERS = SimpleNamespace(  # a tokenizer as Megatron's are: a token is a letter of ASCII
    vocab_size=96, eod=95, bos=None, tokenize=lambda text: [ord(letter) - 32 for letter in text],
    detokenize=lambda tokens, **_: "".join(chr(32 + token) for token in tokens),
)  # fmt: skip


def make_model() -> GPTModel:
    """Two layers with random weights, in float32."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    initialize_rng_tracker(inference_rng_tracker=True)  # there is no GPU whose state to keep
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, normalization="RMSNorm",
        add_bias_linear=False, use_cpu_initialization=True,
    )  # fmt: skip
    layers = get_gpt_layer_local_spec(normalization="RMSNorm")
    return GPTModel(config, layers, 96, 64, position_embedding_type="rope")


def train_step(model: GPTModel, text: str) -> float:
    """One step of an optimizer on a text; returns the loss before it."""
    tokens = torch.tensor([LETTERS.tokenize(text)])
    length = tokens.size(1) - 1
    hidden = torch.ones(1, 1, length, length).tril() < 0.5  # what a position must not see
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loss = model(tokens[:, :-1], torch.arange(length)[None], hidden, labels=tokens[:, 1:]).mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def main() -> None:
    """Answer, train, answer."""
    stand_in()  # Megatron asks torch.cuda also where it needs no GPU; nothing where there is one
    model = make_model()
    settings = InferenceConfig(max_sequence_length=64, max_requests=4, buffer_size_gb=0.01)
    greedy = SamplingParams(num_tokens_to_generate=16, top_k=1, termination_id=-1)
    with MegatronLLM(
        model=model, tokenizer=LETTERS, inference_config=settings, use_coordinator=False
    ) as llm:
        print("before:", repr(llm.generate("The sea", greedy)[0].generated_text))
        llm.suspend()
        print("loss:  ", round(train_step(model, "The sea is wide. " * 3), 2))
        llm.resume()  # serves the trained weights; what caches hold of the old ones is forgotten
        print("after: ", repr(llm.generate("The sea", greedy)[0].generated_text))


if __name__ == "__main__":
    main()
