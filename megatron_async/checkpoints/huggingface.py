"""Hugging Face folders: `config.json`, safetensors (also sharded) and the tokenizer's files."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, NamedTuple, override

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from megatron_async.checkpoints.cache_scales import load_cache_scales, read_scales
from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.family_names import is_transposed
from megatron_async.checkpoints.files import read_json
from megatron_async.checkpoints.huggingface_config import read_architecture, write_config
from megatron_async.checkpoints.huggingface_delta import (
    language_model_config,
    language_model_tensors,
)
from megatron_async.checkpoints.huggingface_mtp import split_mtp
from megatron_async.checkpoints.mapping import Region, Shape, Shard, weights
from megatron_async.checkpoints.quantise import Quantiser
from megatron_async.checkpoints.quantised import (
    INPUT_REMEDY,
    INPUTS,
    KEYS,
    FolderWeight,
    QuantisedFolder,
    take_quantised,
)
from megatron_async.checkpoints.quantised_pieces import folder_layouts, rounding
from megatron_async.checkpoints.quantization_config import (
    HF_QUANT_CONFIG,
    QUANTIZATION_KEYS,
    read_recipe,
)
from megatron_async.checkpoints.safetensors_file import StoredTensor
from megatron_async.checkpoints.source import (
    NamedTensorSource,
    ReadWeight,
    byte_bar,
    embedding_name,
    model_parameters,
    named_tensors,
    total_bytes,
)
from megatron_async.checkpoints.tensor_files import INDEX, SINGLE, TensorFiles, has_weights
from megatron_async.checkpoints.upload import read_to
from megatron_async.json_objects import write_object
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.held_weight import Operand
from megatron_async.models.rotary import described_frequencies
from megatron_async.ops.linear.quantised_layout import Layout
from megatron_async.ops.linear.quantised_weight import QuantisedWeight, widened
from megatron_async.text.tokenizer import GENERATION_CONFIG, TOKENIZER, Tokenizer, read_eos_ids

logger = logging.getLogger("megatron_async")
CONFIG = "config.json"
SHARD_BYTES = 5 * 10**9
"""Largest safetensors file that is written."""

OUTPUT = "lm_head.weight"
FREQUENCIES = "rotary_emb.inv_freq"
"""End of names of tables of rope."""
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""safetensors dtypes that are read."""


class _StoredTensors(NamedTuple):
    """What a folder holds.

    Attributes:
        model, mtp: the language model's tensors, and those of its MTP: the name without
            a vision tower -> that which is stored.
        quantised: weights of both that are stored in another form.
        scales: of what is no weight: by what it is, each name -> that which is stored.
        frequencies: stored tables of rope, which follow from the configuration.
        left_out: how many others there are, by what they are for.
    """

    model: dict[str, str]
    mtp: dict[str, str]
    quantised: dict[str, FolderWeight]
    scales: dict[str, dict[str, str]]
    frequencies: list[str]
    left_out: Counter[str]


