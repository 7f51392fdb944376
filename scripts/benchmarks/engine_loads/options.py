"""Options and tables that the loads share."""

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megatron_async import LLM
from megatron_async.checkpoints import open_model as open_source
from megatron_async.checkpoints.model_names import DUMMY, UNIFORM
from megatron_async.config import CACHE_DTYPES, DEFAULT_DRAFTS, QUANTIZATIONS, STATE_DTYPES
from megatron_async.device_state.cache_layout import cache_layout
from megatron_async.errors import ConfigurationError
from megatron_async.lab.arrival_trace import LengthDistribution, TraceRequest, poisson_trace
from megatron_async.lab.gpu_profile import (
    FIRST_KERNEL,
    GapReport,
    device_activities,
    gap_report,
    profile_device,
)
from megatron_async.lab.simulate_command import parse_chances


def load_parser(
    load: str, about: str | None, model: str = "dummy:smollm2-135m", several: bool = False
) -> argparse.ArgumentParser:
    """A load's command line with the options for the model, where it runs, and the record. `about`
    is the load's docstring, `model` what is measured when nothing else is asked for; `several`
    takes `--models`, a list, in place of `--model`."""
    parser = argparse.ArgumentParser(
        prog=f"benchmark_engine.py {load}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if several:
        parser.add_argument("--models", nargs="+", default=[model], help="anything that LLM loads")
    else:
        parser.add_argument("--model", default=model, help="anything that LLM loads")
    parser.add_argument("--device", default=None, help="cpu, cuda or cuda:N (default: the best)")
    parser.add_argument("--dtype", default=None, help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    return parser


def heads(titles: Iterable[str], width: int) -> str:
    """Titles of columns of so many characters, right-aligned."""
    return "".join(f"{title:>{width}}" for title in titles)


def cells(row: Mapping[str, Any], columns: Iterable[str], width: int, form: str = ".3f") -> str:
    """A row's numbers in columns of so many characters; "nan" for what was not measured."""
    return "".join(f"{row.get(column, math.nan):>{width}{form}}" for column in columns)


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """Add what `make_trace` reads, and `--rate`, `--num-requests`, `--seed` and
    `--warmup-requests`."""
    trace = parser.add_argument_group("trace")
    trace.add_argument(
        "--rate", type=float, nargs="+", default=[8.0], help="arrivals a second (default 8)"
    )
    trace.add_argument("--num-requests", type=int, default=256, help="of a trace (default 256)")
    trace.add_argument("--prompt-mean", type=float, default=256.0, help="tokens (default 256)")
    trace.add_argument("--output-mean", type=float, default=128.0, help="tokens (default 128)")
    trace.add_argument("--max-prompt-tokens", type=int, default=1024, help="default 1024")
    trace.add_argument("--max-output-tokens", type=int, default=512, help="default 512")
    trace.add_argument(
        "--length-sigma",
        type=float,
        default=0.6,
        help="standard deviation of the lengths' logarithm (default 0.6; 0: all equal)",
    )
    trace.add_argument("--seed", type=int, default=0, help="of the whole trace (default 0)")
    trace.add_argument("--warmup-requests", type=int, default=32, help="default 32")


def make_trace(
    args: argparse.Namespace, vocab_size: int, rate: float, count: int, seed: int
) -> list[TraceRequest]:
    """`count` requests with the lengths of the command line."""
    prompts = LengthDistribution(args.prompt_mean, args.max_prompt_tokens, args.length_sigma)
    outputs = LengthDistribution(args.output_mean, args.max_output_tokens, args.length_sigma)
    return poisson_trace(rate, count, prompts, outputs, vocab_size, seed)


AS_LOADED = "as-loaded"


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add `--routing`, which `routed` takes, and settings of the engine that `open_model` reads."""
    parser.add_argument(
        "--routing",
        choices=(AS_LOADED, UNIFORM),
        default=AS_LOADED,
        help=f"{UNIFORM}: dummy models with experts spread tokens over them as trained models do, "
        f"the same as {DUMMY}SHAPE:{UNIFORM} (default: as their random weights have it)",
    )
    parser.add_argument(
        "--mamba-ssm-states-dtype",
        choices=STATE_DTYPES,
        default=STATE_DTYPES[0],
        help=f"of the states of Mamba-2 layers (default: {STATE_DTYPES[0]})",
    )
    parser.add_argument(
        "--batch-invariant-mode", action="store_true", help="bits of a row depend on it alone"
    )
    parser.add_argument(
        "--quantization", choices=QUANTIZATIONS, help="of weights (default: by the model's files)"
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=CACHE_DTYPES,
        default=CACHE_DTYPES[0],
        help=f"of keys and values (default: {CACHE_DTYPES[0]})",
    )


def routed(models: Sequence[str], routing: str) -> list[str]:
    """Names of models with the routing asked for; a ConfigurationError for uniform routing of a
    model that is no dummy."""
    if routing == AS_LOADED:
        return list(models)
    for model in models:
        if not model.startswith(DUMMY):
            raise ConfigurationError(
                f"--routing {UNIFORM} is for {DUMMY}SHAPE models, not for {model!r}, whose "
                "weights say where tokens go: leave it out."
            )
    return [m if UNIFORM in m.split(":") else f"{m}:{UNIFORM}" for m in models]


ONE_SHAPE = {"num_cuda_graphs": 1, "use_cuda_graphs_for_non_decode_steps": False}
"""Captured is the one shape that is measured."""


def open_model(
    model: str, args: argparse.Namespace, rows: int, length: int, max_tokens: int, **changes: Any
) -> LLM:
    """`model` by the options of `load_parser`, with room for `rows` requests of `length` tokens
    each, prompt and answer, in steady decode, and `max_tokens` a step. Without `changes` of the
    settings prompts that come again are computed again."""
    windows = open_source(model).architecture.attention_windows
    tables = len(cache_layout([windows]).windows)
    settings = {
        "enable_prefix_caching": False,
        "mamba_ssm_states_dtype": getattr(args, "mamba_ssm_states_dtype", STATE_DTYPES[0]),
        "batch_invariant_mode": getattr(args, "batch_invariant_mode", False),
        "quantization": getattr(args, "quantization", None),
        "kv_cache_dtype": getattr(args, "kv_cache_dtype", CACHE_DTYPES[0]),
        "num_kv_blocks": rows * (length // 64 + 1) * tables,
        "block_size_tokens": 64,
    }
    return LLM(
        model,
        device=args.device,
        dtype=args.dtype,
        max_requests=rows,
        max_tokens=max_tokens,
        max_sequence_length=length,
        **{**settings, **changes},
    )


MORE_STEPS = 32
"""Before the measured ones, and to spare: with drafts each may yield as many tokens as is wide."""


def add_draft_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `settle_drafts`, `draft_settings` and `decode_tokens` read."""
    parser.add_argument("--speculative-method", default=None, help="mtp or ngram (default: none)")
    parser.add_argument("--num-speculative-tokens", type=int, default=0)
    parser.add_argument(
        "--draft-vocab-size", type=int, default=None, help="with mtp (default: all)"
    )
    parser.add_argument(
        "--forced-acceptance",
        type=parse_chances,
        metavar="P,P,...",
        help="chance that each draft is accepted, given those before it were; every step is wide",
    )


def settle_drafts(args: argparse.Namespace) -> None:
    """Fill in the method or the number of drafts where one of them follows from the others."""
    if args.forced_acceptance is not None:
        args.speculative_method = args.speculative_method or "ngram"
        args.num_speculative_tokens = len(args.forced_acceptance)
    elif args.speculative_method is not None and not args.num_speculative_tokens:
        args.num_speculative_tokens = DEFAULT_DRAFTS[args.speculative_method]


def draft_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the options are to `LLM`."""
    names = ("speculative_method", "num_speculative_tokens", "draft_vocab_size")
    return {name: getattr(args, name) for name in names}


def decode_tokens(args: argparse.Namespace, steps: int) -> int:
    """Tokens that each request may generate in this many measured steps."""
    if args.num_speculative_tokens:
        return (steps + MORE_STEPS) * (1 + args.num_speculative_tokens)
    return steps


def gaps_of(step: Callable[[], object], steps: int) -> GapReport:
    """The gap report of so many calls of `step`; needs a CUDA device.

    A process that has profiled once launches more slowly from then on, so this comes after all
    timings, or on an engine whose timings are not wanted.
    """

    def run() -> None:
        for _ in range(steps):
            step()

    return gap_report(device_activities(profile_device(run)), FIRST_KERNEL)
