"""How long a suspend or a resume took, and what memory it moved."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from megatron_async.device_state.kv_cache import GIB

logger = logging.getLogger("megatron_async")


@contextmanager
def suspension_log(key: str, *, unified_memory_level: int = 0) -> Iterator[None]:
    """Log what the body of a `with` changes; Megatron's `suspend_resume_ctx`.

    Args:
        key: what happens, such as "suspended".
        unified_memory_level: is logged.
    """
    has_gpu = torch.cuda.is_available()
    start, before = time.perf_counter(), torch.cuda.memory_allocated() if has_gpu else 0
    try:
        yield
    finally:
        after = torch.cuda.memory_allocated() if has_gpu else 0
        logger.info(
            "dynamic engine %s, unified %d: GPU %+.1f GiB in %.3f s; now %.1f GiB of the GPU, "
            "%.1f GiB of the host",
            key,
            unified_memory_level,
            (after - before) / GIB,
            time.perf_counter() - start,
            after / GIB,
            psutil.Process().memory_info().rss / GIB,
        )
