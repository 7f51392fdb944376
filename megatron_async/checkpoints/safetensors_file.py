"""One file of safetensors, read by calls of the system and not mapped: a file that is cut short
under its reader is an error, and no signal that ends the process.

Of a region only its bytes are read; the library's own reader without a map (safetensors 0.8) reads
the whole tensor for each. The format: eight bytes of the header's length, a JSON header with dtype,
shape and place of each tensor, and their bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import torch
from torch import Tensor

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.weight import Region, Shape

TORCH_TYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
MOST_HEADER = 100_000_000
"""Bytes of a header, as in the library."""
MOST_DIMENSIONS = 64
"""Dimensions of a tensor, as of torch's kernels."""
GAP_BYTES = 16 << 10
"""A gap in each row of a region is read with it up to this size: a call a row takes as long."""

PIECE_VALUES = 1 << 18
"""Values that are converted at once."""


_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Entry(msgspec.Struct):
    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=MOST_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]


class StoredTensor(NamedTuple):
    """A tensor of a file, of which nothing is read yet; `start` is the place of its bytes."""

    file: SafetensorsFile
    name: str
    dtype: str
    shape: Shape
    start: int
    num_bytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in torch; CheckpointError if there is none that is read."""
        if self.dtype not in TORCH_TYPES:
            raise CheckpointError(
                f"{self.file.path}: tensor {self.name!r} is stored as {self.dtype}, which is not "
                f"read (only {', '.join(TORCH_TYPES)})"
            )
        return TORCH_TYPES[self.dtype]

    def read(self, region: Region | None = None) -> Tensor:
        """A region of the tensor, or all of it, on the CPU.

        Raises:
            CheckpointError: the file has been cut short, or cannot be read.
        """
        region = _whole(self.shape) if region is None else region
        shape = [part.stop - part.start for part in region]
        found = torch.empty(shape, dtype=self.torch_dtype)
        self._read(self.start, self.shape, region, found)
        return found

    def place_of(self, region: Region) -> int | None:
        """Place in the file of a region's first byte, if all of its bytes lie together."""
        place, size = self.start, self.num_bytes
        is_row = True
        for part, whole in zip(region, self.shape, strict=True):
            if not is_row and part != slice(0, whole):
                return None
            size //= max(whole, 1)
            place += part.start * size
            is_row &= part.stop - part.start == 1
        return place

    def copy_to(self, place: Tensor, start: int) -> None:
        """Fill a contiguous tensor of the host with values that lie together in the file, at
        `start`. They are converted in pieces that stay in the cache; of its dtype none is copied
        twice.

        Raises:
            CheckpointError: as `read`.
        """
        if place.dtype == self.torch_dtype:
            self.file.fill(self.name, start, place)
            return
        for target in place.view(-1).split(PIECE_VALUES):
            piece = torch.empty(len(target), dtype=self.torch_dtype)
            self.file.fill(self.name, start, piece)
            target.copy_(piece)
            start += piece.nbytes

    def pieces(self) -> Iterator[Tensor]:
        """The tensor's bytes, whatever its dtype, in pieces."""
        for first in range(0, self.num_bytes, 4 * PIECE_VALUES):
            size = min(4 * PIECE_VALUES, self.num_bytes - first)
            piece = torch.empty(size, dtype=torch.uint8)
            self.file.fill(self.name, self.start + first, piece)
            yield piece

    def _read(self, start: int, shape: Shape, region: Region, found: Tensor) -> None:
        """Read the region of a part of the tensor that begins at `start`."""
        row, inner = math.prod(shape[1:]) * found.itemsize, _whole(shape[1:])
        if region[1:] == inner:
            first = region[0].start * row if region else 0
            self.file.fill(self.name, start + first, found)
            return
        if row - found[:1].nbytes <= GAP_BYTES:
            whole = torch.empty([len(found), *shape[1:]], dtype=found.dtype)
            self._read(start, shape, (region[0], *inner), whole)
            found.copy_(whole[:, *region[1:]])
            return
        for number, of_row in enumerate(found, region[0].start):
            self._read(start + number * row, shape[1:], region[1:], of_row)


