"""`python -m megatron_async.compat SCRIPT ARGS`: a Megatron script, unmodified, on this engine."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

USAGE = "python -m megatron_async.compat [--cpu] [--own NAME] [--no-hook] SCRIPT [ARGS ...]"


def main(argv: Sequence[str] | None = None) -> None:
    """Run a script as Python would, its imports of `megatron.core.inference` answered by ours."""
    options, script, arguments = parse(sys.argv[1:] if argv is None else argv)
    # As `python SCRIPT` has it; the working folder, which -m puts there, is no part of the script.
    sys.path[0] = str(script.resolve().parent)
    sys.argv = [str(script), *arguments]
    if options.cpu:
        from megatron_async.compat.cpu_stand_ins import stand_in

        stand_in()
    if not options.no_hook:
        from megatron_async.compat.import_hook import DEFAULT_PACKAGES, install

        install(script.resolve().parent, (*DEFAULT_PACKAGES, *options.own))
    runpy.run_path(str(script), run_name="__main__")


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Path, list[str]]:
    """Split a command line behind `megatron_async.compat` at the script's name.

    Returns:
        our options, the script, and its arguments, which are not looked at.

    Raises:
        SystemExit: --help was asked for, or no script can be found; a line on stderr says so.
    """
    parser = argparse.ArgumentParser(
        prog="python -m megatron_async.compat",
        usage=USAGE,
        description="Run a Megatron-LM inference script unmodified: its imports of "
        "megatron.core.inference, and those of its own modules, are answered by megatron_async. "
        "Megatron's own files keep theirs. docs/megatron.md says what is served.",
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="on a machine without a GPU: stand-ins for the calls of torch.cuda that scripts make "
        "without asking (megatron_async/compat/cpu_stand_ins.py lists them)",
    )
    parser.add_argument(
        "--own",
        metavar="NAME",
        action="append",
        default=[],
        help="a further package or module whose imports are answered; those in the script's folder "
        "are, and `examples` and `megatron.inference`. May be given several times",
    )
    parser.add_argument(
        "--no-hook",
        action="store_true",
        help="answer no imports: the script on Megatron's own engine, to compare",
    )
    parser.add_argument("script", metavar="SCRIPT", help="the script's file")
    parser.add_argument("arguments", metavar="ARGS", nargs="*", help="the script's arguments")
    at = _script_at(argv)
    options = parser.parse_args(argv[: at + 1])
    script = Path(options.script)
    if not script.is_file():
        parser.error(f"no such script: {script}")
    return options, script, list(argv[at + 1 :])


def _script_at(argv: Sequence[str]) -> int:
    """Where the first word is that is neither an option of ours nor the value of one."""
    at = 0
    while at < len(argv) and argv[at].startswith("-"):
        at += 2 if argv[at] == "--own" else 1
    return at


if __name__ == "__main__":
    main()
