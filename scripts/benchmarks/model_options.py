"""Options that say more of a model: where tokens go, and what states are kept in."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_async.checkpoints.model_names import DUMMY, UNIFORM
from megatron_async.config import STATE_DTYPES
from megatron_async.errors import ConfigurationError

AS_LOADED = "as-loaded"


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add `--routing`, which `routed` takes, and `--mamba-ssm-states-dtype`."""
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


def routed(models: Sequence[str], routing: str) -> list[str]:
    """Names of models with the routing asked for.

    Args:
        models: what `LLM` loads.
        routing: value of `--routing`.

    Raises:
        ConfigurationError: uniform routing of a model that is no dummy.
    """
    if routing == AS_LOADED:
        return list(models)
    for model in models:
        if not model.startswith(DUMMY):
            raise ConfigurationError(
                f"--routing {UNIFORM} is for {DUMMY}SHAPE models, not for {model!r}, whose "
                "weights say where tokens go: leave it out."
            )
    ending = f":{UNIFORM}"
    return [model if model.endswith(ending) else model + ending for model in models]
