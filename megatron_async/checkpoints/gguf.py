"""GGUF files (llama.cpp): dequantised to float32 on the model's device, piece by piece.

A row of a quantised tensor is a sequence of blocks of 32 or 256 values, whose numbers are made by
`ops/linear/gguf_blocks.py`.
"""

from __future__ import annotations

import mmap
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from math import prod
from pathlib import Path
from typing import Any, override

import gguf
import numpy as np
import torch
from torch import Tensor

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.family_names import FamilyNames
from megatron_async.checkpoints.gguf_families import GGUF_FAMILIES, GGUFFamily, window_of
from megatron_async.checkpoints.gguf_metadata import SAMPLING_PREFIX, Metadata, generation_config
from megatron_async.checkpoints.mapping import Region, Shape, Shard, Weight
from megatron_async.checkpoints.quantised import QuantisedFolder
from megatron_async.checkpoints.source import NamedTensorSource
from megatron_async.models.architecture import ModelArchitecture, RopeScaling
from megatron_async.models.held_weight import Operand
from megatron_async.models.rotary import inverse_frequencies
from megatron_async.ops.linear.cpu.group_form import (
    GroupForm,
    Groups,
    StoredGroups,
    joined,
    widened,
)
from megatron_async.ops.linear.gguf_blocks import BLOCKS, PLAIN, dequantise, groups_of, unpermute
from megatron_async.text.tokenizer import Tokenizer

ROPE_FACTORS = "rope_freqs.weight"
"""Llama-3 rope scaling, as one divisor a frequency; the numbers behind it are not stored."""
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL = 1.0, 4.0, 8192
"""The values of all Llama 3.x models; checked against `ROPE_FACTORS`."""


EXPERT_ROWS = 16
"""Rows of an expert's matrix are a multiple of this where its blocks are kept: of the outputs that
a product takes at a time."""
PIECE_VALUES = 1 << 24
"""Weights that are dequantised at once: 64 MiB of float32."""


