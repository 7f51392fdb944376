"""Products of more than 64 rows whose order of sums does not depend on the rows, by cuBLASLt.

The matrix units add up in one order (`IN_ORDER`), in cuBLASLt's kernels too, as long as the inputs
are not divided: among programs, whose partial sums need a workspace, or among the warps of one. So
it is called with a handle of our own, without a workspace, and by algorithms that are proven: on
random numbers they have the bits of `tile_kernel`. Torch's own calls stay as they are. (Of more
tiles than two or three for each processor cuBLASLt's check names 4 bytes, for a count of tiles,
though its heuristic named none: without them it multiplies as fast, docs/records/one_order.md.)

For a weight's shape and each class of rows (`CLASSES`), cuBLASLt's heuristic is asked once, outside
of a capture; the class's algorithm then multiplies any number of its rows. Where there is none, and
in a process without the library, `tile_kernel` multiplies: it is slower, and its bits are the same.
For that reason ranks and replicas agree even where they prove different algorithms.

Names, sizes and values are those of NVIDIA's `cublasLt.h`, of CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
import logging
import os
from bisect import bisect_left
from collections.abc import Iterator
from ctypes import c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from megatron_async.ops.linear.product_kernel import (
    IN_ORDER,
    MAX_ROWS,
    Activation,
    Operands,
    Problem,
    ProductKernel,
    may_be_copied,
)
from megatron_async.ops.linear.tile import TilePlan, tile_plan, tile_product

logger = logging.getLogger("megatron_async")

CLASSES = (
    *range(72, 256, 8), *range(256, 512, 32), *range(512, 1024, 128), *range(1024, 2048, 256),
    *range(2048, 4096, 512), *range(4096, 8193, 1024),
)  # fmt: skip
"""Most rows of each class; more have the last one's algorithm. Few rows have many classes: products
of Llama-3.1-8B by 72 and 144 rows took 1.0 to 1.6 times cuBLAS's with the algorithms of 128 and 192
rows."""
ALIGNMENT = 16
"""Bytes: all that an algorithm may ask of addresses."""
ASKED = 16
"""Most algorithms that the heuristic names for a class."""
PROOF_ROWS, PROOF_OUTPUTS = 256, 2048
"""Size of the products by which algorithms are compared."""

DTYPES = {torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
FLOAT32, COMPUTE_FLOAT32 = 0, 68  # CUDA_R_32F, CUBLAS_COMPUTE_32F
TRANSPOSE_A, EPILOGUE, BIAS_POINTER = 3, 7, 8  # cublasLtMatmulDescAttributes_t
TRANSPOSED, ADD_BIAS = 1, 4  # CUBLAS_OP_T, CUBLASLT_EPILOGUE_BIAS
WORKSPACE, ALIGNMENTS = 1, (5, 6, 7, 8)  # cublasLtMatmulPreferenceAttributes_t
SPLITS, REDUCTION = 2, 3  # cublasLtMatmulAlgoConfigAttributes_t

Layout = c_uint64 * 8
Operation = c_uint64 * 32
Preference = c_uint64 * 8
Algorithm = c_uint64 * 8


class Answer(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`."""

    _fields_: ClassVar = [
        ("algorithm", Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class CublasLtError(RuntimeError):
    """cuBLASLt's answer to a call was not success."""


@dataclass(frozen=True)
class CublasLtPlan:
    """The class of a product's rows, and what multiplies where cuBLASLt does not."""

    most_rows: int
    tiles: TilePlan

    @property
    def splits(self) -> int:
        """Shares of the inputs."""
        return 1


def cublas_lt_plan(problem: Problem) -> CublasLtPlan | None:
    """The layout of a product in one order, of more rows than our own kernels are made for."""
    if not problem.invariant or problem.rows <= MAX_ROWS or problem.dtype not in DTYPES:
        return None
    tiles = tile_plan(problem)
    if tiles is None or not problem.aligned or problem.gated or problem.outputs % 8:
        return None
    return CublasLtPlan(CLASSES[min(bisect_left(CLASSES, problem.rows), len(CLASSES) - 1)], tiles)


def cublas_lt_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation, plan: CublasLtPlan
) -> Tensor:
    """`product` by a given plan."""
    given = Operands(x, weight, bias, activation)
    fits = not activation and may_be_copied(x) and may_be_copied(weight)
    if fits and (bias is None or bias.data_ptr() % ALIGNMENT == 0) and (lt := _here(x)):
        shape = Shape(x.device, given.outputs, x.size(1), x.dtype, bias is not None)
        algorithm = _algorithms_of(shape).get(plan.most_rows)
        if algorithm is not None:
            out = torch.empty((x.size(0), given.outputs), dtype=x.dtype, device=x.device)
            if lt.multiply(x, weight, bias, out, algorithm):
                return out
            _tell_of_refusal(shape)
    return tile_product(x, weight, bias, activation, plan.tiles)


CUBLAS_LT = ProductKernel("cuBLASLt", cublas_lt_plan, lambda *_: set(), cublas_lt_product, IN_ORDER)


class Shape(NamedTuple):
    """What algorithms depend on, besides the rows."""

    device: torch.device
    outputs: int
    k: int
    dtype: torch.dtype
    has_bias: bool


class CublasLt:
    """The calls, on one GPU.

    Raises:
        CublasLtError: there is no handle.
    """

    def __init__(self, library: ctypes.CDLL, device: torch.device) -> None:
        self._library = library
        self._one, self._zero = c_float(1.0), c_float(0.0)
        self._preference = Preference()
        handle = c_void_p()
        with torch.cuda.device(device):
            self._do("cublasLtCreate", ctypes.byref(handle))
        self._handle = handle
        self._do("cublasLtMatmulPreferenceInit_internal", self._preference, 64)
        self._prefer(WORKSPACE, c_uint64(0))
        for attribute in ALIGNMENTS:
            self._prefer(attribute, c_uint32(ALIGNMENT))
        self._prepared = lru_cache(maxsize=4096)(self._prepare)
        self._operation = lru_cache(maxsize=4096)(self._operate)

    def unsplit(self, shape: Shape, rows: int) -> Iterator[bytes]:
        """Algorithms for so many rows that add up all inputs of a sum in one program, the fastest
        by cuBLASLt's own estimate first."""
        operation = self._operation(ALIGNMENT if shape.has_bias else 0)
        a, b, d = self._layouts(shape.outputs, shape.k, rows, shape.k, shape.dtype)
        answers, count = (Answer * ASKED)(), c_int()
        self._do(
            "cublasLtMatmulAlgoGetHeuristic", self._handle, operation, a, b, d, d,
            self._preference, ASKED, answers, ctypes.byref(count),
        )  # fmt: skip
        for answer in answers[: count.value]:
            if answer.state or answer.workspace:
                continue
            is_split = self._read(answer, SPLITS, c_int32()) > 1
            if not is_split and not self._read(answer, REDUCTION, c_uint32()):
                yield bytes(answer.algorithm)

    def multiply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, algorithm: bytes
    ) -> bool:
        """Launch `out = x @ weight.T + bias` on the current stream; False: the algorithm does not
        take the rows, or cuBLASLt fails, and a line was logged."""
        bias_at = 0 if bias is None else bias.data_ptr()
        rows, (outputs, k) = x.size(0), weight.shape
        key = outputs, k, rows, x.stride(0), x.dtype, bias is not None, algorithm
        if (prepared := self._prepared(*key)) is None:
            return False
        a, b, d, chosen = prepared
        status = self._library.cublasLtMatmul(
            self._handle, self._operation(bias_at),
            ctypes.byref(self._one), weight.data_ptr(), a, x.data_ptr(), b,
            ctypes.byref(self._zero), out.data_ptr(), d, out.data_ptr(), d,
            chosen, None, 0, torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
        if status:
            logger.warning("cublasLtMatmul returned status %d: our own kernel multiplies.", status)
        return not status

    def _prepare(
        self, outputs: int, k: int, rows: int, stride: int, dtype: torch.dtype, has_bias: bool,
        algorithm: bytes,
    ) -> tuple[Any, Any, Any, Any] | None:  # fmt: skip
        """What a call is given, after cuBLASLt's check."""
        operation = self._operation(ALIGNMENT if has_bias else 0)
        a, b, d = self._layouts(outputs, k, rows, stride, dtype)
        chosen, answer = Algorithm.from_buffer_copy(algorithm), Answer()
        status = self._library.cublasLtMatmulAlgoCheck(
            self._handle, operation, a, b, d, d, chosen, ctypes.byref(answer)
        )
        if status:
            logger.info("cuBLASLt takes no %d rows by %d x %d: our kernel does.", rows, outputs, k)
            return None
        return a, b, d, chosen

    def _layouts(
        self, outputs: int, k: int, rows: int, stride: int, dtype: torch.dtype
    ) -> list[Any]:
        """Layouts of weight, x and product, as columns: `[k, outputs]`, which is transposed,
        `[k, rows]` and `[outputs, rows]`."""
        layouts = []
        for sizes in ((k, outputs, k), (k, rows, stride), (outputs, rows, outputs)):
            layout = Layout()
            kind = DTYPES[dtype]
            self._do("cublasLtMatrixLayoutInit_internal", layout, 64, kind, *sizes)
            layouts.append(layout)
        return layouts

    def _operate(self, bias_at: int) -> Any:
        """What is computed; with a bias at an address, or 0."""
        operation = Operation()
        name = "cublasLtMatmulDescInit_internal"
        self._do(name, operation, 256, COMPUTE_FLOAT32, FLOAT32)
        attributes: list[tuple[int, Any]] = [(TRANSPOSE_A, c_int32(TRANSPOSED))]
        if bias_at:
            attributes += [(EPILOGUE, c_uint32(ADD_BIAS)), (BIAS_POINTER, c_void_p(bias_at))]
        for attribute, value in attributes:
            size = ctypes.sizeof(value)
            name = "cublasLtMatmulDescSetAttribute"
            self._do(name, operation, attribute, ctypes.byref(value), size)
        return operation

    def _prefer(self, attribute: int, value: Any) -> None:
        size, name = ctypes.sizeof(value), "cublasLtMatmulPreferenceSetAttribute"
        self._do(name, self._preference, attribute, ctypes.byref(value), size)

    def _read(self, answer: Answer, attribute: int, value: Any) -> int:
        """An attribute of an algorithm."""
        self._do(
            "cublasLtMatmulAlgoConfigGetAttribute", answer.algorithm, attribute,
            ctypes.byref(value), ctypes.sizeof(value), None,
        )  # fmt: skip
        return int(value.value)

    def _do(self, name: str, *given: Any) -> None:
        if status := getattr(self._library, name)(*given):
            raise CublasLtError(f"{name} returned status {status}.")


def _prototype(library: ctypes.CDLL) -> None:
    """Types of arguments: addresses, and the numbers that are wider than an int."""
    at = c_void_p
    signatures: dict[str, list[Any]] = {
        "cublasLtCreate": [at],
        "cublasLtMatmulPreferenceInit_internal": [at, c_size_t],
        "cublasLtMatmulPreferenceSetAttribute": [at, c_int, at, c_size_t],
        "cublasLtMatmulDescInit_internal": [at, c_size_t, c_int, c_int],
        "cublasLtMatmulDescSetAttribute": [at, c_int, at, c_size_t],
        "cublasLtMatrixLayoutInit_internal": [at, c_size_t, c_int, c_uint64, c_uint64, c_int64],
        "cublasLtMatmulAlgoConfigGetAttribute": [at, c_int, at, c_size_t, at],
        "cublasLtMatmulAlgoGetHeuristic": [*[at] * 7, c_int, at, at],
        "cublasLtMatmulAlgoCheck": [at] * 8,
        "cublasLtMatmul": [*[at] * 14, c_size_t, at],
    }
    for name, arguments in signatures.items():
        getattr(library, name).argtypes = arguments


def torch_library() -> ctypes.CDLL | None:
    """The libcublasLt that torch has loaded; None: there is none, and a line is logged."""
    name = f"libcublasLt.so.{(torch.version.cuda or '0').split('.')[0]}"
    try:
        library = ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        _prototype(library)
    except (OSError, AttributeError) as error:
        logger.warning(
            "%s of this torch is not usable (%s): products of more than %d rows in one order are "
            "our own, slower kernel's. Install torch with the libraries of NVIDIA's packages.",
            name, error, MAX_ROWS,
        )  # fmt: skip
        return None
    return library


def _here(x: Tensor) -> CublasLt | None:
    """The calls for the GPU of x; None of a GPU that is not there, or without the library."""
    return _on(x.device) if x.is_cuda and torch.cuda.is_initialized() else None


@lru_cache
def _on(device: torch.device) -> CublasLt | None:
    if (library := torch_library()) is None:
        return None
    try:
        return CublasLt(library, device)
    except CublasLtError as error:
        logger.warning("cuBLASLt does not start on %s: %s", device, error)
        return None


NO_ALGORITHMS: dict[int, bytes] = {}
_KNOWN: dict[Shape, dict[int, bytes]] = {}


def _algorithms_of(shape: Shape) -> dict[int, bytes]:
    """The proven algorithm of each class of rows. They are found at the first product outside of a
    capture: those of one that is captured before are `tile_kernel`'s."""
    if (known := _KNOWN.get(shape)) is None:
        if torch.cuda.is_current_stream_capturing():
            _tell_of_capture(shape)
            return NO_ALGORITHMS
        known = _KNOWN[shape] = find_algorithms(shape)
    return known


@lru_cache
def _tell_of_capture(shape: Shape) -> None:
    logger.warning(
        "%s is captured before a product of it ran: our own, slower kernel stays in that graph.",
        shape,
    )


@lru_cache
def _tell_of_refusal(shape: Shape) -> None:
    logger.warning(
        "cuBLASLt refuses an algorithm that it has found for %s: our own, slower kernel multiplies "
        "some rows.", shape,
    )  # fmt: skip


def find_algorithms(shape: Shape) -> dict[int, bytes]:
    """Ask for the algorithms of a shape, and prove them: milliseconds; waits for the GPU."""
    lt = _on(shape.device)
    if lt is None:
        return NO_ALGORITHMS
    found, outcomes, proof = {}, dict[bytes, bool](), Proof(lt, shape)
    for most_rows in CLASSES:
        try:
            for algorithm in lt.unsplit(shape, most_rows):
                if algorithm not in outcomes:
                    outcomes[algorithm] = proof.holds(algorithm)
                if outcomes[algorithm]:
                    found[most_rows] = algorithm
                    break
        except CublasLtError as error:
            logger.debug("cuBLASLt, %d rows by %s: %s", most_rows, shape, error)
    if missing := [rows for rows in CLASSES if rows not in found]:
        logger.warning(
            "cuBLASLt has no algorithm with our order of sums for %s and %s rows (%d of %d do not "
            "have it): our own, slower kernel multiplies them.",
            shape, missing, sum(not outcome for outcome in outcomes.values()), len(outcomes),
        )  # fmt: skip
    return found


class Proof:
    """Random numbers of a shape's inputs, and their product in our order."""

    def __init__(self, lt: CublasLt, shape: Shape) -> None:
        self._lt, (place, outputs, k, dtype, has_bias) = lt, shape
        outputs = min(outputs, PROOF_OUTPUTS)
        generator = torch.Generator(place).manual_seed(1)

        def random(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=dtype, device=place)

        self._x, self._weight = random(PROOF_ROWS, k), random(outputs, k).mul_(k**-0.5)
        self._bias = random(outputs) if has_bias else None
        problem = Problem(PROOF_ROWS, outputs, k, dtype, False, False, False, True, True)
        plan = tile_plan(problem)
        assert plan is not None  # of so many rows in one order it always has one
        self._expected = tile_product(self._x, self._weight, self._bias, "", plan)

    def holds(self, algorithm: bytes) -> bool:
        """Whether an algorithm has the bits of our order."""
        out = torch.empty_like(self._expected)
        is_run = self._lt.multiply(self._x, self._weight, self._bias, out, algorithm)
        return is_run and torch.equal(out, self._expected)
