"""The launch scripts: sizes that fit, clear words where they do not, and the command they run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
SLURM = {"SLURM_NNODES": "4", "SLURM_NODEID": "2", "SLURM_JOB_ID": "123456", "MASTER_ADDR": "h"}


def launch(script, *arguments, gpus=0, **environment):
    """Run a launch script on a machine with so many GPUs."""
    variables = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))),
        "PYTHONPATH": str(SCRIPTS.parent),
        **environment,
    }
    return subprocess.run(
        ["bash", SCRIPTS / script, *arguments],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )


def planned(script, *arguments, **machine):
    """What a launch script would give start_ranks.py."""
    run = launch(script, "--dry-run", *arguments, **machine)
    assert run.returncode == 0, run.stderr
    return run.stderr.split("start_ranks.py ")[1].strip()


@pytest.mark.parametrize(
    ("gpus", "arguments", "ranks", "sizes"),
    [
        (0, "--tp 2 x.py", 2, "x.py --tensor-model-parallel-size 2"),
        (0, "x.py", 1, "x.py"),
        (0, "--nproc 3 x.py", 3, "x.py"),
        (0, "--dp 4 --ep 2 -m m --a", 4, "-m m --a --expert-model-parallel-size 2"),
        (0, "--nproc 4 --tp 2 megatron-async info", 4,
         "-m megatron_async info --tensor-model-parallel-size 2"),
        (8, "x.py", 8, "x.py --tensor-model-parallel-size 8"),
        (8, "--tp 2 x.py", 2, "x.py --tensor-model-parallel-size 2"),
        (8, "--dp 2 --pp 2 x.py", 8,
         "x.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
        (8, "--ep 8 x.py", 8, "x.py --expert-model-parallel-size 8"),
        (8, "--cpu --tp 2 -- ls -l", 2, "--no-python ls -l --tensor-model-parallel-size 2"),
    ],
)  # fmt: skip
def test_sizes_of_one_node(gpus, arguments, ranks, sizes):
    expected = f"--nproc-per-node {ranks} --standalone {sizes}"
    assert planned("launch_node.sh", *arguments.split(), gpus=gpus) == expected


@pytest.mark.parametrize(
    ("gpus", "arguments", "words"),
    [
        (0, "", "no COMMAND"),
        (0, "--tp", "--tp needs a value"),
        (0, "--tp 0 x.py", "--tp 0: it must be"),
        (0, "--tpp 2 x.py", "unknown option --tpp"),
        (0, "--nnodes 2 x.py", "launch_nodes.sh"),
        (0, "--nproc 8 --tp 3 x.py", "no multiple of tp 3"),
        (0, "--nproc 8 --tp 2 --dp 3 x.py", "tp 2 x pp 1 x dp 3 = 6, but there are 8 ranks"),
        (0, "--dp 3 --ep 2 x.py", "--ep 2 does not divide the 3"),
        (8, "--pp 3 x.py", "cannot be divided into pp 3"),
        (8, "--tp 16 x.py", "16 ranks on a node with 8 GPUs"),
    ],
)
def test_sizes_that_do_not_fit_are_named(gpus, arguments, words):
    run = launch("launch_node.sh", *arguments.split(), gpus=gpus)
    assert run.returncode == 2
    assert words in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_nodes_from_options_environment_and_slurm():
    nodes = "--nnodes 2 --node-rank 1 --master-addr a --master-port 77"
    size = "--tensor-model-parallel-size 2"
    given = planned("launch_nodes.sh", *nodes.split(), "--tp", "2", "x.py")
    assert given == f"--nproc-per-node 1 {nodes} x.py {size}"
    of_environment = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "77"}
    found = planned("launch_nodes.sh", "--pp", "2", "x.py", gpus=4, **of_environment)
    sizes = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2"
    assert found == f"--nproc-per-node 4 {nodes} x.py {sizes}"
    found = planned("launch_nodes.sh", "x.py", gpus=2, **SLURM)
    nodes = "--nnodes 4 --node-rank 2 --master-addr h --master-port 23456"
    assert found == f"--nproc-per-node 2 {nodes} x.py {size}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("x.py", "--nnodes N"),
        ("--nnodes 2 x.py", "--node-rank R (0 to 1)"),
        ("--nnodes 2 --node-rank 2 x.py", "one of 0 to 1"),
        ("--nnodes 2 --node-rank 1 x.py", "--master-addr HOST"),
        ("--nnodes 2 --node-rank 1 --master-addr a --master-port x x.py", "no port"),
        ("--nnodes 3 --node-rank 1 --master-addr a --tp 2 x.py", "spread evenly over 3 nodes"),
    ],
)
def test_nodes_that_are_not_known_are_asked_for(arguments, words):
    run = launch("launch_nodes.sh", *arguments.split())
    assert run.returncode == 2
    assert words in run.stderr


def test_every_rank_has_its_own_nsight_report():
    command = planned(
        "launch_node.sh",
        "--tp",
        "2",
        "--nsys",
        "r",
        "scripts/benchmarks/benchmark_engine.py",
        "ranks",
    )
    assert command.split("--no-python bash ")[1].startswith(f"{SCRIPTS}/profile_nsys.sh -o r --")
    run = launch(
        "profile_nsys.sh",
        "--dry-run",
        "-o",
        "r",
        "scripts/benchmarks/benchmark_engine.py",
        "ranks",
        RANK="3",
    )
    assert "--output=r-rank3 " in run.stdout
    assert "osrt" not in run.stdout
    assert "--capture-range=cudaProfilerApi" in run.stdout


def test_the_exit_status_is_that_of_the_rank_that_failed():
    run = launch("launch_node.sh", "--nproc", "2", "bash", "-c", "exit $((7 * RANK))")
    assert run.returncode == 7
    _, said = run.stderr.splitlines()
    assert said.startswith("launch: rank 1 (pid ")
    assert said.endswith("ended with status 7")


def copy_setup(checkout):
    (checkout / "scripts").mkdir()
    shutil.copy(SCRIPTS / "setup.sh", checkout / "scripts")
    for lock in ("requirements.lock", "requirements-demo.lock", "setup.py"):
        (checkout / lock).touch()


@pytest.mark.parametrize("state", ["empty", "unfinished", "of another checkout"])
def test_setup_clears_no_environment_behind_a_link(tmp_path, state):
    """A worktree's `.venv` may be a link to the checkout's. This Python clears nothing."""
    copy_setup(tmp_path)
    (bin_ := tmp_path / "shared" / "bin").mkdir(parents=True)
    if state != "empty":
        for name in ("python", "pip"):
            (bin_ / name).symlink_to(shutil.which("true"))
        (bin_.parent / (".setup-unfinished" if state == "unfinished" else ".setup-done")).touch()
    (tmp_path / ".venv").symlink_to("shared")
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" != -m ] || { echo "$@" >>called; exit 1; }\n')
    python.chmod(0o755)
    run = subprocess.run(
        ["bash", tmp_path / "scripts" / "setup.sh"],
        env={**os.environ, "TMPDIR": str(tmp_path), "MEGATRON_ASYNC_PYTHON": str(python)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not (tmp_path / "called").exists()
    assert run.stderr.splitlines() == [
        "", "setup: .venv is a link to shared, whose packages would be deleted: remove the link "
        "(rm .venv) and run this again.",
    ]  # fmt: skip
    assert run.returncode == 1


def test_setup_without_a_home(tmp_path):
    """Services and containers may set no HOME; here is no Python either, and setup.sh says so."""
    copy_setup(tmp_path)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("dirname", "cat", "tail", "cksum", "grep", "rm", "touch", "mktemp"):
        found = shutil.which(name)
        if found:
            (tools / name).symlink_to(found)
    for name in ("python3", "python3.12", "python3.13", "python"):
        (tools / name).symlink_to(shutil.which("false"))
    run = subprocess.run(
        [shutil.which("bash"), tmp_path / "scripts" / "setup.sh"],
        env={"PATH": str(tools), "TMPDIR": str(tmp_path), "PYENV_ROOT": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "unbound" not in run.stderr
    assert "Python 3.12 or newer is needed" in run.stderr
    assert run.returncode == 1