class GGUFSource(NamedTensorSource):
    """A GGUF file."""

    format = "gguf"

    def __init__(self, file: Path, name: str | None = None) -> None:
        super().__init__(name or str(file))
        self.file = file

    @cached_property
    def architecture(self) -> ModelArchitecture:
        """From the file's metadata and tensor shapes."""
        meta = self._metadata
        meta.check_file()
        if self._reader.byte_order == "S":
            raise CheckpointError(
                f"{self.file}: its bytes are in the other order than this machine's; convert it "
                "with gguf-py's gguf_convert_endian.py"
            )
        family, hidden = self._family, meta.size("embedding_length")
        layers, heads = meta.size("block_count"), meta.size("attention.head_count")
        head_dim = meta.size("attention.key_length", max(hidden // heads, 1))
        kv_heads = meta.per_layer("attention.head_count_kv", layers, heads)
        ffn = meta.per_layer("feed_forward_length", layers)
        base = meta.number("rope.freq_base", 10000.0)
        epsilon = meta.number("attention.layer_norm_rms_epsilon")
        if "token_embd.weight" not in self._tensors:
            raise CheckpointError(f"{self.file}: tensor 'token_embd.weight' is missing")
        vocabulary = _shape(self._tensors["token_embd.weight"])[0]
        own = family.read(meta, kv_heads, ffn)
        uses_rope = own.get("position_embedding_type", "rope") == "rope"
        for name in ("attention.value_length", "rope.dimension_count"):
            is_read = uses_rope or name == "attention.value_length"
            if meta.size(name, head_dim) != head_dim and is_read:
                raise meta.error(name, f"is not supported (only the head size, {head_dim})")
        for name, sizes in (("attention.head_count_kv", kv_heads), ("feed_forward_length", ffn)):
            if len(set(sizes) - {0}) > 1 or (0 in sizes and "pattern" not in own):
                raise meta.error(name, "is not supported (only one size, for all layers)")
        linear = meta.linear_scaling()
        found = {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": max(kv_heads) or heads,
            "kv_channels": head_dim,
            "ffn_hidden_size": max(ffn),
            "vocab_size": vocabulary,
            "layernorm_epsilon": epsilon,
            "rotary_base": base,
            "rope_scaling": self._rope_scaling(linear, head_dim, base) if uses_rope else None,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "max_position_embeddings": meta.size("context_length"),
            "sliding_window": window_of(meta),
            "eos_token_ids": self._eos_ids,
            "bos_token_id": meta.token_id("tokenizer.ggml.bos_token_id"),
        }
        meta.finish(vocabulary, head_dim, epsilon)
        try:
            return ModelArchitecture(**found | own)
        except ValueError as error:
            raise CheckpointError(f"{self.file}: {error}") from error

    @cached_property
    def _family(self) -> GGUFFamily:
        kind = self._metadata.get("general.architecture")
        if kind not in GGUF_FAMILIES:
            raise CheckpointError(
                f"{self.file}: general.architecture = {kind!r:.200} is not supported; supported: "
                f"{', '.join(GGUF_FAMILIES)}"
            )
        return GGUF_FAMILIES[kind]

    @property
    @override
    def names(self) -> FamilyNames:
        return self._family.names

    @cached_property
    @override
    def tokenizer(self) -> Tokenizer | None:
        meta = self._metadata
        names = [name for name in meta.fields if name.startswith("tokenizer.")]
        if "tokenizer.ggml.tokens" not in names:
            return None
        tokens, rows = meta.get("tokenizer.ggml.tokens"), self.architecture.vocab_size
        if not isinstance(tokens, list) or len(tokens) != rows:
            count = len(tokens) if isinstance(tokens, list) else "no"
            raise CheckpointError(
                f"{self.file}: tokenizer.ggml.tokens has {count} entries, but token_embd.weight "
                f"has {rows} rows; the file is incomplete"
            )
        found = Tokenizer.from_gguf({name: meta.get(name) for name in names}, str(self.file))
        sampling = [name for name in meta.fields if name.startswith(SAMPLING_PREFIX)]
        found.generation_config = generation_config(
            {name: meta.get(name) for name in sampling}, str(self.file)
        )
        return found

    @property
    def dtype(self) -> torch.dtype:
        """float32, which every quantised value is computed in."""
        return torch.float32

    @cached_property
    @override
    def tensor_shapes(self) -> Mapping[str, Shape]:
        _ = self._family
        return {
            name: _shape_of_ours(name, _shape(tensor))
            for name, tensor in self._tensors.items()
            if name != ROPE_FACTORS
        }

    @override
    def read_tensor(self, name: str, region: Region, device: torch.device) -> Tensor:
        stored, shape = self._tensors[name], self.tensor_shapes[name]
        if len(region) == 1 or shape != _shape(stored):  # small
            whole = self._values(stored, (), device).view(shape)
            return (self._log_of_decay(whole, name) if _stem(name) == "ssm_a" else whole)[region]
        # Quantised blocks lie along a row, so whole rows are dequantised.
        *rows, columns = region
        tensor = self._values(stored, tuple(rows), device)
        heads = self._permuted_heads(name)
        if heads is not None:
            tensor = unpermute(tensor, len(tensor) // (shape[0] // heads))
        return tensor[..., columns]

    def _log_of_decay(self, decay: Tensor, name: str) -> Tensor:
        """`A_log`, of which llama.cpp's converter stores -exp."""
        if not bool(((decay < 0) & decay.isfinite()).all()):  # sync-ok: when a model is loaded
            raise CheckpointError(
                f"{self.file}: tensor {name!r} has numbers that are not negative, which no decay "
                "is; fetch the file again"
            )
        return decay.neg().log()

    def fill(self, place: Tensor, name: str, region: Region) -> None:
        """Fill a parameter in pieces where its rows lie as in the file: a large embedding, or all
        experts, never exist in float32."""
        target = place[0] if place.dim() > len(region) and place.size(0) == 1 else place
        first, count = region[0].start, region[0].stop - region[0].start
        is_alike = target.dim() == len(region) > 1 and len(target) == count
        if not is_alike or self._permuted_heads(name) is not None:
            super().fill(place, name, region)
            return
        step = max(PIECE_VALUES // prod(target.shape[1:]), 1)
        for start in range(0, len(target), step):
            stop = min(start + step, len(target))
            rows = slice(first + start, first + stop)
            target[start:stop].copy_(self.read_tensor(name, (rows, *region[1:]), place.device))

    @property
    @override
    def quantised(self) -> QuantisedFolder | None:
        found = list(self._tensors.values())
        blocks = [each for each in found if each.tensor_type not in PLAIN]
        if not blocks:
            return None
        counts = Counter(each.tensor_type.name for each in blocks)
        formats = ", ".join(f"{name}: {count} weights" for name, count in sorted(counts.items()))
        values = sum(int(each.n_elements) for each in blocks)
        bits = 8 * sum(int(each.n_bytes) for each in blocks) / values
        stored = sum(int(each.n_bytes) for each in found)
        return QuantisedFolder(self.format, formats, bits, stored, ())

    @cached_property
    @override
    def kept_bytes(self) -> int | None:
        kept = {weight.name: stored.nbytes for weight, stored in self.stored_groups()}
        others = [w for w in self.checked_weights if w.name not in kept]
        return sum(kept.values()) + sum(4 * prod(w.shape) for w in others) if kept else None

    @override
    def stored_groups(self) -> Iterator[tuple[Weight, StoredGroups]]:
        """All matrices in blocks but those of experts whose other matrix is not: both are
        multiplied at once."""
        found = {weight.name: weight for weight in self.checked_weights if self._is_kept(weight)}
        for name, weight in found.items():
            other = name.replace("fc1", "fc3").replace("fc2", "fc1").replace("fc3", "fc2")
            if not weight.experts or other in found:
                yield weight, self._stored_groups(weight)

    def _is_kept(self, weight: Weight) -> bool:
        tensors = [self._tensors[name] for name in weight.parts]
        has_blocks = all(stored.tensor_type in BLOCKS for stored in tensors)
        # An expert begins where a block of outputs does.
        is_even = not weight.experts or weight.whole_shape[1] % EXPERT_ROWS == 0
        return has_blocks and is_even and weight.is_of_whole_rows

    def _stored_groups(self, weight: Weight) -> StoredGroups:
        tensors = [self._tensors[name] for name in weight.parts]
        form = GroupForm.of_all([BLOCKS[each.tensor_type].form for each in tensors])
        if weight.scale != 1:
            form = form._replace(is_half=False)
        *rows, k = weight.whole_shape

        @cache
        def places() -> Tensor:
            return self._row_order(weight)

        def read(first: int, last: int) -> Groups:
            found = _rows_of(tensors, places()[first:last], form)
            if weight.scale == 1:
                return found
            return Groups(found.integers, *(weight.scale * each for each in found[1:]))

        return StoredGroups(prod(rows), k, form, read)

    def _row_order(self, weight: Weight) -> Tensor:
        """Where each row of a weight lies in its tensors, one behind the other: int64."""
        order = torch.empty(*weight.whole_shape[:-1], 1, dtype=torch.int64)
        numbers, first = {}, 0
        for name, (*sizes, _k) in weight.parts.items():
            rows = torch.arange(first, first + prod(sizes))[:, None]
            first += len(rows)
            heads = self._permuted_heads(name)
            numbers[name] = (rows if heads is None else unpermute(rows, heads)).view(*sizes, 1)
        for name, (*region, _columns), place in weight.pieces(order):
            place.copy_(numbers[name][tuple(region)].view(place.shape))
        return order.flatten()

    @override
    def load_into(
        self, tensors: Mapping[str, Operand], shard: Shard, progress: bool = False
    ) -> None:
        super().load_into(tensors, shard, progress)
        self._reader.forget_pages()

    def _values(self, stored: Any, rows: tuple[slice, ...], device: torch.device) -> Tensor:
        try:
            return dequantise(stored.data[rows], stored.tensor_type, device)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.file}: tensor {stored.name!r} has quantisation type "
                f"{stored.tensor_type.name}, which the gguf package cannot dequantise; convert the "
                "file to Q8_0 or F16"
            ) from error

    def _permuted_heads(self, name: str) -> int | None:
        """Heads whose rows llama.cpp has reordered in this tensor; None if it has not."""
        if not self._family.is_permuted:
            return None
        a = self.architecture
        heads = {"attn_q.weight": a.num_attention_heads, "attn_k.weight": a.num_query_groups}
        return heads.get(_stem(name))

    @cached_property
    def _reader(self) -> Any:
        if not self.file.is_file():
            raise CheckpointError(f"{self.file}: no such file")
        if self.file.open("rb").read(4) != b"GGUF":
            raise CheckpointError(f"{self.file}: not a GGUF file (it does not begin with 'GGUF')")
        try:
            # Copy on write, though nobody writes: torch warns of arrays that are read-only.
            return _QuickReader(self.file, "c")
        except (
            ValueError, IndexError, KeyError, OverflowError, TypeError, RecursionError,
        ) as error:  # fmt: skip
            # The reader finds the end of the file as whatever numpy makes of a short slice.
            raise CheckpointError(
                f"{self.file}: not a readable GGUF file, truncated or corrupt "
                f"({self.file.stat().st_size} bytes; {error}); fetch it again"
            ) from error

    @cached_property
    def _tensors(self) -> dict[str, Any]:
        return {tensor.name: tensor for tensor in self._reader.tensors}

    @property
    def _eos_ids(self) -> tuple[int, ...]:
        names = (f"tokenizer.ggml.{key}_token_id" for key in ("eos", "eot", "eom"))
        eos = [self._metadata.token_id(name) for name in names]
        return tuple(dict.fromkeys(token for token in eos if token is not None))

    @cached_property
    def _metadata(self) -> Metadata:
        return Metadata(self._reader.fields, str(self.file))

    def _rope_scaling(
        self, linear: RopeScaling | None, head_dim: int, base: float
    ) -> RopeScaling | None:
        if ROPE_FACTORS not in self._tensors:
            return linear
        if linear is not None:
            raise CheckpointError(
                f"{self.file}: rope is scaled by {linear.factor} and by {ROPE_FACTORS}, which is "
                "not supported together"
            )
        factors = torch.from_numpy(np.array(self._tensors[ROPE_FACTORS].data, dtype=np.float32))
        found = RopeScaling(float(factors.max()), LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL)
        plain = inverse_frequencies(head_dim, base)
        expected = plain / inverse_frequencies(head_dim, base, found)
        if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-4):
            raise CheckpointError(
                f"{self.file}: {ROPE_FACTORS} is not a Llama-3 scaling with low_freq_factor "
                f"{LLAMA3_LOW}, high_freq_factor {LLAMA3_HIGH} and original length "
                f"{LLAMA3_ORIGINAL}; use the model's Hugging Face folder instead"
            )
        return found


class _QuickReader(gguf.GGUFReader):
    """Keeps the file as a plain array over the mapped memory, and walks through a list of strings
    or numbers without a call for each: a vocabulary and its merges are 100,000 of them, 1.1 s by
    the `gguf` package and 0.2 by this class."""

    @property
    def data(self) -> np.ndarray:
        """uint8 `[bytes of the file]`."""
        return self._bytes

    @data.setter
    def data(self, mapped: np.memmap) -> None:
        self._mapped, self._bytes = mapped, mapped.view(np.ndarray)

    def forget_pages(self) -> None:
        """Let the system take back the memory of what was read; the file has it still."""
        self._mapped._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[np.ndarray], list[int], list[gguf.GGUFValueType]]:
        """Bytes of a field, its parts, which of them are values, and their types."""
        if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order == "S":
            return super()._get_field_parts(orig_offs, raw_type)
        head = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
        kind, count, start = gguf.GGUFValueType(head[0][0]), int(head[1][0]), orig_offs + 12
        types = [gguf.GGUFValueType.ARRAY, *[kind] * (count > 0)]
        number = self.gguf_scalar_to_np.get(kind)
        if number is not None:
            values = self._get(start, number, count)
            if len(values) < count:
                raise IndexError(f"{count} numbers at byte {start} reach behind the end")
            parts = [*head, *(values[i : i + 1] for i in range(count))]
            return 12 + values.nbytes, parts, list(range(2, 2 + count)), types
        if kind != gguf.GGUFValueType.STRING:
            return super()._get_field_parts(orig_offs, raw_type)
        strings, end = _strings(self._bytes, start, count)
        return end - orig_offs, [*head, *strings], list(range(2, 2 + count)), types