class HuggingFaceSource(NamedTensorSource):
    """A Hugging Face model folder; of a model with a vision tower, its language model."""

    format = "huggingface"

    def __init__(self, folder: Path, name: str | None = None) -> None:
        super().__init__(name or str(folder))
        self.folder = folder
        where = str(folder / CONFIG)
        config = language_model_config(read_json(folder / CONFIG), where)
        beside = folder / HF_QUANT_CONFIG
        self._recipe = read_recipe(config, read_json(beside) if beside.is_file() else None, where)
        self.config = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
        self._files = TensorFiles(folder)
        self._layouts: dict[Shard, dict[str, Layout]] = {}

    @cached_property
    def architecture(self) -> ModelArchitecture:
        """From `config.json`; end tokens also from the tokenizer and `generation_config.json`.

        Where the configuration ties the output layer to the embedding and another output layer is
        stored, that one is used, as transformers does.
        """
        bos = self.config.get("bos_token_id")
        # Only a tokenizer.json knows its EOS; a tokenizer of another format is an error when it is
        # asked for, not here.
        known = (self.folder / TOKENIZER).is_file() and self.tokenizer
        names = self._files.file_of if has_weights(self.folder) else ()
        where = str(self.folder / CONFIG)
        try:
            found = read_architecture(
                self.config,
                where,
                bos_token_id=bos if isinstance(bos, int) else None,
                eos_token_ids=known.eos_ids if known else read_eos_ids(self.folder),
                names=names,
            )
        except CheckpointError:
            raise
        except ValueError as error:  # of the architecture, which does not know the file
            raise CheckpointError(f"{where}: {error}") from error
        if found.tie_word_embeddings and names and not self._is_tied(found.model_type):
            found = replace(found, tie_word_embeddings=False)
        return found

    def _is_tied(self, kind: str) -> bool:
        """Whether no output layer is stored that differs from the embedding."""
        found = self._stored(kind)
        stored, embedding = found.model, embedding_name(kind, found.model)
        if OUTPUT not in stored or embedding not in stored:
            return True
        is_plain = found.quantised.keys().isdisjoint((OUTPUT, embedding))
        if is_plain and self._files.are_equal(stored[OUTPUT], stored[embedding]):
            return True
        logger.warning(
            "%s: tie_word_embeddings is true, but %r and %r are both stored and differ: both are "
            "used, as transformers does. Set tie_word_embeddings to false.",
            self.folder / CONFIG, stored[OUTPUT], stored[embedding],
        )  # fmt: skip
        return False

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """What the model says of its sampling, also without a tokenizer."""
        file = self.folder / GENERATION_CONFIG
        return read_json(file) if file.is_file() else {}

    @cached_property
    @override
    def tokenizer(self) -> Tokenizer | None:
        if not Tokenizer.is_in(self.folder):
            return None
        found = Tokenizer.from_folder(self.folder)
        rows = self.config.get("vocab_size")
        if isinstance(rows, int):
            found.drop_ends_from(rows)
        return found

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
        """Dtypes of tensors as they are stored, but for those that `quantised` has; other forms are
        refused."""
        found = {}
        for name, stored_name in tensors.items():
            if name in self._tensors.quantised:
                continue
            stored = self._files.tensor(stored_name).dtype
            if stored not in DTYPES:
                raise CheckpointError(
                    f"{self._files.file_of[stored_name]}: tensor {name!r} is stored as {stored}, "
                    f"which is not supported (only {', '.join(DTYPES)}, and others where "
                    f"quantization_config of {CONFIG} says how they are quantised)"
                )
            found[name] = DTYPES[stored]
        return found

    @cached_property
    @override
    def tensor_shapes(self) -> Mapping[str, Shape]:
        return self._shapes(self._tensors.model)

    @cached_property
    def mtp_shapes(self) -> Mapping[str, Shape]:
        """Shapes of the tensors of multi-token prediction, by name."""
        return self._shapes(self._tensors.mtp)

    def _shapes(self, tensors: Mapping[str, str]) -> dict[str, Shape]:
        shapes = {name: self._files.tensor(stored).shape for name, stored in tensors.items()}
        quantised = self._tensors.quantised
        for name in shapes:
            if name in quantised:
                shapes[name] = quantised[name].weight.shape
            elif self._is_transposed(name):
                *lead, columns, rows = shapes[name]
                shapes[name] = (*lead, rows, columns)
        return shapes

    def _is_transposed(self, name: str) -> bool:
        """Whether a tensor is stored `[experts, in, out]`."""
        return (
            is_transposed(self.architecture.model_type, name)
            and name not in self._tensors.quantised
        )

    @cached_property
    @override
    def quantised(self) -> QuantisedFolder | None:
        if self._recipe is None:
            return None
        found = self._tensors
        plain = {*found.model.items(), *found.mtp.items()}
        sizes = [self._files.tensor(s).num_bytes for n, s in plain if n not in found.quantised]
        return QuantisedFolder.of(self._recipe, found.quantised, found.scales, sum(sizes))

    def read_tensor(self, name: str, region: Region, device: torch.device) -> Tensor:
        """Read a region of a tensor (of a quantised one, float32), and no bytes of other rows."""
        if name in self._tensors.quantised:
            found = torch.empty([part.stop - part.start for part in region], device=device)
            self.fill(found, name, region)
            return found
        if self._is_transposed(name):
            experts, rows, columns = region
            stored = self._stored_tensor(name)
            return read_to(stored, (experts, columns, rows), device).transpose(1, 2)
        return read_to(self._stored_tensor(name), region, device)

    @override
    def fill(self, place: Tensor, name: str, region: Region) -> None:
        if quantised := self._tensors.quantised.get(name):
            files, device = self._files, place.device
            quantised.fill(place, region, lambda n, part: read_to(files.tensor(n), part, device))
            return
        stored = self._stored_tensor(name)
        start = None if self._is_transposed(name) else stored.place_of(region)
        if place.device.type == "cpu" and place.is_contiguous() and start is not None:
            stored.copy_to(place, start)
        else:
            super().fill(place, name, region)

    @override
    def layouts(self, shard: Shard, rounds_rows: bool) -> Mapping[str, Layout]:
        if shard not in self._layouts:
            self._layouts[shard] = self._find_layouts(shard)
        found = self._layouts[shard]
        return rounding(found) if rounds_rows else found

    def _find_layouts(self, shard: Shard) -> dict[str, Layout]:
        found, mixed = folder_layouts(self.held_weights(shard), self._tensors.quantised)
        if mixed and len(self._layouts) == 0:  # told once
            logger.warning(
                "%s: %d weights, such as %r, are kept in the model's dtype: their parts have "
                "several forms in the files.", self.name, len(mixed), mixed[0],
            )  # fmt: skip
        return found

    @override
    def is_quantised(self, name: str) -> bool:
        return name in self._tensors.quantised

    @override
    def fill_quantised(
        self, into: QuantisedWeight, places: Mapping[str, Tensor], name: str, region: Region,
        factor: float,
    ) -> None:  # fmt: skip
        files, device, layout = self._files, into.device, Layout(into.form, into.scales.dtype)
        self._tensors.quantised[name].fill_quantised(
            places, region, layout, into.dtype, factor,
            lambda n, part: read_to(files.tensor(n), part, device),
        )  # fmt: skip

    @override
    def input_scale(self, parts: Sequence[str]) -> float:
        found = [self._tensors.quantised[part] for part in parts]
        names = [part.input_scale for part in found if part.input_scale is not None]
        if len(names) < len(found):
            without = next(part for part in found if part.input_scale is None)
            raise CheckpointError(
                f"{without.where}: weight {without.name!r:.200} has no scale of its inputs, for "
                f"which {names[0]!r:.200} is one; {INPUT_REMEDY}"
            )
        tensors = map(self._files.tensor, names)
        return max(float(read_scales(each, 1, INPUT_REMEDY)) for each in tensors)

    def _stored_tensor(self, name: str) -> StoredTensor:
        is_mtp = name in self._tensors.mtp
        return self._files.tensor(self._tensors.mtp[name] if is_mtp else self._tensors.model[name])

    @override
    def check_stored(self, with_mtp: bool) -> None:
        _ = self.dtype  # refuses other forms, which would be copied as if they were numbers
        if with_mtp:
            self._dtypes(self._tensors.mtp)
        for what, count in self._tensors.left_out.items():
            logger.warning("%s: %s (%d tensors) is not loaded.", self.name, what, count)
        if self._tensors.mtp and self.architecture.mtp_pattern and not with_mtp:
            logger.info(
                "%s: multi-token prediction (%d tensors) is read for speculative_method='mtp' "
                "alone.", self.name, len(self._tensors.mtp),
            )  # fmt: skip
        self._tell_quantised()
        others = self._files.passed_over()
        if others:
            read = sorted({path.name for path in self._files.file_of.values()})
            logger.warning(
                "%s: weights are read from %s; beside them lie %s, which are not read.",
                self.name, _few(read), _few(others),
            )  # fmt: skip
        self._check_frequencies()

    def _tell_quantised(self) -> None:
        if (found := self.quantised) is not None:
            level = logging.INFO if found.formats else logging.WARNING
            said = found.formats or "no weight is quantised in the files"
            logger.log(level, "%s: quantised by %s: %s.", self.name, found.method, said)
            for what in found.not_served:
                logger.warning("%s: %s.", self.name, what)

    def _check_frequencies(self) -> None:
        """Older files store the table of rope. It follows from the configuration; if it does not,
        the configuration counts, as in transformers, and that is told."""
        for name in self._tensors.frequencies:
            expected = described_frequencies(self.architecture)
            stored, is_same = self._files.tensor(name), False
            if stored.shape == expected.shape:  # before memory is made for it
                found = stored.read()
                rtol = max(torch.finfo(found.dtype).eps, 1e-5) if found.is_floating_point() else 0
                is_same = torch.allclose(found.float(), expected, rtol=rtol, atol=1e-7)
            if not is_same:
                logger.warning(
                    "%s: tensor %r is not the table that rope has by %s; the tensor is not used.",
                    self.name, name, CONFIG,
                )  # fmt: skip
                return

    @property
    @override
    def has_fp8_cache(self) -> bool:
        return self._recipe is not None and self._recipe.has_fp8_cache

    @override
    def load_scales(self, model: nn.Module) -> None:
        shard, scales = Shard.of(model), self._tensors.scales[KEYS]
        stacked = self.has_stacked_experts, shard.with_mtp and self._has_stacked_mtp
        wanted = weights(self.architecture, shard, *stacked)
        try:
            load_cache_scales(model, wanted, scales, self._files.tensor)
        finally:
            self._files.close()

    @override
    def load_into(
        self, tensors: Mapping[str, Operand], shard: Shard, progress: bool = False
    ) -> None:
        try:
            super().load_into(tensors, shard, progress)
        finally:
            self._files.close()

    @override
    @contextmanager
    def reading(self, shard: Shard) -> Iterator[ReadWeight]:
        try:
            with super().reading(shard) as read:
                yield read
        finally:
            self._files.close()

    @override
    def check_unchanged(self) -> None:
        self._files.check_unchanged()

    @cached_property
    def _tensors(self) -> _StoredTensors:
        a = self.architecture
        found = self._stored(a.model_type)
        if a.tie_word_embeddings and OUTPUT in found.model:
            # It is the embedding again, by its bytes; or there is no other.
            head, embedding = found.model.pop(OUTPUT), embedding_name(a.model_type, found.model)
            if OUTPUT in found.quantised:
                found.quantised[embedding] = found.quantised.pop(OUTPUT)
            found.model.setdefault(embedding, head)
        if self._recipe is not None and self._recipe.method.startswith("gptq"):
            self._leave_out_zero_biases(found)
        if found.mtp and not a.mtp_pattern:
            what = f"multi-token prediction that {CONFIG} does not describe"
            found.left_out[what] = len(found.mtp)
        return found

    def _leave_out_zero_biases(self, found: _StoredTensors) -> None:
        """Tools of GPTQ write a bias for every layer, of zeros where the model has none."""
        known = {name for weight in weights(self.architecture) for name in weight.parts}
        for name in [n for n in found.model if n.endswith(".bias") and n not in known]:
            owner, bias = found.quantised.get(f"{name[:-5]}.weight"), found.model[name]
            is_one = owner and self._files.tensor(bias).shape == owner.weight.shape[:1]
            if is_one and not self._files.tensor(bias).read().any():
                del found.model[name]
                found.left_out["biases of zeros"] += 1

    def _stored(self, kind: str) -> _StoredTensors:
        """What the folder of a family holds; refused where two stored names mean the same tensor of
        the language model."""
        names, mtp = split_mtp(self._files.file_of, kind)
        model, left_out = language_model_tensors(names, kind)
        if len(names) != len(model) + sum(left_out.values()):
            lost = set(names) - set(model.values())
            parts = {name: language_model_tensors([name], kind)[0] for name in sorted(lost)}
            lost_name, part = next((name, next(iter(p))) for name, p in parts.items() if p)
            raise CheckpointError(
                f"{self.folder}: tensors {model[part]!r} and {lost_name!r} are the same part of "
                "the language model; take one of them out"
            )
        frequencies = [name for name in model if name.endswith(FREQUENCIES)]
        stored = [model.pop(name) for name in frequencies]
        mtp_names = {name: name for name in mtp}
        quantised = dict[str, FolderWeight]()
        scales: dict[str, dict[str, str]] = {INPUTS: {}, KEYS: {}}
        if self._recipe is not None:
            for those in (model, mtp_names):
                taken, told = take_quantised(those, self._files.tensor, self._recipe)
                quantised |= taken
                scales = {what: names | told[what] for what, names in scales.items()}
        return _StoredTensors(model, mtp_names, quantised, scales, stored, left_out)


