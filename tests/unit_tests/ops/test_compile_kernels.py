"""A program's kernels, as a list, are compiled beside, into the place where a start looks them up;
what goes wrong there costs time alone."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from itertools import pairwise

import pytest
import torch
import triton
from triton import knobs
from triton.compiler import ASTSource, make_backend
from triton.language import constexpr
from triton.runtime.jit import JITFunction, create_function_from_signature

from megatron_async import InferenceConfig
from megatron_async.cache_folders import SERVICE_VARIABLE, VARIABLE
from megatron_async.llm import OF_NO_KERNEL
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.ops import compile_kernels
from megatron_async.ops.compile_kernels import Compilations, KernelStart
from megatron_async.ops.kernel_list import (
    BadKernel,
    KernelList,
    describe,
    find_kernels,
    full_name,
    source_of,
)
from megatron_async.ops.linear.activations import squared_relu, swiglu
from tests.support.compiled_kernels import HOPPER
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles")

PROGRAM = {"capability": [9, 0], "processors": 132, "gpu": "NVIDIA H200", "model": "of this test"}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Triton's folder, empty; nothing is noted of other tests."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    listener = knobs.compilation.listener
    compile_kernels.compilations.cache_clear()
    with knobs.cache.scope():
        yield tmp_path / "kernels"
    knobs.compilation.listener = listener
    compile_kernels.compilations.cache_clear()


def launch_three():
    """Three kernels of two functions."""
    swiglu.on("gpu")(torch.zeros(4, 64, dtype=torch.bfloat16))
    swiglu.on("gpu")(torch.zeros(4, 64, dtype=torch.float16))
    squared_relu.on("gpu")(torch.zeros(4, 32, dtype=torch.bfloat16))


def packed(kernel, arguments, options):
    backend = make_backend(HOPPER)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    options = options | {"debug": False, "instrumentation_mode": ""}
    bound, specialization, others = bind(*arguments, **options)
    return kernel._pack_args(backend, options, bound, specialization, others)


@pytest.fixture
def three(monkeypatch):
    """The kernels of `launch_three`, described and not compiled."""
    found = []

    def run(kernel, *arguments, grid, warmup, **options):
        chosen, *rest = packed(kernel, arguments, options)
        found.append(describe(kernel, *rest, vars(chosen)))

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        launch_three()
    return found


def write_list(folder, kernels):
    """A list of kernels that are not compiled."""
    known = KernelList(folder, PROGRAM)
    for kernel in kernels:
        known.put(kernel, "")
    known.write()


def test_a_start_finds_what_workers_have_compiled(folder, three, monkeypatch):
    write_list(folder, three)
    start = KernelStart(PROGRAM, workers=2)
    assert (start.join(), start.total, start.failures) == (3, 3, [])
    start.keep()

    def run(kernel, *arguments, grid, warmup, **options):
        chosen, *rest = packed(kernel, arguments, options)
        triton.compile(ASTSource(kernel, *rest), target=HOPPER, options=vars(chosen))

    own = compile_kernels.compilations()
    monkeypatch.setattr(JITFunction, "run", run)
    launch_three()
    assert [each.was_kept for each in own.all] == [True] * 3, "compiled on the card"
    found = {json.dumps(kernel): hash_ for kernel, hash_ in own.hashes}
    assert found == start.list.hashes

    again = KernelStart(PROGRAM)
    assert again._child is None, "a warm start has nothing to compile"
    assert (again.join(), again.total, len(again.list.hashes)) == (0, 0, 3)

    # A source, an option or an environment that Triton's key has changes the hash.
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    launch_three()
    assert [each.was_kept for each in own.all[3:]] == [False] * 3


def test_a_worker_that_dies_costs_its_kernels(folder, three, monkeypatch, tmp_path, caplog):
    real, broken = knobs.nvidia.ptxas.path, tmp_path / "ptxas"
    broken.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec {real} --version\nkill -9 $PPID\n')
    broken.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(broken))
    write_list(folder, three)
    start = KernelStart(PROGRAM, workers=1)
    assert start.join() == 0
    (told,) = caplog.messages
    assert told.startswith("3 kernels were not compiled beforehand (a process ended early)")


def test_the_end_of_the_starting_process_ends_its_workers(folder, three):
    write_list(folder, three)
    start = KernelStart(PROGRAM, workers=1)
    child = start._child
    assert "kernels" in start._told.get(timeout=120)
    os.close(child.stdin.fileno())
    assert child.wait(timeout=120) == -9


def test_no_worker_can_start(folder, three, monkeypatch, caplog):
    def start(command, env, **_):
        seen.update(env)
        raise OSError("no process is left")

    seen = {}
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    write_list(folder, three)
    assert KernelStart(PROGRAM).join() == 0
    assert "were not compiled beforehand (no process is left)" in caplog.messages[0]
    # It sees no GPU, and takes no rank's place in a job.
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["TRITON_CACHE_DIR"]) == ("", str(folder))
    assert not {"RANK", "WORLD_SIZE"} & seen.keys()


@pytest.mark.parametrize(
    "text",
    ["", "[", "{}", "[1]", '[{"what": 1, "hash": ""}]', '[{"what": {}, "hash": 5}]',
     "[" * 100_000, '[{"hash": ""}]', "\udcff"],
    ids=range(9),
)  # fmt: skip
def test_a_list_that_is_none_is_passed_over(text, folder, three, caplog):
    write_list(folder, three)
    known = KernelList(folder, PROGRAM)
    known._file.write_bytes(text.encode(errors="surrogateescape"))
    assert not known.read()
    assert known.hashes == {}
    assert "is passed over" in caplog.messages[0]


def test_a_list_is_not_read_beyond_its_limit(folder, three, monkeypatch):
    write_list(folder, three)
    monkeypatch.setattr("megatron_async.ops.kernel_list.MOST_BYTES", 100)
    assert not KernelList(folder, PROGRAM).read()


def test_a_list_belongs_to_its_program(folder, three):
    write_list(folder, three)
    assert KernelList(folder, PROGRAM | {"gpu": "another name"}).read()
    assert not KernelList(folder, PROGRAM | {"processors": 114}).read()


EVIL = "tensordesc<bf16[2],__import__('os').mkdir('evil')>"
CHANGES = {
    "another function": {"kernel": "os.system"},
    "a type that is code": {"signature": {"x": EVIL}},
    "a layout with a call": {"signature": {"x": "tensordesc<bf16[2],NVMMASharedLayout(a=exit())>"}},
    "no dictionary": {"signature": 5},
    "a file's name": {"options": {"ir_override": "/etc/passwd"}},
    "an option that follows from the GPU": {"options": {"ptx_version": 80}},
    "a library": {"options": {"extern_libs": [["libdevice", "/etc/passwd"]]}},
    "words for ptxas": {"options": {"num_warps": "4 --evil"}},
    "no constants": {"constants": [[1, 2, 3]]},
    "an unknown kind": {"constants": [[[0], {"eval": "exit()"}]]},
    "a function elsewhere": {"constants": [[[0], {"kernel": "os.system"}]]},
    "attributes": {"attributes": [[[0], 5]]},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_kernel_that_is_none_is_refused(change, three, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    functions, kernel = find_kernels(), three[0]
    source, options = source_of(json.loads(json.dumps(kernel)), functions)
    assert full_name(source.fn) == kernel["kernel"]
    assert options == kernel["options"]
    changed = dict(CHANGES[change])
    if isinstance(changed.get("signature"), dict):
        (type_,) = changed["signature"].values()
        changed["signature"] = dict.fromkeys(kernel["signature"], type_)
    with pytest.raises(BadKernel):
        source_of(kernel | changed, functions)
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_that_cannot_be_compiled_leaves_the_list(folder, three, caplog):
    write_list(folder, [three[0] | {"kernel": "os.system"}])
    start = KernelStart(PROGRAM)
    assert start.join() == 0
    assert "os.system: BadKernel" in caplog.messages[0]
    start.keep()
    assert KernelStart(PROGRAM).list.hashes == {}


def test_a_list_that_cannot_be_written_is_told(folder, three, caplog, monkeypatch):
    folder.parent.joinpath("file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder.parent / "file" / "kernels"))
    start = KernelStart(PROGRAM, compiles=False)
    compile_kernels.compilations().hashes.append((three[0], "ab"))
    start.keep()
    assert "cannot be kept" in caplog.messages[-1]


def test_another_listener_goes_on(folder):
    told = []
    knobs.compilation.listener = lambda **values: told.append(values)
    ours = Compilations()
    source = type("Source", (), {"name": "another package's"})()
    times = knobs.CompileTimes(1, [], 1)
    ours(src=source, metadata={}, metadata_group={}, times=times, cache_hit=True)
    assert len(told) == len(ours.all) == 1
    assert ours.hashes == []


def test_keys_of_kernels_are_those_of_every_process():
    """Triton's key has the constants that a kernel reads from modules, by name and then by the
    module's place in memory: two of a name would be in another order in another process."""
    for name, function in find_kernels().items():
        assert function.cache_key
        values = {}
        for (constant, _), (value, _) in function.used_global_vals.items():
            if isinstance(value, constexpr):
                assert values.setdefault(constant, value.value) == value.value, (name, constant)


