"""Which modules are a script's own, so that their imports are answered by this project.

More than 20 of Megatron's own files import `megatron.core.inference`, and must keep what they
know: its models ask whether a context is `StaticInferenceContext`, its layers take its buffers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

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

    Args:
        folder: of the script; None: only `__main__` and the packages.
        packages: names of packages and modules, each with all below it.
    """

    def __init__(self, folder: Path | None, packages: Iterable[str]) -> None:
        self._folder = None if folder is None else folder.resolve()
        self._packages = frozenset(packages)
        self._known: dict[tuple[str, Any], bool] = {}

    def add(self, folder: Path | None, packages: Iterable[str]) -> None:
        """Count more modules as own.

        Args:
            folder: takes the place of an earlier one, if it is not None.
            packages: more of them.
        """
        self._folder = self._folder if folder is None else folder.resolve()
        self._packages |= frozenset(packages)
        self._known.clear()

    def has(self, namespace: Mapping[str, Any] | None) -> bool:
        """Whether the module with these globals is the script's own.

        Args:
            namespace: globals of the module that imports; None, of C code, is not.
        """
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
