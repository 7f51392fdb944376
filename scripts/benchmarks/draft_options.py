"""Options of benchmarks whose steps draft and verify."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_async.cli.chances import parse_chances
from megatron_async.config import DEFAULT_DRAFTS

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
