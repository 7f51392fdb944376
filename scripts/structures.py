"""Writes `docs/structures.md`: a line for each folder of the package, from its docstring.

python scripts/structures.py
"""

import ast
from pathlib import Path

from codeowners import PARTS

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs" / "structures.md"
PACKAGE = ROOT / "megatron_async"
MIRROR = PACKAGE / "compat" / "inference"
"""Its folders are those of Megatron, each with the alias of a class."""
HEAD = """\
# Structures

Each folder of the package: what it is for, and the names of its files, whose docstrings say more.
`scripts/structures.py` writes this page.
"""


def line(folder: Path) -> str:
    """A folder's line: path, what it is for, its files."""
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8"))) or ""
    first = " ".join(docstring.partition("\n\n")[0].split())
    files = sorted(each.stem for each in folder.glob("*.py") if each.stem != "__init__")
    path = folder.relative_to(PACKAGE).as_posix()
    return f"- `{path}/`: {first}{f' *{", ".join(files)}*' if files else ''}\n"


def text() -> str:
    """The page's text."""
    parts = [HEAD]
    for part, rooms in PARTS.items():
        parts.append(f"\n## {part[0].upper()}{part[1:]}\n\n")
        for room in rooms:
            folders = sorted(init.parent for init in (PACKAGE / room).rglob("__init__.py"))
            parts += [line(folder) for folder in folders if MIRROR not in folder.parents]
    roots = sorted(each.stem for each in PACKAGE.glob("*.py") if not each.stem.startswith("__"))
    parts.append(f"\nBeside them, in the package itself: {', '.join(roots)}.\n")
    return "".join(parts)


if __name__ == "__main__":
    FILE.write_text(text(), "utf-8")
