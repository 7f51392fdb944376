"""Paged attention against a plain softmax in float64 over gathered keys and values."""

import itertools

import numpy as np
import pytest
import torch

from megatron_async.ops.attention.backends.base import AttentionShape
from megatron_async.ops.attention.backends.selection import BACKENDS, PrefillChoice
from megatron_async.ops.attention.cpu import host_attention
from megatron_async.ops.attention.cpu.host_attention import HostPagedAttention, shares_of
from megatron_async.ops.attention.gpu_paged_attention import GpuPagedAttention
from megatron_async.ops.attention.paged_attention import TorchPagedAttention
from megatron_async.ops.batch_dimensions import BatchDimensions
from megatron_async.ops.cpu.compiler import compiles
from tests.unit_tests.ops.attention.decode_batch import processors

GUARD = float("nan")
"""Fills the cache where no sequence stands: it must not leak into any output."""


def naive(query, keys, values, group, scale, softcap=0.0, sinks=None):
    """One token's attention: query `[heads, dim]`, keys and values `[length, kv heads, dim]`."""
    out = torch.empty_like(query, dtype=torch.float64)
    for head in range(query.size(0)):
        k, v = keys[:, head // group].double(), values[:, head // group].double()
        scores = k @ query[head].double() * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat((scores, sinks[head : head + 1].double()))
        out[head] = torch.softmax(scores, 0)[: len(k)] @ v
    return out


def check(
    backend,
    device,
    block_size,
    decode,
    prefill,
    kv_heads,
    group,
    dim,
    tolerance,
    width=1,
    dummies=0,
    window=0,
    softcap=0.0,
    has_sinks=False,
):
    """With dummy decode rows the step is a packed one. Blocks before a row's window, and their
    entries in its table, are another's."""
    generator = torch.Generator().manual_seed(block_size * 100 + dim)
    lengths = [*decode, *(kv for _, kv in prefill)]
    max_blocks = -(-max(lengths) // block_size) + 1
    total = sum(-(-n // block_size) for n in lengths) + 3
    order = torch.randperm(total, generator=generator)
    shape = (total, block_size, kv_heads, dim)
    key_cache, value_cache = torch.full(shape, GUARD), torch.full(shape, -GUARD)
    tables = torch.randint(total, (len(lengths), max_blocks), generator=generator)
    rows, used = [], 0
    for row, length in enumerate(lengths):
        count = -(-length // block_size)
        tables[row, :count] = order[used : used + count]
        used += count
        positions = torch.arange(length)
        index = tables[row, positions // block_size] * block_size + positions % block_size
        keys, values = (torch.randn(length, kv_heads, dim, generator=generator) for _ in "kv")
        key_cache.flatten(0, 1)[index], value_cache.flatten(0, 1)[index] = keys, values
        rows.append((keys, values))
        asked = width if row < len(decode) else prefill[row - len(decode)][0]
        if window and (dead := max(length - asked - window + 1, 0) // block_size):
            key_cache[tables[row, :dead]], value_cache[tables[row, :dead]] = GUARD, GUARD
            tables[row, :dead] = torch.randint(total, (dead,), generator=generator)
    dims = BatchDimensions(
        decode_rows=len(decode),
        width=width,
        prefill_lengths=tuple(prefill),
        max_decode_kv_length=max(decode, default=0),
    )
    tokens, first = dims.tokens, dims.decode_tokens
    if dummies:
        count = len(decode)
        dims = BatchDimensions(
            decode_rows=count + dummies,
            is_captured=True,
            padded_prefill_rows=len(prefill),
            padded_prefill_tokens=max(tokens + 3, count + dummies),
            is_packed=True,
            longest_sequence=max(lengths),
        )
        lengths[count:count] = [max(lengths)] * dummies
        tables = torch.cat((tables[:count], tables[:1].expand(dummies, -1), tables[count:]))
    query = torch.randn(dims.tokens, kv_heads * group, dim, generator=generator)
    attention = backend(block_size, max_blocks)
    kv_lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
    starts = torch.tensor([0, *itertools.accumulate(asked for asked, _ in prefill)]) + first
    starts = starts.int().to(device) if prefill else None
    # The query tokens of a decode row are its last; beyond a limit they stand at position 0.
    queries = [max(length - width + j, 0) for length in decode for j in range(width)]
    positions = torch.tensor([*queries, *[-1] * dims.prefill_tokens], device=device)
    attention.begin_step(dims, tables.int().to(device), kv_lengths, starts, positions)
    scale = dim**-0.5
    caches = key_cache.to(device), value_cache.to(device)
    sinks = 3 * torch.randn(kv_heads * group, generator=generator) if has_sinks else None
    asked = {} if sinks is None else {"sinks": sinks.to(device)}
    found = attention.attend((1 + 9 * (softcap > 0)) * query.to(device), *caches, scale, **asked)
    found, query = found.cpu(), (1 + 9 * (softcap > 0)) * query
    token = 0
    for row, (keys, values) in enumerate(rows):
        ends = [position + 1 for position in queries[row * width : (row + 1) * width]]
        if row >= len(decode):
            asked, kv = prefill[row - len(decode)]
            ends = list(range(kv - asked + 1, kv + 1))
        for end in ends:
            seen = slice(max(end - window, 0) if window else 0, end)
            expected = naive(query[token], keys[seen], values[seen], group, scale, softcap, sinks)
            error = (found[token] - expected).norm() / expected.norm()
            assert error < tolerance, (row, end, error)
            token += 1
    assert token == tokens


CASES = [
    (1, [1, 5], [], 1, 1, 16),
    (4, [3, 4, 5, 9], [(3, 3), (2, 7)], 2, 3, 16),
    (16, [], [(20, 20), (1, 33), (17, 40)], 3, 3, 32),
    (16, [16, 17, 70], [(5, 5)], 2, 4, 64),
]


@pytest.mark.parametrize(("block_size", "decode", "prefill", "kv_heads", "group", "dim"), CASES)
@pytest.mark.parametrize(
    ("kind", "threads", "longest"),
    [
        (TorchPagedAttention, 1, 0),
        (HostPagedAttention, 1, 0),
        (HostPagedAttention, 3, 20),
        (HostPagedAttention, 1, 33),
        (HostPagedAttention, 3, 128),
    ],
)
def test_torch_backend(
    kind, threads, longest, block_size, decode, prefill, kv_heads, group, dim, monkeypatch
):
    """Prefill chunks of up to `longest` keys are the loop's, longer ones torch's."""
    if kind is HostPagedAttention and not compiles():
        pytest.skip("Numba is not here, or switched off")
    monkeypatch.setattr(host_attention, "LEAST_SHARED", 0)
    monkeypatch.setattr(host_attention, "LONGEST_CHUNK", longest)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    def backend(size, blocks):
        if kind is TorchPagedAttention:
            return TorchPagedAttention(size, blocks, torch.device("cpu"))
        return HostPagedAttention(size, blocks, torch.device("cpu"), takes_chunks=longest > 0)

    for width in (1, 2, 5):
        check(backend, "cpu", block_size, decode, prefill, kv_heads, group, dim, 1e-5, width)


WINDOWS = [(7, 0.0, True), (16, 5.0, False), (17, 0.0, False), (0, 0.0, True), (64, 5.0, True)]
"""Windows, softcaps, sinks."""


@pytest.mark.parametrize(("window", "softcap", "has_sinks"), WINDOWS)
@pytest.mark.parametrize(
    ("kind", "longest"),
    [(TorchPagedAttention, 0), (HostPagedAttention, 0), (HostPagedAttention, 33)],
)
def test_windows_and_sinks(kind, longest, window, softcap, has_sinks, monkeypatch):
    """Break it: a window from the row's last token for all of its query tokens, or a key more."""
    if kind is HostPagedAttention and not compiles():
        pytest.skip("Numba is not here, or switched off")
    monkeypatch.setattr(host_attention, "LONGEST_CHUNK", longest)

    def backend(size, blocks):
        more = {"takes_chunks": True} if longest else {}
        return kind(size, blocks, torch.device("cpu"), window=window, softcap=softcap, **more)

    for width in (1, 3):
        decode, prefill = [1, 5, 16, 17, 33, 70], [(20, 20), (1, 33), (9, 40), (50, 129)]
        check(backend, "cpu", 16, decode, prefill, 2, 3, 16, 1e-5, width, window=window,
              softcap=softcap, has_sinks=has_sinks)  # fmt: skip


@pytest.mark.parametrize("dummies", [0, 1, 9])
@pytest.mark.parametrize(("block_size", "decode", "prefill", "kv_heads", "group", "dim"), CASES)
def test_gpu_kernels(block_size, decode, prefill, kv_heads, group, dim, dummies, device):
    """Break it: no limit of the schedule, or decode rows before prefill rows. One dummy: with parts
    of one length."""
    if dummies and not prefill:
        pytest.skip("a step of decode rows is not packed")

    def backend(size, blocks):
        where, heads = torch.device(device), kv_heads * group
        part = 128 if dummies == 1 else 0
        shape = AttentionShape(heads, kv_heads, dim, size, blocks, torch.float32, where, part)
        choice = PrefillChoice.of_one(BACKENDS["triton"](shape))
        rows = len(decode) + len(prefill) + dummies
        with processors(7):
            return GpuPagedAttention(shape, rows, choice)

    check(
        backend, device, block_size, decode, prefill, kv_heads, group, dim, 1e-4, dummies=dummies
    )  # fmt: skip


@pytest.mark.parametrize(("window", "softcap", "has_sinks"), WINDOWS)
def test_windows_and_sinks_of_gpu_kernels(window, softcap, has_sinks, device):
    """Decode rows and chunks of one step, with drafts and without. Break it: no width of the
    schedule's rows."""

    def backend(size, blocks):
        where = torch.device(device)
        rules = {"window": window, "softcap": softcap, "has_sinks": has_sinks}
        shape = AttentionShape(6, 2, 16, size, blocks, torch.float32, where, **rules)
        with processors(7):
            return GpuPagedAttention(shape, 8, PrefillChoice.of_one(BACKENDS["triton"](shape)), 3)

    for width in (1, 3):
        decode, prefill = [1, 16, 17, 70], [(20, 20), (9, 40), (50, 129)]
        check(backend, device, 16, decode, prefill, 2, 3, 16, 1e-4, width, window=window,
              softcap=softcap, has_sinks=has_sinks)  # fmt: skip


@pytest.mark.parametrize(
    ("lengths", "shares", "cuts"),
    [
        ([5], 2, [0, 1]),
        ([1, 1, 1, 1], 2, [0, 2, 4]),
        ([9, 1, 1, 1], 2, [0, 1, 4]),
        ([1, 1, 1, 9], 2, [0, 3, 4]),
        ([3, 3, 3], 3, [0, 1, 2, 3]),
        ([0, 4, 0, 4, 0], 2, [0, 2, 5]),
        ([2, 2], 8, [0, 1, 2]),
    ],
)
def test_shares_of_rows(lengths, shares, cuts):
    assert shares_of(np.array(lengths), shares) == cuts


@pytest.mark.parametrize(
    ("block_size", "decode", "prefill", "kv_heads", "group", "dim"),
    [
        *CASES,
        (64, [1, 63, 64, 65, 900], [(9, 100)], 3, 3, 64),
        (256, [2000], [], 8, 4, 128),
        (16, [257, 5000, 511, 1, 600], [], 2, 8, 64),
        (64, [30000], [], 1, 4, 64),
    ],
)
class TestOnGpu:
    """Paged attention by the decode kernel and either prefill backend that is always there."""

    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("name", ["triton", "torch"])
    def test_gpu_backend(self, name, block_size, decode, prefill, kv_heads, group, dim):
        def backend(size, blocks):
            rows, heads = len(decode) + len(prefill), kv_heads * group
            cuda = torch.device("cuda")
            shape = AttentionShape(heads, kv_heads, dim, size, blocks, torch.float32, cuda)
            choice = PrefillChoice.of_one(BACKENDS[name](shape))
            return GpuPagedAttention(shape, rows, choice, 5)

        for width in (1, 2, 5):
            check(backend, "cuda", block_size, decode, prefill, kv_heads, group, dim, 1e-4, width)
