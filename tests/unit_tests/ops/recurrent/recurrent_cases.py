"""Recurrent ops against a plain recurrence: sequences of a layer's inputs, and steps over them.

What a check does is the same for Mamba-2 and Gated DeltaNet (a layer of `recurrent_layers` brings
inputs, pools and the truth), and for references, kernels and loops (`Ops`). Every pool begins full
of NaN, and the dummy row stays so.
"""

from typing import NamedTuple

import torch

from megatron_async.ops.recurrent.recurrent_pools import (
    DecodeRows,
    FlushRule,
    PrefillRows,
    RecurrentPools,
)


class Ops(NamedTuple):
    next_bases: object
    flush: object
    decode: object
    prefill: object


def poisoned_pools(layer, rows, ring, conv_ring, state_dtype=torch.float32):
    """Pools full of NaN, in strips of larger tensors: rows are strided."""

    def poison(*size, dtype=layer.dtype):
        size = rows, 3, *size
        return torch.full(size, torch.nan, dtype=dtype, device=layer.device)[:, 1]

    return RecurrentPools(
        poison(*layer.state_size, dtype=state_dtype),
        poison(ring, layer.ring_dim),
        poison(
            ring,
            layer.gates,
            layer.state_size[0],
            dtype=torch.promote_types(layer.dtype, torch.float32),
        ),
        poison(conv_ring, layer.conv_dim),
    )


class Sequence:
    """A request: its inputs, what they must give, the pool row it has, and how far it is."""

    def __init__(self, layer, tokens, row):
        self.inputs = layer.inputs(tokens)
        self.expected, self.states = layer.truth(self.inputs)
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
    save: int = -1
    """Pool row that gets its state, as it is before the step."""


class Runner:
    def __init__(self, layer, ops, rows=4, rule=None, width=1, spare=0, **pool):
        self.layer, self.ops = layer, ops
        self.rule, self.width = rule or FlushRule(), width
        ring, conv_ring = self.rule.ring_length(width), self.rule.conv_length(width)
        self.pools = poisoned_pools(layer, rows + 1, ring + spare, conv_ring + spare, **pool)
        self.base = torch.full((rows + 1,), 10**6, dtype=torch.int32, device=layer.device)
        self.base[-1] = 0
        limits = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
        self.limit = limits.get(layer.dtype, 1e-12)
        if pool.get("state_dtype") == torch.bfloat16:
            self.limit = 3e-2

    def tensor(self, values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=self.layer.device)

    def step(self, decodes=(), chunks=(), dummies=0, empty=0, padding=0, width=None, book=True):
        """Run a step, check what it gives and what it left; the outputs of each row."""
        layer, width = self.layer, width or self.width
        rows, positions, inputs = [], [], []
        for sequence, right, brought, _save in decodes:
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
        projected, tokens = torch.cat(inputs), len(rows) * width
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
        y = torch.full((len(projected), layer.outputs), torch.nan, dtype=layer.dtype)
        y = y.to(layer.device)
        arguments = (projected, layer.params, self.pools)
        if rows:
            every = RecurrentPools(*(pool[None] for pool in self.pools))  # one layer
            saves = [decode.save for decode in decodes] + [-1] * dummies
            saves = self.tensor(saves) if max(saves) >= 0 else None
            self.ops.flush(every, index, before, after, self.rule, saves)
            step = DecodeRows(index, positions, after, width)
            self.ops.decode(*arguments, step, self.rule, out=y[:tokens])
        if has_chunks:
            most = sum(c.tokens // 128 + 2 for c in chunks) + 2 * empty
            dests = [dest for c in chunks for dest in c.dests]
            dests = self.tensor(dests + [-1] * (most - len(dests))) if dests else None
            self.ops.prefill(
                projected[tokens:],
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
        for number, (sequence, right, brought, _save) in enumerate(decodes):
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
            border = sequence.length // self.rule.period * self.rule.period
            behind = border if self.rule.replays else sequence.length
            assert chunk.is_last or base == behind
            self.compare(self.pools.state[sequence.row], sequence.states[base - 1] if base else 0)
        for number, (sequence, right, _brought, _save) in enumerate(decodes):
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
