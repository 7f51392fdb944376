"""Our own lint: nothing on the step path waits for the device, and the house stays in order.

    python scripts/lint_no_sync.py            # the whole package, tests and pages
    python scripts/lint_no_sync.py FILE ...   # some of these files (pre-commit)

On the step path (`STEP_PATH`) a call that reads a device tensor on the CPU, or uploads a Python
value, makes the CPU wait for everything launched before: the GPU then idles while the next step is
prepared. Such calls are errors, except in files that run on a CPU and nowhere else (`HOST_ONLY`)
and in references of ops and their implementations for a CPU (`@op`, `@swiglu.cpu`).
Where a call is right (the tensor is in host memory, or the code does not run in a step), its line
says so, with the reason:

    rows = mask.nonzero()  # sync-ok: NumPy array, never on the device

Everywhere in the package, a public function, method or class has a docstring; a method may inherit
the docstring from a base class of the package. A docstring does not begin with a pronoun and does
not send its reader elsewhere (`EMPTY_BEGINNING`); docstrings and comments name their things
(`HIDDEN_NOUN`), those of tests too, and so do pages. A file has at most `MAX_LINES` lines and
`MAX_CLASSES` public classes, small ones and records apart. The lint reads syntax, not types, so it
cannot tell an array from a tensor: the reason on the line does.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "megatron_async"
STEP_PATH = (
    "planning",
    "device_state",
    "engine",
    "observe",
    "ranks",
    "rollback",
    "step",
    "updates",
    "models",
    "ops",
)
HOST_ONLY = ("cpu",)
"""Folders of `ops` that run on a CPU and nowhere else: their tensors are in host memory."""
PAGES = ("", "docs", "deploy")
"""Folders of pages. Records keep the words of their day."""
MAX_LINES = 540
MAX_CLASSES = 2
SMALL_CLASS = 40
"""Lines of a class which does not count among a file's public classes: it serves another one."""
RECORD = re.compile(
    r"(dataclass|NamedTuple|TypedDict|Struct|Protocol|\w*(Enum|Flag|Error|Exception))$"
)
"""A decorator or base of a record, which does not count either."""
DOCUMENTED_ELSEWHERE = {"overload", "setter", "gpu", "cpu"}
"""Decorators of what another function documents: an implementation's op is its reference."""
EMPTY_BEGINNING = re.compile(r"(See|As|It|Its|They|Their|Who|Of|Those|That|So|The same)\b")

HIDDEN_NOUN = re.compile(
    r"\b(?:(?i:who(?:m|ever)?|that[\s#]+of|what[\s#]+is[\s#]+(?:there|new|so)|such[\s#]+a[\s#]+one)"
    r"|Those[\s#]+of)\b"
)
"""Words in docstrings and comments for which a reader has to look for a noun."""
PERSON = re.compile(r"(?i:users?|operators?|people|person|(?:any|every|no|some)body)[\s#]+who\b")
"""Nouns that "who" may follow."""
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
"""Code in a page, which is no prose."""

READ = "keep the value on the device, or copy it with the step's samples and read it in resolve"
UPLOAD = "put it into the step's bookkeeping buffer, or make it once, outside the step"
SHAPE = "its result's shape is data: use a mask, torch.where(mask, a, b) or the plan's CPU arrays"

METHODS = {
    "item": READ,
    "cpu": READ,
    "tolist": READ,
    "numpy": READ,
    "nonzero": SHAPE,
    "argwhere": SHAPE,
    "masked_select": SHAPE,
    "synchronize": "wait for the step's event in resolve; nothing else waits",
}
"""Calls that synchronise whatever their receiver is, and the remedy."""

WAIVER = re.compile(r"#\s*sync-ok\b:?\s*(?P<reason>.*)")


@dataclass(frozen=True, order=True)
class Finding:
    """One broken rule: where, which, and what to do instead."""

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{path}:{self.line}: {self.message}"


def synchronising_call(call: ast.Call) -> tuple[str, str] | None:
    """What a call looks like and its remedy, if it makes the CPU wait for the device."""
    if not isinstance(call.func, ast.Attribute):
        return None
    name, receiver = call.func.attr, call.func.value
    of_torch = isinstance(receiver, ast.Name) and receiver.id == "torch"
    of_numpy = isinstance(receiver, ast.Name) and receiver.id in ("np", "numpy")
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if of_numpy:
        return None  # NumPy arrays live in host memory
    if name in METHODS:
        return f"{ast.unparse(call.func)}()", METHODS[name]
    if of_torch and name == "where" and len(call.args) + len(call.keywords) == 1:
        return "torch.where(mask)", SHAPE
    if of_torch and name in ("tensor", "as_tensor") and "device" in keywords:
        return f"torch.{name}(..., device=...)", UPLOAD
    if name == "to":
        target = call.args[0] if call.args else keywords.get("device")
        if target is not None and is_cpu(target):
            return '.to("cpu")', READ
    return None


