import builtins
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import megatron.core.inference.contexts.dynamic_context as megatron_contexts
import megatron.core.inference.sampling_params as megatron_sampling
import pytest

from megatron_async.compat import install, is_installed, uninstall
from megatron_async.compat.import_hook import OwnModules
from megatron_async.compat.inference.contexts import dynamic_context as our_contexts
from megatron_async.compat.mirror import MIRROR, names_of_megatron

CONTEXT = "megatron.core.inference.contexts.dynamic_context"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A script's folder on the search path, with the hook in place."""
    script = tmp_path / "script"
    script.mkdir()
    monkeypatch.syspath_prepend(str(script))
    before, functions = set(sys.modules), (builtins.__import__, importlib.import_module)
    install(script, packages=())
    yield script
    uninstall()
    builtins.__import__, importlib.import_module = functions
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]


def write(folder: Path, name: str, text: str) -> ModuleType:
    (folder / f"{name}.py").write_text(text)
    importlib.invalidate_caches()
    return importlib.import_module(name)


@pytest.mark.parametrize(
    "text",
    [
        f"from {CONTEXT} import DynamicInferenceContext as found",
        f"import {CONTEXT} as m; found = m.DynamicInferenceContext",
        f"import {CONTEXT}; found = {CONTEXT}.DynamicInferenceContext",
        f"import megatron, megatron.core.inference; found = {CONTEXT}.DynamicInferenceContext",
        "from megatron.core.inference.contexts import DynamicInferenceContext as found",
        "from megatron.core.inference import contexts; found = contexts.DynamicInferenceContext",
        "from megatron.core import inference\n"
        "found = inference.contexts.dynamic_context.DynamicInferenceContext",
        "from megatron import core\n"
        "found = core.inference.contexts.dynamic_context.DynamicInferenceContext",
        f"import importlib\nfound = importlib.import_module({CONTEXT!r}).DynamicInferenceContext",
        "import importlib\n"
        "core = importlib.import_module('megatron.core')\n"
        "found = core.inference.contexts.DynamicInferenceContext",
    ],
)
def test_every_form_of_import_in_a_script_gives_ours(folder: Path, text: str) -> None:
    assert write(folder, "own", text).found is our_contexts.DynamicInferenceContext


def test_a_package_of_the_script_is_answered_and_megatrons_file_is_not(folder: Path) -> None:
    (folder / "helpers").mkdir()
    (folder / "helpers" / "__init__.py").write_text("from .build import context_class\n")
    (folder / "helpers" / "build.py").write_text(
        f"from {CONTEXT} import DynamicInferenceContext as context_class\n"
    )
    importlib.invalidate_caches()
    assert importlib.import_module("helpers").context_class is our_contexts.DynamicInferenceContext
    # Megatron's own file, by its name, although it lies below the script's folder.
    theirs = ModuleType("megatron.core.models.invented")
    vars(theirs)["__file__"] = str(folder / "invented.py")
    exec(f"from {CONTEXT} import DynamicInferenceContext as found", vars(theirs))
    assert theirs.found is megatron_contexts.DynamicInferenceContext
    # A file elsewhere.
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    sys.path.insert(0, str(elsewhere))
    try:
        found = write(elsewhere, "other", f"from {CONTEXT} import DynamicInferenceContext as found")
    finally:
        sys.path.remove(str(elsewhere))
    assert found.found is megatron_contexts.DynamicInferenceContext


def test_names_and_modules_that_the_mirror_lacks_are_megatrons_own(folder: Path) -> None:
    lacking = next(
        n for n in vars(megatron_contexts) if n[0].isalpha() and n not in vars(our_contexts)
    )
    own = write(
        folder,
        "own",
        f"from {CONTEXT} import {lacking} as name\n"
        "import megatron.core.inference.batch_dimensions_utils as module\n"
        "import megatron.core.utils as utils\n",
    )
    assert own.name is getattr(megatron_contexts, lacking)
    assert own.module is sys.modules["megatron.core.inference.batch_dimensions_utils"]
    assert own.utils is sys.modules["megatron.core.utils"]
    assert (
        getattr(importlib.import_module(f"{MIRROR}.contexts.dynamic_context"), lacking) is own.name
    )


def test_modules_below_a_package_that_the_mirror_lacks_are_not_loaded_twice(folder: Path) -> None:
    name = "disaggregation.utils"
    own = write(folder, "own", f"import megatron.core.inference.{name} as module")
    # Megatron's package has loaded this module long since; ours comes first all the same.
    assert names_of_megatron(MIRROR)("contexts").__name__ == f"{MIRROR}.contexts"
    assert own.module is importlib.import_module(f"megatron.core.inference.{name}")
    assert own.module is importlib.import_module(f"{MIRROR}.{name}")


