"""Tensors of a GPU in a pickle, as torch's multiprocessing writes them, read as data.

Nothing is imported or called: names are looked up in a table, where torch's rebuild function stands
for a record of its arguments. Every other name and instruction is refused. Nor is torch imported.

Facts: `torch/multiprocessing/reductions.py` of torch 2.11; `srt/utils/patch_torch.py` and
`srt/weight_sync/tensor_bucket.py` of SGLang 0.5.23; vLLM's `ipc_engine.py`.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, override

from megatron_async.checkpoints.plain_pickle import KnownNames

DTYPES = {
    "float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64", "uint8": "U8",
    "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""torch's names of dtypes -> safetensors'."""
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "I16": 2, "I32": 4, "I64": 8}
"""Bytes of an element, where it has more than one."""
MOST_SIZE = 2**48
MOST_DIMENSIONS = 8
MOST_TENSORS = 2**16
MOST_GPUS = 16
MOST_NAME = 1024
"""Letters of a tensor's name: a pickle may repeat one without its letters."""
MOST_BYTES = 8 << 20
"""Bytes of a pickle, some 200 for each tensor."""
MOST_INSTRUCTIONS = 3 << 20
"""Some 50 for each tensor; a million is read in a second."""
MOST_STACK, MOST_MARKS = 1 << 14, 64
"""Values that are not in a container yet (Python's pickler has at most 2000 in one), and containers
that are not closed."""
MOST_HANDLE_BYTES = 256
"""CUDA's handles have 64 bytes, those of torch's counters are names of files."""
FIELDS_OF_A_TENSOR = 15
"""Arguments of torch's `rebuild_cuda_tensor`."""


class NotData(ValueError):
    """A pickle that is not read: the message says what in it, and what to do."""


class CudaMemory(NamedTuple):
    """Memory of another process on a GPU of this host, as torch shares it; sizes in bytes.
    `device` is its number or its UUID; without a `handle` there is none (a tensor without
    elements)."""

    device: int | str
    handle: bytes | None
    size: int
    offset: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


class SentTensor(NamedTuple):
    """A tensor: its dtype by safetensors' name, its stride, and where it begins in its memory, both
    in elements."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    memory: CudaMemory
    offset: int


Named = list[tuple[str, SentTensor]]


class _Known:
    """Stands for a function or class of the table. It has no attributes that a pickle can set: none
    changes what another one meets."""

    __slots__ = ("_call", "_name")

    def __init__(self, name: str, call: Callable[..., Any] | None = None) -> None:
        self._name, self._call = name, call

    def __call__(self, *arguments: Any) -> Any:
        if self._call is None:
            raise NotData(f"it calls {self._name}: send tensors.")
        return self._call(*arguments)

    def __setstate__(self, _state: Any) -> None:
        raise NotData(f"it sets attributes of {self._name}: send tensors.")


class _BucketPart:
    """SGLang's `FlattenedTensorMetadata`: where a tensor lies in a flattened one."""

    __slots__ = ("fields",)

    def __setstate__(self, state: Any) -> None:
        self.fields = state


def _counted(follow: Callable[[Any], None]) -> Callable[[Any], None]:
    """An instruction that is followed as long as there are not too many."""

    def counted(self: Any) -> None:
        self.instructions += 1
        if (
            self.instructions > MOST_INSTRUCTIONS
            or len(self.stack) > MOST_STACK
            or len(self.metastack) > MOST_MARKS
        ):
            raise NotData(
                f"it has more than {MOST_INSTRUCTIONS} instructions, {MOST_STACK} loose values or "
                f"{MOST_MARKS} open containers: send fewer tensors at once."
            )
        follow(self)

    return counted


