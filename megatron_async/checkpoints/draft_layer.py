"""A layer for multi-token prediction in a file of its own, for a model that came without one.

`scripts/train_draft_layer.py` trains such layers. The file is safetensors; its tensors have the
names of `checkpoints/family_names.py` (`mtp.layers.0...`), its metadata say what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import override

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.family_names import FamilyNames
from megatron_async.checkpoints.huggingface import DTYPES
from megatron_async.checkpoints.mapping import Region, Shape, Shard
from megatron_async.checkpoints.quantised import QuantisedFolder
from megatron_async.checkpoints.safetensors_file import SafetensorsFile
from megatron_async.checkpoints.source import ModelSource, NamedTensorSource
from megatron_async.checkpoints.weight import Weight
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.ops.linear.cpu.group_form import StoredGroups
from megatron_async.ops.linear.quantised_layout import Layout
from megatron_async.ops.linear.quantised_weight import QuantisedWeight
from megatron_async.text.tokenizer import Tokenizer

PATTERN = "mtp_pattern"
"""Key of the metadata: layers of the one depth."""
REMEDY = "make one for this model with scripts/train_draft_layer.py"


class WithDraftLayer(NamedTensorSource):
    """A model, and a trained layer for multi-token prediction: safetensors, of one depth that is
    used for all drafts.

    Raises:
        CheckpointError: the file is not such a layer, or the model has layers of its own, or is of
            a format that names its tensors otherwise.
    """

    def __init__(self, base: ModelSource, file: str | Path) -> None:
        super().__init__(base.name)
        self.format = base.format
        self.file = Path(file).expanduser()
        if not isinstance(base, NamedTensorSource):
            raise CheckpointError(
                f"draft layer {str(file)!r}: a {base.format} model takes none; use a GGUF file or "
                "a Hugging Face folder (`megatron-async convert` writes one)."
            )
        if base.architecture.mtp_pattern:
            raise CheckpointError(
                f"draft layer {str(file)!r}: {base.name} has layers for multi-token prediction of "
                "its own; leave the file out."
            )
        self._base = base
        self.metadata = self._read_metadata()

    @property
    @override
    def has_fp8_cache(self) -> bool:
        return self._base.has_fp8_cache

    @override
    def load_scales(self, model: nn.Module) -> None:
        self._base.load_scales(model)

    @property
    @override
    def quantised(self) -> QuantisedFolder | None:
        return self._base.quantised

    @override
    def layouts(self, shard: Shard, rounds_rows: bool) -> Mapping[str, Layout]:
        return self._base.layouts(shard, rounds_rows)

    @override
    def is_quantised(self, name: str) -> bool:
        return self._base.is_quantised(name)

    @override
    def fill_quantised(
        self, into: QuantisedWeight, places: Mapping[str, Tensor], name: str, region: Region,
        factor: float,
    ) -> None:  # fmt: skip
        self._base.fill_quantised(into, places, name, region, factor)

    @override
    def input_scale(self, parts: Sequence[str]) -> float:
        return self._base.input_scale(parts)

    @property
    def architecture(self) -> ModelArchitecture:
        """The model's, with the layer."""
        return replace(
            self._base.architecture,
            mtp_pattern=self.metadata[PATTERN],
            mtp_num_depths=1,
            mtp_use_repeated_layer=True,
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's."""
        return self._base.tokenizer

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return self._base.dtype

    @property
    def tensor_shapes(self) -> Mapping[str, Shape]:
        """The model's."""
        return self._base.tensor_shapes

    @cached_property
    def mtp_shapes(self) -> Mapping[str, Shape]:
        """Shapes of the file's tensors, by name."""
        return {name: stored.shape for name, stored in self._file.tensors.items()}

    @property
    def kept_bytes(self) -> int | None:
        """The model's; its draft layer is small."""
        return self._base.kept_bytes

    def stored_groups(self) -> Iterator[tuple[Weight, StoredGroups]]:
        """The model's."""
        return self._base.stored_groups()

    @property
    @override
    def names(self) -> FamilyNames | None:
        return self._base.names

    @override
    def check_stored(self, with_mtp: bool) -> None:
        for name, stored in self._file.tensors.items():
            if stored.dtype not in DTYPES:
                raise CheckpointError(
                    f"draft layer {str(self.file)!r}: tensor {name!r} is stored as {stored.dtype}, "
                    f"which is not read (only {', '.join(DTYPES)}); {REMEDY}."
                )
        self._base.check_stored(with_mtp=False)

    @override
    def check_unchanged(self) -> None:
        self._file.check_unchanged()
        self._base.check_unchanged()

    def read_tensor(self, name: str, region: Region, device: torch.device) -> Tensor:
        """A region of a tensor of the file, or else of the model."""
        if name not in self.mtp_shapes:
            return self._base.read_tensor(name, region, device)
        return self._file.tensors[name].read(region).to(device)

    def fill(self, place: Tensor, name: str, region: Region) -> None:
        """Read a region of a tensor into its place in a parameter."""
        if name in self.mtp_shapes:
            super().fill(place, name, region)
        else:
            self._base.fill(place, name, region)

    @cached_property
    def _file(self) -> SafetensorsFile:
        try:
            return SafetensorsFile(self.file)
        except CheckpointError as error:
            raise CheckpointError(f"draft layer {error}; {REMEDY}.") from error

    def _read_metadata(self) -> dict[str, str]:
        found = self._file.metadata
        if PATTERN not in found:
            raise CheckpointError(
                f"draft layer {str(self.file)!r}: its metadata have no {PATTERN!r}, so it is no "
                f"draft layer; {REMEDY}."
            )
        return found


def save_draft_layer(
    tensors: Mapping[str, Tensor], pattern: str, facts: Mapping[str, str], file: Path
) -> None:
    """Write a layer that `WithDraftLayer` reads.

    Args:
        tensors: by the names of `checkpoints/family_names.py`.
        pattern: layers of the depth, such as "*-".
        facts: of the training, for later readers of the file: model, tokens, seed, loss.
        file: to write.
    """
    kept = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(kept, file, metadata={PATTERN: pattern, **facts})
