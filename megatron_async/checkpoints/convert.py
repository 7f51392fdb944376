"""Convert a model from any format that loads to a Megatron or a Hugging Face folder."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.files import check_target
from megatron_async.checkpoints.huggingface import save_huggingface
from megatron_async.checkpoints.huggingface_config import write_config
from megatron_async.checkpoints.mapping import Shard, weights
from megatron_async.checkpoints.quantise import Quantiser
from megatron_async.checkpoints.registry import open_model
from megatron_async.checkpoints.source import (
    ModelSource,
    NamedTensorSource,
    parse_dtype,
)
from megatron_async.checkpoints.torch_dist import save_torch_dist
from megatron_async.errors import ConfigurationError

logger = logging.getLogger("megatron_async")
FORMATS = ("torch_dist", "huggingface")


def convert(
    source: str | Path | ModelSource,
    target_folder: str | Path,
    to: str | None = None,
    dtype: str | torch.dtype | None = None,
    progress: bool = False,
    overwrite: bool = False,
    with_mtp: bool | None = None,
    quantization: str | None = None,
) -> None:
    """Write a model, with its configuration and tokenizer, in another format. The target appears
    whole or not at all: it is written beside its place and then renamed.

    Args:
        source: what `open_model` takes, or what it gave.
        target_folder: must not exist, or be empty, unless `overwrite`: a model is replaced, and
            nothing else.
        to: "torch_dist" or "huggingface"; None: "torch_dist", or with `quantization`,
            "huggingface".
        dtype: convert the weights; None keeps them bit for bit in the stored dtype, but for those
            that a residual multiplier (Granite's) becomes part of: they are rounded once more. So
            is the norm after Gated DeltaNet, which Megatron stores less 1, where it is float32.
        progress: show progress bars on stderr.
        with_mtp: write the layers of multi-token prediction too; None: where the source has them.
        quantization: linear layers and experts in FP8, for `to="huggingface"` alone: "fp8", a scale
            for each block of 128 x 128, or "fp8-channel", one for each output. Weights of a
            quantised source are rounded twice, which is told.

    Raises:
        CheckpointError: see `open_model`; the target is taken; a disk is full.
        ConfigurationError: see `check_mtp` and `Quantiser`; a format that is not written.
    """
    from megatron_async.models.hybrid import build_model

    to = to or ("torch_dist" if quantization is None else "huggingface")
    if to not in FORMATS:
        raise ConfigurationError(
            f"to={to!r} is not a format to write: use one of {', '.join(FORMATS)}"
        )
    if quantization is not None and to != "huggingface":
        raise ConfigurationError(
            f"quantization={quantization!r} is of Hugging Face folders: use to='huggingface', "
            "or leave it out and quantise at load"
        )
    target = Path(target_folder).expanduser().absolute()
    check_target(target, overwrite)
    source = source if isinstance(source, ModelSource) else open_model(source)
    architecture, tokenizer = source.architecture, source.tokenizer
    dtype = source.dtype if dtype is None else parse_dtype(dtype)
    if with_mtp is None:
        with_mtp = source.has_mtp_weights
    if to == "huggingface":  # raises before hours of reading, not after them
        write_config(architecture if with_mtp else architecture.without_mtp, "float32")
        if quantization is not None:
            Quantiser.of(quantization, weights(architecture, Shard(with_mtp=with_mtp)))
            if told := source.quantised and source.quantised.formats:
                logger.warning(
                    "%s: is quantised already (%s): its weights are rounded once more. Take the "
                    "model in 16 bits if you have it.", source.name, told,
                )  # fmt: skip
    if source.has_fp8_cache:
        logger.warning(
            "%s: asks for keys and values in fp8, and the target will not: scales of keys and "
            "values are not written.", source.name,
        )  # fmt: skip
    # A folder of tensors is read weight by weight, as they are written.
    streamed = source if to == "huggingface" and isinstance(source, NamedTensorSource) else None
    place = torch.device("cpu" if streamed is None else "meta")
    model = build_model(architecture, dtype, place, with_mtp=with_mtp)
    if streamed is None:
        source.load_weights(model, progress, with_scales=False)
    with _whole_folder(target) as folder:
        if to == "torch_dist":
            save_torch_dist(model, architecture, tokenizer, folder)
            return
        with streamed.reading(Shard(with_mtp=with_mtp)) if streamed else nullcontext() as read:
            save_huggingface(
                model, architecture, tokenizer, folder, progress,
                quantization=quantization, read=read,
            )  # fmt: skip


@contextmanager
def _whole_folder(target: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `target` if the block ends well and vanishes if not."""
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        if target.exists():
            target.rename(old)
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {target}: {_reason(error)}") from error
    except CheckpointException as error:  # torch's, of what failed on each rank; no Exception
        first, _ = next(iter(error.failures.values()))
        free = shutil.disk_usage(partial.parent).free / 2**20
        raise CheckpointError(
            f"cannot write {target}: {_reason(first)} ({free:,.0f} MiB of the disk are free)"
        ) from error
    finally:
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _reason(error: BaseException) -> str:
    """What is wrong; of the system's errors without its number."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
