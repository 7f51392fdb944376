"""Replace all weights again and again while every row decodes: the longest gap between two tokens.

A trainer's thread in this process sends whole rounds of weights, as the tensors lie on the device:
  direct   the copies are made between two steps, from the trainer's own tensors
  device   from spare tensors on the device, which are filled while steps run
  host     from pinned memory of the host, filled while steps run
What is told (milliseconds; medians over the rounds):
  step     between two tokens, without an update
  gap      longest time between two tokens from the end of loading on
  added    gap - step
  floor    what it takes to read and write the weights at this device's rate, as measured
  ratio    added / floor
  host     the engine's thread's part
  loading  longest time between two tokens while the round is begun and loaded
  round    from the begin to the end
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from engine_loads.options import cells, heads, load_parser, open_model
from megatron_async import LLM
from megatron_async.checkpoints.source import named_tensors
from megatron_async.devices import Device
from megatron_async.engine.dynamic_engine import DynamicInferenceEngine
from megatron_async.lab.benchmark_record import write_record
from megatron_async.lab.workloads import start_steady_decode, steady_decode_tokens
from megatron_async.ops.linear.quantised_weight import widened
from megatron_async.updates.incoming import MEGATRON

WAYS = ("direct", "device", "host")
MAX_TOKENS = 2048
AFTER = 8
"""Steps after a round that belong to it."""
MOST_COPIED = 4 << 30
"""Bytes from which the rate of copies is known."""
COLUMNS = ("step", "gap", "added", "floor", "ratio", "host", "loading", "round")


def other_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of another model of the same sizes: the rows of each matrix from the last to the
    first. They lie in new memory."""
    return {name: (t.flip(0) if t.dim() > 1 else t.clone()) for name, t in tensors.items()}


def copy_rate(device: Device, num_bytes: int) -> float:
    """Bytes a second, read and written, of a copy within the device's memory."""
    size = min(num_bytes, MOST_COPIED)
    source = torch.ones(size, dtype=torch.uint8, device=device.torch_device)
    place, times = torch.empty_like(source), []
    device.fence()
    for _ in range(4):
        start, end = device.event(timing=True), device.event(timing=True)
        device.compute.record(start)
        device.compute.launch(partial(_copy, place, source))
        device.compute.record(end)
        end.wait()
        times.append(end.us_since(start) / 1e6)
    return 2 * size / min(times)


def _copy(place: Tensor, source: Tensor) -> None:
    place.copy_(source)


def decode(engine: DynamicInferenceEngine, ends: list[float], until: Callable[[], bool]) -> None:
    """Step until it is time, and note when tokens came."""
    while not until():
        if engine.step_modern()["outputs"]:
            ends.append(time.perf_counter())


def decode_steps(engine: DynamicInferenceEngine, ends: list[float], steps: int) -> None:
    """The same, for so many steps."""
    wanted = len(ends) + steps
    decode(engine, ends, lambda: len(ends) >= wanted)


def longest(ends: Sequence[float], first: float, last: float) -> float:
    """Longest time between two tokens of which a part lies between two instants; milliseconds."""
    found = [b - a for a, b in pairwise(ends) if b >= first and a <= last]
    return 1e3 * max(found, default=0.0)


def serve_round(
    engine: DynamicInferenceEngine, tensors: Mapping[str, Tensor], way: str, names: str = MEGATRON
) -> dict[str, float]:
    """Figures of one round, in milliseconds; the engine decodes before, while, and after."""
    ends, times = list[float](), list[float]()

    def train() -> float:
        times.append(time.perf_counter())
        update = engine.begin_weight_update(engine.weight_epoch + 1, staging=way, names=names)
        update.load(tensors.items())
        times.append(time.perf_counter())
        done = update.finish()
        times.append(time.perf_counter())
        return done.gap

    decode_steps(engine, ends, AFTER)
    with ThreadPoolExecutor(1) as threads:
        trainer = threads.submit(train)
        decode(engine, ends, trainer.done)
    decode_steps(engine, ends, AFTER)
    gap_s = trainer.result()
    begin, loaded, end = times
    return {
        "gap": longest(ends, loaded, ends[-1]),
        "loading": longest(ends, begin, loaded),
        "host": 1e3 * gap_s,
        "round": 1e3 * (end - begin),
    }


def measure(
    engine: DynamicInferenceEngine,
    batch: int,
    ways: Sequence[str],
    weights: Sequence[Mapping[str, Tensor]],
    rate: float,
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Figures of each way, with so many rows; the engine is idle before and after. A round sends
    one of `weights`, the next round the next."""
    num_bytes = sum(tensor.nbytes for tensor in weights[0].values())
    start_steady_decode(engine, batch, args.prompt_tokens, args.most_steps)
    ends, numbers, found = list[float](), itertools.cycle(weights), []
    decode_steps(engine, ends, args.steps)
    step = 1e3 * statistics.median(b - a for a, b in pairwise(ends))
    floor = 2e3 * num_bytes / rate
    for way in ways:
        serve_round(engine, next(numbers), way)  # memory and tables are made
        rounds = [serve_round(engine, next(numbers), way) for _ in range(args.rounds)]
        row = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        added = row["gap"] - step
        row |= {"step": step, "added": added, "floor": floor, "ratio": added / floor}
        row["longest_gap"] = max(each["gap"] for each in rounds)
        found.append({"batch": batch, "way": way, "bytes": num_bytes, **row})
    for request in range(batch):
        engine.abort_request(request)
    while engine.has_unfinished_requests():
        engine.step_modern()
    return found


def open_engine(args: argparse.Namespace) -> LLM:
    """A model with room for the largest batch in steady decode."""
    rows = max(args.batch_sizes)
    tokens = steady_decode_tokens(rows, args.prompt_tokens, MAX_TOKENS, args.most_steps)
    return open_model(args.model, args, rows, args.prompt_tokens + tokens, MAX_TOKENS, lookahead=1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table and, with --json, write the figures."""
    parser = load_parser("updates", __doc__)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=60, help="without an update (default 60)")
    parser.add_argument("--rounds", type=int, default=3, help="of each way (default 3)")
    parser.add_argument(
        "--most-steps", type=int, default=3000, help="that rounds may last (default 3000)"
    )
    args = parser.parse_args(arguments)
    figures = []
    with open_engine(args) as llm:
        engine = llm.engine
        model = engine.controller.inference_wrapped_model.model
        first = {name: widened(each).clone() for name, each in named_tensors(model).items()}
        weights = [other_weights(first), first]
        rate = copy_rate(engine.context.device, sum(tensor.nbytes for tensor in first.values()))
        print(f"{rate / 1e12:.3f} TB/s read and written\n")
        print(f"{'batch':>6} {'way':<8}" + heads(COLUMNS, 11))
        for batch in args.batch_sizes:
            for row in measure(engine, batch, args.ways, weights, rate, args):
                print(f"{row['batch']:>6} {row['way']:<8}{cells(row, COLUMNS, 11)}", flush=True)
                figures.append({"model": args.model, "bytes_per_second": rate, **row})
    if args.json:
        write_record(args.json, "updates", vars(args), figures)
