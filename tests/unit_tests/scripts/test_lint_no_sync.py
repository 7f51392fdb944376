"""Every rule of scripts/lint_no_sync.py fires, a waiver needs its reason, and the tree is clean."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def load_lint():
    spec = importlib.util.spec_from_file_location("lint_no_sync", ROOT / "scripts/lint_no_sync.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


lint_no_sync = load_lint()


def check(line):
    findings, waived = lint_no_sync.check_sync(Path("f.py"), line + "\n")
    return [finding.message for finding in findings], waived


@pytest.mark.parametrize(
    "line",
    [
        "n = x.item()",
        "y = x.cpu()",
        "y = logits[0].max().cpu()",
        "y = x.tolist()",
        "y = x.numpy()",
        "y = x.nonzero()",
        "y = torch.nonzero(x)",
        "y = torch.argwhere(x)",
        "y = torch.masked_select(x, m)",
        "y = torch.where(mask)",
        "y = torch.where(condition=mask)",
        "torch.cuda.synchronize()",
        "event.synchronize()",
        "y = torch.tensor([1, 2], device=device)",
        "y = torch.as_tensor(rows, dtype=torch.int32, device='cuda')",
        "y = x.to('cpu')",
        "y = x.to('cpu:0', non_blocking=True)",
        "y = x.to(device='cpu')",
        "y = x.to(torch.device('cpu'))",
    ],
)
def test_each_synchronising_call_is_found_with_a_remedy(line):
    messages, waived = check(line)
    assert len(messages) == 1, messages
    assert "waits for the device: " in messages[0]
    assert waived == 0


@pytest.mark.parametrize(
    "line",
    [
        "y = torch.where(mask, a, b)",
        "y = torch.tensor([1, 2])",
        "y = torch.zeros(3, device=device)",
        "y = x.to(device, non_blocking=True)",
        "y = x.to(torch.float32)",
        "y = np.nonzero(rows)",
        "y = item(x)",
        "for key, value in table.items(): pass",
        "# x.item() in a comment",
        "text = 'x.item()'",
    ],
)
def test_innocent_calls_pass(line):
    assert check(line) == ([], 0)


def test_waiver_with_a_reason_is_counted_and_without_one_refused():
    assert check("n = x.item()  # sync-ok: host tensor") == ([], 1)
    for comment in ("# sync-ok", "# sync-ok:", "# sync-ok:   "):
        messages, _ = check(f"n = x.item()  {comment}")
        assert messages == ["`# sync-ok` needs a reason: `# sync-ok: why`"]


def test_waiver_covers_its_own_call_only():
    messages, waived = check("n = x.item()  # sync-ok: host tensor\nm = y.item()")
    assert (len(messages), waived) == (1, 1)


def test_waiver_on_the_last_line_of_a_long_call():
    assert check("y = x.to(\n    'cpu'\n)  # sync-ok: host tensor") == ([], 1)


def test_waiver_without_a_call_is_refused():
    messages, _ = check("n = 1  # sync-ok: was needed once")
    assert messages == ["`# sync-ok` waives nothing here: remove it"]


def test_line_number_is_that_of_the_call():
    findings, _ = lint_no_sync.check_sync(Path("f.py"), "a = 1\nb = (\n    x\n    .item()\n)\n")
    assert [finding.line for finding in findings] == [4]


def test_docstrings_of_public_names():
    source = '"""Module."""\nclass A:\n    """A."""\n    def f(self): ...\n    def _g(self): ...\n'
    messages = [f.message for f in lint_no_sync.check_house(Path("f.py"), source)]
    assert messages == ["A.f has no docstring: say what it does"]
    messages = [f.message for f in lint_no_sync.check_house(Path("f.py"), "x = 1\n")]
    assert messages == ["module without a docstring: say what it is for"]


@pytest.mark.parametrize("beginning", ["See `other`.", "It ends.", "Of a step.", "As above."])
def test_docstrings_begin_with_what_they_speak_of(beginning):
    for head in ("def f():\n    ", "x = 1\n"):
        source = f'"""A module."""\n\n\n{head}"""{beginning}"""\n'
        (finding,) = lint_no_sync.check_house(Path("x.py"), source)
        assert "begin with a noun or a verb" in finding.message
        assert lint_no_sync.check_house(Path("x.py"), source.replace(beginning, "Seeing it.")) == []


@pytest.mark.parametrize(
    "words", ["Whoever waits", "a rank who waits", "A length, that\n# of a row", "what is there"]
)
def test_docstrings_and_comments_name_their_things(words):
    for source in (f'"""M."""\n\n# {words}.\n', f'"""M.\n\n{words}."""\n'):
        (finding,) = lint_no_sync.check_house(Path("f.py"), source)
        assert (finding.line, "write the noun" in finding.message) == (3, True)
    source = f'"""M."""\n\nx = """{words}"""  # a user who waits; nobody\n# who does\n'
    assert lint_no_sync.check_house(Path("f.py"), source) == []


def test_pages_and_tests_name_their_things(tmp_path):
    package, page, test = (tmp_path / name for name in ("package", "a.md", "test_a.py"))
    page.write_text("# A\n\nIts words. `what is there`\n\n```\nthat of\n```\n\nRanks who wait.\n")
    test.write_text('def f():\n    """Its f."""\n    n = x.item()  # whoever reads it\n')
    findings, _ = lint_no_sync.lint([page, test], package)
    places = [(each.path, each.line) for each in findings]
    assert places == [(page, 3), (page, 9), (test, 2), (test, 3)]


def test_method_docstring_is_inherited_from_a_base_in_the_package():
    base = 'class A:\n    """A."""\n    def f(self):\n        """F."""\n'
    child = 'class B(x.A[int]):\n    """B."""\n    def f(self): ...\n    def g(self): ...\n'
    findings = lint_no_sync.check_house(Path("f.py"), f'"""M."""\n{base}{child}')
    assert [f.message for f in findings] == ["B.g has no docstring: say what it does"]


def test_file_length():
    assert lint_no_sync.check_house(Path("f.py"), '"""M."""\n' + "x = 1\n" * 539) == []
    (finding,) = lint_no_sync.check_house(Path("f.py"), '"""M."""\n' + "x = 1\n" * 540)
    assert "541 lines, at most 540" in finding.message


@pytest.mark.parametrize(
    ("head", "lines", "count"),
    [
        ("class {}:", 41, 1),
        ("class {}:", 40, 0),
        ("class {}(Base):", 41, 1),
        ("@dataclass(frozen=True)\nclass {}:", 41, 0),
        ("class {}(typing.NamedTuple):", 41, 0),
        ("class {}(ConfigurationError):", 41, 0),
        ("class {}(Record[int]):", 41, 0),
    ],
)
def test_public_classes_of_a_file(head, lines, count):
    """Small classes do not count, nor do records, nor what is made from a record of the file."""
    kept = "".join(f'class {name}:\n    """C."""\n' + "    x = 1\n" * 39 for name in "AB")
    third = head.format("C") + '\n    """C."""\n' + "    x = 1\n" * (lines - 2)
    source = f'"""M."""\nclass Record(Struct):\n    """R."""\n{kept}{third}'
    findings = lint_no_sync.check_house(Path("f.py"), source)
    assert len(findings) == count
    assert all("C is a public class too many" in finding.message for finding in findings)


def test_functions_of_ops_that_run_on_a_cpu_alone_may_read():
    for decorator, count in (("op", 0), ("op(gpu='a.b')", 0), ("add.cpu", 0), ("add.gpu", 1)):
        source = f"@{decorator}\ndef f(x):\n    return x.item()\n"
        tree, is_documented = lint_no_sync.ast.parse(source), not decorator.startswith("op")
        assert list(lint_no_sync.undocumented(tree, {})) == ([] if is_documented else [(2, "f")])
        assert len(lint_no_sync.check_sync(Path("f.py"), source)[0]) == count


def test_only_the_step_path_is_held_to_the_no_sync_rules(tmp_path):
    source = '"""M."""\n\nn = x.item()\n'
    names = ["engine/a.py", "checkpoints/a.py", "llm.py", "ops/cpu/a.py"]
    paths = [tmp_path / name for name in names]
    for path in paths:
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(source)
    findings, _ = lint_no_sync.lint(paths, tmp_path)
    assert [finding.path for finding in findings] == [paths[0]]


def test_main_reports_file_and_line_and_fails(tmp_path, monkeypatch, capsys):
    bad = tmp_path / "megatron_async/engine/bad.py"
    bad.parent.mkdir(parents=True)
    bad.write_text('"""M."""\n\nn = x.item()\n')
    monkeypatch.setattr(lint_no_sync, "ROOT", tmp_path)
    assert lint_no_sync.main([]) == 1
    output = capsys.readouterr()
    assert output.out.startswith("megatron_async/engine/bad.py:3: x.item() waits for the device")
    assert "1 findings" in output.err


def test_the_tree_is_clean(capsys):
    status = lint_no_sync.main([])
    assert status == 0, "\n" + capsys.readouterr().out
