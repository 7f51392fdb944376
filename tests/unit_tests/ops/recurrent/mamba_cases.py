"""Mamba-2 ops against a plain recurrence: a layer, sequences of its inputs, and steps over them.

What a check does is the same for the references and the kernels (`Ops`); every pool begins full of
NaN, and the dummy row stays so.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from megatron_async.ops.recurrent import bases, mamba_decode, mamba_prefill, mamba_reference
from megatron_async.ops.recurrent.mamba_pools import (
    FlushRule,
    MambaParams,
    MambaPools,
    PrefillRows,
)


class Ops(NamedTuple):
    next_bases: object
    decode: object
    prefill: object


REFERENCES = Ops(
    bases.next_bases_reference,
    mamba_reference.mamba_decode_reference,
    mamba_reference.mamba_prefill_reference,
)
KERNELS = Ops(bases.next_bases, mamba_decode.mamba_decode, mamba_prefill.mamba_prefill)


@dataclass
class Layer:
    heads: int = 4
    head_dim: int = 16
    groups: int = 2
    d_state: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def __post_init__(self):
        random = torch.Generator().manual_seed(self.heads)

        def normal(*size, dtype=self.dtype, scale=1.0):
            return (scale * torch.randn(size, generator=random)).to(self.device, dtype)

        self.d_inner = self.heads * self.head_dim
        self.xb_dim = self.d_inner + self.groups * self.d_state
        self.conv_dim = self.xb_dim + self.groups * self.d_state
        # Decays from a tenth a token to a half a hundred tokens, so that states cross chunks.
        rates = torch.logspace(-3, -1, self.heads).to(self.device)
        self.params = MambaParams(
            normal(self.conv_dim, 4, scale=0.5),
            normal(self.conv_dim, scale=0.2),
            normal(self.heads),
            torch.log(rates),
            normal(self.heads, dtype=torch.float32),
        )
        self.random = random

    def inputs(self, tokens):
        """`[tokens, 2 d_inner + 2 groups d_state + heads]`, as in_proj gives them."""
        width = self.d_inner + self.conv_dim + self.heads
        return torch.randn(tokens, width, generator=self.random).to(self.device, self.dtype)

    def pools(self, rows, ring, conv_ring, state_dtype=torch.float32):
        def poison(*size, dtype=self.dtype):
            # A strip of a larger tensor: rows are strided.
            size = rows, 3, *size
            return torch.full(size, torch.nan, dtype=dtype, device=self.device)[:, 1]

        return MambaPools(
            poison(self.heads, self.head_dim, self.d_state, dtype=state_dtype),
            poison(ring, self.xb_dim),
            poison(ring, self.heads, dtype=torch.float32),
            poison(conv_ring, self.conv_dim),
        )


def truth(layer, inputs):
    """Outputs of a sequence `[tokens, d_inner]`, and the state behind each token, in float64."""
    weight, bias, dt_bias, a_log, d = (tensor.double() for tensor in layer.params)
    _z, xbc, dt = inputs.double().split([layer.d_inner, layer.conv_dim, layer.heads], dim=1)
    windows = F.pad(xbc, (0, 0, 3, 0)).unfold(0, 4, 1)
    xbc = F.silu((windows * weight.view(-1, 4)).sum(2) + bias)
    strip = layer.groups * layer.d_state
    x, b, c = xbc.split([layer.d_inner, strip, strip], dim=1)
    x = x.unflatten(1, (layer.heads, -1))
    b, c = (strip.unflatten(1, (layer.groups, -1)) for strip in (b, c))
    b, c = (strip.repeat_interleave(layer.heads // layer.groups, 1) for strip in (b, c))
    dt = F.softplus(dt + dt_bias)
    state, outputs, states = torch.zeros_like(x[0][..., None] * b[0][:, None]), [], []
    for t in range(len(inputs)):
        decay = torch.exp(-dt[t] * a_log.exp())[:, None, None]
        state = state * decay + (dt[t][:, None] * x[t])[..., None] * b[t][:, None]
        states.append(state)
        outputs.append((state @ c[t][..., None])[..., 0] + d[:, None] * x[t])
    return torch.stack(outputs).flatten(1), torch.stack(states)


class Sequence:
    """A request: its inputs, what they must give, the pool row it has, and how far it is."""

    def __init__(self, layer, tokens, row):
        self.inputs = layer.inputs(tokens)
        self.expected, self.states = truth(layer, self.inputs)
        self.row, self.length = row, 0


class Chunk(NamedTuple):
    sequence: Sequence
    tokens: int
    is_last: bool = False
    read_row: int | None = None
    dests: tuple = ()
    """Pool rows for the snapshots of its scan chunks."""


class Decode(NamedTuple):
    sequence: Sequence
    right: int = 1
    """How many of its query tokens are the sequence's; the others are drafts to be rejected."""
    brought: int | None = None
    """How many it brings at all; None: the step's width."""


