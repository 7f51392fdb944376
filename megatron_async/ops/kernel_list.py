"""The kernels that a program compiles, as data: what Triton needs to compile each of them again.

A list is a JSON file in the cache folder. What is read from it is checked: a kernel is named, and
found among the kernels of this package; a type is matched before Triton sees it, because Triton
evaluates the layout in a tensor descriptor's type as Python; options that name files are not taken.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import pkgutil
import re
import sys
import uuid
from collections.abc import Mapping
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

logger = logging.getLogger("megatron_async")

PACKAGE = "megatron_async"
ROOMS = ("ops", "device_state")
"""Rooms with kernels."""
MOST_BYTES = 16 << 20
MOST_KERNELS = 4096
OPTIONS = (
    "num_warps", "num_ctas", "num_stages", "maxnreg", "enable_fp_fusion", "enable_reflect_ftz",
    "launch_cooperative_grid", "launch_pdl", "debug", "sanitize_overflow",
)  # fmt: skip
"""Triton's options that a launch may set. The others follow from the GPU's architecture and from
the environment, or name files."""
ATTRIBUTES = ("tt.divisibility", "tt.pointer_range")
TYPE = re.compile(
    r"constexpr|nvTmaDesc|\*?k?[a-z]{1,4}\d{1,2}(e\d)?(b\d+)?(nv)?"
    r"|tensordesc<[a-z]+\d+(e\d)?\[\d+(, \d+)*\]"
    r"(,NVMMASharedLayout\(\w+=(\d+|True|False|\[\])(, \w+=(\d+|True|False|\[\]))*\))?>"
)
"""Types of arguments."""

Kernel = dict[str, Any]
"""One compilation: "kernel" (the function's whole name), "signature", "constants", "attributes" and
"options". Constants and attributes are pairs of a place and a value."""


class BadKernel(ValueError):
    """A kernel that this package does not have, or that is not written as `describe` writes it."""


def describe(
    function: JITFunction[Any],
    signature: Mapping[str, Any],
    constants: Mapping[tuple[int, ...], Any],
    attributes: Mapping[tuple[int, ...], Any],
    options: Mapping[str, Any],
) -> Kernel:
    """What Triton was given to compile, as JSON has it.

    Raises:
        BadKernel: a constant is something that no JSON can hold.
    """
    return {
        "kernel": full_name(function),
        "signature": dict(signature),
        "constants": [[list(place), _written(value)] for place, value in constants.items()],
        "attributes": [[list(place), value] for place, value in attributes.items()],
        "options": {name: options.get(name) for name in OPTIONS},
    }


def full_name(function: JITFunction[Any]) -> str:
    """Module and name."""
    return f"{function.__module__}.{function.__qualname__}"


def _written(value: Any) -> Any:
    if isinstance(value, tl.constexpr):
        return {"constexpr": _written(value.value)}
    if isinstance(value, tl.dtype):
        return {"dtype": str(value)}
    if isinstance(value, JITFunction):
        return {"kernel": full_name(value)}
    if isinstance(value, (tuple, list)):
        return [_written(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise BadKernel(f"{value!r} is no constant that can be written down")


def source_of(
    kernel: Kernel, functions: Mapping[str, JITFunction[Any]]
) -> tuple[ASTSource, dict[str, Any]]:
    """What `triton.compile` takes: a source and options.

    Args:
        kernel: as read from a file.
        functions: `find_kernels()`.

    Raises:
        BadKernel: see there.
    """
    try:
        function = functions[kernel["kernel"]]
        signature, options = kernel["signature"], kernel["options"]
        if list(signature) != function.arg_names:
            raise BadKernel(f"other arguments than {full_name(function)} has")
        for type_ in signature.values():
            if not TYPE.fullmatch(type_):
                raise BadKernel(f"no type: {type_!r}")
        if not options.keys() <= set(OPTIONS) or not all(
            value is None or isinstance(value, (bool, int)) for value in options.values()
        ):
            raise BadKernel(f"options {options!r}")
        constants = {_place(place): _read(value, functions) for place, value in kernel["constants"]}
        attributes = {
            _place(place): [[name, int(value)] for name, value in pairs if name in ATTRIBUTES]
            for place, pairs in kernel["attributes"]
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadKernel(f"{type(error).__name__}: {error}") from error
    kind = GluonASTSource if function.is_gluon() else ASTSource
    return kind(function, signature, constants, attributes), options


def _place(place: list[int]) -> tuple[int, ...]:
    return tuple(int(each) for each in place)


def _read(value: Any, functions: Mapping[str, JITFunction[Any]]) -> Any:
    if isinstance(value, list):
        return tuple(_read(each, functions) for each in value)
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "kernel":
        return functions[inner]
    return {"dtype": tl.dtype, "constexpr": tl.constexpr}[kind](_read(inner, functions))


def find_kernels() -> dict[str, JITFunction[Any]]:
    """All kernels of this package, by their whole names; imports the modules that have some."""
    for room in ROOMS:
        package = import_module(f"{PACKAGE}.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if ".cpu" not in module.name:  # loops for a CPU: Numba need not be imported
                import_module(module.name)
    return {
        full_name(value): value
        for name, module in list(sys.modules.items())
        if name.startswith(f"{PACKAGE}.")
        for value in list(vars(module).values())
        if isinstance(value, JITFunction)
    }


class KernelList:
    """The kernels of one program, and where Triton keeps each.

    Args:
        folder: of Triton's cache; the list lies below it.
        program: facts on which kernels depend, as JSON has them; "gpu", a name, counts not.

    Attributes:
        folder: as given.
        hashes: by kernel, as text: the hash under which Triton keeps it, or "".
    """

    def __init__(self, folder: str | os.PathLike[str], program: Mapping[str, Any]) -> None:
        counting = {name: fact for name, fact in program.items() if name != "gpu"}
        facts = json.dumps([triton.__version__, counting], sort_keys=True, default=str)
        name = blake2b(facts.encode(), digest_size=16).hexdigest()
        self.folder = Path(folder)
        self._file = self.folder / "lists" / f"{name}.json"
        self.hashes: dict[str, str] = {}
        self._written: dict[str, str] = {}

    def read(self) -> bool:
        """Read the file.

        Returns:
            whether there is one; a file that holds something else counts as none.
        """
        try:
            if self._file.stat().st_size > MOST_BYTES:
                raise ValueError(f"more than {MOST_BYTES} bytes")
            rows = json.loads(self._file.read_bytes())
            found = {_text(row["what"]): row["hash"] for row in rows[:MOST_KERNELS]}
            if not all(isinstance(value, str) for value in found.values()):
                raise ValueError("a hash that is no text")
        except FileNotFoundError:
            return False
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            logger.warning("The list of kernels %s is passed over (%s).", self._file, error)
            return False
        self.hashes |= found
        self._written = dict(self.hashes)
        return True

    def put(self, kernel: Kernel, hash_: str | None) -> None:
        """Note a kernel that was compiled; without a hash: one that could not be, which goes."""
        if hash_ is None:
            self.hashes.pop(_text(kernel), None)
        else:
            self.hashes[_text(kernel)] = hash_

    def missing(self) -> list[Kernel]:
        """Kernels that Triton would have to compile."""
        kept = {text for text, hash_ in self.hashes.items() if self._kept(text, hash_)}
        return [json.loads(text) for text in self.hashes if text not in kept]

    def _kept(self, text: str, hash_: str) -> bool:
        try:
            key = base64.b32encode(bytes.fromhex(hash_)).decode().rstrip("=")
        except ValueError:
            return False
        name = str(json.loads(text).get("kernel")).rpartition(".")[2][:150]
        return bool(hash_) and (self.folder / key / f"__grp__{name}.json").is_file()

    def write(self) -> None:
        """Write the file, if there is something new.

        Raises:
            OSError: the folder does not take it.
        """
        if self.hashes == self._written:
            return
        rows = [{"what": json.loads(text), "hash": hash_} for text, hash_ in self.hashes.items()]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part = self._file.with_suffix(f".{uuid.uuid4().hex}")
        part.write_text(json.dumps(rows[:MOST_KERNELS]))
        part.replace(self._file)
        self._written = dict(self.hashes)


def _text(kernel: Kernel) -> str:
    if not isinstance(kernel, dict):
        raise TypeError(f"no kernel: {kernel!r}"[:200])
    return json.dumps(kernel)
