"""Children of the supervisor: they end when their parent does, and are not started too often."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from megatron_async.server.supervisor.processes import (
    LONGEST_DELAY_S,
    ChildProcess,
    restart_delay_s,
    why_ended,
)
from tests.support.patience import PATIENCE_S, eventually

PARENT = """
import os, time
from megatron_async.server.supervisor.processes import ChildProcess
pipe, held = os.pipe()
# A command that needs no torch and runs until it is ended.
child = ChildProcess("child", ("coordinator", "--bind", "tcp://127.0.0.1:*"), pipe)
child.start()
print(child.pid, flush=True)
time.sleep(60)
"""
IN_FRONT = """
import os, sys, time
from megatron_async.server.supervisor import parent
parent.PR_SET_PDEATHSIG = 0  # not understood by the kernel: the pipe alone is left
parent.end_with_parent(os.getppid(), int(sys.argv[1]))
print("bound", flush=True)
time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_child_does_not_outlive_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline().startswith(b"coordinator at")  # the child is at work
        parent.kill()
        try:
            eventually(lambda: not is_alive(pid), "the child to end")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_pipe_tells_of_the_end_too() -> None:
    pipe, held = os.pipe()
    command = [sys.executable, "-c", IN_FRONT, str(pipe)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[pipe]) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"bound\n"
        assert child.poll() is None
        os.close(held)
        assert child.wait(PATIENCE_S) == -signal.SIGKILL
    os.close(pipe)


def test_a_child_whose_parent_is_another_ends_at_once() -> None:
    pipe, held = os.pipe()
    command = [sys.executable, "-m", "megatron_async.server.supervisor.child", "1", str(pipe), "15"]
    done = subprocess.run([*command, "replicas"], pass_fds=[pipe], check=False, timeout=PATIENCE_S)
    assert done.returncode == -signal.SIGTERM
    os.close(pipe)
    os.close(held)


def test_deaths_in_a_row_take_longer_and_longer() -> None:
    delays = [restart_delay_s(deaths) for deaths in range(1, 50)]
    assert delays[:4] == [0.5, 1.0, 2.0, 4.0]
    assert delays == sorted(delays)
    assert delays[-1] == LONGEST_DELAY_S


def test_a_child_is_reaped_once_and_started_again() -> None:
    pipe, held = os.pipe()
    child = ChildProcess("child", ("no-such-command",), pipe)
    for deaths in (1, 2):
        child.start()
        status: list[int] = []

        def has_ended(found: list[int] = status) -> bool:
            if (code := child.reap()) is not None:
                found.append(code)
            return bool(found)

        eventually(has_ended, "the end")
        assert status == [2]
        assert child.reap() is None
        assert child.pid is None
        assert child.deaths == deaths
        assert child.start_later() == restart_delay_s(deaths)
        assert child.due is not None
    child.signal(signal.SIGTERM)  # a service that ends starts nobody
    assert child.due is None
    os.close(pipe)
    os.close(held)


def test_ends_in_words() -> None:
    assert why_ended(2) == "it ended with status 2"
    assert why_ended(-9) == "it was ended by SIGKILL"
    assert why_ended(-99) == "it was ended by signal 99"