class Runner:
    def __init__(self, layer, ops, rows=4, rule=None, width=1, spare=0, **pool):
        self.layer, self.ops = layer, ops
        self.rule, self.width = rule or FlushRule(), width
        ring, conv_ring = self.rule.ring_length(width), self.rule.conv_length(width)
        self.pools = layer.pools(rows + 1, ring + spare, conv_ring + spare, **pool)
        self.base = torch.full((rows + 1,), 10**6, dtype=torch.int32, device=layer.device)
        self.base[-1] = 0
        limits = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
        self.limit = limits[layer.dtype]
        if pool.get("state_dtype") == torch.bfloat16:
            self.limit = 3e-2

    def tensor(self, values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=self.layer.device)

    def step(self, decodes=(), chunks=(), dummies=0, empty=0, padding=0, width=None, book=True):
        """Run a step, check what it gives and what it left; the outputs of each row."""
        layer, width = self.layer, width or self.width
        rows, positions, inputs = [], [], []
        for sequence, right, brought in decodes:
            rows.append(sequence.row)
            at = [sequence.length + query for query in range(width)]
            count = width if brought is None else brought
            positions += [p if query < count else 0 for query, p in enumerate(at)]
            drafts = layer.inputs(width)
            drafts[:right] = sequence.inputs[sequence.length : sequence.length + right]
            inputs.append(drafts)
        rows += [len(self.base) - 1] * dummies
        positions += [0] * width * dummies
        inputs.append(layer.inputs(width * dummies))
        starts = [0]
        for chunk in chunks:
            length = chunk.sequence.length
            inputs.append(chunk.sequence.inputs[length : length + chunk.tokens])
            starts.append(starts[-1] + chunk.tokens)
        starts += [starts[-1]] * empty
        inputs.append(layer.inputs(padding))
        zxbcdt, tokens = torch.cat(inputs), len(rows) * width
        dummy = len(self.base) - 1
        read = [c.sequence.row if c.read_row is None else c.read_row for c in chunks]
        prefill = PrefillRows(
            self.tensor(starts),
            self.tensor([c.sequence.length for c in chunks] + [0] * empty),
            self.tensor(read + [dummy] * empty, torch.int64),
            self.tensor([c.sequence.row for c in chunks] + [dummy] * empty),
            self.tensor([c.is_last for c in chunks] + [False] * empty, torch.bool),
        )
        index = self.tensor(rows, torch.int64)
        positions = self.tensor(positions, torch.int64)
        has_chunks = len(chunks) + empty > 0
        before, after = self.ops.next_bases(
            self.base, index, positions, width, prefill if has_chunks else None, self.rule
        )
        y = torch.full((len(zxbcdt), layer.d_inner), torch.nan, dtype=layer.dtype)
        y = y.to(layer.device)
        arguments = (zxbcdt, layer.params, self.pools)
        if rows:
            bases = (before, after, width, self.rule)
            self.ops.decode(*arguments, index, positions, *bases, out=y[:tokens])
        if has_chunks:
            most = sum(c.tokens // 128 + 2 for c in chunks) + 2 * empty
            dests = [dest for c in chunks for dest in c.dests]
            dests = self.tensor(dests + [-1] * (most - len(dests))) if dests else None
            self.ops.prefill(
                zxbcdt[tokens:],
                *arguments[1:],
                prefill,
                after[len(rows) :],
                self.rule,
                out=y[tokens:],
                chunk_dest=dests,
            )
        outputs = self.check(y, decodes, chunks, starts, tokens, width)
        self.book(decodes, chunks, len(rows), before, after, book)
        return outputs

    def check(self, y, decodes, chunks, starts, tokens, width):
        outputs = []
        for number, (sequence, right, brought) in enumerate(decodes):
            own = y[number * width : (number + 1) * width]
            self.compare(own[:right], sequence.expected[sequence.length :][:right])
            assert own.isfinite().all()
            assert brought is None or not own[brought:].any()
            outputs.append(own[:right].clone())
        assert not y[len(decodes) * width : tokens].any()  # dummy rows
        for chunk, start in zip(chunks, starts):
            own = y[tokens + start :][: chunk.tokens]
            self.compare(own, chunk.sequence.expected[chunk.sequence.length :][: chunk.tokens])
            outputs.append(own.clone())
        assert not y[tokens + starts[-1] :].any()  # padding
        return outputs

    def book(self, decodes, chunks, decode_rows, before, after, book):
        """Move sequences on; what stands in the pools must be the truth's."""
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.length += chunk.tokens
            base = int(self.base[sequence.row])
            assert chunk.is_last or base == sequence.length
            self.compare(self.pools.state[sequence.row], sequence.states[base - 1] if base else 0)
        for number, (sequence, right, _brought) in enumerate(decodes):
            base = int(self.base[sequence.row])
            assert base == after[number] >= before[number]
            if right:
                self.compare(
                    self.pools.state[sequence.row], sequence.states[base - 1] if base else 0
                )
            sequence.length += right * book
        for pool in self.pools:
            assert pool[-1].isnan().all()
        assert self.base[-1] == 0

    def compare(self, found, expected):
        expected = torch.as_tensor(expected, device=found.device, dtype=torch.float64)
        scale = 1.0 + expected.abs().max() if expected.numel() else 1.0
        torch.testing.assert_close(
            found.double() / scale, (expected / scale).expand(found.shape), rtol=0, atol=self.limit
        )

    def prefill(self, sequence, *splits):
        """A prompt alone, in these chunks; its outputs."""
        outputs = []
        for number, tokens in enumerate(splits):
            chunk = Chunk(sequence, tokens, number == len(splits) - 1)
            outputs += self.step(chunks=[chunk])
        return torch.cat(outputs)

    def decode(self, sequence, steps):
        for _ in range(steps):
            self.step([Decode(sequence)])
