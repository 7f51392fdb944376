"""A program's kernels are compiled beside, into the place where a start looks them up; what goes
wrong there costs time alone."""

import contextlib
import json
import os
import pkgutil
import socket
import subprocess
import sys
import time
from dataclasses import fields
from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace

import psutil
import pytest
import torch
import triton
from triton import knobs
from triton.language import constexpr
from triton.runtime.jit import JITFunction

from megatron_async import InferenceConfig, llm
from megatron_async.checkpoints.kernel_program import OF_NO_KERNEL
from megatron_async.llm import LLM
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.ops import compile_kernels
from megatron_async.ops.compile_kernels import KernelStart, start_kernels
from tests.support.compiled_kernels import HOPPER
from tests.unit_tests.ops import three_kernels
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles")

PROGRAM = {"capability": [9, 0], "processors": 132, "gpu": "NVIDIA H200", "model": "of this test"}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Triton's folder, empty; a program has three kernels."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(compile_kernels, "DERIVE", three_kernels.__name__)
    with knobs.cache.scope():
        yield tmp_path / "kernels"


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Lets a script of the shell be the child."""

    def write(script):
        file = tmp_path / "child"
        file.write_text(f"#!/bin/sh\nread job\n{script}\n")
        file.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(file))

    return write


def is_kept(folder, monkeypatch, program=PROGRAM):
    """Whether a start of the program compiles nothing; what it would is not begun."""
    with monkeypatch.context() as patch:
        patch.setattr(KernelStart, "_start", lambda start, job: None)
        return KernelStart(program).was_kept


def test_a_start_finds_what_workers_have_compiled(folder, monkeypatch, tmp_path):
    for name in ("torch", "json", "triton", "megatron_async", "sitecustomize"):
        tmp_path.joinpath(f"{name}.py").write_text("raise SystemExit('the working directory')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with socket.socket() as server:  # as a server's, which others must not keep open
        server.set_inheritable(True)
        start = KernelStart(PROGRAM, workers=2)
        start.join()
    assert (len(start.keys), start.total, start.failures) == (3, 3, [])
    assert not is_kept(folder, monkeypatch), "noted before the engine has started"
    start.keep()

    told = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **values: told.append(values))
    for source, options in three_kernels.three():
        triton.compile(source, target=HOPPER, options=options)
    assert [each["cache_hit"] for each in told] == [True] * 3, "compiled on the card"

    again = KernelStart(PROGRAM)
    assert (again._child, again.total, again.keys) == (None, 3, start.keys)
    again.join()
    assert again.failures == []
    for other in ({"processors": 114}, {"gpu": "NVIDIA H100 NVL"}):
        assert not is_kept(folder, monkeypatch, PROGRAM | other)
    with monkeypatch.context() as patch:
        patch.setenv("DISABLE_LLVM_OPT", "1")  # Triton's key has it
        assert not is_kept(folder, monkeypatch)
    for file in (folder / start.keys[0]).glob("__grp__*"):
        file.unlink()
    assert not is_kept(folder, monkeypatch), "what is noted is not there"


def test_a_worker_that_dies_costs_its_kernels(folder, monkeypatch, tmp_path, caplog):
    real, broken = knobs.nvidia.ptxas.path, tmp_path / "ptxas"
    broken.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec {real} --version\nkill -9 $PPID\n')
    broken.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(broken))
    start = KernelStart(PROGRAM, workers=1)
    start.join()
    assert (start.keys, start.total) == ([], 3)
    (told,) = caplog.messages
    assert told.startswith("3 kernels were not compiled beforehand (a process ended early)")
    start.keep()
    assert not is_kept(folder, monkeypatch), "the next start would not try again"


def test_the_end_of_the_starting_process_ends_its_workers(folder):
    start = KernelStart(PROGRAM | {"times": 9000}, workers=1)  # more than it has time for
    child = start._child
    assert os.read(child.stdout.fileno(), 12) == b"total 27000\n"
    os.close(child.stdin.fileno())
    assert child.wait(timeout=120) == -9
    assert not os.path.exists(start._temporary.name)


def test_a_program_of_unknown_kernels(folder, caplog, monkeypatch):
    start = KernelStart(PROGRAM | {"fails": "two\nlines"})
    start.join()
    assert "Some kernels were not compiled beforehand (ValueError: two lines)" in caplog.messages[0]
    start.keep()
    assert is_kept(folder, monkeypatch, PROGRAM | {"fails": "two\nlines"}), "failing takes time"


def test_no_worker_can_start(folder, monkeypatch, caplog):
    def start(*_, **__):
        raise OSError("no process is left")

    monkeypatch.setattr(subprocess, "Popen", start)
    KernelStart(PROGRAM).join()
    assert "were not compiled beforehand (no process is left)" in caplog.messages[0]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exit 1", "a process ended early"),
        ("kill -9 $$", "a process ended early"),
        ("kill -STOP $$", "nothing was compiled for 1 s"),
        ("echo total 2; echo key A; sleep 600 & wait", "nothing was compiled for 1 s"),
        ("echo total 1; yes | tr -d '\\n'| head -c 200000; sleep 600", "nothing was compiled"),
        ("head -c 100000 /dev/urandom", "a process ended early"),
        ("echo total -1; echo total x; echo; echo [; echo 5; echo key", "a process ended early"),
        ("echo total 2; echo key A; echo error why; echo error why", "why"),
        ("exec <&- ; echo total 5", "a process ended early"),
    ],
    ids=range(9),
)
def test_a_child_that_does_not_do_its_work(script, why, folder, child, caplog, monkeypatch):
    monkeypatch.setattr(compile_kernels, "STALL_S", 1.0)
    child(script)
    start = KernelStart(PROGRAM)
    group = start._child.pid
    start.join()
    assert f"not compiled beforehand ({why}" in caplog.messages[0]
    assert nothing_runs(group)


def running(group):
    """The processes of a group."""
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(each.pid) == group and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found


def nothing_runs(group):
    """Whether no process of a group is left, a moment after it was killed."""
    return any(not running(group) or time.sleep(0.05) for _ in range(200))


def test_an_interrupt_ends_the_child(folder, child, monkeypatch):
    child("sleep 600 & sleep 600 & echo total 3; wait")

    def interrupt(*_):
        raise KeyboardInterrupt

    start = KernelStart(PROGRAM)
    group, temporary = start._child.pid, start._temporary.name
    monkeypatch.setattr(KernelStart, "_hear", interrupt)
    assert running(group)
    assert os.path.exists(temporary)
    with pytest.raises(KeyboardInterrupt):
        start.join()
    assert nothing_runs(group)
    assert not os.path.exists(temporary)


def test_weights_that_cannot_be_loaded_end_the_child(folder, child, monkeypatch):
    def start(program):
        started.append(KernelStart(program))
        return started[-1]

    def build(*_, **__):
        raise MemoryError("no memory")

    started = []
    child("sleep 600")
    gpu = SimpleNamespace(torch_device=torch.device("cuda", 0), free_memory=lambda: 1 << 40)
    monkeypatch.setattr(llm, "build_model", build)
    monkeypatch.setattr(llm, "resolve_device_name", lambda device: "cuda")
    monkeypatch.setattr(llm, "make_device", lambda device: gpu)
    monkeypatch.setattr(llm, "describe_gpu", lambda device: {"capability": [9, 0]})
    monkeypatch.setattr(llm, "start_kernels", start)
    with pytest.raises(MemoryError):
        LLM("dummy:tiny")
    assert [each._child for each in started] == [None]


def test_nothing_is_compiled_beside_on_a_cpu(monkeypatch):
    monkeypatch.setattr(llm, "KernelStart", None)
    monkeypatch.setattr(llm, "start_kernels", None)
    monkeypatch.setattr(llm, "choose_triton_folder", None)
    LLM("dummy:tiny", device="cpu", max_requests=1, max_sequence_length=64).close()


def test_who_compiles(folder, monkeypatch):
    monkeypatch.setattr(KernelStart, "_start", lambda start, job: None)
    assert start_kernels(PROGRAM) is not None
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert start_kernels(PROGRAM) is None


NOTES = {
    "a path": "../other",
    "a zero": "\0",
    "letters": "é" * 52,
    "no text": "\udcff",
    "a pattern": "*" * 52,
    "a kernel that is not there": "A" * 52,
    "too long": "A" * compile_kernels.MOST_BYTES + "A",
}


@pytest.mark.parametrize("note", [*NOTES, "a pipe", "a folder", "a link to itself"])
def test_notes_of_others(note, folder, monkeypatch):
    monkeypatch.setattr(KernelStart, "_start", lambda start, job: None)
    start = KernelStart(PROGRAM)
    file = start._file
    start.keep()
    assert is_kept(folder, monkeypatch)
    file.unlink()
    folder.parent.joinpath("other").mkdir()
    folder.parent.joinpath("other", "__grp__").touch()
    if note in NOTES:
        file.write_bytes(NOTES[note].encode(errors="surrogateescape"))
    elif note == "a pipe":
        os.mkfifo(file)
    elif note == "a folder":
        file.mkdir()
    else:
        file.symlink_to(file)
    assert not is_kept(folder, monkeypatch)


def test_a_note_that_cannot_be_written_is_told(folder, caplog, monkeypatch):
    monkeypatch.setattr(KernelStart, "_start", lambda start, job: None)
    start = KernelStart(PROGRAM)
    folder.touch()
    start.keep()
    assert "cannot be kept" in caplog.messages[-1]


def find_kernels():
    """All kernels of the package, by their whole names."""
    for room in ("ops", "device_state"):
        package = import_module(f"megatron_async.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if ".cpu" not in module.name:
                import_module(module.name)
    return {
        f"{value.__module__}.{value.__qualname__}": value
        for name, module in list(sys.modules.items())
        if name.startswith("megatron_async.")
        for value in list(vars(module).values())
        if isinstance(value, JITFunction)
    }


def test_keys_of_kernels_are_those_of_every_process():
    """Triton's key has the constants that a kernel reads from modules, by name and then by the
    module's place in memory: two of a name would be in another order in another process. Nor does
    it matter which kernel is launched first.

    Break it: update a hash before the callee's own.
    """
    kernels = find_kernels()

    def keys(names):
        for function in kernels.values():
            function.hash, function.used_global_vals = None, {}
        return {name: kernels[name].cache_key for name in names}

    assert keys([*kernels]) == keys(reversed(kernels))
    for name, function in kernels.items():
        values = {}
        for (constant, _), (value, _) in function.used_global_vals.items():
            if isinstance(value, constexpr):
                assert values.setdefault(constant, value.value) == value.value, (name, constant)


def test_settings_of_no_kernel_are_settings():
    assert set(OF_NO_KERNEL) <= {field.name for field in fields(InferenceConfig)}


KERNELS = """
import json, os, sys
from megatron_async import choices
from megatron_async.lab.absent_gpu import few_layers, kernels_of
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
few = [few_layers(each) for each in DUMMY_SHAPES.values()]
program, used, use = json.loads(sys.argv[1]), [], choices.Choices._use
def note(self, question, source, value):
    found = use(self, question, source, value)
    used.append(self.used[question.kind][0])
    return found
