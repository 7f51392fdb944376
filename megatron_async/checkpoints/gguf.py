"""GGUF files (llama.cpp): dequantised to float32 on the model's device, piece by piece.

A row of a quantised tensor is a sequence of blocks of 32 or 256 values, whose numbers are made by
`ops/linear/gguf_blocks.py`.
"""

from __future__ import annotations

import mmap
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache, cached_property
from math import prod
from pathlib import Path
from typing import Any, override

import gguf
import numpy as np
import torch
from torch import Tensor

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.gguf_metadata import SAMPLING_PREFIX, Metadata, generation_config
from megatron_async.checkpoints.huggingface_config import family_of
from megatron_async.checkpoints.mapping import Region, Shape, Shard, Weight, weights
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

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Values of `general.architecture` that are read; llama.cpp calls Mistral "llama", too."""

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF tensor name -> Hugging Face name, both without layer and suffix."""

ROPE_FACTORS = "rope_freqs.weight"
"""Llama-3 rope scaling, as one divisor a frequency; the numbers behind it are not stored."""
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL = 1.0, 4.0, 8192
"""The values of all Llama 3.x models; checked against `ROPE_FACTORS`."""


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
        kind = meta.get("general.architecture")
        if kind not in ARCHITECTURES:
            raise CheckpointError(
                f"{self.file}: general.architecture = {kind!r} is not supported; supported: "
                f"{', '.join(ARCHITECTURES)}"
            )
        if meta.get(f"{kind}.expert_count", 0):
            raise CheckpointError(f"{self.file}: mixture-of-experts GGUF files are not supported")
        hidden = meta.size(f"{kind}.embedding_length")
        heads = meta.size(f"{kind}.attention.head_count")
        head_dim = meta.size(f"{kind}.attention.key_length", hidden // heads)
        for name in ("attention.value_length", "rope.dimension_count"):
            if meta.size(f"{kind}.{name}", head_dim) != head_dim:
                raise meta.error(
                    f"{kind}.{name}", f"is not supported (only the head size, {head_dim})"
                )
        base = meta.number(f"{kind}.rope.freq_base", 10000.0)
        window = meta.get(f"{kind}.attention.sliding_window", 0)
        window = meta.size(f"{kind}.attention.sliding_window") if window != 0 else None
        family = family_of("mistral" if kind == "llama" and window else kind)
        if "token_embd.weight" not in self._tensors:
            raise CheckpointError(f"{self.file}: tensor 'token_embd.weight' is missing")
        epsilon = meta.number(f"{kind}.attention.layer_norm_rms_epsilon")
        vocabulary = _shape(self._tensors["token_embd.weight"])[0]
        scaling = self._rope_scaling(meta.linear_scaling(kind), head_dim, base)
        found = ModelArchitecture(
            model_type=family.model_type,
            num_layers=meta.size(f"{kind}.block_count"),
            hidden_size=hidden,
            num_attention_heads=heads,
            num_query_groups=meta.size(f"{kind}.attention.head_count_kv", heads),
            kv_channels=head_dim,
            ffn_hidden_size=meta.size(f"{kind}.feed_forward_length"),
            vocab_size=vocabulary,
            layernorm_epsilon=epsilon,
            rotary_base=base,
            rope_scaling=scaling,
            add_qkv_bias=family.add_qkv_bias,
            qk_layernorm=family.qk_layernorm,
            tie_word_embeddings="output.weight" not in self._tensors,
            max_position_embeddings=meta.size(f"{kind}.context_length"),
            sliding_window=window,
            eos_token_ids=self._eos_ids,
            bos_token_id=meta.token_id("tokenizer.ggml.bos_token_id"),
        )
        meta.finish(kind, vocabulary, head_dim, epsilon)
        return found

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
        return {name: _shape(tensor) for name, tensor in self._by_huggingface_name.items()}

    @override
    def read_tensor(self, name: str, region: Region, device: torch.device) -> Tensor:
        rows, *columns = region
        # Quantised blocks lie along a row, so whole rows are dequantised.
        tensor = self._values(self._by_huggingface_name[name], rows, device)
        heads = self._permuted_heads(name)
        if heads is not None:
            dim = self.tensor_shapes[name][0] // heads
            tensor = unpermute(tensor, len(tensor) // dim)
        return tensor[(slice(None), *columns)]

    def fill(self, place: Tensor, name: str, region: Region) -> None:
        """Fill a parameter in pieces where its rows lie as in the file: a large embedding never
        exists in float32."""
        if place.dim() < 3 or place.size(0) > 1 or self._permuted_heads(name) is not None:
            super().fill(place, name, region)
            return
        target, first = place[0], region[0].start
        step = max(PIECE_VALUES // self.tensor_shapes[name][1], 1)
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
        total, some = 0, False
        for weight in weights(self.architecture):
            found = self.stored_groups(weight)
            some |= found is not None
            total += 4 * prod(weight.shape) if found is None else found.nbytes
        return total if some else None

    @override
    def stored_groups(self, weight: Weight) -> StoredGroups | None:
        _ = self.checked_weights  # tensors of other shapes do not stand side by side
        names = self._by_huggingface_name
        tensors = [names[name] for name in weight.parts if name in names]
        kept = [each for each in tensors if each.tensor_type in BLOCKS]
        if len(kept) < len(weight.parts) or not weight.is_of_whole_rows:
            return None
        form = GroupForm.of_all([BLOCKS[each.tensor_type].form for each in tensors])
        outputs, k = weight.whole_shape

        @cache
        def places() -> Tensor:
            return self._row_order(weight)

        def read(first: int, last: int) -> Groups:
            return _rows_of(tensors, places()[first:last], form)

        return StoredGroups(outputs, k, form, read)

    def _row_order(self, weight: Weight) -> Tensor:
        """Where each row of a weight lies in its tensors, one behind the other: int64."""
        order, first = torch.empty(weight.whole_shape[0], 1, dtype=torch.int64), 0
        for name, place in weight.places(order).items():
            rows = torch.arange(place.numel())[:, None]
            heads = self._permuted_heads(name)
            if heads is not None:
                rows = unpermute(rows, heads)
            place.copy_((rows + first).view(place.shape))
            first += len(rows)
        return order.flatten()

    @override
    def load_into(
        self, tensors: Mapping[str, Operand], shard: Shard, progress: bool = False
    ) -> None:
        super().load_into(tensors, shard, progress)
        self._reader.forget_pages()

    def _values(self, stored: Any, rows: slice, device: torch.device) -> Tensor:
        try:
            return dequantise(stored.data[rows], stored.tensor_type, device)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.file}: tensor {stored.name!r} has quantisation type "
                f"{stored.tensor_type.name}, which the gguf package cannot dequantise; convert the "
                "file to Q8_0 or F16"
            ) from error

    def _permuted_heads(self, name: str) -> int | None:
        """Heads whose rows llama.cpp has reordered in this tensor; None if it has not.

        It rotates neighbours (2j, 2j + 1), we rotate (j, j + dim / 2): for these architectures
        alone it reorders the rows of each head when it writes the file.
        """
        a = self.architecture
        if a.model_type not in ("llama", "mistral"):
            return None
        heads = {"q_proj": a.num_attention_heads, "k_proj": a.num_query_groups}
        return heads.get(name.split(".")[-2]) if name.endswith(".weight") else None

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

    @cached_property
    def _by_huggingface_name(self) -> dict[str, Any]:
        named = {name: _huggingface_name(name) for name in self._tensors if name != ROPE_FACTORS}
        found = {theirs: self._tensors[name] for name, theirs in named.items()}
        if len(found) < len(named):
            twice = next(name for name, theirs in named.items() if found[theirs].name != name)
            raise CheckpointError(f"{self.file}: tensor {twice!r} is there under two names")
        return found

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
        rows = len(stored.data)
        where = ((order >= first) & (order < first + rows)).nonzero().flatten()  # sync-ok: CPU
        if len(where):
            raw = torch.from_numpy(stored.data)[order[where] - first]
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


def _huggingface_name(name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in NAMES:
        return name  # reported as superfluous, under the name that the file uses
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{NAMES[match[2]]}.{match[3]}"


def _shape(tensor: Any) -> Shape:
    """GGUF lists the fastest dimension first."""
    return tuple(int(size) for size in reversed(tensor.shape))
