"""Values that programs of one launch send to each other, without a barrier.

A word of 64 bits holds a float32 and its epoch, the number of the layer and step that it belongs
to. One store writes both, so whoever reads the right epoch has the right value: there is no fence,
no counter and no flag to wait for. NCCL's LL protocol does the same between GPUs. Words of an
earlier epoch are overwritten only when all who read them have sent what depends on them
(`persistent_kernel.py`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MOST_TOGETHER = gl.constexpr(16)
"""Words that a thread reads at a time."""
MOST_POLLS = 1 << 26
"""Of one word: some 20 seconds, where a whole step takes milliseconds."""


def _poll(count: int) -> tuple[str, str]:
    """PTX that reads `count` adjacent words until all have their epoch, and its constraints.

    Operands: values out; then of each word its address, its epoch and whether it is wanted, of
    which those of the first word count. Values of unwanted words are 0. A warp leaves the loop as
    one: else the compiler takes its threads for divergent ever after. A word that never comes ends
    the launch with an error of the device, not the process's life with a GPU that is busy for ever.
    """
    words = range(count)
    step = 1 if count == 1 else 2
    lines = ["{", ".reg .pred late, wanted, lost;", ".reg .b32 zero, polls;", "mov.b32 zero, 0;"]
    lines.append("mov.b32 polls, 0;")
    lines += [f".reg .b64 w{i}; .reg .b32 v{i}, e{i};" for i in words]
    lines += [f"mov.b64 w{i}, {{zero, ${2 * count}}};" for i in words]
    lines += [f"setp.ne.s32 wanted, ${3 * count}, 0;", "AGAIN:"]
    for i in range(0, count, step):
        into = f"w{i}" if step == 1 else f"{{w{i}, w{i + 1}}}"
        kind = "" if step == 1 else ".v2"
        lines.append(f"@wanted ld.relaxed.gpu.global{kind}.b64 {into}, [${count} + {8 * i}];")
    lines += [f"mov.b64 {{v{i}, e{i}}}, w{i};" for i in words]
    lines.append(f"setp.ne.s32 late, e0, ${2 * count};")
    lines += [f"setp.ne.or.s32 late, e{i}, ${2 * count}, late;" for i in words[1:]]
    lines += ["add.u32 polls, polls, 1;", f"setp.gt.u32 lost, polls, {MOST_POLLS};", "@lost trap;"]
    lines += ["vote.sync.any.pred late, late, 0xffffffff;", "@late bra.uni AGAIN;"]
    lines += [f"mov.b32 ${i}, v{i};" for i in words] + ["}"]
    operands = ["=r"] * count + ["l"] * count + ["r"] * (2 * count)
    return "\n".join(lines), ",".join([*operands, "~{memory}"])


ONE, ONE_OPERANDS = map(gl.constexpr, _poll(1))
TWO, TWO_OPERANDS = map(gl.constexpr, _poll(2))
FOUR, FOUR_OPERANDS = map(gl.constexpr, _poll(4))
EIGHT, EIGHT_OPERANDS = map(gl.constexpr, _poll(8))
SIXTEEN, SIXTEEN_OPERANDS = map(gl.constexpr, _poll(16))


@gluon.jit
def receive(
    words: gl.tensor, index: gl.tensor, epoch: gl.tensor, wanted: gl.tensor, together: gl.constexpr
) -> gl.tensor:
    """Values of words, float32 like `index`, once all have this epoch; 0 where not `wanted`.

    Args:
        words: pointer to int64 words.
        index: int32, which ones; each thread's elements are `together` adjacent ones at a time.
        epoch: int32.
        wanted: like `index`; alike for the elements that are read together.
        together: 1, 2, 4, 8 or 16. A thread with more elements waits for them one after the other.
    """
    address = (words + index).to(gl.int64)
    epochs = gl.zeros_like(index) + epoch
    on = wanted.to(gl.int32)
    operands = (address, epochs, on)
    if together == 1:
        value = gl.inline_asm_elementwise(ONE, ONE_OPERANDS, operands, gl.int32, False, 1)
    elif together == 2:
        value = gl.inline_asm_elementwise(TWO, TWO_OPERANDS, operands, gl.int32, False, 2)
    elif together == 4:
        value = gl.inline_asm_elementwise(FOUR, FOUR_OPERANDS, operands, gl.int32, False, 4)
    elif together == 8:
        value = gl.inline_asm_elementwise(EIGHT, EIGHT_OPERANDS, operands, gl.int32, False, 8)
    else:
        value = gl.inline_asm_elementwise(SIXTEEN, SIXTEEN_OPERANDS, operands, gl.int32, False, 16)
    return value.to(gl.float32, bitcast=True)


@gluon.jit
def send(
    words: gl.tensor, index: gl.tensor, value: gl.tensor, epoch: gl.tensor, wanted: gl.tensor
) -> None:
    """Write values, float32 like `index`, with their epoch, where `wanted`."""
    word = value.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
    gl.store(words + index, word | (epoch.to(gl.int64) << 32), mask=wanted)


@gluon.jit
def last_sent(words: gl.tensor, index: gl.tensor) -> gl.tensor:
    """Values that this program has sent itself, before a barrier of its threads, whatever their
    epoch."""
    word = gl.load(words + index, cache_modifier=".cg")
    return (word & 0xFFFFFFFF).to(gl.int32).to(gl.float32, bitcast=True)
