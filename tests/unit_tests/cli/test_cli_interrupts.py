"""Ctrl-C before there is anything to end in order: one line, status 130, no traceback."""

import subprocess
import sys

from megatron_async import __main__
from megatron_async.cli import main as cli
from tests.unit_tests.cli.cli_runs import TINY


def test_interrupt_is_clean(capsys, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "read_prompts", interrupted)
    assert cli.main([*TINY]) == 130
    assert capsys.readouterr().err.strip() == "megatron-async: interrupted"


HELD = """
import os, signal, sys
from megatron_async import __main__
from megatron_async.cli.terminal import raise_interrupts

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "megatron_async.llm":  # inside an import of a module, whoever imports it
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:  # an import may swallow it, or fail at any place
                pass

sys.meta_path.insert(0, Finder())
sys.argv = ["megatron-async", "generate", "dummy:tiny", "-p", "1"]
sys.exit(__main__.main())
"""


def test_an_interrupt_inside_an_import_ends_the_process():
    done = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (130, "megatron-async: interrupted")


def test_an_interrupt_while_the_command_line_is_imported(capsys, monkeypatch):
    class Importing:
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "megatron_async.cli.main", Importing())
    assert __main__.main() == 130
    assert capsys.readouterr().err.strip() == "megatron-async: interrupted"
