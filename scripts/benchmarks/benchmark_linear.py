"""Time the matrix products of a decode step beside cuBLAS and beside their bytes.

Each product is a chain over several layers' weights in one captured graph, so that the launch of a
kernel beside the one before it counts and the weights come from memory. "layer" is a layer's
products in turn, with the norms and SwiGLU between them, ours fused where the engine fuses; the
qkv product's first columns stand for attention's output.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_async.devices import make_device
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.ops.linear.rms_norm import add_rms_norm
from megatron_async.ops.linear.skinny_linear import Unnormed, linear, linear_swiglu
from megatron_async.ops.linear.skinny_plan import takes_unnormed
from megatron_async.ops.linear.swiglu import swiglu
from megatron_async.profiling.benchmark_record import write_record

BANDWIDTH = 4.3e12
"""Bytes a second that a large copy moves on an H200, reads and writes together."""
CACHE_BYTES = 120e6
"""A chain's weights are more than this: twice the L2 cache."""
EPS = 1e-5
WINDOWS = 5


class Layers:
    """Random weights of several layers, and their products; what `linear` is, the caller says."""

    def __init__(self, shape: ModelArchitecture, dtype: torch.dtype) -> None:
        hidden, ffn = shape.hidden_size, shape.ffn_hidden_size
        self.heads = shape.num_attention_heads * shape.kv_channels
        qkv = self.heads + 2 * shape.num_query_groups * shape.kv_channels
        sizes = {"qkv": (qkv, hidden), "proj": (hidden, self.heads)}
        sizes |= {"fc1": (2 * ffn, hidden), "fc2": (hidden, ffn)}
        layer_bytes = sum(n * k for n, k in sizes.values()) * dtype.itemsize
        layers = max(2, min(32, int(4 * CACHE_BYTES / layer_bytes)))
        self.weights = {
            name: [random(n, k, dtype=dtype, scale=k**-0.5) for _ in range(layers)]
            for name, (n, k) in sizes.items()
        }
        vocabulary = random(shape.vocab_size, hidden, dtype=dtype, scale=hidden**-0.5)
        self.weights["vocabulary"] = [vocabulary, vocabulary.clone()]
        self.norm = torch.ones(hidden, dtype=dtype, device="cuda")

    def products(self, rows: int, ours: bool) -> Iterator[tuple[str, int, Callable[[], None]]]:
        """Name, bytes a call and chain of each product."""
        for name, weights in self.weights.items():
            x = random(rows, weights[0].size(1), dtype=weights[0].dtype)
            call = partial(self._chain, name, x, ours)
            yield name, weights[0].numel() * weights[0].itemsize, call
        x = random(rows, len(self.norm), dtype=self.norm.dtype)
        total = sum(weights[0].numel() for name, weights in self.weights.items() if name[0] != "v")
        yield "layer", total * x.itemsize, partial(self._layers, x, ours)

    def _chain(self, name: str, x: Tensor, ours: bool) -> None:
        for weight in self.weights[name]:
            if name == "fc1":
                linear_swiglu(x, weight) if ours else swiglu(F.linear(x, weight))
            elif ours:
                linear(x, weight, may_split=name in ("proj", "fc2"))
            else:
                F.linear(x, weight)

    def _layers(self, x: Tensor, ours: bool) -> None:
        layer = self._layer if ours else self._cublas_layer
        residual: Tensor | None = None
        for qkv, proj, fc1, fc2 in zip(*list(self.weights.values())[:4], strict=True):
            x, residual = layer(x, residual, qkv, proj, fc1, fc2)

    def _layer(
        self,
        x: Tensor,
        residual: Tensor | None,
        qkv: Tensor,
        proj: Tensor,
        fc1: Tensor,
        fc2: Tensor,
    ) -> tuple[Tensor, Tensor]:
        x, residual = self._behind_norm(linear, x, residual, qkv)
        x = linear(x[:, : self.heads], proj, may_split=True)
        x, residual = self._behind_norm(linear_swiglu, x, residual, fc1)
        return linear(x, fc2, may_split=True), residual

    def _behind_norm(
        self,
        product: Callable[[Tensor | Unnormed, Tensor], Tensor],
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
    ) -> tuple[Tensor, Tensor]:
        if takes_unnormed(x):
            unnormed = Unnormed(x, residual, self.norm, EPS)
            y = product(unnormed, weight)
            assert unnormed.total is not None
            return y, unnormed.total
        x, total = add_rms_norm(x, residual, self.norm, EPS)
        return product(x, weight), total

    def _cublas_layer(
        self,
        x: Tensor,
        residual: Tensor | None,
        qkv: Tensor,
        proj: Tensor,
        fc1: Tensor,
        fc2: Tensor,
    ) -> tuple[Tensor, Tensor]:
        x, residual = add_rms_norm(x, residual, self.norm, EPS)
        x = F.linear(F.linear(x, qkv)[:, : self.heads], proj)
        x, residual = add_rms_norm(x, residual, self.norm, EPS)
        return F.linear(swiglu(F.linear(x, fc1)), fc2), residual


def random(*size: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Normal numbers on the GPU."""
    return torch.randn(size, device="cuda", dtype=dtype).mul_(scale)


def microseconds(call: Callable[[], None], replays: int) -> float:
    """Median microseconds of a captured call, on the engines' compute stream: dependent launch
    works on one stream only."""
    device = make_device("cuda")
    device.fence()
    device.compute.launch(call)  # compiles
    graph = device.capture(call)
    times = []
    for _ in range(WINDOWS + 1):
        start, end = device.event(timing=True), device.event(timing=True)
        device.compute.record(start)
        for _ in range(replays):
            device.compute.launch(graph.replay)
        device.compute.record(end)
        end.wait()
        times.append((end.time_us() - start.time_us()) / replays)
    return statistics.median(times[1:])


def main() -> None:
    """Print a table and, with --json, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--shapes", nargs="+", choices=DUMMY_SHAPES, default=["smollm2-135m", "llama-3.1-8b"]
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--replays", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "benchmark_linear: needs a CUDA device, and torch finds none.\n")
    print(f"{'shape':<14}{'rows':>5}  {'product':<12}{'floor us':>9}{'ours':>9}{'cuBLAS':>9}")
    figures = []
    for shape in args.shapes:
        layers = Layers(DUMMY_SHAPES[shape], getattr(torch, args.dtype))
        for rows in args.rows:
            both = zip(layers.products(rows, True), layers.products(rows, False), strict=True)
            for (name, size, ours), (_name, _size, cublas) in both:
                links = len(layers.weights.get(name, layers.weights["qkv"]))
                found = [microseconds(call, args.replays) / links for call in (ours, cublas)]
                floor = size / BANDWIDTH * 1e6
                cells = f"{floor:>9.2f}{found[0]:>9.2f}{found[1]:>9.2f}"
                print(f"{shape:<14}{rows:>5}  {name:<12}{cells}", flush=True)
                row = {"shape": shape, "rows": rows, "product": name, "floor_us": floor}
                figures.append({**row, "ours_us": found[0], "cublas_us": found[1]})
        del layers
    if args.json:
        write_record(args.json, "linear", vars(args), figures)


if __name__ == "__main__":
    main()
