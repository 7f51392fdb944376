"""`transformers` reading a GGUF file in a third of the time.

It reads all strings of the tokenizer twice, one by one from a file in memory, and makes a table of
the names of weights anew for each module. Here a file is read once, into an array, and a table is
made once; what `transformers` does with them is its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import gguf_reader


@contextmanager
def quick_gguf() -> Iterator[None]:
    """Let `transformers` read GGUF files in this way meanwhile."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))
        monkeypatch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
        monkeypatch.setattr(gguf_reader.np, "memmap", _read)
        yield


def _read(path: str | Path, mode: str, dtype: Any = np.uint8) -> np.ndarray:
    """What `np.memmap` is asked for, as an array."""
    assert mode == "r"
    return np.fromfile(path, dtype)
