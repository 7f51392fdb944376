"""Products by cuBLASLt: what its calls are given, and, on a GPU, the bits of our own order."""

import ctypes
import logging
import re
from pathlib import Path

import pytest
import torch

from megatron_async.ops.linear import cublas_lt
from megatron_async.ops.linear.cublas_lt import (
    CLASSES,
    CUBLAS_LT,
    Answer,
    CublasLt,
    CublasLtPlan,
    Shape,
    cublas_lt_product,
    torch_library,
)
from megatron_async.ops.linear.product_kernel import Problem, Wants
from megatron_async.ops.linear.products import WeightShape, choose
from megatron_async.ops.linear.tile import HIGH_TILES, LOW_TILES, tile_product
from tests.unit_tests.ops.linear.test_products import BRAIN, HALF, random, weight_of

WEIGHTS = {
    "8B": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)],
    "Qwen3-30B-A3B": [(5120, 2048), (2048, 4096), (151936, 2048)],
    "Nano": [(10304, 2688), (2688, 4096), (4608, 2688), (3712, 2688), (2688, 3712), (131072, 2688)],
    "SmolLM2": [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)],
}
"""Outputs and inputs of the products of four models."""
ROWS = (65, 96, 128, 200, 256, 512, 1000, 2048, 8192)


def problem(rows, outputs=4096, k=4096, dtype=BRAIN, aligned=True, invariant=True):
    return Problem(rows, outputs, k, dtype, False, False, False, aligned, invariant)


def test_classes_of_rows():
    plans = {rows: CUBLAS_LT.plan(problem(rows)) for rows in (65, 128, 129, 200, 1000, 8193, 10**6)}
    classes = {rows: plan.most_rows for rows, plan in plans.items()}
    assert classes == {
        65: 72, 128: 128, 129: 136, 200: 200, 1000: 1024, 8193: 8192, 10**6: 8192,
    }  # fmt: skip
    assert sorted(set(CLASSES)) == list(CLASSES)
    assert plans[65].tiles == LOW_TILES
    assert plans[1000].tiles == HIGH_TILES


@pytest.mark.parametrize(
    "change",
    [{"rows": 64}, {"outputs": 4095}, {"aligned": False}, {"invariant": False},
     {"dtype": torch.float32}],
)  # fmt: skip
def test_products_of_others(change):
    assert CUBLAS_LT.plan(problem(**{"rows": 256, **change})) is None


def test_it_is_asked_only_for_rows_in_one_order():
    weight = WeightShape(4096, 4096, BRAIN)
    assert choose(weight, Wants(256, invariant=True)).kernel is CUBLAS_LT
    assert choose(weight, Wants(256)).kernel.name == "cuBLAS"
    assert choose(weight._replace(aligned=False), Wants(256, invariant=True)).kernel.name == "tile"


def numbers_of_header():
    """`cublasLt.h` and its neighbours of the package that torch's library comes from."""
    with open("/proc/self/maps") as maps:
        found = re.search(r"/\S*libcublasLt\.so\S*", maps.read())
    include = Path(found[0]).parents[1] / "include" if found else Path("/nowhere")
    if not (include / "cublasLt.h").exists():
        pytest.skip("the headers of cuBLASLt are not installed")
    names = "cublasLt.h", "cublas_api.h", "library_types.h"
    text = "\n".join((include / name).read_text() for name in names)
    return {name: int(n) for name, n in re.findall(r"\b(CU[A-Z0-9_]+)\s*=\s*(\d+)\s*[,/\n]", text)}


