"""Start and end very many short jobs on a busy host, and check how their processes end.

    python scripts/stress_job_ends.py --jobs 500

Ranks of a job agree a few times and then leave all at once, one after another, or with an error. In
some jobs one rank is killed at a random moment, or stops itself (after it has joined: until then
torch waits for the rank). A rank may end in order, with an error of ours, or by the signal that it
was sent. Any other end (libzmq's assertions are SIGABRT), and a rank that hangs, fails the run.
"""

import argparse
import faulthandler
import logging
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field

from megatron_async.communication.bootstrap import join_job
from megatron_async.communication.channel import StepChannel
from megatron_async.communication.communicator import AsyncZMQCommunicator
from megatron_async.communication.death_watch import EXIT_CODE_RANK_LOST
from megatron_async.errors import ConfigurationError, JobFailed

ERROR_CODE = 3
"""Exit code of a rank that ends with an error of ours."""
UNEXPECTED_CODE = 4
"""Exit code of a rank that ends with another error."""
JOIN_TIMEOUT_S = 6.0
"""A rank that is killed before it joins is waited for so long."""
LONGEST_S = 60.0
"""A job that takes longer hangs."""
LONGEST_PAUSE_S = 0.05
"""Of random pauses."""


@dataclass
class RunningJob:
    """Processes of a job: those that have not ended, the one to be killed at `kill_at` (on the
    clock of `time.monotonic`, as `started`), the one that stops by itself; 0: none."""

    pids: set[int]
    victim: int
    stopping: int
    started: float
    kill_at: float
    ends: list[str] = field(default_factory=list)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=12, help="jobs that run side by side")
    parser.add_argument("--silence", type=float, default=0.4, help="MEGATRON_ASYNC_SILENCE_S")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["MEGATRON_ASYNC_SILENCE_S"] = str(options.silence)
    os.environ["MEGATRON_ASYNC_LOSS_GRACE_S"] = "2"
    randomly = random.Random(options.seed)
    ends: Counter[str] = Counter()
    running: list[RunningJob] = []
    todo = options.jobs
    while todo or running:
        while todo and len(running) < options.at_once:
            running.append(start_job(randomly))
            todo -= 1
        for job in list(running):
            look_after(job)
            if not job.pids:
                running.remove(job)
                ends.update(job.ends)
        time.sleep(0.002)
    print(f"{options.jobs} jobs, seed {options.seed}; ranks ended so: {dict(ends)}")
    sys.exit(any(end.startswith("BAD") for end in ends))


def start_job(randomly: random.Random) -> RunningJob:
    """Fork the ranks of a job of 2 or 3; nothing here has threads or sockets yet."""
    world = randomly.choice((2, 3))
    port = free_port()
    seed = randomly.random()
    what = randomly.choices(("nothing", "kill", "stop"), (70, 20, 10))[0]
    chosen = randomly.randrange(world)
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            run_rank(rank, world, port, seed, stops=what == "stop" and rank == chosen)
        pids.append(pid)
    now = time.monotonic()
    victim = pids[chosen] if what == "kill" else 0
    stopping = pids[chosen] if what == "stop" else 0
    return RunningJob(set(pids), victim, stopping, now, now + randomly.uniform(0.0, 1.5))


def look_after(job: RunningJob) -> None:
    """Kill the victim when its time has come, and collect ended processes."""
    now = time.monotonic()
    if job.victim in job.pids and now >= job.kill_at:
        os.kill(job.victim, signal.SIGKILL)
    if job.pids == {job.stopping} or now - job.started > LONGEST_S:
        for pid in job.pids:
            job.ends.append("stopped" if pid == job.stopping else "BAD: it hangs")
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        job.pids.clear()
    for pid in list(job.pids):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            job.pids.discard(pid)
            job.ends.append(describe(os.waitstatus_to_exitcode(status), pid == job.victim))


def describe(code: int, was_killed: bool) -> str:
    """How a rank ended, from its exit code; ends that must not be begin with BAD."""
    known = {0: "in order", ERROR_CODE: "with an error", EXIT_CODE_RANK_LOST: "by the watch"}
    if code in known:
        return known[code]
    if code == -signal.SIGKILL and was_killed:
        return "killed"
    return f"BAD: exit code {code}"


def run_rank(rank: int, world: int, port: int, seed: float, stops: bool) -> None:
    """Take part in a job, and leave it as the seed says; does not return."""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ["WORLD_SIZE"] = str(world)
    logging.disable()  # losses are expected here
    faulthandler.dump_traceback_later(LONGEST_S - 20)
    together = random.Random(seed)
    alone = random.Random(f"{seed} {rank}")
    code = 0
    failure = ""
    job = None
    try:
        job = join_job(timeout_s=JOIN_TIMEOUT_S)
        steps: StepChannel[int, int] = StepChannel(job, range(world), int)
        rounds = AsyncZMQCommunicator(job, range(world))
        for turn in range(together.randrange(20)):
            if rank == 0:
                steps.send(turn)
            else:
                steps.report(turn)
            rounds.sync_all_reduce_max(turn)
        if stops:
            time.sleep(alone.uniform(0.0, LONGEST_PAUSE_S))
            os.kill(os.getpid(), signal.SIGSTOP)
        how = together.choice(("at once", "one by one", "with an error", "after a while"))
        if how == "one by one":
            time.sleep(alone.uniform(0.0, LONGEST_PAUSE_S))
        elif how == "after a while":
            time.sleep(together.uniform(0.0, 1.0))
        elif how == "with an error":
            code, failure = ERROR_CODE, "ValueError: chosen"
    except (JobFailed, ConfigurationError):
        code = ERROR_CODE
    except BaseException:
        traceback.print_exc()
        code = UNEXPECTED_CODE
    finally:
        if job is not None:
            job.close(failure)
        os._exit(code)


def free_port() -> int:
    """A TCP port that nobody uses, below those that the system gives to connections."""
    while True:
        port = random.randrange(15000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


if __name__ == "__main__":
    main()
