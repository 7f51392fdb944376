"""Tensors on their way into parameters: whether they can be copied, and the copies."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_async.checkpoints.huggingface import DTYPES
from megatron_async.checkpoints.mapping import Weight
from megatron_async.devices import Device, makes_ordinary_tensors
from megatron_async.errors import UpdateError
from megatron_async.ops.linear.quantised_layout import quantise
from megatron_async.ops.linear.quantised_weight import QuantisedWeight

LARGE = 32 << 20
"""Bytes."""
LEAST_PIECE = 16 << 10
"""Bytes."""
WORD = torch.int32
"""Elements as which equal dtypes are copied together: a thread of torch's kernel takes four at
once, and 16 bytes are the most that it can."""


EVERY_S = 0.0005
"""Seconds."""


def giving_way[T](items: Iterable[T]) -> Iterator[T]:
    """The items, for long work beside the engine's thread: that may have the interpreter every
    half millisecond. Without this it would wait 5 ms each time that it comes back from a wait
    (`sys.getswitchinterval`), so that a step of 2 ms took 7."""
    due = 0.0
    for item in items:
        if time.perf_counter() >= due:
            time.sleep(0)
            due = time.perf_counter() + EVERY_S
        yield item


def let_go(things: list[Any]) -> None:
    """Empty a list: to close a GPU's shared memory takes 11 ms a gigabyte (H200), in which the
    engine's thread is to have the interpreter again and again."""
    for _ in giving_way(range(len(things))):
        things.pop()


class Write(NamedTuple):
    """Values for a place, by the conventions of the names that they came under."""

    sent: str
    place: Tensor
    values: Tensor
    weight: Weight
    is_scaled: bool

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """The place, and the values in its shape."""
        return self.place, self.values.reshape(self.place.shape)

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
    found: Tensor = tensor.detach().resolve_neg()
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


class Copies:
    """All copies of a commit, made ready on any thread, so that the engine's thread has little to
    do. To launch a copy may take it longer than a GPU takes to copy less than `LARGE` bytes, so
    smaller ones go together, in few kernels.

    Args:
        device: where they are made.
        pairs: places and the values for them, of equal shapes, as they are.
        scaled: writes that compute something.
        rounded: quantised weights and the whole numbers of each.
    """

    def __init__(
        self,
        device: Device,
        pairs: Iterable[tuple[Tensor, Tensor]],
        scaled: Iterable[Write],
        rounded: Iterable[tuple[QuantisedWeight, Tensor]] = (),
    ) -> None:
        self._scaled, self._rounded = list(scaled), list(rounded)
        self._alone: list[tuple[Tensor, Tensor]] = []
        self._together: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for place, values in giving_way(pairs):
            device.keep(values)
            for piece in _dense_pieces(place, values):
                self._add(*piece)
        for values in (write.values for write in self._scaled):
            device.keep(values)
        for _, values in self._rounded:
            device.keep(values)

    def _add(self, place: Tensor, values: Tensor) -> None:
        is_dense = place.is_contiguous() and values.is_contiguous()
        if not is_dense or place.nbytes >= LARGE or place.device != values.device:
            self._alone.append((place, values))
            return
        flat = place.view(-1), values.view(-1)
        if place.dtype == values.dtype and not any(map(_is_odd, flat)):
            flat = flat[0].view(WORD), flat[1].view(WORD)
        places, sources = self._together.setdefault((flat[0].dtype, flat[1].dtype), ([], []))
        places.append(flat[0])
        sources.append(flat[1])

    @makes_ordinary_tensors
    def run(self) -> None:
        """Make them, in launched work."""
        for places, sources in self._together.values():
            torch._foreach_copy_(places, sources, non_blocking=True)
        for place, values in self._alone:
            place.copy_(values, non_blocking=True)
        for write in self._scaled:
            write.run(non_blocking=True)
        for into, numbers in self._rounded:
            quantise(numbers.to(into.device, non_blocking=True), into)


def _is_odd(flat: Tensor) -> bool:
    """Whether a tensor is not made of whole words, or of so few elements that torch takes any
    stride and place for right, but not to view them as words."""
    is_whole = flat.nbytes % WORD.itemsize == 0 == flat.data_ptr() % WORD.itemsize
    return not is_whole or flat.numel() < 2


def _dense_pieces(place: Tensor, values: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Pieces of a copy that are whole ranges of memory, where these are large: heads of a
    joined q, k and v lie apart, and a kernel would compute the place of each element."""
    is_apart = place.dim() > 1 and not place.is_contiguous() and values.is_contiguous()
    if is_apart and len(place) and place[0].is_contiguous() and place[0].nbytes >= LEAST_PIECE:
        return zip(place, values, strict=True)
    return [(place, values)]
