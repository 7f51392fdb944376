"""`Parser`: argparse's, with errors of one line that name what was meant."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, override

from megatron_async.cli.option_names import ELSEWHERE, SHORT, command_meant, option_meant
from megatron_async.cli.options import PROGRAM, HelpFormatter
from megatron_async.cli.ranks import is_to_say
from megatron_async.requests.parameter_names import nearest

INVALID_CHOICE = re.compile(r"invalid choice: '(?P<given>[^']*)' \(choose from (?P<known>.*)\)")
NO_NUMBER = re.compile(
    r"argument (?P<option>\S+): invalid (?P<kind>int|float) value: (?P<given>.*)"
)
SWITCH_WITH_VALUE = re.compile(r"argument (--[\w-]+)/(--no-[\w-]+): ignored explicit argument")


class Parser(argparse.ArgumentParser):
    """argparse's parser with errors of one line, as all our errors are."""

    def __init__(
        self, run: Callable[[argparse.Namespace], int] | None = None, **named: Any
    ) -> None:
        super().__init__(formatter_class=HelpFormatter, **named)
        if run is not None:
            self.set_defaults(run=run)

    @override
    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where help is; exit with 2."""
        if found := INVALID_CHOICE.search(message):
            known = re.findall(r"'([^']*)'", found["known"])
            meant = _meant(found["given"], known)
            if self._subparsers is not None and "COMMAND" in message:
                meant = command_meant(found["given"], known)
                message = f"there is no command {found['given']!r}"
                meant = meant or f". The commands are: {', '.join(known)}"
            message += meant
        if found := NO_NUMBER.search(message):
            kind = "an integer" if found["kind"] == "int" else "a number"
            message = f"argument {found['option']}: {found['given']} is not allowed: give {kind}"
        if found := SWITCH_WITH_VALUE.search(message):
            message = f"{found[1]} takes no value: write {found[1]} or {found[2]}"
        text = f"{PROGRAM}: error: {message} (see `{self.prog} --help`)\n"
        self.exit(2, text if is_to_say(text) else None)

    @override
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; an option that a command does not have is the error of this command's parser,
        which knows those that it has, and is told before any value is looked at."""
        self._check_options(sys.argv[1:] if args is None else args)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            words = " ".join(unknown)
            has_prompts = "--prompt" in self._option_string_actions
            hint = f": a prompt is given by -p {words!r}" if has_prompts else ": leave it out"
            self.error(f"unrecognized arguments: {words}{hint}")
        return found, unknown

    def _check_options(self, words: Sequence[str]) -> None:
        """Refuse the first option that there is not. argparse would say so last, and would take an
        unknown option's value for a model's name."""
        known = self._option_string_actions
        for word in words:
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                return  # what follows is the command's
            option = word.partition("=")[0]
            if option in known or not self._is_option(option):
                continue
            is_short = not option.startswith("--") and option[:2] in known
            begun = [name for name in known if option[:2] == "--" and name.startswith(option)]
            meant = option_meant(option, known)
            # --temp is one for --temperature; --stop is none for --stop-token-id.
            is_one = begun and (option not in ELSEWHERE or (len(begun) == 1 and begun[0] in meant))
            if option in SHORT or not (is_short or is_one):
                self.error(f"unrecognized option {option}{meant}")

    def _is_option(self, word: str) -> bool:
        """Whether argparse takes a word for an option: a negative number or a text is none."""
        is_number = self._negative_number_matcher.match(word)
        return word.startswith("-") and len(word) > 1 and not is_number and " " not in word


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
    near = nearest(given, known)
    return f". Did you mean {near}?" if near else ""
