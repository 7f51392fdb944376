"""Names of the dtypes that weights may have."""

from __future__ import annotations

import torch

from megatron_async.checkpoints.errors import CheckpointError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The dtype of that name.

    Raises:
        CheckpointError: not one that weights may have.
    """
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in DTYPES.values():
        raise CheckpointError(f"dtype {dtype!r} is not supported: use one of {', '.join(DTYPES)}")
    return found
