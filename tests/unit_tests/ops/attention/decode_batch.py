"""Rows of decode attention in a paged cache, and what their attention should be.

Whatever no sequence owns is NaN: cells of the cache, the output and the workspace.
"""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_async.ops.attention import decode_attention, decode_schedule
from megatron_async.ops.attention.decode_attention import DecodeWorkspace, paged_decode_attention
from megatron_async.ops.attention.narrow_cache import NARROW, narrowed, scales_of
from tests.support.compiled_kernels import record

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def processors(count):
    """A device of so many processors: with few of them a batch has few parts."""
    properties = SimpleNamespace(multi_processor_count=count)
    if torch.cuda.is_available():  # torch and Triton ask for the capability too
        properties.major, properties.minor = torch.cuda.get_device_capability()
    return mock.patch.object(torch.cuda, "get_device_properties", return_value=properties)


def some_scales(kv_heads, device):
    """Scales that differ from head to head, and between keys and values."""
    keys = torch.arange(1, kv_heads + 1) / 300
    return scales_of(keys, keys.flip(0) / 7).to(device)


def as_stored(drawn, dtype, scales, of):
    """Keys or values as a cache stores them, and as they are read, in float64."""
    if scales is None:
        return drawn.to(dtype), drawn.to(dtype).double()
    scales = scales.to(drawn.device)
    stored = narrowed(drawn, scales, of)
    return stored, stored.double() * scales[of, :, None].double()


class Batch:
    """Rows of given lengths in a cache whose blocks are shuffled; `refill` draws others in place:
    tensors keep their addresses, as a captured graph needs."""

    def __init__(
        self, longest, rows, block_size, kv_heads, group, dim, dtype, device, count=132, seed=0,
        width=1, first_key=0, part=0, is_narrow=False, window=0, softcap=0.0, has_sinks=False,
    ):  # fmt: skip
        self.first_key, self.window, self.softcap = first_key, window, softcap
        self.generator = torch.Generator().manual_seed(seed)
        self.kv_heads, self.group, self.dim, self.device = kv_heads, group, dim, device
        self.block_size, self.scale, self.width = block_size, dim**-0.5, width
        blocks_a_row = -(-longest // block_size)
        self.blocks = rows * blocks_a_row + 1
        shape = (self.blocks, block_size, kv_heads, dim)
        self.scales = some_scales(kv_heads, device) if is_narrow else None
        self.keys = torch.empty(shape, dtype=NARROW if is_narrow else dtype, device=device)
        self.values = torch.empty_like(self.keys)
        # One column more than is used: the kernel has to mind the row's stride.
        self.tables = torch.empty((rows, blocks_a_row + 1), dtype=torch.int32, device=device)
        self.lengths = torch.empty(rows, dtype=torch.int32, device=device)
        self.query = torch.empty(rows * width, kv_heads * group, dim, dtype=dtype, device=device)
        self.positions = torch.empty(rows * width, dtype=torch.int64, device=device)
        self.out = torch.full_like(self.query, float("nan"))
        with processors(count):
            self.workspace = DecodeWorkspace(
                rows, kv_heads * group, kv_heads, dim, device, width, part, longest, window
            )
        self.sinks = None
        if has_sinks:
            self.sinks = (3 * self.random(kv_heads * group)).to(device)
        for tensor in (self.workspace.output, self.workspace.maximum, self.workspace.total):
            tensor.fill_(float("nan"))
        for tensor in (self.workspace.schedule.items, self.workspace.schedule.splits):
            tensor.fill_(2**30)

    def random(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def refill(self, lengths, query_scale=1.0):
        """New lengths, tables, keys, values and queries; returns what attention should be."""
        keys, values = (torch.full(self.keys.shape, float("nan")) for _ in "kv")
        # A column beyond a row's length points outside the cache: reading through it is an error.
        tables = torch.full(self.tables.shape, 2**30, dtype=torch.int32)
        order = torch.randperm(self.blocks, generator=self.generator)
        query = (query_scale * self.random(*self.query.shape)).to(self.query.dtype)
        expected = torch.zeros(self.query.shape, dtype=torch.float64)
        sinks = torch.full((query.size(1), 1), -torch.inf, dtype=torch.float64)
        if self.sinks is not None:
            sinks = self.sinks.cpu().double()[:, None]
        for row, length in enumerate(lengths):
            used = -(-length // self.block_size)
            tables[row, :used], order = order[:used], order[used:]
            position = torch.arange(length)
            cells = tables[row, position // self.block_size].long() * self.block_size
            cells += position % self.block_size
            read = []
            for of, cache in enumerate((keys, values)):
                drawn = self.random(length, self.kv_heads, self.dim)
                stored, its = as_stored(drawn, self.keys.dtype, self.scales, of)
                cache.flatten(0, 1)[cells] = stored.float()
                read.append(its.repeat_interleave(self.group, 1))
            if length:
                k, v = read
                for j in range(self.width):
                    # The row's last tokens; beyond a limit they stand at position 0.
                    token, last = row * self.width + j, max(length - self.width + j, 0)
                    self.positions[token] = last
                    seen = slice(min(self.first_key, last), last + 1)
                    if self.window:
                        seen = slice(max(last + 1 - self.window, 0), last + 1)
                    seen_k, seen_v = k[seen], v[seen]
                    score = torch.einsum("hd,nhd->hn", query[token].double(), seen_k) * self.scale
                    if self.softcap:
                        score = self.softcap * torch.tanh(score / self.softcap)
                    weight = torch.cat((score, sinks), 1).softmax(1)[:, :-1]
                    expected[token] = torch.einsum("hn,nhd->hd", weight, seen_v)
                # What no query sees is not this row's any more: blocks are given away.
                if self.window and (dead := max(length - self.width - self.window + 1, 0)):
                    tables[row, : dead // self.block_size] = 2**30
                    for cache in keys, values:
                        cache.flatten(0, 1)[cells[:dead]] = torch.nan
        self.keys.copy_(keys)
        self.values.copy_(values)
        self.tables.copy_(tables)
        self.query.copy_(query)
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        self.out.fill_(float("nan"))
        return expected

    def run(self, is_settled=False):
        self.workspace.schedule.update(self.lengths, width=self.width)
        if is_settled:
            self.out.fill_(float("nan"))  # a kernel between
        self.attend(is_settled)

    def attend(self, is_settled=False, is_beside=False):
        paged_decode_attention(
            self.query,
            self.keys,
            self.values,
            self.tables,
            self.scale,
            self.workspace,
            self.out,
            is_settled,
            self.positions if self.width > 1 else None,
            self.first_key,
            is_beside,
            scales=self.scales,
            sinks=self.sinks,
            softcap=self.softcap,
        )

    def compiled(self, is_beside=False):
        """The parts' kernel as it is launched, for Hopper; nothing runs."""
        with pytest.MonkeyPatch.context() as patch:
            kernels = (decode_schedule, "_schedule_kernel"), (decode_attention, "join_kernel")
            *_, recorder = record(patch, *kernels, (decode_attention, "_parts_kernel"))
            self.workspace.schedule.update(self.lengths, width=self.width)
            self.attend(True, is_beside)
        return recorder.launches[0].compiled()

    def check(self, expected):
        found, tolerance = self.out.cpu().double(), TOLERANCE[self.out.dtype]
        assert not found.isnan().any()
        for row, length in enumerate(self.lengths.tolist()):
            for token in range(row * self.width, (row + 1) * self.width):
                error = (found[token] - expected[token]).norm()
                assert error <= tolerance * expected[token].norm(), (row, token, length, error)
