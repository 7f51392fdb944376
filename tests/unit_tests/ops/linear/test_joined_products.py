"""Products that add up the parts of attention first."""

import pytest
import torch
from test_skinny_linear import BRAIN, assert_close, random, weight_of
from triton_interpreter import INTERPRETED

from megatron_async.ops.attention.decode_attention import LOG2_E
from megatron_async.ops.linear.planned_products import one_row_product
from megatron_async.ops.linear.skinny_linear import linear, linear_reference
from megatron_async.ops.linear.skinny_plan import OneRowPlan, joins_parts
from megatron_async.ops.linear.unjoined import AT_ONCE, Unjoined

DTYPE = torch.float32 if INTERPRETED else BRAIN


@pytest.fixture(autouse=True)
def same_numbers(poisoned_memory):
    torch.manual_seed(0)


def attention_in_parts(heads, dim, parts, dtype, device):
    """A row over 8 keys a part, and what the product should read; other slots are NaN."""
    scores = random(parts, 8, heads, device=device) * 4
    values = random(parts, 8, heads, dim, device=device)
    first, slots = 3, parts + 5
    output = torch.full((slots, heads, dim), torch.nan, device=device)
    maximum = torch.full((slots, heads), torch.nan, device=device)
    total = torch.full_like(maximum, torch.nan)
    mine = slice(first, first + parts)
    maximum[mine] = scores.amax(1) * LOG2_E
    weights = torch.exp(scores - scores.amax(1, keepdim=True))
    total[mine] = weights.sum(1)
    output[mine] = (weights[..., None] * values).sum(1)
    share = scores.flatten(0, 1).softmax(0)
    expected = (share[..., None] * values.flatten(0, 1)).sum(0).view(1, -1).to(dtype)
    # One part is in x, and has no slot.
    x = expected if parts == 1 else torch.full_like(expected, torch.nan)
    split = [-1, 1] if parts == 1 else [first, parts]
    splits = torch.tensor([split], dtype=torch.int32, device=device)
    return Unjoined(x, output, maximum, total, splits), expected


def check(product, heads, dim, parts, dtype, device):
    unjoined, expected = attention_in_parts(heads, dim, parts, dtype, device)
    weight = weight_of(40, heads * dim, dtype, device)
    found = product(unjoined, weight)
    assert_close(found, torch.nn.functional.linear(expected, weight), dtype)
    assert_close(linear_reference(unjoined, weight), found, dtype)


@pytest.mark.parametrize("parts", [1, 2, AT_ONCE.value, AT_ONCE.value + 1, 3 * AT_ONCE.value])
@pytest.mark.parametrize(("heads", "dim"), [(9, 32), (4, 64), (1, 64)])
def test_small_shapes(heads, dim, parts, device):
    tile = 1 << (heads - 1).bit_length()
    plan = OneRowPlan(4, tile * dim, 2, 0)

    def product(x, weight):
        return one_row_product(x, weight, None, "", plan)

    check(product, heads, dim, parts, DTYPE, device)


def test_bad_input(device):
    unjoined, _expected = attention_in_parts(4, 32, 2, DTYPE, device)
    weight = weight_of(8, 128, DTYPE, device)
    with pytest.raises(ValueError, match="does not hold 128 of 4 heads: ask joins_parts"):
        one_row_product(unjoined, weight, None, "", OneRowPlan(4, 64, 2, 0))
    other = Unjoined(
        unjoined.x[:, :64], unjoined.output, unjoined.maximum, unjoined.total, unjoined.splits
    )
    with pytest.raises(ValueError, match="not those of a row of 64 elements"):
        one_row_product(other, weight[:, :64].contiguous(), None, "", OneRowPlan(4, 128, 2, 0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("parts", [1, 3, 7, 64])
@pytest.mark.parametrize(("heads", "dim"), [(9, 64), (16, 64), (4, 128), (7, 64)])
def test_by_the_rule(heads, dim, parts):
    x = random(1, heads * dim, dtype=BRAIN, device="cuda")
    assert joins_parts(x, weight_of(40, heads * dim, BRAIN, "cuda"), heads)
    check(linear, heads, dim, parts, BRAIN, "cuda")
