"""Names in a pickle that others wrote are looked up in a table, and never imported. This module
does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Names = Mapping[tuple[str, str], Any]
"""Module and name in a pickle -> what stands for it here."""
NAMES_OF_PYTHON_2 = {"__builtin__": "builtins"}
"""Modules that pickles of protocol 2 name as Python 2 does."""


class KnownNames:
    """An unpickler's `find_class`, to be put before one of `pickle`'s own classes. It sets
    `known`."""

    known: Names

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name."""
        module = NAMES_OF_PYTHON_2.get(module, module)
        found = self.known.get((module, name))
        return self.unknown(module, name) if found is None else found

    def unknown(self, module: str, name: str) -> Any:
        """What stands for a name that the table does not have; an exception stops the reading."""
        raise NotImplementedError
