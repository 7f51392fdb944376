"""Whether a model's weights fit into the memory that is free, told before any are made."""

from __future__ import annotations

import torch

from megatron_async.errors import OutOfMemoryError
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.parallel_state import ParallelSizes

GIB = 2**30


def check_weights_fit(
    architecture: ModelArchitecture, dtype: torch.dtype, sizes: ParallelSizes, free: int
) -> None:
    """Check that a rank's share of the weights fits.

    Args:
        architecture: of the model.
        dtype: of the weights.
        sizes: ranks that share them; experts count as if all ranks of a job shared all weights
            evenly, so a model that passes may still be too large.
        free: bytes, on the rank's device.

    Raises:
        OutOfMemoryError: they do not fit; the message has the figures and what helps.
    """
    ranks = (
        sizes.tensor_model_parallel * sizes.pipeline_model_parallel * sizes.expert_model_parallel
    )
    needed = architecture.num_parameters * dtype.itemsize // ranks
    if needed <= free:
        return
    share = "the weights" if ranks == 1 else f"a rank's share of the weights (1 of {ranks})"
    name = str(dtype).removeprefix("torch.")
    half = ""
    if dtype.itemsize > 2 and needed // 2 <= free:
        half = f" In bfloat16 (dtype='bfloat16') they take {needed / 2 / GIB:.3g} GiB."
    raise OutOfMemoryError(
        f"{share} take {needed / GIB:.3g} GiB in {name}, and {free / GIB:.3g} GiB of memory are "
        f"free.{half} Split the model over more ranks (tensor_model_parallel_size), or take a "
        "smaller one."
    )
