"""Packed weights: the same products, and no copy where it does not fit."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.hybrid import build_model, init_dummy_weights
from megatron_async.models.linear import (
    PACKING_MEMORY_SHARE,
    InferenceColumnParallelLinear,
    InferenceRowParallelLinear,
    linear,
    pack_weights,
)
from megatron_async.ops.all_ops import Ops
from megatron_async.ops.linear.stream import Stream

TINY = DUMMY_SHAPES["tiny"]
needs_mkldnn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)
PLENTY = 1 << 40


def make(dtype=torch.float32, **changes):
    model = build_model(replace(TINY, **changes), dtype, torch.device("cpu"))
    init_dummy_weights(model)
    return model


def linears(model):
    kinds = InferenceColumnParallelLinear | InferenceRowParallelLinear
    return [module for module in model.modules() if isinstance(module, kinds)]


@needs_mkldnn
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 64, 300])
def test_packed_products_are_the_plain_ones(tied, rows):
    model = make(tie_word_embeddings=tied, add_qkv_bias=True)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
    size = pack_weights(model, PLENTY)
    modules = linears(model)
    assert len(modules) == 4 * TINY.num_layers + 1
    assert all(module.packed_weight is not None for module in modules)
    total = 0
    for module in modules:
        weight = module.weight
        if weight is None:
            weight = model.shared_embedding_or_output_weight()
        total += 4 * weight.numel()
        x = torch.randn(rows, 1, weight.size(1), generator=torch.Generator().manual_seed(rows))
        found, bias = module(x, weight) if module is model.output_layer else module(x)
        expected = F.linear(x.double(), weight.double())
        if module.bias is not None and not module.skip_bias_add:
            expected = expected + module.bias.double()
        assert bias is None or module.skip_bias_add
        assert (found - expected).norm() < 1e-6 * expected.norm()
    assert size == total


@needs_mkldnn
def test_weights_are_packed_only_where_memory_allows():
    model = make()
    size = pack_weights(model, PLENTY)
    limit = int(size / PACKING_MEMORY_SHARE)
    for free, packed in ((limit, size), (limit - 2, 0), (0, 0)):
        other = make()
        assert pack_weights(other, free) == packed
        assert all((m.packed_weight is not None) == (packed > 0) for m in linears(other))


def test_other_dtypes_keep_their_plain_weights():
    model = make(torch.bfloat16)
    assert pack_weights(model, PLENTY) == 0
    assert all(module.packed_weight is None for module in linears(model))


@needs_mkldnn
def test_packing_again_follows_changed_weights():
    model = make()
    pack_weights(model, PLENTY)
    module = linears(model)[0]
    x = torch.randn(3, 1, module.weight.size(1))
    before, _ = module(x)
    module.weight.mul_(2)
    pack_weights(model, PLENTY)
    torch.testing.assert_close(module(x)[0], 2 * before)


def test_linear_without_a_packed_weight():
    x, weight, bias = torch.randn(4, 5), torch.randn(3, 5), torch.randn(3)
    ops = Ops(torch.device("cpu"))
    assert torch.equal(linear(ops, x, weight, bias, None), F.linear(x, weight, bias))


def test_a_product_of_gathered_rows_is_chosen_for_all_of_them(monkeypatch):
    """With sequence parallelism the stream has a share of the rows, and the product takes all."""
    model = make(torch.bfloat16)
    layer = next(each for each in linears(model) if isinstance(each, InferenceColumnParallelLinear))
    stand_in = SimpleNamespace(major=9, is_invariant=False)
    monkeypatch.setattr(InferenceColumnParallelLinear, "ops", stand_in, raising=False)
    ranks = SimpleNamespace(size=2)
    monkeypatch.setattr(InferenceColumnParallelLinear, "collectives", ranks, raising=False)
    rows = []
    for layer.sequence_parallel in (False, True):
        choice = layer.choose(Stream(torch.zeros(1, TINY.hidden_size, dtype=torch.bfloat16)))
        rows.append((choice.met.rows, choice.kernel.name))
    assert rows[0] == (1, "one row")
    assert rows[1][0] == 2
    assert rows[1][1] != "one row"
