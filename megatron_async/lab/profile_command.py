"""`megatron-async profile`: run a workload, and show where the device waited for the CPU."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_async.cli.early_checks import check_early
from megatron_async.cli.options import (
    DEVICE,
    MODEL_HELP,
    NO_BARS,
    PROGRAM,
    Rows,
    add_dtype,
    add_rows,
)
from megatron_async.cli.parser import add_model, take_model
from megatron_async.cli.terminal import importing_engine, raise_interrupts

if TYPE_CHECKING:
    from megatron_async.lab.profile_workload import ProfileWorkload
    from megatron_async.llm import LLM

WORKLOADS = ("steady", "churn", "trace")

WORKLOAD_OPTIONS: Rows = (
    ("batch", int, "N", 16, "rows of a step; of a trace, the most"),
    ("prompt_tokens", int, "N", 64, "length of each prompt; of a trace, the mean"),
    ("steps", int, "N", 200, "steady, churn: steps to record"),
    ("finishes", int, "N", 1, "churn: requests that end, and that arrive, in each step"),
    ("requests", int, "N", 32, "trace: requests"),
    ("rate", float, "R", 4.0, "trace: arrivals a second"),
    ("output_tokens", int, "N", 64, "trace: mean length of an answer"),
    ("seed", int, "N", 0, "of prompts, lengths and arrivals"),
)
"""Options that are fields of `ProfileWorkload`."""
ENGINE: Rows = (
    DEVICE,
    ("--lookahead", int, "N", 1, "steps launched ahead of bookkeeping: 0 is serial"),
    ("--enable-prefix-caching", argparse.BooleanOptionalAction, None, None,
     "let requests that begin alike share blocks (default: on); the workloads' do not"),
)  # fmt: skip


def add_profile(commands: Any, common: argparse.ArgumentParser) -> None:
    """Options of `profile`."""
    profile = commands.add_parser(
        "profile",
        run=run_profile,
        parents=[common],
        help="run a workload and show where the device waited for the CPU",
        description="Run a workload and write into a folder: index.html (pictures of the longest\n"
        "gap, of typical steps and of all gaps), gaps.txt and gaps.json (idle time of the\n"
        "device and CPU time by stage, for each step), and timeline.json for\n"
        "https://ui.perfetto.dev.",
        epilog=f"""workloads:
  steady  a full batch decodes; nobody arrives or ends
  churn   requests end and arrive in every step
  trace   requests of random lengths arrive at random times

examples:
  {PROGRAM} profile smollm2 --out profile
  {PROGRAM} profile dummy:llama-3.1-8b --workload churn --batch 64 --out profile""",
    )
    what = profile.add_argument_group("what to run")
    add_model(what, MODEL_HELP, default="smollm2")
    add_rows(what, [("--workload", WORKLOADS, None, "steady", "see below"), *WORKLOAD_OPTIONS])
    engine = profile.add_argument_group("engine")
    add_rows(engine, ENGINE)
    add_dtype(engine)
    output = profile.add_argument_group("output")
    output.add_argument(
        "--out", required=True, metavar="DIR", help="folder to write into; made if it is not there"
    )
    add_rows(output, [NO_BARS])


def run_profile(arguments: argparse.Namespace) -> int:
    """Run the workload and write its profile."""
    arguments.model = take_model(arguments, default="smollm2")
    from megatron_async.lab.profile_workload import ProfileWorkload

    options = {name: getattr(arguments, name) for name, *_ in WORKLOAD_OPTIONS}
    workload = ProfileWorkload(arguments.workload, **options)
    check_early(arguments.model, {"device": arguments.device, "lookahead": arguments.lookahead})
    folder = writable_folder(arguments.out)

    with importing_engine():
        from megatron_async.lab.profile_run import record_workload, write_profile
        from megatron_async.lab.step_gaps import gap_text
        from megatron_async.llm import LLM

    progress = not arguments.no_progress
    with LLM(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        progress=progress,
        timeline=True,
        enable_prefix_caching=arguments.enable_prefix_caching,
        **workload.engine_settings(arguments.lookahead),
    ) as llm:
        raise_interrupts()
        timeline = record_workload(llm, workload, progress)
        facts = describe_run(arguments, workload, llm)
    report = write_profile(folder, timeline, facts)
    print(gap_text(report, facts), end="")
    print(f"\nopen {folder / 'index.html'} in a browser, and timeline.json at ui.perfetto.dev")
    return 0


def writable_folder(name: str) -> Path:
    """The folder, made if need be, before a model is loaded for it.

    Raises:
        ValueError: it cannot be made or written into.
    """
    folder = Path(name)
    probe = folder / ".megatron_async_profile"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"--out {name}: cannot write there ({reason}); name another.") from error
    return folder


def describe_run(
    arguments: argparse.Namespace, workload: ProfileWorkload, llm: LLM
) -> dict[str, Any]:
    """What was run, for the head of the report; lengths are tokens."""
    import torch

    device = llm.engine.context.device.torch_device
    is_gpu = device.type == "cuda"
    stats = llm.engine.stats()
    facts = {
        "model": arguments.model,
        "workload": workload.name,
        "device": torch.cuda.get_device_name(device) if is_gpu else "CPU",
        "dtype": str(llm.dtype).removeprefix("torch."),
        "lookahead": arguments.lookahead,
        "batch": workload.batch,
        "prompt": workload.prompt_tokens,
        "overlap ratio": f"{stats['overlap_ratio']:.3f}",
    }
    if llm.engine.context.prefix_cache is not None:
        found, asked = stats["prefix_cache_hits"], stats["prefix_cache_queries"]
        facts["prefix cache"] = f"{found:,} of {asked:,} tokens found"
        if llm.engine.context.sharing is not None:
            lost, kept = stats["prefix_cache_lost_no_state"], stats["prefix_cache_snapshots"]
            facts["states"] = f"{kept:,} snapshots; {lost:,} tokens found without a state"
    if workload.name == "churn":
        facts["ends a step"] = workload.finishes
    if workload.name == "trace":
        facts |= {"requests": workload.requests, "arrivals a second": workload.rate}
    return facts