def _few(names: list[str]) -> str:
    """Some names, for a message."""
    more = f" and {len(names) - 3} more" if len(names) > 4 else ""
    return ", ".join(names[:3] if more else names) + more


def save_huggingface(
    model: nn.Module,
    architecture: ModelArchitecture,
    tokenizer: Tokenizer | None,
    folder: Path,
    progress: bool = False,
    shard_bytes: int = SHARD_BYTES,
    quantization: str | None = None,
    read: ReadWeight | None = None,
) -> None:
    """Write a folder that transformers' `AutoModelForCausalLM.from_pretrained` loads.

    Args:
        model: a `HybridModel` of `architecture`; its weights are written in its dtype, those of
            multi-token prediction where it has them. It may be on the meta device if `read` is
            given.
        architecture: what `config.json` is made from.
        tokenizer: its files are written too, if there is one.
        folder: made if needed; files in it are replaced.
        progress: show a progress bar on stderr.
        shard_bytes: weights beyond this many bytes of the model go to further files, with an
            index.
        quantization: how linear layers and experts are quantised (see `Quantiser`); None: not.
        read: reads each weight when it is written; None: they are the model's.

    Raises:
        CheckpointError: the architecture has no Hugging Face form; see `Quantiser`.
    """
    held = Shard.of(model)
    if not held.with_mtp:
        architecture = architecture.without_mtp
    wanted = list(weights(architecture, held))
    parameters = model_parameters(named_tensors(model), wanted)
    dtype = parameters[wanted[0].name].dtype
    config = write_config(architecture, str(dtype).removeprefix("torch."))
    quantiser = None if quantization is None else Quantiser.of(quantization, wanted)
    if quantiser is not None:
        config["quantization_config"] = quantiser.config
    folder.mkdir(parents=True, exist_ok=True)
    write_object(folder / CONFIG, config)
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
    written = 0
    total = sum(parameter.nbytes for parameter in parameters.values())
    with byte_bar(total, progress, "writing weights") as bar:
        for number, shard in enumerate(shards, 1):
            count = len(shards)
            file = SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            tensors: dict[str, Tensor] = {}
            for weight in shard:
                plain = widened(parameters[weight.name])
                plain = torch.empty_like(plain, device="cpu") if plain.is_meta else plain.cpu()
                if read is not None:
                    read(weight.name, plain)
                for name, values in weight.split(plain).items():
                    if is_transposed(architecture.model_type, name):
                        values = values.transpose(1, 2).contiguous()
                    tensors |= quantiser.tensors(name, values) if quantiser else {name: values}
            save_file(tensors, folder / file, metadata={"format": "pt"})
            # safetensors makes it readable to its owner alone; a model folder is often shared.
            (folder / file).chmod((folder / CONFIG).stat().st_mode)
            weight_map |= dict.fromkeys(tensors, file)
            written += total_bytes(tensors)
            bar.update(sum(parameters[weight.name].nbytes for weight in shard))
    if len(shards) > 1:
        write_object(
            folder / INDEX, {"metadata": {"total_size": written}, "weight_map": weight_map}
        )
    if tokenizer is not None:
        tokenizer.save(folder)
