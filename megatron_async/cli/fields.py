"""Options of the command line from the fields of dataclasses.

A field's option has the field's type and default, and its help is the first sentence of the
docstring under the field, so that nothing is written twice. (tyro and jsonargparse do as much, but
make whole parsers of dataclasses; here fields join groups of other options, in an order for
people.)
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, get_args, get_type_hints

SENTENCE = re.compile(r"(?<=\.)\s+(?=[A-Z\"0-9(`])")
IF_NONE = re.compile(r"\bNone(?: \(or \"none\"\))?: (.*?)(?:\.(?=\s|$)|$)")
DEFAULT = re.compile(r" \(default: .*\)$")
FIELD_NAME = re.compile(r"`([a-z][a-z_]+)`")
OPTION_NAMES = {"max_tokens": "max-step-tokens"}
"""Options that are not called as their fields: Megatron's `max_tokens` is a step's budget, and
everybody else's the length of an answer."""
METAVARS = {int: "N", float: "X", str: "NAME"}


@dataclass(frozen=True)
class FieldOption:
    """A field as an option.

    Attributes:
        name: of the field.
        kind: bool, int, float or str; of a list, the type of its elements.
        is_list: the option may be repeated.
        default: of the field.
        help: the first sentence of the field's docstring, and the default where it has one.
    """

    name: str
    kind: type
    is_list: bool
    default: Any
    help: str

    @property
    def metavar(self) -> str:
        """What stands for the value in the help."""
        return "GB" if self.name.endswith("_gb") else METAVARS[self.kind]


@cache
def field_options(made: type) -> dict[str, FieldOption]:
    """The fields of a dataclass that can be options, by name: those of a plain type, or lists of
    one.

    Args:
        made: a dataclass in a module of its own file, a docstring under each field.
    """
    tree = ast.parse(inspect.getsource(inspect.getmodule(made) or made))
    (body,) = (n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == made.__name__)
    texts = {
        field.target.id: " ".join(inspect.cleandoc(str(text.value.value)).split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }
    hints, found = get_type_hints(made), {}
    for name, text in texts.items():
        kind, is_list = _kind_of(hints[name])
        if kind is not None:
            default = getattr(made, name, None)
            found[name] = FieldOption(name, kind, is_list, default, _help(text, default))
    return found


def _kind_of(hint: Any) -> tuple[type | None, bool]:
    kinds = [kind for kind in (get_args(hint) or (hint,)) if kind is not type(None)]
    if len(kinds) == 1 and kinds[0] in (bool, int, float, str):
        return kinds[0], False
    of = get_args(kinds[0]) if len(kinds) == 1 else ()
    return (of[0], True) if len(of) == 1 and of[0] in (int, str) else (None, False)


def _help(text: str, default: Any) -> str:
    first = SENTENCE.split(text, maxsplit=1)[0].rstrip(".")
    first = first if first.startswith("Megatron") else first[0].lower() + first[1:]
    if default is None:
        meant = IF_NONE.search(text)
        shown = meant[1] if meant else None
    else:
        shown = None if default is False else "on" if default is True else default
    help_ = first if shown is None else f"{first} (default: {shown})"
    return FIELD_NAME.sub(lambda name: flag(name[1]), help_).replace("%", "%%")


def add_fields(
    group: Any, made: type, names: Iterable[str], defaults: Mapping[str, str] | None = None
) -> None:
    """Add the options of some fields to a group. An option that is not given is None.

    Args:
        group: of options.
        made: a dataclass.
        names: of its fields.
        defaults: by field, what is told of its default where a command has another than the field.
    """
    for name in names:
        field = field_options(made)[name]
        text = field.help
        if defaults and name in defaults:
            text = f"{DEFAULT.sub('', text)} (default: {defaults[name]})"
        if field.kind is bool:
            group.add_argument(
                flag(name), action=argparse.BooleanOptionalAction, help=text, dest=name
            )
        else:
            group.add_argument(
                flag(name), type=field.kind, metavar=field.metavar, help=text, dest=name,
                action="append" if field.is_list else "store",
            )  # fmt: skip


def flag(name: str) -> str:
    """The option of a field: `top_k` is `--top-k`."""
    return "--" + OPTION_NAMES.get(name, name.replace("_", "-"))
