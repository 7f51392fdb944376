"""What is asked of recurrent ops, of Mamba-2 or Gated DeltaNet, references or kernels."""

from copy import copy

import torch

from megatron_async.ops.recurrent.recurrent_pools import DecodeRows, FlushRule, PrefillRows
from tests.unit_tests.ops.recurrent.recurrent_cases import (
    Chunk,
    Decode,
    Runner,
    Sequence,
    poisoned_pools,
)

SPLITS = [
    (1,),
    (2,),
    (3, 2, 1),
    (1, 1, 1, 1, 5),
    (127, 2, 1, 129),
    (128, 1, 2, 3),
    (129, 128, 127),
    (5, 2, 6),
    (16, 15),
    (250,),
]
"""Prompts, and how they are cut into chunks."""
FEW_SPLITS = SPLITS[::3]
"""Some of these for the interpreter, which takes a second for a hundred tokens."""
RULES = [(1, 0), (8, 2), (16, 20), (128, 3)]
"""Period and lag of a `FlushRule`."""
FEW_RULES = RULES[::2]


def check_split(layer, ops, splits, steps=45, **options):
    """A prompt in chunks, and decoding over several flushes after it."""
    runner = Runner(layer, ops, **options)
    sequence = Sequence(layer, sum(splits) + steps, row=1)
    runner.prefill(sequence, *splits)
    runner.decode(sequence, steps)


def check_packed(layer, ops, steps=20):
    """Three prompts of uneven length in one step, another two after them with decode rows, dummy
    rows, empty chunks and padding."""
    runner = Runner(layer, ops, rows=6)
    lengths = (3, 141, 40, 1, 2)
    first = [Sequence(layer, length + steps + 2, row) for row, length in enumerate(lengths)]
    late = first[3:]
    first = first[:3]
    runner.step(
        chunks=[Chunk(first[0], 3, True), Chunk(first[1], 130), Chunk(first[2], 40, True)],
        empty=2,
        padding=9,
    )
    runner.step(
        decodes=[Decode(first[0]), Decode(first[2])],
        dummies=3,
        chunks=[Chunk(late[1], 2, True), Chunk(first[1], 11, True), Chunk(late[0], 1, True)],
        empty=1,
        padding=2,
    )
    for _ in range(steps):
        runner.step([Decode(sequence) for sequence in (*late, *first)], dummies=2)


def check_widths(layer, ops, widths=(1, 2, 3, 4), steps=14):
    """Rows with drafts, some of which are rejected or not brought: the next step starts at any
    token of the one before."""
    random = torch.Generator().manual_seed(1)

    def draw(most):
        return int(torch.randint(1, most + 1, (), generator=random))

    runner = Runner(layer, ops, rows=3, width=max(widths))
    sequences = [Sequence(layer, 20 + steps * max(widths), row) for row in range(3)]
    lengths = (13, 1, 20)
    runner.step(chunks=[Chunk(s, length, True) for s, length in zip(sequences, lengths)])
    for step in range(steps):
        width = widths[step % len(widths)]
        brought = [draw(width) for _ in sequences]
        rows = [Decode(s, draw(most), most) for s, most in zip(sequences, brought)]
        runner.step(rows, dummies=1, width=width)


def check_wide_row_is_causal(layer, ops, width=4):
    """A query token's output does not depend on drafts after it."""
    outputs = []
    for _ in range(2):
        layer.random.manual_seed(3)
        runner = Runner(layer, ops, width=width)
        sequence = Sequence(layer, 40, row=0)
        runner.prefill(sequence, 17)
        layer.random.manual_seed(len(outputs))
        outputs += runner.step([Decode(sequence, right=2)])
    assert torch.equal(*outputs)


def check_taken_back(layer, ops, lag=3, steps=40):
    """Steps are run, taken back, and run again, over flushes: the same bits each time."""
    runner = Runner(layer, ops, rule=FlushRule(lag=lag))
    sequence = Sequence(layer, 21 + steps + lag, row=2)
    runner.prefill(sequence, 21)
    for step in range(steps):
        back = step % (lag + 1)
        first = [runner.step([Decode(sequence)])[0] for _ in range(back + 1)]
        sequence.length -= back + 1
        again = [runner.step([Decode(sequence)])[0] for _ in range(back + 1)]
        # A base that moved on in between is another order of the same sums.
        runner.compare(torch.stack(first), torch.stack(again))
        sequence.length -= back


