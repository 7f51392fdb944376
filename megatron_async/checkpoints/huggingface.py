"""Hugging Face folders: `config.json`, safetensors (also sharded) and the tokenizer's files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, NamedTuple, override

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.huggingface_config import read_architecture, write_config
from megatron_async.checkpoints.huggingface_delta import (
    language_model_config,
    language_model_tensors,
)
from megatron_async.checkpoints.huggingface_mtp import split_mtp
from megatron_async.checkpoints.json_files import read_json, write_json
from megatron_async.checkpoints.mapping import Region, Shape, Shard, weights
from megatron_async.checkpoints.source import (
    NamedTensorSource,
    byte_bar,
    model_parameters,
    total_bytes,
)
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.text.tokenizer import TOKENIZER, Tokenizer, read_eos_ids

logger = logging.getLogger("megatron_async")
CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
"""Largest safetensors file that is written."""

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""safetensors dtypes that are read."""


class _StoredTensors(NamedTuple):
    """What a folder holds.

    Attributes:
        model: the language model's tensors: the name without a vision tower -> that which is
            stored.
        left_out: how many others there are, by what they are for.
        mtp: the same as `model` of multi-token prediction.
    """

    model: dict[str, str]
    left_out: Mapping[str, int]
    mtp: dict[str, str]


class HuggingFaceSource(NamedTensorSource):
    """A Hugging Face model folder; of a model with a vision tower, its language model."""

    format = "huggingface"

    def __init__(self, folder: Path, name: str | None = None) -> None:
        super().__init__(name or str(folder))
        self.folder = folder
        self.config = language_model_config(read_json(folder / CONFIG), str(folder / CONFIG))
        self._open_files: dict[Path, Any] = {}

    @cached_property
    def architecture(self) -> ModelArchitecture:
        """From `config.json`; end tokens also from the tokenizer and `generation_config.json`."""
        bos = self.config.get("bos_token_id")
        # Only a tokenizer.json knows its EOS; a tokenizer of another format is an error when it is
        # asked for, not here.
        known = (self.folder / TOKENIZER).is_file() and self.tokenizer
        has_tensors = any((self.folder / file).is_file() for file in (SINGLE, INDEX))
        return read_architecture(
            self.config,
            str(self.folder / CONFIG),
            bos_token_id=bos if isinstance(bos, int) else None,
            eos_token_ids=known.eos_ids if known else read_eos_ids(self.folder),
            names=self._tensor_files if has_tensors else (),
        )

    @cached_property
    @override
    def tokenizer(self) -> Tokenizer | None:
        return Tokenizer.from_folder(self.folder) if Tokenizer.is_in(self.folder) else None

    @cached_property
    @override
    def dtype(self) -> torch.dtype:
        float32 = {
            part
            for weight in weights(self.architecture, stacked_experts=self.has_stacked_experts)
            if weight.is_float32
            for part in weight.parts
        }
        found = self._dtypes(self._tensors.model)
        return reduce(
            torch.promote_types, (dtype for name, dtype in found.items() if name not in float32)
        )

    def _dtypes(self, tensors: Mapping[str, str]) -> dict[str, torch.dtype]:
        """Dtypes of tensors as they are stored; quantised ones are refused."""
        found = {}
        for name, stored_name in tensors.items():
            path = self._tensor_files[stored_name]
            stored = self._file(path).get_slice(stored_name).get_dtype()
            if stored not in DTYPES:
                raise CheckpointError(
                    f"{path}: tensor {name!r} is stored as {stored}, which is not supported "
                    f"(only {', '.join(DTYPES)})"
                )
            found[name] = DTYPES[stored]
        return found

    @cached_property
    @override
    def tensor_shapes(self) -> Mapping[str, Shape]:
        found = self._shapes(self._tensors.model)
        # Older files store the rotary table, which follows from the configuration.
        return {k: v for k, v in found.items() if not k.endswith("rotary_emb.inv_freq")}

    @cached_property
    def mtp_shapes(self) -> Mapping[str, Shape]:
        """Shapes of the tensors of multi-token prediction, by name."""
        return self._shapes(self._tensors.mtp)

    def _shapes(self, tensors: Mapping[str, str]) -> dict[str, Shape]:
        return {
            name: tuple(self._file(self._tensor_files[stored]).get_slice(stored).get_shape())
            for name, stored in tensors.items()
        }

    def read_tensor(self, name: str, region: Region, device: torch.device) -> Tensor:
        """Read a region of a tensor, and no byte of the file outside the region's rows."""
        is_mtp = name in self._tensors.mtp
        stored = self._tensors.mtp[name] if is_mtp else self._tensors.model[name]
        shape = self.mtp_shapes[name] if is_mtp else self.tensor_shapes[name]
        path = self._tensor_files[stored]
        try:
            if tuple(part.stop - part.start for part in region) == shape:
                tensor: Tensor = self._file(path).get_tensor(stored)
            else:
                tensor = self._file(path).get_slice(stored)[region]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: cannot read tensor {name!r}: {error}") from error
        return tensor.to(device)

    @override
    def load_weights(self, model: nn.Module, progress: bool = False) -> None:
        _ = self.dtype  # refuses quantised tensors, which would be copied as if they were numbers
        if Shard.of(model).with_mtp:
            self._dtypes(self._tensors.mtp)
        for what, count in self._tensors.left_out.items():
            logger.warning("%s: %s (%d tensors) is not loaded.", self.name, what, count)
        try:
            super().load_weights(model, progress)
        finally:
            self._open_files.clear()

    @cached_property
    def _tensors(self) -> _StoredTensors:
        kind = self.architecture.model_type
        names, mtp = split_mtp(self._tensor_files, kind)
        return _StoredTensors(*language_model_tensors(names, kind), {name: name for name in mtp})

    @cached_property
    def _tensor_files(self) -> dict[str, Path]:
        """Which file holds which tensor, by the name that is stored."""
        if (self.folder / INDEX).is_file():
            index = read_json(self.folder / INDEX)
            if not isinstance(index.get("weight_map"), dict):
                raise CheckpointError(f"{self.folder / INDEX}: has no weight_map")
            files = {name: self.folder / file for name, file in index["weight_map"].items()}
            for path in sorted(set(files.values())):
                stored = set(self._file(path).keys())
                lost = [name for name, file in files.items() if file == path and name not in stored]
                if lost:
                    raise CheckpointError(f"{path}: lacks tensor {lost[0]!r}, which {INDEX} names")
            return files
        path = self.folder / SINGLE
        if path.is_file():
            return {name: path for name in self._file(path).keys()}  # noqa: SIM118
        old = sorted(file.name for file in self.folder.glob("*.bin"))
        hint = f" It holds {old[0]}: save it as safetensors first." if old else ""
        raise CheckpointError(f"{self.folder}: has neither {SINGLE} nor {INDEX}.{hint}")

    def _file(self, path: Path) -> Any:
        if path not in self._open_files:
            if not path.is_file():
                raise CheckpointError(
                    f"{path}: is missing, though {INDEX} names it; fetch it again"
                )
            try:
                self._open_files[path] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path}: not a readable safetensors file, truncated or corrupt ({error}); "
                    "fetch it again"
                ) from error
        return self._open_files[path]