def test_settings_of_no_kernel_are_settings():
    assert set(OF_NO_KERNEL) <= {field.name for field in fields(InferenceConfig)}


KERNELS = """
import json, sys
from megatron_async.lab.absent_gpu import few_layers, kernels_of
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
few = [few_layers(each) for each in DUMMY_SHAPES.values()]
found = kernels_of(json.loads(sys.argv[1]))
print(json.dumps([[each.pattern for each in few], found]))
"""


def test_kernels_are_known_without_a_gpu_or_weights(tmp_path):
    config = InferenceConfig(max_requests=2, max_tokens=64, max_sequence_length=256)
    program = PROGRAM | {
        "architecture": DUMMY_SHAPES["tiny"].to_dict(),
        "dtype": "bfloat16",
        "config": {name: value for name, value in vars(config).items() if name != "device"},
        "sizes": {},
        "transformer_impl": "local",
    }
    command = [sys.executable, "-c", KERNELS, json.dumps(program)]
    folders = {SERVICE_VARIABLE: f"{tmp_path}/service", VARIABLE: f"{tmp_path}/cache"}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **folders})
    assert done.returncode == 0, done.stderr
    assert not [*tmp_path.iterdir()], "nothing was measured"
    few, found = json.loads(done.stdout.splitlines()[-1])
    for begin, whole in zip(few, (each.pattern for each in DUMMY_SHAPES.values())):
        assert whole.startswith(begin)
        assert {*pairwise(begin)} == {*pairwise(whole)}
    names = {kernel["kernel"].rpartition(".")[2] for kernel in found}
    assert {"_prefill_kernel", "_add_rms_norm_kernel", "_feed_back_kernel", "_finish"} <= names
    functions = find_kernels()
    for kernel in found:
        source_of(kernel, functions)
    assert len(found) < 150