def _whole(shape: Shape) -> Region:
    return tuple(slice(0, size) for size in shape)


class SafetensorsFile:
    """An open file.

    Args:
        path: of the file.

    Attributes:
        tensors: what it holds, by name.
        metadata: texts of the header.

    Raises:
        CheckpointError: it cannot be opened, or its header does not describe it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not path.is_file():
                raise OSError("it is no file")
            self._stream = path.open("rb", buffering=0)
            self._was = self._state
            self.metadata, self.tensors = self._read_header()
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{path}: not a readable safetensors file, truncated or corrupt ({error}); fetch "
                "it again"
            ) from error

    def fill(self, name: str, start: int, place: Tensor) -> None:
        """Read a contiguous tensor of host memory from the bytes of tensor `name` at `start`.

        Raises:
            CheckpointError: the file ends before, or cannot be read.
        """
        view = memoryview(place.view(-1).view(torch.uint8).numpy())
        while len(view):
            try:
                count = os.preadv(self._stream.fileno(), [view], start)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path}: cannot read tensor {name!r}: {error}"
                ) from error
            if not count:
                raise CheckpointError(
                    f"{self.path}: ends within tensor {name!r}, as it was cut short while it was "
                    "read: write a new file instead, and rename it"
                )
            start, view = start + count, view[count:]

    def close(self) -> None:
        """Close it; a cycle of references holds it otherwise until garbage is looked for."""
        self._stream.close()

    def check_unchanged(self) -> None:
        """Raise `CheckpointError` if the file was written to since it was opened."""
        if self._state != self._was:
            raise CheckpointError(
                f"{self.path}: was written to while it was read: write a new file instead, and "
                "rename it"
            )

    @property
    def _state(self) -> tuple[int, int]:
        found = os.fstat(self._stream.fileno())
        return found.st_size, found.st_mtime_ns

    def _read_header(self) -> tuple[dict[str, str], dict[str, StoredTensor]]:
        """ValueError: the header is none, or its tensors do not fill the file."""
        num_bytes = self._was[0]
        length = int.from_bytes(self._stream.read(8), "little")
        if not 2 <= length <= min(MOST_HEADER, num_bytes - 8):
            raise ValueError(f"a header of {length} bytes in a file of {num_bytes}")
        header = os.pread(self._stream.fileno(), length, 8)
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(
            raw.pop("__metadata__", None) or b"null", type=dict[str, str] | None
        )
        found = {}
        for name, given in raw.items():
            entry = msgspec.json.decode(given, type=_Entry)
            first, end = entry.data_offsets
            item = TORCH_TYPES[entry.dtype].itemsize if entry.dtype in TORCH_TYPES else None
            if end < first or (item and math.prod(entry.shape) * item != end - first):
                raise ValueError(f"tensor {name!r:.200} has no such bytes: {bytes(given)!r:.200}")
            place = 8 + length + first, end - first
            found[name] = StoredTensor(self, name, entry.dtype, tuple(entry.shape), *place)
        last = 8 + length
        for each in sorted(found.values(), key=lambda each: (each.start, each.num_bytes)):
            if each.start != last:
                raise ValueError(
                    f"tensor {each.name!r:.200} begins at byte {each.start}, where the one before "
                    f"it ends at {last}"
                )
            last += each.num_bytes
        if last != num_bytes:
            raise ValueError(f"{last} bytes by its header, and it has {num_bytes}")
        # Of equal names the last one counts; only the metadata's would leave no hole in the file.
        if header.count(b"_metadata__") > 1 or b"\\u" in header:
            pairs = json.loads(header, object_pairs_hook=list)
            if sum(name == "__metadata__" for name, _ in pairs) > 1:
                raise ValueError("its header has __metadata__ twice")
        return metadata or {}, found
