"""Fields of the verbs of a weight update, as they come from a client: data, checked before use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from megatron_async.serving.messages import Name, Version

MOST_LOAD_BYTES = 64 << 20
"""Most bytes of tensors in one message: larger tensors come in pieces."""
MOST_SIZE = 2**48
"""Most bytes of a tensor, and its largest dimension."""
MOST_LIMIT_S = 86_400.0

Key = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
"""Secret of a round: its sender must know it."""
Size = Annotated[int, msgspec.Meta(ge=0, le=MOST_SIZE)]
Shape = Annotated[list[Size], msgspec.Meta(max_length=8)]
Dtype = Annotated[str, msgspec.Meta(max_length=16)]
"""Name of a type, as safetensors has it."""


class Fields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of a verb; by itself, none."""


class Source(Fields):
    """Where tensors will come from. `name`: of a trainer's process group."""

    kind: Literal["tensors", "folder", "group", "ipc"] = "tensors"
    name: Name = ""


class Begin(Fields):
    """Fields of `weights_begin`; docs/rl.md tells what each means.

    Attributes:
        time_limit_s: seconds without a message of the round after which it is dropped.
    """

    round: Key | None = None
    version: Version | None = None
    staging: Literal["auto", "direct", "device", "host", "none"] = "auto"
    names: Literal["auto", "huggingface", "megatron", "megatron_gpt"] = "auto"
    selector: Literal["all", "target", "draft"] = "all"
    policy: Literal["keep", "recompute", "abort"] = "keep"
    way: Literal["together", "rolling"] = "together"
    partial: bool = False
    checks_finite: bool = False
    source: Source = msgspec.field(default_factory=lambda: Source())
    time_limit_s: Annotated[float, msgspec.Meta(gt=0, le=MOST_LIMIT_S)] = 300.0

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the weights before is left after it."""
        return not self.partial and self.selector == "all"


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor's bytes, or some of them: `offset` is the place of the first. Pieces of a tensor
    come in order, and in messages after each other."""

    name: Annotated[str, msgspec.Meta(max_length=1024)]
    dtype: Dtype
    shape: Shape
    data: bytes
    offset: Size = 0


class Broadcast(Fields):
    """Tensors that a group's rank 0 broadcasts, in this order; `packed`: several at once, as vLLM's
    trainers do."""

    name: Name
    names: list[str]
    dtypes: list[Dtype]
    shapes: list[Shape]
    packed: bool = False


class Load(Fields):
    """Fields of `weights_load`: one of the last four. A version is the round's."""

    round: Key
    version: Version | None = None
    tensors: list[Piece] | None = None
    folder: Name | None = None
    group: Broadcast | None = None
    handles: list[Any] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of tensors in this message."""
        return sum(len(piece.data) for piece in self.tensors or ())

    def check(self) -> None:
        """Raise ValueError if it is not one of the four, or too large."""
        given = [self.tensors, self.folder, self.group, self.handles]
        if sum(each is not None for each in given) != 1:
            raise ValueError("give one of tensors, folder, group and handles.")
        if self.num_bytes > MOST_LOAD_BYTES:
            raise ValueError(
                f"{self.num_bytes} bytes of tensors came at once: send at most {MOST_LOAD_BYTES}, "
                "and a larger tensor in pieces."
            )


class Drop(Fields):
    """Fields of `weights_drop`."""

    round: Key


class Finish(Drop):
    """Fields of `weights_finish`; its version is the round's, if it is given."""

    version: Version | None = None


class Label(Fields):
    """Fields of `weights_label`."""

    version: Version


class Group(Fields):
    """Fields of `weights_group`: a trainer's process group, which all ranks of all replicas join
    from `rank_offset` on; or its end."""

    name: Name
    address: Name = ""
    rank_offset: Annotated[int, msgspec.Meta(ge=1, le=2**20)] = 1
    world_size: Annotated[int, msgspec.Meta(ge=0, le=2**20)] = 0
    backend: Literal["nccl", "gloo"] = "nccl"
    destroy: bool = False


def read_fields[Kind: Fields](fields: Mapping[str, Any], kind: type[Kind]) -> Kind:
    """The fields of a verb.

    Raises:
        ValueError: one is unknown, missing, of another type or out of its range.
    """
    try:
        return msgspec.convert(dict(fields), kind, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        takes = ", ".join(kind.__struct_fields__) or "no fields"
        raise ValueError(f"{error}: this verb takes {takes}.") from None
