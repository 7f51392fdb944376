"""Time steady decode: shapes x batch sizes x lookahead, greedy, every request decoding.

Reports the median step time of windows of steps, the share of steps launched ahead, and the CPU
time of the engine's own thread a step (a forward that runs eagerly launches its kernels from that
thread, and is counted under launch).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from megatron_async import LLM, SamplingParams
from megatron_async.ops.sampling import SamplingMode

WINDOWS = 5


def measure(llm: LLM, batch: int, prompt_tokens: int, steps: int) -> dict[str, float]:
    """Fill the engine with `batch` requests, let them reach decode, and time windows of steps."""
    engine = llm.engine
    vocabulary = engine.controller.vocab_size
    generator = torch.Generator().manual_seed(0)
    total = WINDOWS * steps + 32
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=total, termination_id=-1)
    for request in range(batch):
        prompt = torch.randint(vocabulary, (prompt_tokens,), generator=generator)
        engine.add_request(request, prompt, params)
    while engine.statistics.generated_tokens < 2 * batch or engine.context.waiting:
        for request in engine.step_modern()["finished_request_records"]:
            raise SystemExit(f"request {request.request_id} ended early: {request.error}")
    for _ in range(8):
        engine.step_modern()
    before = dict(engine.stats())
    times = []
    for _ in range(WINDOWS):
        start = time.perf_counter()
        for _ in range(steps):
            engine.step_modern()
        times.append((time.perf_counter() - start) / steps)
    after = engine.stats()
    done = after["steps"] - before["steps"]

    def per_step(name: str) -> float:
        key = f"{name}_us_per_step"
        return (after[key] * after["steps"] - before[key] * before["steps"]) / done

    step = statistics.median(times)
    return {
        "step_ms": step * 1e3,
        "tokens_per_second": batch / step,
        "prepare_us": per_step("prepare"),
        "launch_us": per_step("launch"),
        "resolve_us": per_step("resolve"),
        "overlap_ratio": after["overlap_ratio"],
    }


def replay_ms(llm: LLM, batch: int, replays: int = 100) -> float | None:
    """Milliseconds a step when the captured step is replayed back to back, without bookkeeping: the
    limit for the engine. None where nothing is captured."""
    engine = llm.engine
    if not engine.context.graph_shapes.decode_sizes:
        return None
    for step in engine.in_flight:
        step.ready.wait()
    dims = engine.context.graph_shapes.find(batch, 0, 0)
    assert dims is not None
    graph = engine.controller.graphs.find(dims, SamplingMode.GREEDY)
    assert graph is not None
    times = []
    device = engine.context.device
    for _ in range(WINDOWS):
        start, end = device.event(timing=True), device.event(timing=True)
        device.compute.record(start)
        for _ in range(replays):
            device.compute.launch(graph.replay)
        device.compute.record(end)
        end.wait()
        times.append((end.time_us() - start.time_us()) / 1e3 / replays)
    return statistics.median(times)


def main() -> None:
    """Print a table and, with --json, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["dummy:smollm2-135m"])
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--lookahead", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20, help="steps in each of 5 windows")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    columns = (
        "step_ms",
        "replay_ms",
        "over_replay",
        "tokens_per_second",
        "prepare_us",
        "launch_us",
        "resolve_us",
    )
    print(f"{'model':<22}{'batch':>6}{'lookahead':>10}" + "".join(f"{c:>19}" for c in columns))
    figures = []
    for model in args.models:
        for batch in args.batch_sizes:
            for lookahead in args.lookahead:
                length = args.prompt_tokens + WINDOWS * args.steps + 64
                with LLM(
                    model,
                    device=args.device,
                    dtype=args.dtype,
                    lookahead=lookahead,
                    max_requests=batch,
                    max_tokens=max(8192, batch),
                    max_sequence_length=length,
                    num_kv_blocks=batch * (length // 64 + 1),
                    block_size_tokens=64,
                ) as llm:
                    result = measure(llm, batch, args.prompt_tokens, args.steps)
                    limit = replay_ms(llm, batch)
                if limit is not None:
                    result["replay_ms"] = limit
                    result["over_replay"] = result["step_ms"] / limit
                figures.append({"model": model, "batch": batch, "lookahead": lookahead, **result})
                cells = "".join(f"{result.get(c, float('nan')):>19.3f}" for c in columns)
                print(f"{model:<22}{batch:>6}{lookahead:>10}{cells}", flush=True)
    if args.json:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        note = {"date": time.strftime("%F"), "gpu": gpu, "settings": vars(args)}
        with open(args.json, "w") as file:
            json.dump({**note, "figures": figures}, file, indent=1)


if __name__ == "__main__":
    main()
