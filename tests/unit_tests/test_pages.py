"""Pages: links and file names in them lead somewhere, and the index has all pages."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(ROOT / "deploy").glob("*.md")])
# Dated records keep the names that files had on their day.
RECORDS = sorted((DOCS / "records").glob("*.md"))
# Pages for users of Megatron-LM name its files too.
OWN_FILES = [page for page in PAGES if not page.name.startswith("megatron")]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(r"`([\w./]+/[\w./]+\.(?:py|sh))`")
MOST_LINES = {"README.md": 120, "docs/architecture.md": 180, "docs/performance.md": 120}


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), flags=re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {each.strip().replace(" ", "-") for each in words}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [*PAGES, *RECORDS], ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text("utf-8")):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)} links to {link}, which does not exist"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{name(page)}: no heading of {path} makes #{anchor}"


@pytest.mark.parametrize("page", OWN_FILES, ids=name)
def test_files_that_are_named_exist(page: Path) -> None:
    """Paths count from the root, or from the package."""
    for path in FILE.findall(page.read_text("utf-8")):
        roots = (ROOT, ROOT / "megatron_async", page.parent)
        found = any((root / path).exists() for root in roots)
        assert found, f"{name(page)} names {path}, which is neither in the root nor in the package"


@pytest.mark.parametrize("page", RECORDS, ids=name)
def test_a_record_says_what_replaced_a_benchmark_that_is_gone(page: Path) -> None:
    text, here = page.read_text("utf-8"), ROOT / "scripts" / "benchmarks"
    gone = {file for file in re.findall(r"benchmark_\w+\.py", text) if not (here / file).exists()}
    head = next((line for line in text.splitlines()[:5] if "are gone" in line), "")
    replaced = dict(re.findall(r"`(benchmark_\w+\.py)` by `(benchmark_\w+\.py)", head))
    left = next((line for line in text.splitlines()[:6] if "without a successor" in line), "")
    assert replaced.keys() | set(re.findall(r"`(benchmark_\w+\.py)`", left)) == gone
    assert not left or re.search(r"at commit [0-9a-f]{7}\b", left)
    assert all((here / file).exists() for file in replaced.values())


def test_the_index_has_every_page() -> None:
    index = (DOCS / "README.md").read_text("utf-8")
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in LINK.findall(index)}
    assert {page for page in DOCS.glob("*.md") if page.name != "README.md"} <= linked


@pytest.mark.parametrize("path", MOST_LINES)
def test_pages_for_a_first_reading_stay_short(path: str) -> None:
    lines = len((ROOT / path).read_text("utf-8").splitlines())
    assert lines <= MOST_LINES[path], "move what grew to a page of its own"
