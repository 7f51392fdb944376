"""Checks of what the ops of recurrent layers get beside a layer's own tensors: a step's rows, and
where the outputs go."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async.ops.recurrent.recurrent_pools import MAX_WIDTH, PrefillRows


def check_decode_rows(
    op: str,
    inputs: Tensor,
    row_index: Tensor,
    positions: Tensor,
    base: Tensor,
    width: int,
) -> None:
    """Refuse a step's decode rows if their numbers are fewer than the rows.

    Args:
        op: name of who asks, for messages.
        inputs: `[tokens, channels]`, output of the layer's first product.
        row_index: `[rows]`.
        positions: `[rows * width]` or more.
        base: `[rows]` or more.
        width: query tokens of a row.

    Raises:
        ValueError: the width is not served, or something is too short.
    """
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"{op}: rows have 1 to {MAX_WIDTH} query tokens, not {width}.")
    rows = row_index.numel()
    if inputs.size(0) < rows * width or positions.numel() < rows * width:
        raise ValueError(
            f"{op}: {rows} rows of {width} query tokens want {rows * width} input rows and "
            f"positions; found {inputs.size(0)} and {positions.numel()}."
        )
    if base.numel() < rows:
        raise ValueError(
            f"{op}: {rows} rows want as many bases; found {base.numel()}: pass the second tensor "
            "that next_bases returned."
        )


def check_chunks(op: str, rows: PrefillRows, base_after: Tensor) -> None:
    """Refuse a step's prefill chunks if their numbers are not one for each.

    Args:
        op: name of who asks, for messages.
        rows: the chunks.
        base_after: `[chunks]`.

    Raises:
        ValueError: there are too few or too many starts or bases.
    """
    chunks = rows.write_rows.numel()
    if rows.starts.numel() != chunks + 1 or base_after.numel() != chunks:
        raise ValueError(
            f"{op}: {chunks} chunks want {chunks + 1} starts and {chunks} bases; found "
            f"{rows.starts.numel()} and {base_after.numel()}: slice what next_bases returned."
        )


def output_for(op: str, out: Tensor | None, inputs: Tensor, tokens: int, channels: int) -> Tensor:
    """The output of an op: `out`, or a new tensor.

    Args:
        op: name of who asks, for messages.
        out: given by the caller, or None.
        inputs: its dtype and device are the output's.
        tokens: rows of the output.
        channels: columns of the output.

    Raises:
        ValueError: `out` has another shape or dtype, or its elements are not adjacent.
    """
    if out is None:
        return torch.empty((tokens, channels), dtype=inputs.dtype, device=inputs.device)
    if out.shape != (tokens, channels) or out.stride(1) != 1 or out.dtype != inputs.dtype:
        raise ValueError(
            f"{op}: out must be ({tokens}, {channels}) of {inputs.dtype} with adjacent elements; "
            f"found {tuple(out.shape)} of {out.dtype}, strides {out.stride()}."
        )
    return out
