"""What the command line shows of a run: its progress line, logged steps, and metrics."""

import contextlib
import json
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from cli_runs import TINY, fails

from megatron_async.cli import main as cli
from megatron_async.cli import output as cli_output


def test_the_progress_line_says_what_there_is_to_say():
    stats = {"overlap_ratio": 0.987, "waiting_requests": 0, "pauses": 0, "evictions": 0}
    line = cli_output.progress_line(stats, rows=7, tokens=90, seconds=2.0)
    assert line == "90 tokens, 45 tokens/s, 7 rows, overlap 0.99"
    stats |= {"waiting_requests": 3, "evictions": 2}
    line = cli_output.progress_line(stats, rows=7, tokens=90, seconds=0.0)
    assert line == "90 tokens, 0 tokens/s, 7 rows, overlap 0.99, 3 waiting, 2 evictions"


def test_logged_steps_and_progress_are_on_stderr(capsys):
    command = [a for a in TINY if a != "--no-progress"]
    logged = ["--logging-step-interval", "4"]
    assert cli.main([*command, "--prompt", "1 2", "--max-new-tokens", "9", "--json", *logged]) == 0
    output = capsys.readouterr()
    json.loads(output.out)
    assert "step 3: device" in output.err
    assert "step 7: device" in output.err
    assert "9 tokens" in output.err
    assert "overlap 1.00" in output.err


def test_metrics_are_served_while_prompts_are_answered(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    page = f"http://127.0.0.1:{port}/metrics"
    command = [*TINY, "--prompt", "1", "--max-new-tokens", "600", "--metrics-port", str(port)]
    with ThreadPoolExecutor() as pool:
        run = pool.submit(cli.main, command)
        text = ""
        while not run.done() and "megatron_async_steps_total" not in text:
            with contextlib.suppress(OSError), urllib.request.urlopen(page, timeout=20) as answer:
                text = answer.read().decode()
        assert run.result() == 0
    assert "megatron_async_steps_total" in text
    capsys.readouterr()
    assert "choose a free port" in fails(capsys, *TINY, "--prompt", "1", "--metrics-port", "70000")