def test_numbers_are_the_header_s():
    found = numbers_of_header()
    ours = {
        "CUDA_R_16F": cublas_lt.DTYPES[HALF],
        "CUDA_R_16BF": cublas_lt.DTYPES[BRAIN],
        "CUDA_R_32F": cublas_lt.FLOAT32,
        "CUBLAS_COMPUTE_32F": cublas_lt.COMPUTE_FLOAT32,
        "CUBLAS_OP_T": cublas_lt.TRANSPOSED,
        "CUBLASLT_EPILOGUE_BIAS": cublas_lt.ADD_BIAS,
        "CUBLASLT_MATMUL_DESC_TRANSA": cublas_lt.TRANSPOSE_A,
        "CUBLASLT_MATMUL_DESC_EPILOGUE": cublas_lt.EPILOGUE,
        "CUBLASLT_MATMUL_DESC_BIAS_POINTER": cublas_lt.BIAS_POINTER,
        "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES": cublas_lt.WORKSPACE,
        "CUBLASLT_ALGO_CONFIG_SPLITK_NUM": cublas_lt.SPLITS,
        "CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME": cublas_lt.REDUCTION,
        "CUBLASLT_REDUCTION_SCHEME_NONE": 0,
    }
    ours |= {
        f"CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_{name}_BYTES": number
        for name, number in zip("ABCD", cublas_lt.ALIGNMENTS, strict=True)
    }
    assert {name: found[name] for name in ours} == ours
    assert ctypes.sizeof(Answer) == 64 + 8 + 4 + 4 + 16


def without_handle():
    """The calls that need no GPU."""
    if (library := torch_library()) is None:
        pytest.skip("this torch has no cuBLASLt")

    class Unstarted(CublasLt):
        def _do(self, name, *given):
            if name != "cublasLtCreate":
                super()._do(name, *given)

    return Unstarted(library, torch.device("cuda", 0)), library


def read(call, what, attribute, value):
    written = ctypes.c_size_t()
    assert call(
        what, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)),
        ctypes.byref(written),
    ) == 0  # fmt: skip
    assert written.value == ctypes.sizeof(value)
    return value.value


def test_descriptions_are_what_the_library_reads(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.inference_mode())
    lt, library = without_handle()
    names = "MatmulDesc", "MatrixLayout", "MatmulPreference"
    of_operation, of_layout, of_preference = (
        getattr(library, f"cublasLt{name}GetAttribute") for name in names
    )
    plain, biased = lt._operation(0), lt._operation(0x1230)
    number, wide = ctypes.c_uint32, ctypes.c_uint64
    assert [read(of_operation, plain, at, number()) for at in (0, 1, 3, 4, 7)] == [68, 0, 1, 0, 1]
    assert read(of_operation, biased, 7, number()) == 4
    assert read(of_operation, biased, 8, wide()) == 0x1230
    layouts = lt._layouts(48, 320, 70, 336, BRAIN)
    assert [[read(of_layout, each, at, wide()) for at in (2, 3, 4)] for each in layouts] == [
        [320, 48, 320], [320, 70, 336], [48, 70, 48],
    ]  # fmt: skip
    assert {read(of_layout, each, 0, number()) for each in layouts} == {14}
    assert read(of_preference, lt._preference, 1, wide()) == 0
    assert {read(of_preference, lt._preference, at, number()) for at in (5, 6, 7, 8)} == {16}


def test_a_library_that_is_not_there_is_said(monkeypatch, caplog):
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    with caplog.at_level(logging.WARNING):
        assert torch_library() is None
    assert "libcublasLt.so.99" in caplog.text


class Named:
    """Algorithms by name: some have other bits, some do not take the rows."""

    def __init__(self, names):
        self.names, self.asked = names, []

    def unsplit(self, shape, rows):
        self.asked.append(rows)
        yield from self.names.get(rows, ())

    def multiply(self, x, weight, bias, out, algorithm):
        if algorithm == b"other bits":
            out.copy_(x @ weight.T + 1)
        elif algorithm == b"good":
            out.copy_(tile_product(x, weight, bias, "", LOW_TILES))
        return algorithm != b"does not fit"


