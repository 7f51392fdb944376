"""`Choices`: what timing decides is a row of a table, so that two starts choose the same.

A row holds for one GPU by its exact name, one shape and the versions below; nothing is taken from
the nearest row. Rows come with this package (`SHIPPED`), or are measured once and kept in the
user's cache, a file each. Rank 0 of a job finds or measures them for all of its ranks and replicas;
replicas of one `serve` are jobs of their own, and agree in a folder of the service.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import msgspec

from megatron_async.cache_folders import SERVICE_VARIABLE, VARIABLE, cache_folder
from megatron_async.communication.bootstrap import join_job
from megatron_async.devices import Device

logger = logging.getLogger("megatron_async")

SHIPPED = Path(__file__).with_name("choices.json")
FOLDER = "choices"
FORMAT = "1"
"""Is raised when kernels have changed so much that rows are to be measured again."""
PACKAGES = ("triton", "flash-attn-4", "flash_attn_3", "transformer-engine", "nvidia-cublas")
"""Beside torch, whose versions a row holds for, where they are installed."""
MOST_BYTES = 1 << 20
MOST_FILES = 1000

Fact = bool | int | float | str | list[str]


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was chosen, and where it holds."""

    kind: str
    gpu: str
    shape: dict[str, Fact]
    versions: dict[str, str]
    value: dict[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        """Where it holds."""
        return self.kind, self.gpu, self.shape, self.versions

    @property
    def file_name(self) -> str:
        """Name of its file in the cache: one for each key."""
        key = json.dumps(self.key, sort_keys=True).encode()
        return f"{self.kind.replace(' ', '_')}-{blake2b(key, digest_size=8).hexdigest()}.json"


class Table(msgspec.Struct, forbid_unknown_fields=True):
    """A file of rows."""

    rows: list[Row]


@dataclass(frozen=True)
class Question[V: msgspec.Struct]:
    """One choice to be made."""

    kind: str
    shape: dict[str, Fact]
    """All that decides it but the GPU and versions."""
    rule: V
    """What is chosen where nothing may be measured."""
    check: Callable[[V], object]
    """Raises `ValueError` for a value that does not fit here, whatever its types."""


class Choices:
    """The choices of one engine. All ranks of a job ask in the same order.

    Args:
        mode: `InferenceConfig.choices`.
        device: on which the engine runs.
        progress: show bars of what is measured.

    Attributes:
        used: the row of each kind, and its source: "shipped", "cached", "measured", "by rule".
        files: of the cache, by kind, into which rows were written.
    """

    def __init__(self, mode: str, device: Device, progress: bool = False) -> None:
        self._mode, self.device, self.progress = mode, device, progress
        self.used: dict[str, tuple[Row, str]] = {}
        self.files: dict[str, Path] = {}

    def find[V: msgspec.Struct](self, question: Question[V]) -> V | None:
        """The value of the leader's row, or by rule; None: measure it, then call `keep`."""
        found = self._look_up(question) if join_job().rank == 0 else None
        told = leaders(question.kind, msgspec.to_builtins(found))
        return None if told is None else self._use(question, *told)

    def keep[V: msgspec.Struct](self, question: Question[V], value: V, is_sound: bool = True) -> V:
        """What all ranks use after each has measured: the leader's value, or what another process
        has meanwhile kept for the same key. An unsound value is used and not kept."""
        if join_job().rank == 0 and is_sound:
            # Replicas which all measure anew shall not each replace what the others use.
            for is_service in (True, False) if self._mode == "measure" else (False, True):
                value = self._keep(question, value, is_service)
        told = leaders(f"the measured {question.kind}", msgspec.to_builtins(value))
        return self._use(question, "measured", told)

    def records(self) -> list[dict[str, Any]]:
        """The rows used, as JSON, each with its source."""
        return [msgspec.to_builtins(row) | {"source": source} for row, source in self.used.values()]

    def _use[V: msgspec.Struct](self, question: Question[V], source: str, value: Any) -> V:
        found = msgspec.convert(value, type(question.rule))
        self.used[question.kind] = self._row(question, found), source
        logger.info("choice of %s: %s (%s)", question.kind, json.dumps(value), source)
        return found

    def _row(self, question: Question[Any], value: msgspec.Struct) -> Row:
        values = msgspec.to_builtins(value)
        return Row(question.kind, self.device.name, question.shape, versions(), values)

    def _look_up[V: msgspec.Struct](self, question: Question[V]) -> tuple[str, V] | None:
        """The source and the value of the first sound row that the mode allows, or by rule."""
        row, files = self._row(question, question.rule), dict[Path, str]()
        if self._mode != "measure":
            files[SHIPPED] = "shipped"
        if self._mode == "cached":
            with contextlib.suppress(OSError):  # no home; `keep` says so
                files[cache_folder(FOLDER) / row.file_name] = "cached"
        if self._mode != "shipped" and (service := os.environ.get(SERVICE_VARIABLE)):
            files = {Path(service) / row.file_name: "cached"} | files
        for file, source in files.items():
            if (value := _value_in(file, row, question)) is not None:
                if source == "cached":  # a replica that starts again shall find it, come what may
                    value = self._keep(question, value, is_service=True)
                return source, value
        return ("by rule", question.rule) if self._mode == "shipped" else None

    def _keep[V: msgspec.Struct](self, question: Question[V], value: V, is_service: bool) -> V:
        """Keep a row in the service's folder, if there is one, or in the cache. What counts is the
        value of a sound row that is there already, unless the cache's is to be replaced."""
        row, service = self._row(question, value), os.environ.get(SERVICE_VARIABLE)
        if is_service and not service:
            return value
        replaces = self._mode == "measure" and not is_service
        try:
            folder = Path(service) if is_service and service else cache_folder(FOLDER)
            folder.mkdir(parents=not is_service, exist_ok=True)  # the service may have ended
            file = folder / row.file_name
            try:
                write_rows(file, [row], replaces)
            except OSError:  # it is there; or a file system without hard links, or a full one
                other = None if replaces else _value_in(file, row, question)
                if other is not None:
                    return other
                write_rows(file, [row])
            if not is_service:
                self.files[row.kind] = file
        except OSError as error:
            logger.warning(
                "The choice of %s cannot be kept (%s): each start measures it again, and may "
                "choose otherwise; set %s to a folder that can be written.",
                row.kind, error, VARIABLE,
            )  # fmt: skip
        return value


def leaders[T](name: str, value: T) -> T:
    """What rank 0 of the job has for a value, which is JSON; all ranks call this."""
    return cast(T, json.loads(join_job().exchange(name, json.dumps(value))[0]))


def everywhere(name: str, items: Sequence[str]) -> list[str]:
    """The items that every rank of the job has, in this rank's order."""
    told = join_job().exchange(name, json.dumps(list(items))).values()
    return [item for item in items if all(item in json.loads(others) for others in told)]


def versions() -> dict[str, str]:
    """The versions that rows hold for."""
    import torch

    found = {"choices": FORMAT, "torch": str(torch.__version__)}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, which is data of anybody's.

    Raises:
        OSError: it is no file that can be read; a link is none.
        ValueError: it is too large, or no table of rows.
    """
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    with open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no ordinary file")
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES >> 20} MiB")
    try:
        return msgspec.json.decode(data, type=Table).rows
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error


def write_rows(path: Path, rows: Iterable[Row], replaces: bool = True) -> None:
    """Write a file of rows, at once or not at all.

    Raises:
        FileExistsError: it is there, and is not to be replaced.
        OSError: it cannot be written.
    """
    text = msgspec.json.format(msgspec.json.encode(Table(list(rows))))
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with open(handle, "wb") as file:
            file.write(text + b"\n")
        os.chmod(temporary, 0o644)
        if replaces:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def merged(path: Path, new: Sequence[Row]) -> list[Row]:
    """The rows of a table, which need not be there, and new ones in place of those of their keys.

    Raises:
        OSError, ValueError: it is there, and is no table that can be read.
    """
    try:
        rows = read_rows(path) if path.exists() else []
    except ValueError as error:
        raise ValueError(f"{path}: {error}; name a table of rows, or a new file.") from error
    keys = [row.key for row in new]
    kept = [row for row in rows if row.key not in keys]
    return sorted([*kept, *new], key=lambda row: (row.gpu, row.kind, row.file_name))


def known_rows(gpu: str) -> Iterator[tuple[Row, str]]:
    """The shipped rows and those in the cache, of GPUs whose name has the word `gpu`, each with its
    source; a damaged file has none."""
    files = [(SHIPPED, "shipped")]
    with contextlib.suppress(OSError):
        files += [(path, "cached") for path in sorted(cache_folder(FOLDER).glob("*.json"))]
    for path, source in files[:MOST_FILES]:
        with contextlib.suppress(OSError, ValueError):
            for row in read_rows(path):
                if gpu.lower() in (row.gpu.lower(), *re.split("[ -]", row.gpu.lower())):
                    yield row, source


def _value_in[V: msgspec.Struct](path: Path, row: Row, question: Question[V]) -> V | None:
    """The value for a row's key in a file; what is wrong in the file is told and passed over."""
    try:
        for other in read_rows(path):
            if other.key == row.key:
                value = msgspec.convert(other.value, type(question.rule))
                question.check(value)
                return value
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        again = "install the package again" if path == SHIPPED else "it is measured anew"
        logger.warning(
            "%s has no choice of %s that can be used (%s): %s.", path, row.kind, error, again
        )
    return None