def save_huggingface(
    model: nn.Module,
    architecture: ModelArchitecture,
    tokenizer: Tokenizer | None,
    folder: Path,
    progress: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that transformers' `AutoModelForCausalLM.from_pretrained` loads.

    Args:
        model: a `HybridModel` of `architecture`; its weights are written in its dtype, those of
            multi-token prediction where it has them.
        architecture: what `config.json` is made from.
        tokenizer: its files are written too, if there is one.
        folder: made if needed; files in it are replaced.
        progress: show a progress bar on stderr.
        shard_bytes: weights beyond this many bytes go to further files, with an index.

    Raises:
        CheckpointError: the architecture has no Hugging Face form.
    """
    held = Shard.of(model)
    if not held.with_mtp:
        architecture = architecture.without_mtp
    wanted = list(weights(architecture, held))
    parameters = model_parameters(model, wanted)
    dtype = parameters[wanted[0].name].dtype
    config = write_config(architecture, str(dtype).removeprefix("torch."))
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG, config)
    shards: list[list[Any]] = [[]]
    size = 0
    for weight in wanted:
        weight_bytes = parameters[weight.name].nbytes
        if shards[-1] and size + weight_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(weight)
        size += weight_bytes
    weight_map: dict[str, str] = {}
    total = total_bytes(parameters)
    with byte_bar(total, progress, "writing weights") as bar:
        for number, shard in enumerate(shards, 1):
            count = len(shards)
            file = SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            tensors: dict[str, Tensor] = {}
            for weight in shard:
                tensors |= weight.split(parameters[weight.name].cpu())
            save_file(tensors, folder / file, metadata={"format": "pt"})
            # safetensors makes it readable to its owner alone; a model folder is often shared.
            (folder / file).chmod((folder / CONFIG).stat().st_mode)
            weight_map |= dict.fromkeys(tensors, file)
            bar.update(sum(parameters[weight.name].nbytes for weight in shard))
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    if tokenizer is not None:
        tokenizer.save(folder)