def is_cpu(node: ast.expr) -> bool:
    """True for the expressions `"cpu"` and `torch.device("cpu")`."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value.split(":")[0] == "cpu"
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.device":
        return bool(node.args) and is_cpu(node.args[0])
    return False


def waivers(source: str) -> dict[int, str]:
    """Line -> reason of each `# sync-ok` comment; the reason is empty where none is given."""
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and (match := WAIVER.match(token.string)):
            found[token.start[0]] = match["reason"].strip()
    return found


def check_sync(path: Path, source: str) -> tuple[list[Finding], int]:
    """Findings of the no-sync rules in one file, and how many calls a waiver lets through."""
    findings: list[Finding] = []
    reasons = waivers(source)
    used: set[int] = set()
    waived = 0
    tree = ast.parse(source, str(path))
    on_hosts = {
        id(call)
        for function in ast.walk(tree)
        if serves_hosts(function)
        for call in ast.walk(function)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or id(node) in on_hosts:
            continue
        if (problem := synchronising_call(node)) is None:
            continue
        # The attribute's own line (a chain of calls starts lines above), or the statement's last.
        assert isinstance(node.func, ast.Attribute)
        line = node.func.end_lineno or node.lineno
        waiver = next((at for at in (line, node.end_lineno or line) if at in reasons), None)
        if waiver is not None:
            used.add(waiver)
            waived += 1
            continue
        what, remedy = problem
        findings.append(Finding(path, line, f"{what} waits for the device: {remedy}"))
    for line, reason in reasons.items():
        if not reason:
            findings.append(Finding(path, line, "`# sync-ok` needs a reason: `# sync-ok: why`"))
        elif line not in used:
            findings.append(Finding(path, line, "`# sync-ok` waives nothing here: remove it"))
    return findings, waived


def prose(source: str) -> str:
    """Docstrings and comments of a file on their lines; other lines are a full stop."""
    lines = ["."] * (source.count("\n") + 1)
    is_start = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and is_start):
            for number, line in enumerate(token.string.split("\n"), token.start[0] - 1):
                lines[number] = line
        elif token.type not in (tokenize.NL, tokenize.COMMENT):
            is_start = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    return "\n".join(lines)


def check_words(path: Path, source: str, tree: ast.AST | None = None) -> list[Finding]:
    """Findings of each `HIDDEN_NOUN` in the prose of a file or a page, and of docstrings and
    paragraphs with an `EMPTY_BEGINNING`."""
    findings = []

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    if path.suffix == ".md":
        source = CODE.sub(blank, source)
        for match in re.finditer(rf"(?<=\n\n){EMPTY_BEGINNING.pattern}", source):
            line = source.count("\n", 0, match.start()) + 1
            why = f"the paragraph begins with {match[0]!r}: begin with a noun or a verb"
            findings.append(Finding(path, line, why))
    for node in ast.walk(tree or ast.parse("" if path.suffix == ".md" else source)):
        said = node.value if isinstance(node, ast.Expr) else None  # of an attribute, too
        if isinstance(said, ast.Constant) and (found := EMPTY_BEGINNING.match(str(said.value))):
            why = f"the docstring begins with {found[0]!r}: begin with a noun or a verb"
            findings.append(Finding(path, said.lineno, why))
    if HIDDEN_NOUN.search(source):
        text = PERSON.sub(blank, source if path.suffix == ".md" else prose(source))
        for match in HIDDEN_NOUN.finditer(text):
            words = re.sub(r"[\s#]+", " ", match[0])
            why = f'{words!r} hides what is meant: write the noun ("which" for a thing)'
            findings.append(Finding(path, text.count("\n", 0, match.start()) + 1, why))
    return findings


def public_definitions(body: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    """Classes and functions defined directly in `body` whose docstring a reader may look for."""
    for node in ast.iter_child_nodes(body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {ast.unparse(d).split(".")[-1] for d in node.decorator_list}
            if not node.name.startswith("_") and not decorators & DOCUMENTED_ELSEWHERE:
                yield cast("ast.ClassDef | ast.FunctionDef", node)


def documented_methods(trees: Iterable[ast.AST]) -> dict[str, set[str]]:
    """Class name -> names of the methods that have a docstring there or in a base class. Classes of
    one name are taken together: those of `compat` have the names of their bases."""
    classes: dict[str, list[ast.ClassDef]] = {}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            classes.setdefault(node.name, []).append(node)
    found: dict[str, set[str]] = {}

    def methods(name: str) -> set[str]:
        if name not in found and name in classes:
            found[name] = set()  # ends a circle of names
            own: set[str] = set()
            for node in classes[name]:
                own |= {m.name for m in public_definitions(node) if ast.get_docstring(m)}
                bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
                own = own.union(*map(methods, bases))
            found[name] = own
        return found.get(name, set())

    for name in classes:
        methods(name)
    return found


def undocumented(tree: ast.AST, documented: dict[str, set[str]]) -> Iterator[tuple[int, str]]:
    """Line and name of the public classes, functions and methods that have no docstring."""
    for node in public_definitions(tree):
        if ast.get_docstring(node) is None:
            yield node.lineno, node.name
        if isinstance(node, ast.ClassDef):
            for method in public_definitions(node):
                if method.name not in documented[node.name]:
                    yield method.lineno, f"{node.name}.{method.name}"


def counted_classes(tree: ast.Module) -> list[ast.ClassDef]:
    """A file's public classes which are neither small nor records, nor made from its records."""
    records: set[str] = set()
    counted = []
    for node in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        marks = {re.split(r"[(\[]", ast.unparse(n))[0] for n in node.decorator_list + node.bases}
        if marks & records or any(RECORD.match(mark.split(".")[-1]) for mark in marks):
            records.add(node.name)
        elif node.name[0] != "_" and (node.end_lineno or 0) - node.lineno >= SMALL_CLASS:
            counted.append(node)
    return counted


