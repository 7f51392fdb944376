"""A whole engine by the kernels of a GPU in Triton's interpreter: a request's bits are those that
it has alone.

Orders of products and the fast ops are seen. Attention whose parts follow the step is not, by these
lengths: test_decode_attention.py and test_prefill_attention.py see that."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_async.models.architecture import ModelArchitecture
from megatron_async.ops.all_ops import Ops
from megatron_async.ops.attention.backends.base import AttentionShape
from megatron_async.ops.attention.backends.own_kernel import TritonPrefill
from megatron_async.ops.attention.backends.selection import PrefillChoice
from megatron_async.ops.attention.gpu_paged_attention import GpuPagedAttention
from megatron_async.ops.linear import products
from megatron_async.planning import dynamic_context
from tests.support.harness import CPU, greedy, make_engine, make_model
from tests.unit_tests.ops.attention.decode_batch import processors
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="an engine on the CPU")

DENSE = ModelArchitecture("qwen3", 2, 64, 4, 2, 16, 64, 128, qk_layernorm=True)
EXPERTS = replace(
    DENSE, num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=32,
    moe_shared_expert_intermediate_size=32,
)  # fmt: skip
PART, BLOCK = 64, 16


@pytest.fixture(params=[DENSE, EXPERTS], ids=["dense", "experts"])
def engine(request, device, matrix_units, monkeypatch):
    """An engine of a float16 model; its ops and its attention are a GPU's, and keep the promise."""
    invariant = Ops(CPU, frozenset({"invariant"}), "gpu")
    invariant.major, product = 9, invariant.product

    def product_of_rows(x, *rest, **named):  # hidden states have an axis that a GPU's caller drops
        if isinstance(x, torch.Tensor) and x.dim() == 3:
            return product(x.flatten(0, 1), *rest, **named).unflatten(0, x.shape[:2])
        return product(x, *rest, **named)

    invariant.product = product_of_rows
    monkeypatch.setattr(products, "choose_for", partial(products.choose_for, major=9))
    make_view = dynamic_context.make_gpu_view

    def make_view_of_a_gpu(model, config, *rest):
        view = make_view(model, config, *rest)
        view.ops = invariant
        heads = model.num_attention_heads, model.num_query_groups, model.kv_channels
        blocks = -(-config.max_sequence_length // BLOCK)
        shape = AttentionShape(*heads, BLOCK, blocks, torch.float16, CPU, PART)
        with processors(2):
            prefill = PrefillChoice.of_one(TritonPrefill(shape))
            view._attention = GpuPagedAttention(
                shape, config.max_requests, prefill, config.decode_width
            )
        return view

    monkeypatch.setattr(dynamic_context, "make_gpu_view", make_view_of_a_gpu)
    model = make_model(request.param).half()
    model.config.params_dtype = torch.float16
    return make_engine(
        model, block_size_tokens=BLOCK, max_sequence_length=320, num_kv_blocks=96, max_requests=4,
        max_tokens=800, enable_prefix_caching=True,
    )  # fmt: skip


def bits(engine, prompts, budget=800):
    """Tokens and log probs of each prompt."""
    engine.context.scheduler.prefill_limit = engine.context.config.max_tokens = budget
    engine.reset_prefix_cache()
    return answers(engine, prompts)


def answers(engine, prompts, **changes):
    requests = engine.generate(prompts, greedy(3, return_log_probs=True, **changes))
    return [(r.generated_tokens, r.generated_log_probs, r.prompt_log_probs) for r in requests]


def test_a_request_has_its_bits_in_any_company(engine):
    """In a batch, in another order, by chunks, behind a prefix that is found, and without steps in
    flight."""
    draws = torch.Generator().manual_seed(0)
    prompts = [torch.randint(128, (n,), generator=draws).tolist() for n in (300, 5, 150, 1)]
    alone = [bits(engine, [prompt])[0] for prompt in prompts]
    assert bits(engine, prompts) == alone
    assert bits(engine, prompts[::-1]) == alone[::-1]
    assert bits(engine, prompts, budget=101) == alone
    found = answers(engine, prompts, skip_prompt_log_probs=True)
    assert [each[:2] for each in found] == [each[:2] for each in alone]
    engine.loop.lookahead = 0
    assert bits(engine, prompts) == alone