class _DataUnpickler(KnownNames, pickle._Unpickler):
    """Makes numbers, texts, bytes, lists, tuples, dictionaries and records of the table. It is the
    unpickler that Python's library has in Python: no length in the bytes makes it reserve memory,
    and its instructions are a table too."""

    instructions = 0
    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    @override
    def unknown(self, module: str, name: str) -> Any:
        raise NotData(
            f"it names {module}.{name}"[:200] + ", and only torch's tensors of a GPU are read: "
            "send other tensors by a process group, or as a folder."
        )

    def load_setitem(self) -> None:
        """One item. Only texts are keys: others may take any time to hash."""
        value, key = self.stack.pop(), self.stack.pop()
        self._set(key, value)

    def load_setitems(self) -> None:
        """Several items."""
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._set(key, value)

    def _set(self, key: Any, value: Any) -> None:
        target = self.stack[-1]
        if type(target) is not dict or type(key) is not str:
            raise NotData("it has a dictionary whose keys are no texts.")
        target[key] = value

    _plain = (
        pickle.PROTO + pickle.FRAME + pickle.STOP + pickle.MARK + pickle.NONE + pickle.NEWTRUE
        + pickle.NEWFALSE + pickle.BININT + pickle.BININT1 + pickle.BININT2 + pickle.LONG1
        + pickle.SHORT_BINUNICODE + pickle.BINUNICODE + pickle.SHORT_BINBYTES + pickle.BINBYTES
        + pickle.EMPTY_TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3 + pickle.TUPLE
        + pickle.EMPTY_LIST + pickle.APPEND + pickle.APPENDS + pickle.EMPTY_DICT + pickle.MEMOIZE
        + pickle.BINPUT + pickle.LONG_BINPUT + pickle.BINGET + pickle.LONG_BINGET + pickle.GLOBAL
        + pickle.STACK_GLOBAL + pickle.REDUCE + pickle.NEWOBJ + pickle.BUILD
    )  # fmt: skip
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **{code: _counted(pickle._Unpickler.dispatch[code]) for code in _plain},
        pickle.SETITEM[0]: _counted(load_setitem),
        pickle.SETITEMS[0]: _counted(load_setitems),
    }


def read_named_tensors(data: bytes, is_flattened: bool) -> Named:
    """The tensors of SGLang's `serialized_named_tensors`: a list of names and tensors, or
    (`is_flattened`) one of bytes, with what lies where in it.

    Raises:
        NotData: it names something that is no tensor, is damaged, or of another form.
    """
    value = _load(data)
    found = _of_bucket(value) if is_flattened else _entries(value)
    for item in found:
        match item:
            case (str() as name, SentTensor()) if len(name) <= MOST_NAME:
                continue
        raise NotData("it is no list of names and tensors.")
    return found


