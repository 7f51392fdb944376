"""Decode rows' attention at the same time as prompts': compiled for a GPU, and on one."""

import re

import pytest
import torch

from megatron_async.ops.attention.backends.base import AttentionShape, BackendUnavailable
from megatron_async.ops.attention.backends.selection import BACKENDS, PrefillChoice
from megatron_async.ops.attention.gpu_paged_attention import GpuPagedAttention
from megatron_async.ops.attention.rope_append import rope_append_gpu
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.linear.products import product_gpu
from megatron_async.ops.linear.rms_norm import add_rms_norm_gpu
from tests.unit_tests.ops.attention.decode_batch import Batch
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

HEADS, KV_HEADS, DIM = 8, 2, 64


def compiled(joins, is_beside):
    """Machine code in PTX; rows that fill the device join their parts."""
    batch = Batch(64, 64 if joins else 2, 64, 8, 4, 128, torch.bfloat16, "cpu")
    return batch.compiled(is_beside).asm["ptx"]


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("joins", [True, False])
def test_compiled(joins):
    """Break it: wait before the loads, or not at all."""
    before, behind = compiled(joins, is_beside=True).split("griddepcontrol.wait")
    touches = r"(ld|st|atom)\.[\w.]*global|cp\.async"
    assert re.search(touches, before)
    assert not re.search(touches, behind), "ends with the kernel before"
    assert "griddepcontrol.launch_dependents" in before
    start, _ = before.split("griddepcontrol.launch_dependents")
    assert not re.search(touches, start), "lets the next one start first"
    before, behind = compiled(joins, is_beside=False).split("griddepcontrol.wait")
    assert re.search(touches, behind)
    assert "cp.async" not in before
    assert "griddepcontrol.launch_dependents" in behind


@pytest.mark.gpu
@pytest.mark.parametrize("prompts", [[5], [300], [64, 1, 200]])
@pytest.mark.parametrize("decode", [[1], [70, 500, 3], [200] * 90])
@pytest.mark.parametrize("name", ["triton", "warpgroup"])
def test_a_chain_of_layers_in_a_graph(name, decode, prompts, monkeypatch):
    """Layers that append keys and values, attend and read what attention wrote, by kernels that
    start early, have the bits of layers in which attention runs one after the other. Break it:
    `is_beside` behind another kernel than the prompts', or without the wait at its end."""
    torch.manual_seed(0)
    layers, block_size, hidden = 8, 64, HEADS * DIM
    lengths = [*decode, *(2 * length for length in prompts)]
    blocks = [-(-length // block_size) for length in lengths]
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32, device="cuda")
    free = iter(torch.randperm(sum(blocks)).tolist())
    for row, count in enumerate(blocks):
        for i in range(count):
            tables[row, i] = next(free)
    asked = [*([1] * len(decode)), *prompts]
    positions = [p for n, new in zip(lengths, asked) for p in range(n - new, n)]
    owners = [row for row, new in enumerate(asked) for _ in range(new)]
    at = torch.tensor(positions, device="cuda")
    owner = torch.tensor(owners, device="cuda")
    write = tables[owner, at // block_size].long() * block_size + at % block_size
    starts = torch.tensor([0, *prompts]).cumsum(0).add(len(decode)).int().cuda()
    dims = BatchDimensions(
        decode_rows=len(decode),
        prefill_lengths=tuple((new, 2 * new) for new in prompts),
        max_decode_kv_length=max(decode),
    )

    def random(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    angles = torch.rand(max(lengths), DIM, device="cuda")
    cos, sin = angles.cos(), angles.sin()
    norm = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    start = random(len(positions), hidden)
    qkv = [random((HEADS + 2 * KV_HEADS) * DIM, hidden) * hidden**-0.5 for _ in range(layers)]
    proj = [random(hidden, hidden) * hidden**-0.5 for _ in range(layers)]
    shape = (sum(blocks), block_size, KV_HEADS, DIM)
    caches = [(random(*shape), random(*shape)) for _ in range(layers)]
    of = AttentionShape(
        HEADS, KV_HEADS, DIM, block_size, max(blocks), torch.bfloat16, torch.device("cuda")
    )
    try:
        backend = BACKENDS[name](of)
    except BackendUnavailable as reason:
        pytest.skip(str(reason))
    choice = PrefillChoice.of_one(backend)
    attention = GpuPagedAttention(of, len(lengths), choice)
    kv_lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")

    def chain():
        attention.begin_step(dims, tables, kv_lengths, starts)
        x, residual = start, torch.zeros_like(start)
        for w_qkv, w_proj, (keys, values) in zip(qkv, proj, caches, strict=True):
            x, residual = add_rms_norm_gpu(x, residual, norm, 1e-5)
            query = rope_append_gpu(product_gpu(x, w_qkv), cos, sin, at, write, keys, values)
            x = attention.attend(query, keys, values, DIM**-0.5)
            x = product_gpu(x.view(len(positions), hidden), w_proj)
        return x

    monkeypatch.setattr(backend, "lets_others_start", False)
    expected = chain()
    monkeypatch.setattr(backend, "lets_others_start", True)
    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    assert expected.isfinite().all()
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)
