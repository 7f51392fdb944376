"""Profile steady decode with torch.profiler: idle time between steps, and where a step's time goes.

Runs on a GPU. The kernel timeline includes the kernels of graph replays. The table's first column
is what a step waits for (from the end of all kernels before to a kernel's own end), so it adds up
to the step; "run" is a kernel's own length, in which it may wait for the kernel before.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict

import torch

from megatron_async import LLM
from megatron_async.lab.benchmark_record import write_record
from megatron_async.lab.gpu_profile import (
    FIRST_KERNEL,
    HEADER,
    device_activities,
    gap_report,
    kernel_shares,
    profile_device,
)
from megatron_async.lab.workloads import start_steady_decode, steady_decode_tokens

MAX_TOKENS = 8192


def main(arguments: Sequence[str] | None = None) -> None:
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
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.exit(1, "profile_torch: needs a CUDA device, and torch finds none.\n")
    batch, steps = args.batch_size, args.steps
    tokens = steady_decode_tokens(batch, args.prompt_tokens, MAX_TOKENS, steps)
    length = args.prompt_tokens + max(tokens, 4 * steps + 64)
    llm = LLM(
        args.model,
        device="cuda",
        lookahead=args.lookahead,
        max_requests=batch,
        max_tokens=MAX_TOKENS,
        max_sequence_length=length,
        num_kv_blocks=(batch + 2) * (length // 64 + 1),
        block_size_tokens=64,
    )
    engine = llm.engine
    start_steady_decode(engine, batch, args.prompt_tokens, steps)

    def run() -> None:
        for _ in range(steps):
            engine.step_modern()

    profiler = profile_device(run)
    activities = device_activities(profiler)
    report = gap_report(activities, FIRST_KERNEL)
    print(f"{args.model}, batch {batch}, lookahead {args.lookahead}: {report}")
    print(HEADER)
    for share in kernel_shares(activities, steps)[: args.top]:
        print(share)
    if args.json:
        row = {"model": args.model, "batch": batch, "lookahead": args.lookahead}
        write_record(args.json, "profile", vars(args), [{**row, **asdict(report)}])
    if args.trace:
        profiler.export_chrome_trace(args.trace)
    llm.close()


if __name__ == "__main__":
    main()
