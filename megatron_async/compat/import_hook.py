"""The import hook: a script's imports of `megatron.core.inference` are answered by this project.

The function behind every import statement (`builtins.__import__`) is told the globals of the
module that imports, so one wrapper decides by the importer. A loader that rewrites the script's
source would not do: pytest's own loader rewrites test files already, a name that is walked down to
(`import megatron` ... `megatron.core.inference.config`) is no import statement, and compiled files
have no source. Imports of other names cost a comparison of strings.

`import megatron.core.inference.config` binds the name `megatron`, and the script walks down from
there. So a script is given these views of the two packages; all else in them is Megatron's.

Only a script's own modules are answered so. More than 20 of Megatron's own files import
`megatron.core.inference`, and must keep what they know: its models ask whether a context is
`StaticInferenceContext`, its layers take its buffers.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_async.compat.mirror import MEGATRON, MIRROR, mirror_of

ROOT, CORE = "megatron", "megatron.core"


class ModuleView(ModuleType):
    """A module (`megatron` or `megatron.core`), seen with one attribute exchanged.

    Reading and writing go to the module itself, so that a script that sets an attribute of
    `megatron.core` sets Megatron's.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        seen = importlib.import_module(name)
        vars(self).update(
            {key: value for key, value in vars(seen).items() if key.startswith("__")}, _seen=seen
        )

    def __getattr__(self, name: str) -> Any:
        full_name = f"{self.__name__}.{name}"
        if full_name == CORE:
            return view(CORE)
        if full_name == MEGATRON:
            return importlib.import_module(MIRROR)
        return getattr(vars(self)["_seen"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_seen"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(vars(self)["_seen"], name)

    def __dir__(self) -> list[str]:
        return dir(vars(self)["_seen"])


_views: dict[str, ModuleView] = {}


def view(name: str) -> ModuleView:
    """The view of `megatron` or `megatron.core`, always the same object."""
    if name not in _views:
        _views[name] = ModuleView(name)
    return _views[name]


DEFAULT_PACKAGES = ("examples", "megatron.inference")
"""Packages that count as a script's own: Megatron-LM's folder of examples, whose helpers lie
beside the scripts' folder, and the module that builds an engine from the command line's arguments
(`megatron.inference.utils.get_dynamic_inference_engine`)."""
INSTALLED = frozenset({"site-packages", "dist-packages"})


class OwnModules:
    """The modules of a script.

    These are `__main__`, modules whose file lies in `folder` or below, and modules of `packages`.
    Never its own, unless named in `packages`, are `megatron` and `megatron_async` (a script in the
    root of a checkout has both below it) and what is installed in an environment below the folder.
    """

    def __init__(self, folder: Path | None, packages: Iterable[str]) -> None:
        self._folder = None if folder is None else folder.resolve()
        self._packages = frozenset(packages)
        self._known: dict[tuple[str, Any], bool] = {}

    def add(self, folder: Path | None, packages: Iterable[str]) -> None:
        """Count more modules as own; a folder takes the place of an earlier one."""
        self._folder = self._folder if folder is None else folder.resolve()
        self._packages |= frozenset(packages)
        self._known.clear()

    def has(self, namespace: Mapping[str, Any] | None) -> bool:
        """Whether the module with these globals is the script's own; C code, which has none, is
        not."""
        if namespace is None:
            return False
        name = namespace.get("__name__")
        if not isinstance(name, str):
            return False
        if name == "__main__":
            return True
        key = name, namespace.get("__file__")
        if key not in self._known:
            self._known[key] = self._is_own(*key)
        return self._known[key]

    def _is_own(self, name: str, file: Any) -> bool:
        parts = name.split(".")
        if any(".".join(parts[:count]) in self._packages for count in range(1, len(parts) + 1)):
            return True
        if parts[0] in ("megatron", "megatron_async") or name in sys.stdlib_module_names:
            return False
        if self._folder is None or not isinstance(file, str):
            return False
        try:
            below = Path(file).resolve().relative_to(self._folder)
        except ValueError:
            return False
        return INSTALLED.isdisjoint(below.parts)


class ImportHook:
    """Stands in front of `builtins.__import__` and `importlib.import_module` until `stop`, and
    answers the imports of a script's own modules."""

    def __init__(self, own: OwnModules) -> None:
        self.own = own
        self._is_on = True
        self._import: Callable[..., Any] = builtins.__import__
        self._import_module: Callable[..., Any] = importlib.import_module
        builtins.__import__ = self.import_
        importlib.import_module = self.import_module

    def stop(self) -> None:
        """Give the place back. Where another hook has wrapped this one since, the hook stays in
        the chain and does nothing."""
        self._is_on = False
        if builtins.__import__ == self.import_:
            builtins.__import__ = self._import
        if importlib.import_module == self.import_module:
            importlib.import_module = self._import_module

    def import_(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        """`builtins.__import__` while the hook is on. Relative imports (`level` above 0) are never
        Megatron's: no module of a script lies in Megatron's packages."""
        if level or not _is_megatron(name) or not self._answers(globals):
            return self._import(name, globals, locals, fromlist, level)
        mirrored = self._mirror(name)
        if not fromlist:
            self._import(mirrored or name, globals, locals, (), 0)
            return view(ROOT)  # what the statement binds, or walks down from
        if mirrored is None and name in (ROOT, CORE):
            self._import(name, globals, locals, fromlist, 0)
            return view(name)
        return self._import(mirrored or name, globals, locals, fromlist, 0)

    def import_module(self, name: str, package: str | None = None) -> Any:
        """`importlib.import_module` while the hook is on; the calling module is the importer."""
        full_name = importlib.util.resolve_name(name, package)
        if not _is_megatron(full_name) or not self._answers(sys._getframe(1).f_globals):
            return self._import_module(name, package)
        if full_name in (ROOT, CORE):
            return view(full_name)
        return self._import_module(self._mirror(full_name) or full_name)

    def _answers(self, namespace: Mapping[str, Any] | None) -> bool:
        return self._is_on and self.own.has(namespace)

    def _mirror(self, name: str) -> str | None:
        """The mirror's module for Megatron's, None if neither has one: then Megatron's name is
        imported, and the error is about the name that the script wrote."""
        mirrored = mirror_of(name)
        if mirrored is None:
            return None
        self._import_module(MIRROR)  # adds the finder
        try:
            return mirrored if importlib.util.find_spec(mirrored) is not None else None
        except ModuleNotFoundError as error:
            if error.name is not None and mirrored.startswith(error.name):
                return None
            raise


def _is_megatron(name: str) -> bool:
    return name == ROOT or name.startswith(ROOT + ".")


_hook: ImportHook | None = None


def install(
    folder: str | Path | None = None, packages: Iterable[str] = DEFAULT_PACKAGES
) -> ImportHook:
    """Answer a script's imports of `megatron.core.inference` with this project's modules.

    Call it before the script's modules are imported: what is imported already stays. Called again,
    it counts the modules as well, and moves on to the new folder.

    Args:
        folder: of the script: modules whose files lie there or below are its own, as `__main__`
            is. None: the folder of the file that Python was started with.
        packages: names of further packages and modules that count as its own, each with all below.

    Returns:
        the hook.
    """
    global _hook
    place = None if folder is None else Path(folder)
    if _hook is None:
        _hook = ImportHook(OwnModules(place or _main_folder(), packages))
    else:
        _hook.own.add(place, packages)
    return _hook


def _main_folder() -> Path | None:
    file = getattr(sys.modules["__main__"], "__file__", None)  # none in an interactive session
    return None if file is None else Path(file).parent


def uninstall() -> None:
    """Take the hook away; what was imported through it stays. Without one, nothing happens."""
    global _hook
    if _hook is not None:
        _hook.stop()
    _hook = None


def is_installed() -> bool:
    """Whether the hook answers imports."""
    return _hook is not None
