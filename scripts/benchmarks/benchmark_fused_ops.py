"""Time the fused kernels against the torch operations that they replace and against their bytes.

Each is captured in a CUDA graph, many calls in a row, and replayed. Inputs and outputs stay in the
L2 cache where they fit, as they do between the kernels of a decode step; so a small kernel can beat
the floor (fewest bytes over `--bandwidth`), and its time is what the launch in a graph costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async.ops.attention.rope_append import rope_append
from megatron_async.ops.attention.rotary import apply_rotary_reference
from megatron_async.ops.linear.rms_norm import add_rms_norm, add_rms_norm_reference
from megatron_async.ops.linear.swiglu import swiglu
from megatron_async.ops.sampling.sampling import SamplingMode, SamplingRows, sample_reference
from megatron_async.ops.sampling.slot_records import HEADER, RECORD_WORDS, Header, pack_record
from megatron_async.ops.sampling.triton_sampling import sample

DTYPE = torch.bfloat16
POSITIONS = 4096
BLOCK_SIZE = 64


@dataclass(frozen=True)
class Shape:
    """What the kernels see of a model."""

    hidden: int
    kv_heads: int
    group: int
    dim: int
    ffn: int
    vocab: int


SHAPES = {
    "smollm2-135m": Shape(576, 3, 3, 64, 1536, 49152),
    "llama-3.1-8b": Shape(4096, 8, 4, 128, 14336, 128256),
}


@dataclass
class Case:
    """One kernel at one size."""

    name: str
    bytes: int
    fused: Callable[[], object]
    unfused: Callable[[], object]


def random(*size: int) -> Tensor:
    """Standard normal numbers in the compute dtype."""
    return torch.randn(size, device="cuda").to(DTYPE)


def block_cases(shape: Shape, batch: int) -> Iterator[Case]:
    """Norm, rope with KV append, and SwiGLU."""
    x, residual, weight = random(batch, shape.hidden), random(batch, shape.hidden), random(1)
    weight = weight.expand(shape.hidden).contiguous()
    yield Case(
        "add_rms_norm",
        (4 * batch + 1) * shape.hidden * 2,
        lambda: add_rms_norm(x, residual, weight, 1e-5),
        lambda: add_rms_norm_reference(x, residual, weight, 1e-5),
    )

    heads = shape.kv_heads * (shape.group + 2)
    qkv = random(batch, heads * shape.dim)
    cos, sin = torch.randn(2, POSITIONS, shape.dim, device="cuda")
    positions = torch.randint(POSITIONS, (batch,), device="cuda")
    places = torch.randperm(batch * BLOCK_SIZE, device="cuda")[:batch]
    keys, values = random(2, batch, BLOCK_SIZE, shape.kv_heads, shape.dim)
    row_cos, row_sin = cos[positions][:, None].to(DTYPE), sin[positions][:, None].to(DTYPE)

    def rope_unfused() -> Tensor:
        parts = qkv.view(batch, shape.kv_heads, shape.group + 2, shape.dim)
        query, key, value = parts.split([shape.group, 1, 1], dim=2)
        query = query.reshape(batch, -1, shape.dim)
        query, key = apply_rotary_reference(query, key.squeeze(2), row_cos, row_sin)
        keys.flatten(0, 1).index_copy_(0, places, key)
        values.flatten(0, 1).index_copy_(0, places, value.squeeze(2))
        return query

    yield Case(
        "rope_append",
        2 * qkv.numel() * 2 + batch * shape.dim * 4,
        lambda: rope_append(qkv, cos, sin, positions, places, keys, values),
        rope_unfused,
    )

    gates = random(batch, 2 * shape.ffn)

    def swiglu_unfused() -> Tensor:
        gate, up = gates.chunk(2, dim=-1)
        return F.silu(gate) * up

    yield Case("swiglu", 3 * batch * shape.ffn * 2, lambda: swiglu(gates), swiglu_unfused)


def sampling_cases(shape: Shape, batch: int, spread: float) -> Iterator[Case]:
    """Each kind of row, and greedy rows in a graph captured for all kinds."""
    logits = spread * random(batch, shape.vocab)

    def case(name: str, mode: SamplingMode, heat: float, k: int, p: float, min_p: float) -> Case:
        numbers = {
            Header.TEMPERATURE: heat,
            Header.TOP_K: k,
            Header.TOP_P: p,
            Header.MIN_P: min_p,
        }
        row = torch.arange(batch, device="cuda")
        records = torch.zeros(batch, RECORD_WORDS, dtype=torch.int32, device="cuda")
        records[:, :HEADER] = torch.from_numpy(pack_record(numbers))
        records[:, Header.SEED_LOW] = row.int()
        params = SamplingRows(row, row.int(), records)
        return Case(
            f"{name}, spread {spread:g}",
            logits.numel() * 2,
            lambda: sample(logits, params, mode),
            lambda: sample_reference(logits, params, mode),
        )

    yield case("greedy", SamplingMode.GREEDY, 0.0, 0, 0.0, 0.0)
    yield case("greedy rows of any", SamplingMode.FILTERED, 0.0, 0, 0.0, 0.0)
    yield case("temperature", SamplingMode.SOFTMAX, 0.8, 0, 0.0, 0.0)
    yield case("top_k 50 top_p 0.9", SamplingMode.FILTERED, 0.8, 50, 0.9, 0.0)
    yield case("top_p 0.9", SamplingMode.FILTERED, 0.8, 0, 0.9, 0.0)
    yield case("min_p 0.05", SamplingMode.FILTERED, 0.8, 0, 0.0, 0.05)


def graph_us(call: Callable[[], object], calls: int, replays: int = 9) -> float:
    """Median microseconds of a call, from graphs of `calls` calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which may still fill what the call reads
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def main() -> None:
    """Print a table and, with --json, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--spread", type=float, nargs="+", default=[1.0, 4.0])
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s")
    parser.add_argument("--fused-only", action="store_true", help="leave out what is replaced")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "benchmark_fused_ops: needs a CUDA device, and torch finds none.\n")
    print(f"{'shape':<14}{'batch':>6}  {'kernel':<30}{'floor us':>9}{'fused us':>9}{'unfused':>9}")
    figures = []
    for name in args.shapes:
        for batch in args.batch_sizes:
            cases = [*block_cases(SHAPES[name], batch)]
            for spread in args.spread:
                cases += sampling_cases(SHAPES[name], batch, spread)
            for case in cases:
                floor = case.bytes / args.bandwidth * 1e-6
                fused = graph_us(case.fused, 50)
                unfused = torch.nan if args.fused_only else graph_us(case.unfused, 2)
                cells = f"{floor:>9.2f}{fused:>9.2f}{unfused:>9.1f}"
                print(f"{name:<14}{batch:>6}  {case.name:<30}{cells}", flush=True)
                row = {"shape": name, "batch": batch, "kernel": case.name, "floor_us": floor}
                figures.append({**row, "fused_us": fused, "unfused_us": unfused})
    if args.json:
        note = {"date": time.strftime("%F"), "gpu": torch.cuda.get_device_name()}
        with open(args.json, "w") as file:
            json.dump({**note, "settings": vars(args), "figures": figures}, file, indent=1)


if __name__ == "__main__":
    main()