def _rows_of(tensors: list[Any], order: Tensor, form: GroupForm) -> Groups:
    """Rows of several tensors, by their place in these one behind the other."""
    found, places, first = [], [], 0
    for stored in tensors:
        data = stored.data.reshape(-1, stored.data.shape[-1])
        rows = len(data)
        where = ((order >= first) & (order < first + rows)).nonzero().flatten()  # sync-ok: CPU
        if len(where):
            raw = torch.from_numpy(data)[order[where] - first]
            found.append(widened(groups_of(raw, stored.tensor_type), form))
            places.append(where)
        first += rows
    if len(found) == 1:
        return found[0]
    back = torch.cat(places).argsort()
    return Groups(*(numbers[back] for numbers in joined(found)))


def _strings(data: np.ndarray, start: int, count: int) -> tuple[list[np.ndarray], int]:
    """`count` strings one behind the other, each behind its length, and the byte after the last."""
    found, place, view = [], start, memoryview(data)
    for _ in range(count):
        end = place + 8 + int.from_bytes(view[place : place + 8], "little")
        if end > len(data):
            raise IndexError(f"a string at byte {place} reaches behind the end")
        found.append(data[place + 8 : end])
        place = end
    return found, place


def _stem(name: str) -> str:
    """A tensor's name without its layer."""
    return re.sub(r"^blk\.\d+\.", "", name)


def _shape(tensor: Any) -> Shape:
    """GGUF lists the fastest dimension first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _shape_of_ours(name: str, shape: Shape) -> Shape:
    """The shape of what we call the same, of small tensors; others stay as they are."""
    match _stem(name), shape:
        case "ssm_a" | "ssm_d", (heads, 1):
            return (heads,)
        case "ssm_norm.weight", (groups, size):
            return (groups * size,)
        case "ssm_conv1d.weight", (channels, taps):
            return (channels, 1, taps)
        case "ffn_gate_inp_shexp.weight", (hidden,):
            return (1, hidden)
    return shape
