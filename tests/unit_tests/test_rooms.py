"""Rooms, the folders of the package, do not import each other in a circle."""

import ast
import re
from collections import Counter
from pathlib import Path

import codeowners

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_async"


def statements(body):
    """What runs when a module is imported, but for what is there for type checkers alone."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from statements(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            for part in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, part, []))


def rooms_imported(file):
    """The folders directly in the package from which a file imports."""
    for node in statements(ast.parse(file.read_text("utf-8")).body):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, _, inside = name.partition(".")
            room = inside.split(".")[0]
            if package == PACKAGE.name and (PACKAGE / room).is_dir():
                yield room


def test_every_room_says_what_is_in_it():
    """More than a line in a room of its own; a line in a room within a room."""
    for init in PACKAGE.rglob("__init__.py"):
        room = init.parent.relative_to(PACKAGE)
        says = ast.get_docstring(ast.parse(init.read_text("utf-8"))) or ""
        assert len(says) > (100 if len(room.parts) == 1 else 20), f"{room}: {says!r}"


def test_every_room_has_owners():
    """GitHub's syntax has a pattern and owners on a line, and no sections; an owner is @NAME,
    @ORGANISATION/TEAM or an address."""
    text = codeowners.FILE.read_text("utf-8")
    assert text == codeowners.text(), "run python scripts/codeowners.py"
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    patterns = [pattern for pattern, *_ in lines]
    rooms = {f"/{PACKAGE.name}/{init.parent.name}/" for init in PACKAGE.glob("*/__init__.py")}
    assert Counter(patterns) == Counter(["*", *rooms]), "PARTS of scripts/codeowners.py"
    for _, *owners in lines:
        assert owners
        assert all(re.fullmatch(r"@[\w-]+(/[\w-]+)?|[^@\s]+@[\w.-]+", each) for each in owners)


def test_no_circles():
    imports = {
        room.name: {each for file in room.rglob("*.py") for each in rooms_imported(file)}
        - {room.name}
        for room in PACKAGE.iterdir()
        if (room / "__init__.py").is_file()
    }
    assert "contexts" in imports["engines"]  # it sees something at all
    while ends := [room for room, others in imports.items() if not others & imports.keys()]:
        for room in ends:
            del imports[room]
    circle = {room: sorted(others & imports.keys()) for room, others in imports.items()}
    assert circle == {}, (
        "rooms import each other: import types under TYPE_CHECKING, or move what both need below "
        f"both: {circle}"
    )