def test_the_folder_is_that_of_the_main_script_at_first(folder: Path, monkeypatch):
    uninstall()
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(folder / "main.py"), raising=False)
    install(packages=())
    own = write(folder, "own", f"from {CONTEXT} import DynamicInferenceContext as found")
    assert own.found is our_contexts.DynamicInferenceContext


def test_what_nobody_has_is_an_error_about_the_name_that_was_written(folder: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"'megatron\.core\.inference\.no_such'"):
        write(folder, "first", "import megatron.core.inference.no_such")
    with pytest.raises(ImportError, match="cannot import name 'NoSuch'"):
        write(folder, "second", f"from {CONTEXT} import NoSuch")
    with pytest.raises(AttributeError, match="has no attribute '__wrapped__'"):
        names_of_megatron(f"{MIRROR}.contexts")("__wrapped__")


def test_data_classes_pass_isinstance_in_both_worlds(folder: Path) -> None:
    own = write(
        folder,
        "own",
        "from megatron.core.inference.sampling_params import SamplingParams\n"
        "from megatron.core.inference.config import InferenceConfig\n"
        "params, config = SamplingParams(), InferenceConfig()\n",
    )
    from megatron.core.inference.config import InferenceConfig

    assert isinstance(own.params, megatron_sampling.SamplingParams)
    assert isinstance(own.config, InferenceConfig)


def test_attributes_that_a_script_sets_are_megatrons(folder: Path, monkeypatch):
    import megatron.core

    monkeypatch.setattr(megatron.core, "set_by_test", 1, raising=False)
    own = write(
        folder, "own", "import megatron.core as core\ncore.set_by_test = 2\nseen = dir(core)"
    )
    assert megatron.core.set_by_test == 2
    assert own.core.set_by_test == 2
    assert "set_by_test" in own.seen
    assert own.core.__path__ is megatron.core.__path__


def test_installed_twice_and_taken_away(folder: Path) -> None:
    hooked = builtins.__import__
    install(packages=("named",))
    assert builtins.__import__ == hooked
    own = write(folder, "own", f"from {CONTEXT} import DynamicInferenceContext as found")
    assert own.found is our_contexts.DynamicInferenceContext  # the folder is still the script's
    uninstall()
    uninstall()
    assert not is_installed()
    assert builtins.__import__ != hooked
    late = write(folder, "late", f"from {CONTEXT} import DynamicInferenceContext as found")
    assert late.found is megatron_contexts.DynamicInferenceContext


def test_a_hook_that_somebody_wrapped_stays_and_does_nothing(folder: Path, monkeypatch):
    hooked = builtins.__import__
    with monkeypatch.context() as patched:
        patched.setattr(builtins, "__import__", lambda *args, **kwargs: hooked(*args, **kwargs))
        uninstall()
        own = write(folder, "own", f"from {CONTEXT} import DynamicInferenceContext as found")
    assert own.found is megatron_contexts.DynamicInferenceContext


@pytest.mark.parametrize(
    ("name", "file", "own"),
    [
        ("__main__", None, True),
        ("helper", "/work/script/helper.py", True),
        ("deep.helper", "/work/script/deep/helper.py", True),
        ("helper", "/work/other/helper.py", False),
        ("helper", None, False),
        ("installed", "/work/script/.venv/lib/python3.12/site-packages/installed.py", False),
        ("megatron.core.utils", "/work/script/megatron/core/utils.py", False),
        ("megatron_async.llm", "/work/script/megatron_async/llm.py", False),
        ("json", "/work/script/json.py", False),
        ("examples.inference.utils", "/elsewhere/examples/inference/utils.py", True),
        ("examples_of_others", "/elsewhere/examples_of_others.py", False),
        ("megatron.inference.utils", "/elsewhere/megatron/inference/utils.py", True),
        ("megatron.inference_tools", "/elsewhere/megatron/inference_tools.py", False),
    ],
)
def test_which_modules_are_a_scripts_own(name: str, file: str | None, own: bool) -> None:
    modules = OwnModules(Path("/work/script"), ("examples", "megatron.inference"))
    assert modules.has({"__name__": name, "__file__": file}) is own
    assert modules.has({"__name__": name, "__file__": file}) is own  # remembered


def test_code_without_a_module_is_nobodys_own() -> None:
    modules = OwnModules(None, ())
    assert not modules.has(None)
    assert not modules.has({})
    assert not modules.has({"__name__": "helper", "__file__": "/work/script/helper.py"})
