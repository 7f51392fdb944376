"""Runs of the command line in this process, for its tests."""

from megatron_async.cli import main as cli

TINY = ["generate", "--model", "dummy:tiny", "--device", "cpu", "--no-progress"]
"""Random weights, no tokenizer: prompts are token ids."""


def fails(capsys, *arguments):
    """Run a command that must fail as a user's error; return its one line on stderr."""
    assert cli.main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    line = output.err.strip().splitlines()[-1]
    assert line.startswith("megatron-async: error: ")
    assert "Traceback" not in output.err
    return line
