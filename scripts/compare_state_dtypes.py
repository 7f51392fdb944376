"""What do bfloat16 states of Mamba-2 layers change? Log probs beside those of float32 states.

Both runs have the same weights and the same tokens, decoded one by one. The tokens of a request are
forced (`megatron_async/parity/forced_tokens.py`), so errors of the states add up and nothing else
differs. The tokens come from --text, where the model has a tokenizer, or are random. Reported over
all places and requests: differences of log probs of the forced tokens and of the whole vocabulary,
how often the most likely token is the same, and both perplexities. The first and the last quarter
of the places are reported by themselves, to see errors grow.

    python scripts/compare_state_dtypes.py --model dummy:granite-4.0-h-350m --tokens 256
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_async import InferenceConfig
from megatron_async.checkpoints import load_model, open_model
from megatron_async.checkpoints.dtypes import DTYPES, parse_dtype
from megatron_async.config import STATE_DTYPES
from megatron_async.devices import resolve_device_name
from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import MAMBA
from megatron_async.parity.forced_tokens import forced_log_probs
from megatron_async.profiling.benchmark_record import write_record

BLOCK_SIZE = 64


def make_sequences(args: argparse.Namespace) -> Tensor:
    """Token ids int64 `[requests, prompt and forced tokens]`.

    Raises:
        ConfigurationError: a text without a tokenizer, or one that is too short.
    """
    source = open_model(args.model)
    length = args.prompt_tokens + args.tokens
    if args.text is None:
        generator = torch.Generator().manual_seed(args.seed)
        shape = args.requests, length
        return torch.randint(source.architecture.vocab_size, shape, generator=generator)
    if source.tokenizer is None:
        raise ConfigurationError(f"{args.model} has no tokenizer for --text: leave it out.")
    ids = list(source.tokenizer.tokenize(Path(args.text).read_text()))
    if len(ids) < args.requests * length:
        raise ConfigurationError(
            f"{args.text} has {len(ids)} tokens, and {args.requests} requests of {length} need "
            f"{args.requests * length}: give a longer text, or lower --requests or --tokens."
        )
    return torch.tensor(ids[: args.requests * length]).view(args.requests, length)


def compare(expected: Tensor, found: Tensor, forced: Tensor) -> dict[str, float]:
    """Figures of some places.

    Args:
        expected, found: log probs float32 `[requests, places, vocabulary]`.
        forced: int64 `[requests, places]`, on the same device.
    """
    difference = (found - expected).abs()
    index = forced[..., None]
    of_forced = difference.gather(2, index)
    return {
        "forced_largest": of_forced.max().item(),
        "forced_mean": of_forced.mean().item(),
        "largest": difference.max().item(),
        "mean": difference.mean().item(),
        "same_best": (expected.argmax(-1) == found.argmax(-1)).float().mean().item(),
        "perplexity_float32": (-expected.gather(2, index).mean()).exp().item(),
        "perplexity": (-found.gather(2, index).mean()).exp().item(),
    }


def measure(args: argparse.Namespace) -> list[dict[str, object]]:
    """Figures of all places, and of the first and the last quarter.

    Raises:
        ConfigurationError: a model without Mamba-2 layers; see `make_sequences`.
    """
    if not open_model(args.model).architecture.count(MAMBA):
        raise ConfigurationError(
            f"{args.model} has no Mamba-2 layers, and no states: choose a hybrid model."
        )
    device = resolve_device_name(args.device)
    dtype = parse_dtype(args.dtype or ("float32" if device == "cpu" else "bfloat16"))
    sequences = make_sequences(args)
    requests, length = sequences.shape
    model = load_model(args.model, dtype, torch.device(device)).model
    log_probs = {}
    for state_dtype in STATE_DTYPES:
        config = InferenceConfig(
            device=device,
            lookahead=0,
            num_cuda_graphs=0,
            max_requests=requests,
            max_tokens=max(2048, requests),
            max_sequence_length=length,
            block_size_tokens=BLOCK_SIZE,
            num_kv_blocks=requests * -(-length // BLOCK_SIZE),
            mamba_ssm_states_dtype=state_dtype,
        )
        found = forced_log_probs(model, sequences, args.prompt_tokens, config)
        log_probs[state_dtype] = found[:, 1:]  # what decode steps say
    forced = sequences[:, args.prompt_tokens + 1 :].to(device)
    places = forced.size(1)
    parts = {
        "all": slice(0, places),
        "first quarter": slice(0, -(-places // 4)),
        "last quarter": slice(places - -(-places // 4), places),
    }
    expected, found = (log_probs[state_dtype] for state_dtype in STATE_DTYPES)
    return [
        {"places": name, **compare(expected[:, part], found[:, part], forced[:, part])}
        for name, part in parts.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table and, with --json, write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="dummy:granite-4.0-h-350m", help="any hybrid model")
    parser.add_argument("--device", default=None, help="cpu, cuda or cuda:N (default: the best)")
    parser.add_argument("--dtype", choices=list(DTYPES), help="of weights and activations")
    parser.add_argument("--requests", type=int, default=4, help="default 4")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="default 32")
    parser.add_argument(
        "--tokens",
        type=int,
        default=129,
        help="forced tokens of a request, at least 2; all but one are decoded (default 129)",
    )
    parser.add_argument("--text", metavar="FILE", help="tokens to force (default: random ones)")
    parser.add_argument("--seed", type=int, default=0, help="of random tokens")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    args = parser.parse_args(arguments)
    if min(args.requests, args.prompt_tokens) < 1 or args.tokens < 2:
        parser.error("--requests and --prompt-tokens start at 1, --tokens at 2")
    figures = measure(args)
    columns = [name for name in figures[0] if name != "places"]
    print(f"{args.model}: bfloat16 states beside float32, {args.tokens - 1} decode steps")
    print(f"{'places':<14}" + "".join(f"{name:>20}" for name in columns))
    for row in figures:
        print(f"{row['places']:<14}" + "".join(f"{row[name]:>20.5g}" for name in columns))
    if args.json:
        write_record(args.json, "state_dtypes", vars(args), figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