def read_handles(
    data: bytes, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> Named:
    """The tensors of vLLM's `ipc_handles_pickled`: for each name, by the UUID of a GPU, the
    function that rebuilds it and its arguments. The UUID is their `device`.

    Raises:
        NotData: as `read_named_tensors`; or a dtype or shape is not what is said beside it.
    """
    value, found = _entries(_load(data)), list[tuple[str, SentTensor]]()
    if not len(value) == len(names) == len(dtypes) == len(shapes):
        raise NotData("it is no list with an entry for each of names, dtype_names and shapes.")
    for name, dtype, shape, by_gpu in zip(names, dtypes, shapes, value, strict=True):
        if type(by_gpu) is not dict or len(by_gpu) > MOST_GPUS:
            raise NotData(f"the handles of {name[:200]!r} are not of at most {MOST_GPUS} GPUs.")
        for gpu, pair in by_gpu.items():
            match pair:
                case (_Known() as rebuild, tuple() as arguments):
                    tensor = rebuild(*arguments)
                case _:
                    tensor = None
            if not isinstance(tensor, SentTensor):
                raise NotData(f"the handle of {name[:200]!r} is no tensor of a GPU.")
            if (tensor.dtype, tensor.shape) != (dtype_named(dtype), tuple(shape)):
                raise NotData(
                    f"{name[:200]!r} is {tensor.dtype} {list(tensor.shape)} by its handle, and "
                    f"{dtype} {list(shape)} by dtype_names and shapes."
                )
            memory = tensor.memory._replace(device=_device(gpu))
            found.append((name, tensor._replace(memory=memory)))
    return found


def dtype_named(name: str) -> str:
    """Safetensors' name of a dtype of torch, with or without "torch." before it.

    Raises:
        NotData: there is none.
    """
    found = DTYPES.get(name.removeprefix("torch."))
    if found is None:
        raise NotData(f"dtype {name[:50]!r} is not known: use one of {', '.join(DTYPES)}.")
    return found


# ---- What the table's names stand for ------------------------------------------------------------


def _load(data: bytes) -> Any:
    if len(data) > MOST_BYTES:
        raise NotData(
            f"it has {len(data)} bytes, and {MOST_BYTES} are read: send fewer tensors at once."
        )
    try:
        return _DataUnpickler(io.BytesIO(data)).load()
    except NotData:
        raise
    except Exception as error:  # damaged bytes are read as anything
        raise NotData(
            f"it is damaged, or holds more than data ({type(error).__name__}): send torch's "
            "tensors, pickled with protocol 3 or later."
        ) from error


def _entries(value: Any) -> list[Any]:
    if type(value) is not list or len(value) > MOST_TENSORS:
        raise NotData(f"it is no list of at most {MOST_TENSORS} names and tensors.")
    return value


def _device(value: Any) -> int | str:
    if type(value) is str and len(value) <= 64:
        return value
    return _number(value)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST_SIZE:
        raise NotData(f"a {type(value).__name__} is no size, place or device of a tensor.")
    return value


def _size(sizes: Any) -> tuple[int, ...]:
    if not isinstance(sizes, tuple | list) or len(sizes) > MOST_DIMENSIONS:
        raise NotData(f"it has a tensor without a shape, or of more than {MOST_DIMENSIONS} sizes.")
    return tuple(map(_number, sizes))


def _bytes(value: Any) -> bytes:
    if value is not None and not (isinstance(value, bytes) and len(value) <= MOST_HANDLE_BYTES):
        raise NotData(f"a handle is no text of at most {MOST_HANDLE_BYTES} bytes.")
    return value or b""


def _rebuild_cuda_tensor(*arguments: Any) -> SentTensor:
    """torch's, with the same arguments. The tensor must lie in its memory."""
    if len(arguments) != FIELDS_OF_A_TENSOR:
        raise NotData(f"a tensor has {len(arguments)} fields: torch's has {FIELDS_OF_A_TENSOR}.")
    _, shape, stride, offset, _, dtype, device, handle, *rest = arguments
    size, place, _, ref_counter, ref_place, event, waits = rest
    memory = CudaMemory(
        _device(device), _bytes(handle) or None, _number(size), _number(place or 0),
        _bytes(ref_counter), _number(ref_place or 0), _bytes(event), waits is True,
    )  # fmt: skip
    shape, stride, offset = _size(shape), _size(stride), _number(offset)
    if dtype not in DTYPES.values() or len(shape) != len(stride):
        raise NotData("a tensor has no dtype that is known, or its stride is not its shape's.")
    last = sum((size - 1) * step for size, step in zip(shape, stride)) if all(shape) else -1
    item = ITEM_BYTES.get(dtype, 1)
    if (offset + last + 1) * item > (memory.size if memory.handle else 0):
        raise NotData(f"a tensor of shape {list(shape)} does not lie within its memory.")
    return SentTensor(dtype, shape, stride, memory, offset)


def _of_bucket(value: Any) -> Named:
    """The tensors of a flattened one; places count in its elements."""
    match value:
        case {
            "flattened_tensor": SentTensor(shape=(length,)) as whole,
            "metadata": parts,
        }:
            parts = _entries(parts)
        case _:
            raise NotData('it is no flattened bucket, as load_format="flattened_bucket" says.')
    item, found = ITEM_BYTES.get(whole.dtype, 1), list[tuple[str, SentTensor]]()
    for part in parts:
        match getattr(part, "fields", None):
            case {"name": str() as name, "dtype": str() as dtype, "shape": shape,
                  "start_idx": start, "end_idx": end}:  # fmt: skip
                shape, begin, behind = _size(shape), _number(start) * item, _number(end) * item
            case _:
                raise NotData("a part of the bucket is in a form that is not known.")
        own = ITEM_BYTES.get(dtype, 1)
        place, rest = divmod(whole.offset * item + begin, own)
        is_whole = whole.stride == (1,) and dtype in DTYPES.values() and not rest
        if not is_whole or behind - begin != math.prod(shape) * own or behind > length * item:
            raise NotData(f"{name[:200]!r} does not lie in its bucket as its shape says.")
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        found.append((name, SentTensor(dtype, shape, stride, whole.memory, place)))
    return found


_DataUnpickler.known = {
    **{("torch", name): known for name, known in DTYPES.items()},
    **{
        (module, name): _Known(f"{module}.{name}", call)
        for module, name, call in (
            ("torch", "Tensor", None),
            ("torch", "Size", _size),
            ("torch.nn.parameter", "Parameter", None),
            ("torch.storage", "UntypedStorage", None),
            ("torch.storage", "TypedStorage", None),
            ("torch.multiprocessing.reductions", "rebuild_cuda_tensor", _rebuild_cuda_tensor),
            ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified", _rebuild_cuda_tensor),
        )
    },
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): _BucketPart,
}
