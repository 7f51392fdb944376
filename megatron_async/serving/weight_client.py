"""`update_weights`: send a service new weights, from plain Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from megatron_async.checkpoints.huggingface import DTYPES
from megatron_async.serving.messages import Version
from megatron_async.serving.token_client import TokenClient

BUCKET_BYTES = 32 << 20
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


async def update_weights(
    client: TokenClient,
    weights: str | Iterable[tuple[str, Tensor]],
    version: Version | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Replace the weights of all replicas of a service; if that fails, the ones before serve on.

    Args:
        client: connected to the service's coordinator.
        weights: names and whole tensors, in any order, on any device; or the name of a folder below
            the service's `--weights-dir`, which each replica reads itself.
        version: what answers call these weights.
        options: fields of `weights_begin`: `policy`, `way`, `staging`, `partial` ...

    Returns:
        the answer of `weights_finish`.

    Raises:
        ValueError: it is not allowed now, or an option is wrong.
        UpdateError: a replica refuses them, or could not load them.
    """
    kind = "folder" if isinstance(weights, str) else "tensors"
    begun = await client.ask("weights_begin", version=version, source={"kind": kind}, **options)
    key = begun["round"]
    try:
        if isinstance(weights, str):
            await client.ask("weights_load", round=key, folder=weights)
        else:
            for bucket in _buckets(weights):
                await client.ask("weights_load", round=key, tensors=bucket)
    except BaseException:
        with suppress(ValueError):  # it was dropped already
            await client.ask("weights_drop", round=key)
        raise
    return await client.ask("weights_finish", round=key)


def _buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[list[Any]]]:
    """Messages of about `BUCKET_BYTES`; a larger tensor comes in pieces."""
    bucket: list[list[Any]] = []
    room = BUCKET_BYTES
    for name, tensor in weights:
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{name} is of type {tensor.dtype}: send {', '.join(DTYPES)}.")
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        for offset in range(0, max(data.nbytes, 1), BUCKET_BYTES):
            piece = data[offset : offset + BUCKET_BYTES].tobytes()
            if bucket and len(piece) > room:
                yield bucket
                bucket, room = [], BUCKET_BYTES
            bucket.append([name, _NAMES[tensor.dtype], list(tensor.shape), piece, offset])
            room -= len(piece)
    if bucket:
        yield bucket