def test_only_proven_algorithms_are_used(monkeypatch, caplog, device, matrix_units):
    names = {rows: [b"other bits", b"does not fit", b"good"] for rows in CLASSES[:-1]}
    lt = Named(names)
    monkeypatch.setattr(cublas_lt, "_on", lambda index: lt)
    monkeypatch.setattr(cublas_lt, "PROOF_ROWS", 80)
    with caplog.at_level(logging.WARNING):
        found = cublas_lt.find_algorithms(Shape(torch.device(device), 32, 64, HALF, True))
    assert found == dict.fromkeys(CLASSES[:-1], b"good")
    assert lt.asked == list(CLASSES)
    assert "[8192] rows (2 of 3" in caplog.text


def test_a_refused_algorithm_is_said_once(monkeypatch, caplog, device, matrix_units):
    """Nothing else shows: our own kernel has the same bits."""
    monkeypatch.setattr(cublas_lt, "_here", lambda x: Named({}))
    monkeypatch.setattr(cublas_lt, "_algorithms_of", lambda shape: {80: b"does not fit"})
    x = torch.randn(80, 64, device=device, dtype=HALF)
    weight = torch.randn(32, 64, device=device, dtype=HALF)
    plan = CublasLtPlan(80, LOW_TILES)
    with caplog.at_level(logging.WARNING):
        found = [cublas_lt_product(x, weight, None, "", plan) for _ in range(2)]
    assert torch.equal(*found)
    assert torch.equal(found[0], tile_product(x, weight, None, "", LOW_TILES))
    assert caplog.text.count("refuses an algorithm") == 1
    cublas_lt._tell_of_refusal.cache_clear()


def test_a_captured_product_proves_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(cublas_lt, "find_algorithms", lambda shape: pytest.fail("in a capture"))
    shape = Shape(torch.device("cuda", 0), 32, 64, HALF, False)
    assert cublas_lt._algorithms_of(shape) == {}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cublas_lt, "find_algorithms", lambda shape: {128: b"good"})
    assert cublas_lt._algorithms_of(shape) == {128: b"good"}
    del cublas_lt._KNOWN[shape]


def by_library(x, weight, bias=None):
    """The product by the library alone, and whether its class has an algorithm."""
    plan = CublasLtPlan(
        CUBLAS_LT.plan(problem(len(x), *weight.shape, x.dtype)).most_rows, LOW_TILES
    )
    shape = Shape(x.device, *weight.shape, x.dtype, bias is not None)
    return cublas_lt_product(x, weight, bias, "", plan), plan.most_rows in (
        cublas_lt._algorithms_of(shape)
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "k"), [pytest.param(*pair, id=f"{name}-{pair[0]}-{pair[1]}")
                 for name, pairs in WEIGHTS.items() for pair in pairs],
)  # fmt: skip
def test_bits_on_a_gpu(n, k, caplog):
    """Rows of all classes have the bits of our own kernel, eagerly and in a graph, and the library
    takes them all."""
    torch.manual_seed(0)
    most = ROWS[-1] if n < 64_000 else 512
    cublas_lt._tell_of_refusal.cache_clear()
    x, weight = random(most, k, dtype=BRAIN, device="cuda"), weight_of(n, k, BRAIN, "cuda")
    expected = tile_product(x, weight, None, "", HIGH_TILES)
    missing = []
    for rows in (rows for rows in ROWS if rows <= most):
        found, is_library = by_library(x[:rows], weight)
        assert torch.equal(found, expected[:rows]), rows
        missing += [] if is_library else [rows]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = by_library(x[:96], weight)[0]
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, expected[:96])
    assert not missing, "these rows have no algorithm of the library"
    assert "refuses" not in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BRAIN, HALF])
def test_biases_and_strides_on_a_gpu(dtype):
    torch.manual_seed(0)
    wide, weight = (
        random(300, 1536, dtype=dtype, device="cuda"),
        weight_of(1024, 1024, dtype, "cuda"),
    )
    x, bias = wide[:, 256:1280], random(1024, dtype=dtype, device="cuda")
    expected = tile_product(x, weight, bias, "", HIGH_TILES)
    found, is_library = by_library(x, weight, bias)
    assert torch.equal(found, expected)
    assert is_library
