"""Reading a pickle that others wrote: known plain classes are made, any other is left unread.

A checkpoint of a training run holds whatever was in the run's arguments: enums of the installed or
of another Megatron, classes of the user's own program. Nothing of these is imported or called here.
Each becomes an `UnreadObject`, so that it stops only code that needs its value.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, BinaryIO, override

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.serialization import _get_layout

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.plain_pickle import KnownNames

ARGUMENT_CLASSES = (Namespace, SimpleNamespace, OrderedDict, set, frozenset, bytearray, complex)
"""Classes of training arguments whose value is read."""

METADATA_CLASSES = (
    metadata.Metadata,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.TensorProperties,
    metadata.ChunkStorageMetadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    _get_layout,
    OrderedDict,
)
"""What the index of a distributed checkpoint consists of."""

LARGEST_PICKLE = 1 << 28
"""Bytes of the arguments of a training run, once inflated; a run has some 100 KB of them."""


class UnreadObject:
    """Stands for an object of an unknown class (`class_name`, with its module), and takes whatever
    a pickle gives it."""

    class_name = ""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> UnreadObject:
        """The pickled arguments are dropped."""
        return super().__new__(cls)

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """The pickled arguments are dropped."""

    def __call__(self, *_args: Any, **_kwargs: Any) -> UnreadObject:
        """What a pickled function would have given is unread too."""
        return self

    def __setstate__(self, _state: Any) -> None:
        """The pickled attributes are dropped."""

    def __setitem__(self, _key: Any, _value: Any) -> None:
        """An item of a mapping of an unknown class is dropped."""

    def append(self, _item: Any) -> None:
        """An item of a list of an unknown class is dropped."""

    def extend(self, _items: Any) -> None:
        """Items of a list of an unknown class are dropped."""

    def add(self, _item: Any) -> None:
        """An item of a set of an unknown class is dropped."""

    def __repr__(self) -> str:
        return f"<{self.class_name}, not read>"


class PlainUnpickler(KnownNames, pickle.Unpickler):
    """A pickle in which only the given classes (and functions) are made, and torch's dtypes and
    sizes. Names are looked up in a table and never imported, so nothing that a pickle names can
    run."""

    def __init__(self, file: BinaryIO | io.BytesIO, known: tuple[Callable[..., Any], ...]) -> None:
        super().__init__(file)
        self.known = {(item.__module__, item.__qualname__): item for item in known}
        self.known["builtins", "getattr"] = _inner_class  # how protocol 2 names an inner class

    @override
    def unknown(self, module: str, name: str) -> Any:
        if module == "torch":
            value = getattr(torch, name, None)
            if value is torch.Size or isinstance(value, torch.dtype):
                return value
        return _unread_class(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> UnreadObject:
        """A tensor, whose bytes are elsewhere: left unread."""
        return _unread_class("torch.Tensor")()


class TrainingArguments(Mapping[str, Any]):
    """Arguments of a training run by name, as a checkpoint holds them. A value of an unknown class
    is refused only where it is needed, with the remedy."""

    def __init__(self, values: Mapping[str, Any], where: str, remedy: str) -> None:
        self._values, self._where, self._remedy = values, where, remedy

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        items = value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(item, UnreadObject) for item in items):
            raise CheckpointError(
                f"{self._where}: {name} = {value!r} is an object of a class that is not read from "
                f"checkpoints; {self._remedy}"
            )
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def load_common_state(data: bytes) -> Any:
    """What `torch.save` wrote into a file, without its tensors and without objects of unknown
    classes. Where the file is damaged, an exception of any class: a pickle reads damaged bytes as
    anything."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        if archive.getinfo(name).file_size > LARGEST_PICKLE:
            raise ValueError(f"{name} is larger than {LARGEST_PICKLE >> 20} MiB")
        return PlainUnpickler(io.BytesIO(archive.read(name)), ARGUMENT_CLASSES).load()


def _unread_class(class_name: str) -> type[UnreadObject]:
    return type("UnreadObject", (UnreadObject,), {"class_name": class_name})


def _inner_class(outer: Any, name: str) -> type[UnreadObject]:
    return _unread_class(f"{getattr(outer, 'class_name', '') or outer!r}.{name}")
