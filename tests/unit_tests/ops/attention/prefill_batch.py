"""Random chunks in a shuffled paged cache, and what their attention should be."""

import random

import pytest
import torch

from megatron_async.ops.attention import prefill_attention, prefill_schedule
from megatron_async.ops.attention.backends.base import PrefillRows
from megatron_async.ops.attention.narrow_cache import NARROW, as_bytes
from megatron_async.ops.attention.prefill_attention import paged_prefill_attention
from megatron_async.ops.attention.prefill_schedule import PrefillSchedule
from megatron_async.ops.attention.prefill_tile import PROGRAMS_A_PROCESSOR, tile_of
from tests.support.compiled_kernels import record
from tests.unit_tests.ops.attention.decode_batch import as_stored, some_scales

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
PADDING = 2**30
"""Block number beyond a row's length: reading through it is an error."""


class PrefillBatch:
    """Decode rows' tokens, prefill rows, dummy rows and padding tokens. Whatever no prefill row
    owns is NaN.

    Tensors keep their addresses when `refill` draws other rows, as a captured graph needs. `poison`
    stands in the cache where no sequence does, `unused_block` in block tables beyond a row's
    length; queries after `first_key` do not see the keys before it.
    """

    def __init__(
        self,
        max_tokens,
        rows,
        longest,
        block_size,
        kv_heads,
        group,
        dim,
        dtype,
        device,
        seed=0,
        poison=float("nan"),
        unused_block=PADDING,
        first_key=0,
        is_narrow=False,
        window=0,
        softcap=0.0,
        has_sinks=False,
    ):
        torch.manual_seed(seed)
        self.group, self.block_size, self.scale = group, block_size, dim**-0.5
        self.longest, self.poison, self.unused_block = longest, poison, unused_block
        self.first_key, self.window, self.softcap = first_key, window, softcap
        self.sinks = (3 * torch.randn(kv_heads * group)).to(device) if has_sinks else None
        blocks_a_row = -(-longest // block_size)
        shape = (rows * blocks_a_row, block_size, kv_heads, dim)
        self.scales = some_scales(kv_heads, device) if is_narrow else None
        self.keys = torch.empty(shape, dtype=NARROW if is_narrow else dtype, device=device)
        self.values = torch.empty_like(self.keys)
        # One column more than is used: a kernel has to mind the row's stride.
        tables = torch.empty((rows, blocks_a_row + 1), dtype=torch.int32, device=device)
        self.tables = tables[:, :blocks_a_row]
        self.lengths = torch.empty(rows, dtype=torch.int32, device=device)
        self.starts = torch.empty(rows + 1, dtype=torch.int32, device=device)
        self.query = torch.empty(max_tokens, kv_heads * group, dim, dtype=dtype, device=device)
        self.out = torch.empty_like(self.query)
        self.expected = torch.empty(self.query.shape, dtype=torch.float64, device=device)
        self.first = self.tokens = 0

    def refill(self, chunks, query_scale=1.0, first=0):
        """Draw rows of (query, KV) lengths; rows that are left over are dummies. The first row's
        first token is `first`."""
        device = self.query.device
        dummies = [(0, 1 + i) for i in range(len(self.lengths) - len(chunks))]
        chunks = [*chunks, *dummies]
        self.first, self.tokens = first, first + sum(query for query, _ in chunks)
        assert self.tokens <= len(self.query)
        starts = torch.tensor([first] + [query for query, _ in chunks]).cumsum(0)
        self.starts.copy_(starts)
        self.lengths.copy_(torch.tensor([kv for _, kv in chunks]))
        self.query.normal_().mul_(query_scale)
        self.query[self.tokens :] = self.query[:first] = float("nan")
        for tensor in (self.keys, self.values):
            tensor.fill_(self.poison)
        self.out.fill_(float("nan"))
        self.expected.fill_(float("nan"))
        self.tables.fill_(self.unused_block)
        order = torch.randperm(len(self.keys), device=device)
        for row, (query_length, length) in enumerate(chunks):
            used = -(-length // self.block_size)
            self.tables[row, :used], order = order[:used], order[used:]
            position = torch.arange(length, device=device)
            cells = self.tables[row].long()[position // self.block_size] * self.block_size
            cells += position % self.block_size
            sequence = []
            for of, cache in enumerate((self.keys, self.values)):
                drawn = torch.randn(length, *cache.shape[2:], device=device)
                stored, read = as_stored(drawn, cache.dtype, self.scales, of)
                as_bytes(cache).flatten(0, 1)[cells] = as_bytes(stored)
                sequence.append(read.repeat_interleave(self.group, 1))
            k, v = sequence
            tokens = slice(int(starts[row]), int(starts[row + 1]))
            score = torch.einsum("qhd,nhd->hqn", self.query[tokens].double(), k) * self.scale
            if self.softcap:
                score = self.softcap * torch.tanh(score / self.softcap)
            last_key = torch.arange(length - query_length, length, device=device)
            score = score.masked_fill(position > last_key[:, None], -float("inf"))
            begins = last_key.clamp(max=self.first_key)[:, None]
            score = score.masked_fill(position < begins, -float("inf"))
            if self.window:
                score = score.masked_fill(position <= last_key[:, None] - self.window, -torch.inf)
                # Blocks of which no query sees anything are not this row's any more.
                dead = max(length - query_length - self.window + 1, 0) // self.block_size
                self.tables[row, :dead] = self.unused_block
                for cache in self.keys, self.values:
                    cache.flatten(0, 1)[cells[: dead * self.block_size]] = self.poison
            if self.sinks is not None:
                column = self.sinks.double()[:, None, None].expand(-1, query_length, 1)
                score = torch.cat((score, column), 2)
            weight = score.softmax(2)[..., :length]
            self.expected[tokens] = torch.einsum("hqn,nhd->qhd", weight, v)
        return chunks

    def rows(self, chunks=(), max_query_length=None):
        """Rows for a backend; without `chunks` like those of a captured step."""
        bounds = len(self.query), max_query_length or len(self.query), self.longest
        if chunks:
            queries, lengths = zip(*chunks, strict=True)
            bounds = sum(queries), max(queries), max(lengths)
        first = self.first if chunks else 0
        return PrefillRows(self.tables, self.lengths, self.starts, *bounds, tuple(chunks), first)

    def tile(self, tokens=None):
        """The Triton kernel's, for so many tokens; all if None."""
        heads, dim = self.query.shape[1:]
        tokens = len(self.query) if tokens is None else tokens
        return tile_of(tokens, heads, dim, self.block_size, self.query.dtype, self.query.device)

    def schedule(self, processors=0, tile=None, part=0):
        """A schedule that divides keys if there are processors. Partial results are NaN."""
        kv_heads, dim = self.keys.shape[2:]
        queries = (tile or self.tile()).queries
        schedule = PrefillSchedule(
            kv_heads, self.group, queries, dim, self.query.device, processors, PROGRAMS_A_PROCESSOR,
            part,
        )  # fmt: skip
        for tensor in (schedule._parts or ())[:3]:
            tensor.fill_(float("nan"))
        return schedule

    def plan(self, schedule, rows, tile=None):
        """The step's schedule; returns its tile."""
        tile = tile or self.tile(rows.tokens)
        schedule.update(
            rows.kv_lengths, rows.starts, rows.tokens, rows.max_query_length, tile.keys,
            tile.programs,
        )  # fmt: skip
        return tile

    def attend(self, rows, schedule=None, is_settled=False):
        """By the Triton kernel."""
        if schedule is None:
            schedule = self.schedule()
        tile = self.plan(schedule, rows)
        paged_prefill_attention(
            self.query, self.keys, self.values, rows.block_tables, schedule, tile, self.scale,
            self.out, is_settled, self.first_key, scales=self.scales, **self.rules,
        )  # fmt: skip

    def compiled(self, schedule):
        """The kernel as it is launched, for Hopper; nothing runs."""
        with pytest.MonkeyPatch.context() as patch:
            kernels = (prefill_schedule, "_schedule_kernel"), (prefill_attention, "_prefill_kernel")
            _, recorder = record(patch, *kernels)
            self.attend(self.rows(), schedule, is_settled=True)
        return recorder.launches[0].compiled()

    @property
    def rules(self):
        """Window, softcap and sinks, as a kernel takes them."""
        return {"window": self.window, "softcap": self.softcap, "sinks": self.sinks}

    def check(self, padding_is_left_alone=True):
        own = slice(self.first, self.tokens)
        found, expected = self.out[own].double(), self.expected[own]
        error = (found - expected).flatten(1).norm(dim=1)
        bound = TOLERANCE[self.out.dtype] * expected.flatten(1).norm(dim=1)
        bad = (~(error <= bound)).nonzero().flatten().tolist()
        assert not bad, (bad[:8], self.starts.tolist(), self.lengths.tolist())
        if padding_is_left_alone:
            assert self.out[self.tokens :].isnan().all()
            assert self.out[: self.first].isnan().all()


def random_chunks(rng: random.Random, rows, max_tokens, longest):
    """Some rows, short ones as often as long ones, whole prompts as often as later chunks."""
    chunks, left = [], max_tokens
    for _ in range(rng.randint(1, rows)):
        query = min(int(max_tokens ** rng.random()), left, longest)
        if query == 0:
            break
        before = 0 if rng.random() < 0.5 else int((longest - query + 1) ** rng.random()) - 1
        chunks.append((query, query + max(before, 0)))
        left -= query
    return chunks
