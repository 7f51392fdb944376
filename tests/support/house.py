"""The house in numbers: which room imports which, and how large everything is.

`python -m tests.support.house` prints today's numbers as `tests/house.toml` has them.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_async"
HOUSE = ROOT / "tests" / "house.toml"
FACE = "face"
"""The room of the package's own `__init__.py`. Another file beside the rooms is a room itself."""
ROOM, MANY = 50, 500
"""Ceilings of a room's lines, and of more lines and words, are multiples of these: not every
change edits them."""


class Import(NamedTuple):
    """A module of the package takes something from another one."""

    importer: str
    """Path below the package with dots, such as `engine.step_loop`."""
    imported: str
    when: str
    """"top": when the module is imported; "late": in a function; "type": for type checkers."""

    def __str__(self) -> str:
        return f"{self.importer} -> {self.imported} ({self.when})"


def room_of(module: str) -> str:
    """The first folder of a module, or the module."""
    return module.split(".")[0] or FACE


def _name_of(file: Path, package: Path) -> str:
    parts = file.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(package: Path = PACKAGE) -> list[Import]:
    """All imports between modules of a package, each pair and time once."""
    modules = {_name_of(file, package): file for file in sorted(package.rglob("*.py"))}
    found: dict[Import, None] = {}
    for importer, file in modules.items():
        for node, when in _import_nodes(ast.parse(file.read_text("utf-8")), "top"):
            for name in _names(node):
                head, _, inside = name.partition(".")
                while head == package.name and inside not in modules:
                    inside = inside.rpartition(".")[0]
                if head == package.name and inside != importer:
                    found[Import(importer, inside, when)] = None
    return list(found)


def _import_nodes(node: ast.AST, when: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    typed = []
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        typed = node.body
    for child in ast.iter_child_nodes(node):
        inside = "type" if child in typed else when
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, inside
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and when == "top":
            yield from _import_nodes(child, "late")
        else:
            yield from _import_nodes(child, inside)


def _names(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    return [f"{node.module}.{each.name}" for each in node.names]


def circles(pairs: Iterable[tuple[str, str]]) -> list[set[str]]:
    """The groups of names that import each other, directly or through others."""
    after: dict[str, set[str]] = defaultdict(set)
    for one, other in pairs:
        after[one].add(other)
    reached = {name: _reached(name, after) for name in after}
    groups = {
        frozenset(other for other in reached[name] if name in reached.get(other, ()))
        for name in after
        if name in reached[name]
    }
    return [set(group) for group in groups]


def _reached(name: str, after: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    todo = [name]
    while todo:
        new = after.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


def back_arrows(found: Iterable[Import], storeys: list[str]) -> dict[str, list[Import]]:
    """Imports of a room by a room that stands before it in `storeys`, by "room -> room"."""
    arrows: dict[str, list[Import]] = defaultdict(list)
    for each in found:
        importer, imported = room_of(each.importer), room_of(each.imported)
        if storeys.index(importer) < storeys.index(imported):
            arrows[f"{importer} -> {imported}"].append(each)
    return dict(arrows)


def _lines(files: Iterable[Path]) -> int:
    return sum(len(file.read_text("utf-8").splitlines()) for file in files)


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from (name for name in action.option_strings[:1] if name != "-h")
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _options(each)


def numbers() -> dict[str, dict[str, int]]:
    """Today's numbers, as tests/house.toml has them as ceilings."""
    from megatron_async.cli.main import build_parser
    from megatron_async.config import InferenceConfig

    files = sorted(PACKAGE.rglob("*.py"))
    lines: Counter[str] = Counter()
    for file in files:
        room = room_of(_name_of(file, PACKAGE))
        lines[room if (PACKAGE / room).is_dir() else "beside the rooms"] += _lines([file])
    pages = [*(ROOT / "docs").glob("*.md")]
    late = [each for each in imports() if each.when == "late"]
    return {
        "lines": dict(lines)
        | {folder: _lines((ROOT / folder).rglob("*.py")) for folder in ("scripts", "tests")},
        "counts": {
            "files of the package": len(files),
            "files of tests": len([*(ROOT / "tests").rglob("*.py")]),
            "fields of InferenceConfig": len(dataclasses.fields(InferenceConfig)),
            "options of the command line": len({*_options(build_parser())}),
            "pages of docs": len(pages),
            "words of docs": sum(len(page.read_text("utf-8").split()) for page in pages),
            "late imports between rooms": sum(
                room_of(each.importer) != room_of(each.imported) for each in late
            ),
        },
    }


def ceiling(table: str, name: str, number: int) -> int:
    """A number as tests/house.toml has it, rounded up where it changes often."""
    step = ROOM if table == "lines" else 1
    if name in ("scripts", "tests", "words of docs"):
        step = MANY
    return -(-number // step) * step


def house() -> dict[str, Any]:
    """What tests/house.toml says."""
    return tomllib.loads(HOUSE.read_text("utf-8"))


if __name__ == "__main__":
    for table, rows in numbers().items():
        print(f"[{table}]")
        for name, number in sorted(rows.items()):
            key = name if name.isidentifier() else f'"{name}"'
            print(f"{key} = {ceiling(table, name, number)}  # {number}")
