"""What decides which mixed steps are captured, and how many tokens a short one has."""

from torch import nn

from megatron_async.choices import Fact, Question
from megatron_async.models.model_config import DECIDING_TIMES
from megatron_async.planning.dynamic_context import DynamicInferenceContext
from megatron_async.planning.graph_shapes import FINE_TOKENS, MixedRow

OF_CONFIG = (
    "block_size_tokens", "max_requests", "max_tokens", "cuda_graph_mixed_prefill_count",
    "speculative_method", "num_speculative_tokens", "draft_vocab_size", "mamba_ssm_states_dtype",
)  # fmt: skip


def mixed_question(
    context: DynamicInferenceContext, model: nn.Module, vocab_size: int
) -> Question[MixedRow]:
    """The choice of a context's mixed shapes, before any is dropped. By rule all are captured, and
    a short step has `FINE_TOKENS`, if there are longer ones."""
    asked = [*context.graph_shapes.mixed_sizes]

    def check(row: MixedRow) -> None:
        if row.sizes != [size for size in asked if size in row.sizes]:
            raise ValueError(f"its sizes {row.sizes} are none of this engine's")
        if row.step_tokens is not None and row.step_tokens < 1:
            raise ValueError(f"its step_tokens are {row.step_tokens}")

    facts: dict[str, Fact] = {
        "model": type(model).__name__,
        "vocab": vocab_size,
        "dtype": str(context.model_config.params_dtype).removeprefix("torch."),
        "attention": [*context.gpu_view.prefill_backends],
    }
    for owner, names in (context.model_config, DECIDING_TIMES), (context.config, OF_CONFIG):
        found = {name: getattr(owner, name, None) for name in names}
        facts |= {name: value for name, value in found.items() if value}
    tokens = FINE_TOKENS if asked and asked[-1] > FINE_TOKENS else None
    return Question("mixed steps", facts, MixedRow(asked, tokens), check)