def check_same_step_again(layer, ops, width, tokens=70, **options):
    """Running a step again gives the same bits, whether it wrote the state or not."""
    runner = Runner(layer, ops, width=width, **options)
    sequence = Sequence(layer, tokens, row=0)
    runner.prefill(sequence, 11)
    while sequence.length + width <= tokens:
        layer.random.manual_seed(5)
        first = runner.step([Decode(sequence, right=width)], book=False)
        kept = runner.pools.state[0].clone()
        second = runner.step([Decode(sequence, right=width)])
        assert torch.equal(*first, *second)
        assert torch.equal(kept, runner.pools.state[0])


def check_slot_reuse(layer, ops, steps=20):
    """A row is taken over from another request, whose numbers, or NaN, still lie there; so they do
    in the row that a beginning request names as its read row."""
    runner = Runner(layer, ops)
    for length in (37, 2, 1, 150):
        sequence = Sequence(layer, length + steps, row=1)
        runner.step(chunks=[Chunk(sequence, length, True, read_row=length % 2)])
        runner.decode(sequence, steps)
        for pool in runner.pools:
            pool[1] = torch.nan
        runner.base[1] = 10**6


def check_row_at_its_limit(layer, ops):
    """A row that was launched for nothing (position 0) changes nothing of its own."""
    runner = Runner(layer, ops)
    sequence = Sequence(layer, 40, row=1)
    runner.prefill(sequence, 20)
    runner.decode(sequence, 3)
    kept = [pool.clone() for pool in (*runner.pools, runner.base)]
    length, sequence.length = sequence.length, 0
    runner.step([Decode(sequence, right=0, brought=0)])
    for pool, before in zip((*runner.pools, runner.base), kept):
        assert torch.equal(pool.nan_to_num(-7), before.nan_to_num(-7))
    sequence.length = length
    runner.decode(sequence, 15)


def check_resumed_scan(layer, ops, splits=((257,), (128, 129), (256, 1), (128, 128, 1))):
    """Cuts at multiples of 128 do not change a bit, of outputs or of what is left behind."""
    results = []
    for cuts in splits:
        layer.random.manual_seed(9)
        runner = Runner(layer, ops)
        sequence = Sequence(layer, sum(cuts), row=1)
        y = runner.prefill(sequence, *cuts)
        results.append((y, *(pool[1].nan_to_num(-7) for pool in runner.pools[:3])))
    for result in results[1:]:
        for tensor, expected in zip(result, results[0]):
            assert torch.equal(tensor, expected)


def check_snapshots(layer, ops, steps=30):
    """The rows that scan chunks name get the state and the inputs at their ends: a request that
    resumes there gets the same bits. The snapshots' own rows stay."""
    runner = Runner(layer, ops, rows=9)
    other = Sequence(layer, 20, row=3)
    sequence = Sequence(layer, 300, row=0)
    runner.step(chunks=[Chunk(other, 7), Chunk(sequence, 127)])
    cold = runner.step(
        chunks=[Chunk(other, 13, True, dests=(-1,)), Chunk(sequence, 173, True, dests=(5, 6, -1))]
    )[1]
    kept = [pool[5:7].clone() for pool in runner.pools]
    for border, row in ((128, 5), (256, 6)):
        runner.compare(runner.pools.state[row], sequence.states[border - 1])
        places = [p % runner.pools.conv.size(1) for p in range(border - 3, border)]
        raw = layer.conv_inputs(sequence.inputs[border - 3 : border])
        assert torch.equal(runner.pools.conv[row][places], raw)
        warm = copy(sequence)
        warm.row, warm.length = 1, border
        chunk = Chunk(warm, 300 - border, True, read_row=row)
        assert torch.equal(runner.step(chunks=[chunk])[0], cold[border - 127 :])
        # Short chunks carry the snapshot's inputs into their own row.
        warm.length = border
        runner.step(chunks=[Chunk(warm, 1, False, read_row=row)])
        runner.prefill(warm, 1, 5)
        runner.decode(warm, steps)
    for pool, before in zip(runner.pools, kept):
        assert torch.equal(pool[5:7].nan_to_num(-7), before.nan_to_num(-7))


def check_saves(layer, ops, steps=20, cases=((23, 32), (32, 32), (1, 16))):
    """A decode row leaves its state, and the inputs before it, in another row, from which a request
    goes on: where the step moves the state there, and where it stands there already."""
    for prompt, border in cases:
        runner = Runner(layer, ops, rows=6)
        sequence, other = (Sequence(layer, 90, row=row) for row in (0, 1))
        runner.prefill(sequence, prompt)
        runner.prefill(other, 5)
        runner.decode(sequence, border - prompt)
        runner.step([Decode(sequence, save=4), Decode(other)], dummies=1)
        kept = [pool[4].clone() for pool in runner.pools]
        runner.compare(runner.pools.state[4], sequence.states[border - 1])
        runner.decode(sequence, 17)  # over the next flush
        warm = copy(sequence)
        warm.row, warm.length = 2, border
        runner.step([Decode(other)], chunks=[Chunk(warm, 1, False, read_row=4)])
        runner.prefill(warm, 2, 5)
        runner.decode(warm, steps)
        for pool, before in zip(runner.pools, kept):
            assert torch.equal(pool[4].nan_to_num(-7), before.nan_to_num(-7))