choices.Choices._use = note
unknown = [source.name for source, _ in kernels_of(program)]
folder = choices.cache_folder(choices.FOLDER)
assert not folder.exists(), "a choice is kept that nobody has measured"
folder.mkdir(parents=True)
for row in used[:2]:
    choices.write_rows(folder / row.file_name, [row])
known = [source.name for source, _ in kernels_of(program)]
assert "torch._dynamo" not in sys.modules, "torch's compiler takes seconds to import"
print(json.dumps([[each.pattern for each in few], unknown, known]))
"""


def test_kernels_are_known_without_a_gpu_or_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_ASYNC_CACHE", str(tmp_path / "cache"))
    config = InferenceConfig(max_requests=2, max_tokens=64, max_sequence_length=256)
    program = PROGRAM | {
        "architecture": DUMMY_SHAPES["llama-3.1-8b"].to_dict(),
        "dtype": "bfloat16",
        "config": {name: value for name, value in vars(config).items() if name != "device"},
        "transformer_impl": "local",
    }
    command = [sys.executable, "-c", KERNELS, json.dumps(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    few, unknown, known = json.loads(done.stdout.splitlines()[-1])
    for begin, whole in zip(few, (each.pattern for each in DUMMY_SHAPES.values())):
        assert whole.startswith(begin)
        assert {*pairwise(begin)} == {*pairwise(whole)}
    assert {"_prefill_kernel", "_add_rms_norm_kernel", "_feed_back_kernel", "_finish"} <= {*known}
    assert {*known} < {*unknown}, "where choices are known, others are not compiled"
    assert len(unknown) < 150
