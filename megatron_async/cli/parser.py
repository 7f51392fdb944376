"""`Parser`: argparse's, with errors of one line that name what was meant."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, override

from megatron_async.cli.options import PROGRAM
from megatron_async.cli.ranks import is_to_say

INVALID_CHOICE = re.compile(r"invalid choice: '(?P<given>[^']*)' \(choose from (?P<known>.*)\)")


class Parser(argparse.ArgumentParser):
    """argparse's parser with errors of one line, as all our errors are."""

    @override
    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where help is; exit with 2."""
        if found := INVALID_CHOICE.search(message):
            message += _meant(found["given"], re.findall(r"'([^']*)'", found["known"]))
        text = f"{PROGRAM}: error: {message} (see `{self.prog} --help`)\n"
        self.exit(2, text if is_to_say(text) else None)

    @override
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; an option that a command does not have is the error of this command's parser,
        which knows those that it has."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            hint = ""
            if unknown[0].startswith("-"):
                hint = _meant(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown


def add_model(group: Any, text: str, default: str | None = None) -> None:
    """A model, as `MODEL` or as `--model NAME_OR_PATH`; `take_model` makes one of the two."""
    group.add_argument("model_name", nargs="?", metavar="MODEL", help=text)
    group.add_argument(
        "-m", "--model", default=None, metavar="NAME_OR_PATH",
        help="the same" + (f" (default: {default})" if default else ""),
    )  # fmt: skip


def take_model(arguments: argparse.Namespace, default: str | None = None) -> str:
    """The model of `add_model`'s two options.

    Raises:
        ValueError: none was given, or two different ones.
    """
    given = {name for name in (arguments.model_name, arguments.model) if name is not None}
    if len(given) > 1:
        raise ValueError(
            f"two models were given, {arguments.model_name} and --model {arguments.model}: leave "
            "one out."
        )
    if not given and default is None:
        raise ValueError(f"no model was given: `{PROGRAM} generate smollm2 --prompt TEXT`.")
    return next(iter(given), default or "")


def _meant(given: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(given, list(known), n=1)
    return f". Did you mean {near[0]}?" if near else ""
