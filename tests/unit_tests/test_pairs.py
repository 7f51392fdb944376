"""Cases that are left out leave every two values together somewhere."""

from itertools import combinations, product
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.pairs import ALL_CASES, LEAST, needed

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("sizes", [(2, 3), (2, 2, 2), (3, 3, 2, 3), (3, 8, 3)])
def test_every_two_values_meet(sizes: tuple[int, ...]) -> None:
    """Break it: `needed` that stops one pair too early."""
    cases = [
        frozenset((str(axis), value) for axis, value in enumerate(values))
        for values in product(*map(range, sizes))
    ]
    kept = [cases[number] for number in needed(cases)]
    for (one, first), (other, second) in combinations(enumerate(sizes), 2):
        for pair in product(range(first), range(second)):
            assert any({(str(one), pair[0]), (str(other), pair[1])} <= case for case in kept)
    for axis, size in enumerate(sizes):
        for value in range(size):
            assert sum((str(axis), value) in case for case in kept) >= LEAST
    assert len(kept) < len(cases) or len(sizes) == 2


def test_values_that_never_met_need_not_meet() -> None:
    cases = [frozenset({("a", n), ("b", n)}) for n in range(3)]
    assert sorted(needed(cases)) == [0, 1, 2]


def test_marked_tests_are_thinned_behind_a_choice_by_name(tmp_path, monkeypatch, capfd):
    file = tmp_path / "test_some.py"
    file.write_text(
        dedent("""
        import pytest

        @pytest.mark.pairs
        @pytest.mark.parametrize("a", [[], {}])
        @pytest.mark.parametrize("b", [1, 2])
        @pytest.mark.parametrize("c", [3, 4])
        def test_marked(a, b, c): pass

        @pytest.mark.parametrize("a", [1, 2])
        @pytest.mark.parametrize("b", [1, 2])
        @pytest.mark.parametrize("c", [1, 2])
        def test_whole(a, b, c): pass
    """)
    )
    plugin = tmp_path / "conftest.py"
    plugin.write_text((TESTS / "conftest.py").read_text())

    def outcomes(*options: str) -> str:
        words = ["--rootdir", str(tmp_path), "-c", "/dev/null", "-p", "no:cacheprovider"]
        assert pytest.main([str(file), *words, "-q", *options]) == 0
        return capfd.readouterr().out

    monkeypatch.delenv(ALL_CASES, raising=False)
    assert "12 passed, 4 deselected" in outcomes()
    assert "1 passed, 15 deselected" in outcomes("-k", "marked and 3-1-a0")
    monkeypatch.setenv(ALL_CASES, "1")
    assert "16 passed" in outcomes()
