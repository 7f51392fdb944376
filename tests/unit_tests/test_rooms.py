"""The house: which room imports which, and how large everything is, against `tests/house.toml`."""

import ast
import re
from collections import Counter

import codeowners
import pytest
import structures

from tests.support.house import (
    PACKAGE,
    Import,
    back_arrows,
    ceiling,
    circles,
    house,
    imports,
    numbers,
)


def test_every_room_says_what_is_in_it():
    """More than a line in a room of its own; a line in a room within a room."""
    for init in PACKAGE.rglob("__init__.py"):
        room = init.parent.relative_to(PACKAGE)
        says = ast.get_docstring(ast.parse(init.read_text("utf-8"))) or ""
        assert len(says) > (100 if len(room.parts) == 1 else 20), f"{room}: {says!r}"


def test_the_page_of_structures_is_the_folders():
    assert structures.FILE.read_text("utf-8") == structures.text(), "run scripts/structures.py"


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


@pytest.fixture(scope="module")
def found():
    """The imports of the package."""
    return imports()


def test_no_circle_of_files(found):
    """Counting imports in functions and for type checkers too: files in a circle can only be
    understood together."""
    assert Import("engine.dynamic_engine", "planning.dynamic_context", "top") in found
    groups = circles((each.importer, each.imported) for each in found)
    ties = [[str(each) for each in found if {*each[:2]} <= group] for group in groups]
    assert ties == [], f"files import each other: move what both need below both: {ties}"


def test_rooms_import_what_is_below(found):
    """The order of rooms is a list from the ground up; an arrow that runs back up has a reason."""
    order = house()["order"]
    rooms = {file.parent.name if file.stem == "__init__" else file.stem
             for file in (*PACKAGE.glob("*/__init__.py"), *PACKAGE.glob("*.py"))}  # fmt: skip
    assert set(order["rooms"]) == rooms - {PACKAGE.name} | {"face"}, "edit tests/house.toml"
    arrows = back_arrows(found, order["rooms"])
    new = {pair: list(map(str, each)) for pair, each in arrows.items() if pair not in order["back"]}
    assert new == {}, (
        "a room imports a room above it: move what both need below both, or edit tests/house.toml "
        f"on purpose: {new}"
    )
    assert arrows.keys() == order["back"].keys(), "an arrow is gone: edit tests/house.toml"
    assert all(each.when != "top" for pair in arrows.values() for each in pair)
    assert len(arrows) <= 5


def test_the_house_has_not_grown():
    """A room, the options, the pages: what grows over its ceiling does so on purpose."""
    said = house()
    for table, rows in numbers().items():
        ceilings = said[table]
        grown = {name: n for name, n in rows.items() if n > ceilings.get(name, 0)}
        assert grown == {}, (
            f"larger than [{table}] of tests/house.toml says: {grown}. Make it smaller, or edit "
            "tests/house.toml on purpose (python -m tests.support.house prints today's numbers)"
        )
        assert ceilings.keys() == rows.keys(), "edit tests/house.toml on purpose"


FILES = {
    "__init__.py": "if TYPE_CHECKING:\n    from house.b import c\n",
    "a.py": "def late():\n    from house import b\n",
    "b/__init__.py": "from house.b.c import d\n",
    "b/c.py": "import json\nfrom house.b.e import f\nif 1:\n    import house.a\nd = 0\n",
    "b/e.py": "if TYPE_CHECKING:\n    from house.b import c\nf = 0\n",
}


def test_imports_are_seen(tmp_path):
    """Imports of modules and names, at the top, in functions, for type checkers; the face takes
    part."""
    package = tmp_path / "house"
    for name, text in FILES.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    found = imports(package)
    assert set(found) == {
        Import("", "b.c", "type"), Import("a", "b", "late"), Import("b", "b.c", "top"),
        Import("b.c", "b.e", "top"), Import("b.c", "a", "top"), Import("b.e", "b.c", "type"),
    }  # fmt: skip
    assert circles((each.importer, each.imported) for each in found) == [{"a", "b", "b.c", "b.e"}]
    assert list(back_arrows(found, ["a", "b", "face"])) == ["a -> b"]
    assert list(back_arrows(found, ["face", "b", "a"])) == ["face -> b", "b -> a"]


@pytest.mark.parametrize(
    ("table", "name", "number", "expected"),
    [
        ("lines", "ops", 101, 150),
        ("lines", "tests", 501, 1000),
        ("counts", "words of docs", 500, 500),
        ("counts", "x", 7, 7),
    ],
)
def test_ceilings(table, name, number, expected):
    assert ceiling(table, name, number) == expected