def check_state_is_float32(layer, ops, others, limit):
    """What a scan of 16-bit inputs adds to the state is not rounded to 16 bits."""
    states = []
    for each in (ops, others):
        layer.random.manual_seed(1)
        runner = Runner(layer, each)
        runner.prefill(Sequence(layer, 200, row=1), 200)
        states.append(runner.pools.state[1])
    difference = (states[0] - states[1]).abs().max() / states[1].abs().max()
    assert difference < limit, difference


def check_equal_tokens(layer, ops, tokens=200):
    """One token again and again, as in a prompt that repeats itself: all keys are the same, and the
    delta rule's triangular system is as far from the identity as it gets."""
    runner = Runner(layer, ops)
    if layer.dtype == torch.bfloat16:
        runner.limit = 5e-2  # 256 equal keys: one of half a million numbers was off by 0.038
    sequence = Sequence(layer, tokens + 20, row=0)
    sequence.inputs = sequence.inputs[:1].expand(tokens + 20, -1).contiguous()
    sequence.expected, sequence.states = layer.truth(sequence.inputs)
    runner.prefill(sequence, tokens)
    runner.decode(sequence, 20)


def check_replays_in_a_graph(layer, kernels, references):
    """A graph of a step serves any positions, lengths, rows and snapshots that fit its shape."""
    rule = FlushRule()
    pools = poisoned_pools(layer, 9, rule.ring_length(1), rule.conv_length(1))
    index = torch.zeros(4, dtype=torch.int64, device="cuda")
    positions, base = index.clone(), torch.zeros(9, dtype=torch.int32, device="cuda")
    numbers = torch.zeros(5, 5, dtype=torch.int32, device="cuda")
    prefill = PrefillRows(numbers[0], *numbers[1:, :4])
    projected = layer.inputs(4 + 300)
    saves, dests = (torch.full((n,), -1, dtype=torch.int32, device="cuda") for n in (4, 10))

    def step(ops, base, pools):
        before, after = ops.next_bases(base, index, positions, 1, prefill, rule)
        arguments = (layer.params, pools)
        ops.flush(type(pools)(*(pool[None] for pool in pools)), index, before, after, rule, saves)
        rows = DecodeRows(index, positions, after, 1)
        y = ops.decode(projected[:4], *arguments, rows, rule)
        last = ops.prefill(projected[4:], *arguments, prefill, after[4:], rule, chunk_dest=dests)
        return y, last

    def write(rows, at, lengths, firsts, last, saved=(-1, -1, -1, -1), kept=()):
        saves.copy_(torch.tensor(saved))
        dests.copy_(torch.tensor([*kept, *[-1] * (10 - len(kept))]))
        index.copy_(torch.tensor(rows))
        positions.copy_(torch.tensor(at))
        starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        targets = [5, 6, 7, 8]
        rows = (starts, [*firsts, 0], [*targets, 0], [*targets, 0], [*last, 0])
        numbers.copy_(torch.tensor(rows))

    write([8] * 4, [0] * 4, [0] * 4, [0] * 4, [0] * 4)
    step(kernels, base, pools)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(kernels, base, pools)
    expected_base, expected_pools = base.clone(), type(pools)(*(pool.clone() for pool in pools))
    for arguments in (
        ([8] * 4, [0] * 4, [3, 250, 40, 0], [0] * 4, [1, 0, 1, 0], [-1] * 4, [-1, 0]),
        ([5, 7, 8, 8], [3, 40, 0, 0], [0, 20, 0, 0], [0, 250, 0, 0], [0, 1, 0, 0], [-1] * 4, [1]),
        ([5, 6, 7, 8], [4, 270, 41, 0], [0] * 4, [0] * 4, [0] * 4, [-1, 2, 3, -1]),
    ):
        projected.copy_(layer.inputs(304))
        write(*arguments)
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        expected = step(references, expected_base, expected_pools)
        torch.testing.assert_close(results, expected, rtol=3e-2, atol=3e-1)
        assert torch.equal(base, expected_base)
        torch.testing.assert_close(
            tuple(pools), tuple(expected_pools), rtol=3e-2, atol=3e-2, equal_nan=True
        )
