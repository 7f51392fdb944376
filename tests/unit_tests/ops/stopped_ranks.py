"""Processes that take the places of GPUs which share memory."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from itertools import count
from typing import Any

TIMEOUT_S = 60.0
STOP_S = 0.011


def run_stopped_ranks(ranks: int, function: Callable[..., None], *args: Any) -> None:
    """Call `function(rank, *args)` in a process for each rank, all at once. Each is stopped now and
    then, so that the others get as far ahead as the flags of the shared memory let them. An
    AssertionError if one raised, or had not ended after `TIMEOUT_S` seconds."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=function, args=(rank, *args)) for rank in range(ranks)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + TIMEOUT_S
    for turn in count():
        failed = any(process.exitcode for process in processes)
        running = any(process.is_alive() for process in processes)
        if failed or not running or time.monotonic() > deadline:
            break
        process = processes[turn % ranks]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            if process.is_alive():
                os.kill(process.pid, number)
            time.sleep(STOP_S)
    for process in processes:
        process.kill()
        process.join()
    assert [process.exitcode for process in processes] == [0] * ranks