def check_house(
    path: Path, source: str, documented: dict[str, set[str]] | None = None
) -> list[Finding]:
    """Findings of the rules that hold everywhere in the package: length, classes and docstrings.

    `documented` is `documented_methods` of the package; without it, of this file alone.
    """
    findings = []
    lines = source.count("\n") + (not source.endswith("\n"))
    if lines > MAX_LINES:
        findings.append(
            Finding(path, lines, f"{lines} lines, at most {MAX_LINES}: one idea a file, split it")
        )
    tree = ast.parse(source, str(path))
    if source.strip() and ast.get_docstring(tree) is None:
        findings.append(Finding(path, 1, "module without a docstring: say what it is for"))
    for extra in counted_classes(tree)[MAX_CLASSES:]:
        why = f"{extra.name} is a public class too many, at most {MAX_CLASSES}: one idea a file"
        findings.append(Finding(path, extra.lineno, why))
    documented = documented_methods([tree]) if documented is None else documented
    findings += check_words(path, source, tree)
    for line, name in undocumented(tree, documented):
        findings.append(Finding(path, line, f"{name} has no docstring: say what it does"))
    return findings


def on_step_path(path: Path) -> bool:
    """Whether the no-sync rules hold for a file, whose path begins at the package's folder."""
    host_only = path.parts[0] == "ops" and not set(HOST_ONLY).isdisjoint(path.parts)
    return path.parts[0] in STEP_PATH and not host_only


def serves_hosts(node: ast.AST) -> bool:
    """Whether a function runs on a CPU and nowhere else: an op's reference, or an implementation
    for a CPU."""
    if not isinstance(node, ast.FunctionDef):
        return False
    decorators = [ast.unparse(decorator).split("(")[0] for decorator in node.decorator_list]
    return any(name == "op" or name.endswith(".cpu") for name in decorators)


def lint(paths: list[Path], package: Path) -> tuple[list[Finding], int]:
    """All findings in the given files of `package`, and of words in others, sorted, and the number
    of waived calls."""
    findings: list[Finding] = []
    waived = 0
    documented = documented_methods(ast.parse(p.read_bytes()) for p in package.rglob("*.py"))
    for path in paths:
        source = path.read_text(encoding="utf-8")
        if not path.is_relative_to(package):
            findings += check_words(path, source)
            continue
        findings += check_house(path, source, documented)
        if on_step_path(path.relative_to(package)):
            found, allowed = check_sync(path, source)
            findings += found
            waived += allowed
    return sorted(findings), waived


def main(argv: list[str] | None = None) -> int:
    """Lint the package, tests and pages, or the given files of them; 1 if a rule is broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="default: all")
    arguments = parser.parse_args(argv)
    package = ROOT / PACKAGE
    given = [path.resolve() for path in arguments.files]
    pages = [page for folder in PAGES for page in (ROOT / folder).glob("*.md")]
    everything = sorted([*package.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *pages])
    paths = [path for path in everything if not given or path in given]
    findings, waived = lint(paths, package)
    for finding in findings:
        print(finding)
    verdict = f"{len(findings)} findings" if findings else "clean"
    print(f"lint_no_sync: {len(paths)} files, {waived} waived calls, {verdict}", file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
