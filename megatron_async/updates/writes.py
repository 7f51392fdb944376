"""One tensor on its way into a parameter: whether it can be copied, and the copy."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_async.checkpoints.huggingface import DTYPES
from megatron_async.checkpoints.mapping import Weight
from megatron_async.devices import makes_ordinary_tensors
from megatron_async.errors import UpdateError


class Write(NamedTuple):
    """Values for a place, by the conventions of the names that they came under."""

    sent: str
    place: Tensor
    values: Tensor
    weight: Weight
    is_scaled: bool

    def run(self, non_blocking: bool = False) -> None:
        """Write them; `non_blocking`: in launched work, where nobody changes the values."""
        values = self.values
        if self.is_scaled:
            values = values.float() * self.weight.scale + self.weight.offset
        self.place.copy_(values.reshape(self.place.shape), non_blocking=non_blocking)


def checked(name: str, tensor: Any) -> Tensor:
    """A tensor that can be copied, without gradients."""
    what = None
    if not isinstance(tensor, Tensor):
        what = f"is a {type(tensor).__name__} and no tensor"
    elif hasattr(tensor, "full_tensor"):
        what = "is a DTensor; send tensor.full_tensor()"
    elif tensor.layout is not torch.strided:
        what = f"is {tensor.layout}; sparse forms and deltas are not served, send it dense"
    elif tensor.dtype not in DTYPES.values():  # each is converted to the parameter's
        what = f"is {tensor.dtype}; send {', '.join(map(str, DTYPES.values()))}"
    elif tensor.is_meta:
        what = "is on the meta device and has no numbers"
    if what is not None:
        raise UpdateError(f"tensor {name!r} {what}.")
    found: Tensor = tensor.detach()
    return found


def check_twins(first: Write, second: Write) -> None:
    """Raise if embedding and output layer, which are one weight here, differ."""
    like = first.place
    values = [each.values.reshape(like.shape).to(like) for each in (first, second)]
    if not torch.equal(*values):
        raise UpdateError(
            f"tensors {first.sent!r} and {second.sent!r} differ, and are one weight in this model "
            "(tie_word_embeddings): send one of them."
        )


@makes_ordinary_tensors
def copy_all(jobs: list[tuple[Tensor, Tensor]], later: list[Write]) -> None:
    """The copies of a commit, in launched work."""
    for parameter, spare in jobs:
        parameter.copy_(spare, non_blocking=True)
        _keep_for_stream(spare)
    for write in later:
        write.run(non_blocking=True)
        _keep_for_stream(write.values)


def _keep_for_stream(tensor: Tensor) -> None:
    """Let the memory of a tensor that others made be taken only when this stream has read it."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
