"""Profile steady decode with torch.profiler: idle time between steps, and where a step's time goes.

Runs on a GPU. The kernel timeline includes the kernels of graph replays.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_async import LLM, SamplingParams
from megatron_async.profiling.gap_report import DeviceActivity, gap_report

FIRST_KERNEL = "_unpack_kernel"


def device_activities(profiler: profile) -> list[DeviceActivity]:
    """Kernels and copies of a finished profile."""
    return [
        DeviceActivity(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def main() -> None:
    """Print the gap report and the kernels that take most of a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="dummy:smollm2-135m")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lookahead", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--top", type=int, default=15, help="kernels to list")
    parser.add_argument("--json", metavar="FILE", help="write the gap report")
    parser.add_argument("--trace", metavar="FILE", help="write the Chrome trace")
    args = parser.parse_args()
    batch, steps = args.batch_size, args.steps
    length = args.prompt_tokens + 4 * steps + 64
    llm = LLM(
        args.model,
        device="cuda",
        lookahead=args.lookahead,
        max_requests=batch,
        max_tokens=8192,
        max_sequence_length=length,
        num_kv_blocks=(batch + 2) * (length // 64 + 1),
        block_size_tokens=64,
    )
    engine = llm.engine
    params = SamplingParams(temperature=0.0, termination_id=-1)
    prompt = [7] * args.prompt_tokens
    for request in range(batch):
        engine.add_request(request, prompt, params)
    for _ in range(20):
        engine.step_modern()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            engine.step_modern()
        torch.cuda.synchronize()
    activities = device_activities(profiler)
    report = gap_report(activities, FIRST_KERNEL)
    print(f"{args.model}, batch {batch}, lookahead {args.lookahead}: {report}")
    totals: dict[str, list[float]] = defaultdict(list)
    for activity in activities:
        totals[activity.name].append(activity.end_us - activity.start_us)
    print(f"{'us a step':>10}{'calls':>7}{'us each':>9}  kernel")
    for name, times in sorted(totals.items(), key=lambda item: -sum(item[1]))[: args.top]:
        calls = len(times) / steps
        each = sum(times) / len(times)
        print(f"{sum(times) / steps:>10.1f}{calls:>7.1f}{each:>9.2f}  {name[:90]}")
    if args.json:
        Path(args.json).write_text(json.dumps({"settings": vars(args), **asdict(report)}, indent=1))
    if args.trace:
        profiler.export_chrome_trace(args.trace)
    llm.close()


if __name__ == "__main__":
    main()
