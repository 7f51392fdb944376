"""Which model a name or path means: `open_model` and `load_model`.

Models by their id on the Hugging Face Hub ("Qwen/Qwen3-0.6B") come from the cache, or are fetched.

`dummy:SHAPE`: a model of a shape, well-known or given by hand, with random weights, to measure
speed with.

`dummy:SHAPE:uniform` is one whose routers spread tokens over experts as those of a trained model
do. Random weights alone do not: what layers add to the residual stream is in part the same for
all tokens, more so with every layer, and in wide models it soon outweighs the embedding. (Nemotron
3 Nano with experts of 32 units, 64 decode rows, on a CPU: layers hit 77 to 93 % of the experts that
even routing hits, and some experts get 4 to 10 times their share; with ":uniform" 97 to 102 %.) So
there the embedding is larger than what all layers add: then a token's experts follow from the
token, anew in each layer. Nothing else differs, and each product is as it was.

`dummy:SHAPE:int4` is one whose linear layers and experts are 4-bit numbers, as of a quantised
folder: kept or decoded as these are.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, override

import torch
from torch import Tensor

from megatron_async.checkpoints.draft_layer import WithDraftLayer
from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.files import is_megatron
from megatron_async.checkpoints.huggingface import CONFIG, HuggingFaceSource
from megatron_async.checkpoints.mapping import Shard, Weight, weights
from megatron_async.checkpoints.model_names import (
    DEMO,
    DUMMY,
    HUB_ID,
    check_model_name,
    demo_file,
    dummy_shape,
    is_hub_id,
    no_model,
)
from megatron_async.checkpoints.quantised import QuantisedFolder
from megatron_async.checkpoints.source import (
    ModelSource,
    clear_padding,
    model_parameters,
    rounded_into,
)
from megatron_async.checkpoints.tensor_files import has_weights
from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import DUMMY_FORMS
from megatron_async.models.held_weight import Operand, is_linear
from megatron_async.models.pipeline import EMBEDDING
from megatron_async.ops.linear.quantised_layout import Layout
from megatron_async.ops.linear.quantised_weight import Form, QuantisedWeight
from megatron_async.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megatron.core.models.hybrid.hybrid_model import HybridModel

UNIFORM_EMBEDDING = 4096.0
"""How much larger embeddings are then: standard deviation 82. What 52 layers of Nemotron 3 Nano add
has 12 (estimated from the weights' sizes), so no more than 2 % of the residual stream's variance
may be shared by tokens. A power of two, so that no number is rounded."""


DUMMY_LAYOUTS = dict(
    zip(
        DUMMY_FORMS,
        (
            Layout(Form("INT4", inputs=128), torch.float16),
            Layout(Form("FP4", inputs=32), torch.uint8),
            Layout(Form("FP4", inputs=16, has_outer=True), torch.float8_e4m3fn),
        ),
        strict=True,
    )
)
"""Layouts of the forms of dummy models, where a row has several groups."""


class DummySource(ModelSource):
    """A shape of `DUMMY_SHAPES`, or one by hand (`models/dummy_shapes.py`); it has no tokenizer, so
    it takes prompts of token ids. (With tied embeddings, ":uniform" makes the logits larger too:
    for greedy tokens alone.)

    Raises:
        CheckpointError: no such shape, sizes that are no model's, or ":uniform" without experts.
    """

    format = "dummy"
    _form: str | None = None

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._architecture, self._is_uniform, self._form = dummy_shape(name)

    @property
    @override
    def architecture(self) -> ModelArchitecture:
        return self._architecture

    @property
    def tokenizer(self) -> None:
        """None: random weights have no language."""

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16, in which models of these shapes are published."""
        return torch.bfloat16

    @property
    def has_mtp_weights(self) -> bool:
        """Whether any weight of multi-token prediction is stored."""
        return self.architecture.mtp_num_depths > 0

    @property
    @override
    def quantised(self) -> QuantisedFolder | None:
        meta, found = torch.device("meta"), self.layouts(Shard(), False)
        if not found:
            return None
        shapes = {w.name: w.shape for w in weights(self.architecture) if w.name in found}
        kept = [found[name].empty(shape, self.dtype, meta) for name, shape in shapes.items()]
        counts = Counter(weight.form.words for weight in kept)
        formats = ", ".join(f"{words}: {count} weights" for words, count in counts.items())
        size, values = sum(w.nbytes for w in kept), sum(w.shape.numel() for w in kept)
        total = (self.architecture.num_parameters - values) * self.dtype.itemsize + size
        return QuantisedFolder("random numbers", formats, 8 * size / values, total, ())

    @override
    def layouts(self, shard: Shard, rounds_rows: bool) -> Mapping[str, Layout]:
        found = dict[str, Layout]()
        for weight in weights(self.architecture, shard) if self._form else ():
            if not is_linear(weight.name):
                continue
            # Published files of gpt-oss have experts alone in 4 bits.
            if self.architecture.model_type == "gpt_oss" and not weight.experts:
                continue
            assert self._form is not None
            layout = DUMMY_LAYOUTS[self._form]
            width, whole, group = weight.shape[-1], weight.whole_shape[-1], layout.form.inputs
            if group >= whole:
                layout = layout._replace(form=layout.form._replace(inputs=0))
            elif width != whole and width % group:
                raise ConfigurationError(
                    f"{self.name}: a rank's {width} inputs of {weight.name!r} are no whole groups "
                    f"of {group}: use another tensor_model_parallel_size."
                )
            found[weight.name] = layout
        return found

    def load_into(
        self, tensors: Mapping[str, Operand], shard: Shard, progress: bool = False
    ) -> None:
        """Random weights, the same for the same device, rounded to the dtype, however many ranks
        share them.

        Every rank draws each weight that it has a part of whole, one at a time, and keeps its part.
        """
        zero_centered = self.architecture.layernorm_zero_centered_gamma
        held, layouts = list(weights(self.architecture, shard)), self.layouts(shard, False)
        parameters = model_parameters(tensors, held)
        for weight in held:
            into = parameters[weight.name]
            if weight.name in layouts:
                self._fill_form(weight, into, layouts[weight.name])
                continue
            with rounded_into(into) as parameter:
                self._fill(weight, parameter, zero_centered)

    def _fill_form(self, weight: Weight, into: Operand, layout: Layout) -> None:
        # As in `_fill`.
        from megatron_async.models.hybrid import fill_dummy_codes

        drawn = layout.empty(weight.whole_shape, into.dtype, into.device)
        fill_dummy_codes(weight.stored, drawn)
        if not isinstance(into, QuantisedWeight):
            _take_part(weight, drawn.values(into.dtype), into)
            return
        columns = weight.whole_shape[-1]
        covers = {"codes": 8 // layout.form.bits, "scales": layout.form.inputs or columns}
        for (name, whole), (_, place) in zip(drawn.tensors(), into.tensors(), strict=True):
            if name == "outer":
                whole, place = whole[..., None], place[..., None]
            _take_part(weight, whole, place, covers.get(name, columns))

    def _fill(self, weight: Weight, parameter: Tensor, zero_centered: bool) -> None:
        # Imports Megatron, which takes seconds and is not needed to describe a shape.
        from megatron_async.models.hybrid import fill_dummy_weight

        if weight.shape == weight.whole_shape:
            fill_dummy_weight(weight.stored, parameter, zero_centered=zero_centered)
        else:
            whole = parameter.new_empty(weight.whole_shape)
            fill_dummy_weight(weight.stored, whole, zero_centered=zero_centered)
            clear_padding(weight, parameter)
            _take_part(weight, whole, parameter)
        if self._is_uniform and weight.stored == EMBEDDING:
            parameter.mul_(UNIFORM_EMBEDDING)


def _take_part(weight: Weight, whole: Tensor, parameter: Tensor, columns: int = 1) -> None:
    """A rank's part of a whole tensor, a column of which covers so many of the weight."""
    for (*start, first), place in weight.whole_pieces(parameter):
        start.append(first // columns)
        region = (slice(s, s + n) for s, n in zip(start, place.shape, strict=True))
        place.copy_(whole[tuple(region)])


FILES = ["*.json", "*.safetensors", "*.jinja", "*.model"]
"""Files from which a model is read: configuration, weights, tokenizer, chat templates (also those
of a folder `additional_chat_templates`). A `tokenizer.model` alone is not read, but named."""
LEFT_OUT = ["*/*.json", "*/*.safetensors", "*/*.model", "consolidated*"]
"""Copies of the weights in other formats, which some repositories have."""


def hub_folder(name: str) -> Path:
    """The folder with the files of a model (`organisation/model`, or with `@revision`): from
    Hugging Face's cache where they are all there, else fetched into the cache. A model in the cache
    is not asked for again.

    `HF_HUB_OFFLINE`, `HF_HUB_CACHE`, `HF_ENDPOINT` and `HF_TOKEN` mean what they mean to
    `huggingface_hub`, the library that does it.

    Raises:
        CheckpointError: the model is not in the cache and cannot be fetched; the message has the
            reason and the command that fetches it.
    """
    # Imported here because it takes a third of a second, and other models do not need it.
    import httpx
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )
    from huggingface_hub.utils import disable_progress_bars

    found = HUB_ID.fullmatch(name)
    assert found is not None
    repo, revision = found["repo"], found["revision"]
    fetch = partial(
        snapshot_download, repo, revision=revision, allow_patterns=FILES, ignore_patterns=LEFT_OUT
    )
    try:
        return Path(fetch(local_files_only=True))
    except LocalEntryNotFoundError:  # or a part of it is missing
        pass
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(fetch())
    except GatedRepoError as error:
        raise CheckpointError(
            f"model {name!r}: its terms must be accepted at {constants.ENDPOINT}/{repo}; then "
            "`hf auth login` (or set HF_TOKEN) with the account that has."
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"model {name!r}: there is no such file or folder here, and {constants.ENDPOINT} knows "
            "no such repository. If it is a private one: `hf auth login`, or set HF_TOKEN."
        ) from error
    except (OSError, ValueError, HfHubHTTPError, httpx.HTTPError) as error:
        where = "" if revision is None else f" --revision {revision}"
        target = f"./{repo.partition('/')[2]}"
        raise CheckpointError(
            f"model {name!r}: there is no such file or folder here, no whole copy in Hugging "
            f"Face's cache ({constants.HF_HUB_CACHE}), and none could be fetched "
            f"({_first_line(error)}). `hf download {repo}{where} --local-dir {target}` fetches it "
            f"where there is a network; then give {target}."
        ) from None


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")


DEMO_DRAFT_LAYER = Path(__file__).with_name("layers") / "smollm2_draft.safetensors"


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, ready for the engine."""

    model: HybridModel
    tokenizer: Tokenizer | None
    architecture: ModelArchitecture


def open_model(name_or_path: str | Path, draft_layer: str | Path | None = None) -> ModelSource:
    """The model that a name or path means, configuration read, weights not.

    Args:
        name_or_path: "smollm2", a GGUF file, a Hugging Face or `torch_dist` folder, a model's id on
            the Hugging Face Hub, "dummy:SHAPE".
        draft_layer: file of a layer for multi-token prediction that was trained for it; see
            `WithDraftLayer`.

    Raises:
        CheckpointError: nothing of the kind; the message lists what is accepted. Or the draft layer
            is not the model's.
    """
    source = _open(name_or_path)
    return source if draft_layer is None else WithDraftLayer(source, draft_layer)


def shipped_draft_layer(name_or_path: str | Path) -> Path | None:
    """The draft layer that this package has for a model; None if it has none.

    The demo model's was trained by `scripts/train_draft_layer.py` (docs/records/figures.md has the
    figures). A layer is drafts alone: no token of an answer depends on it.
    """
    return DEMO_DRAFT_LAYER if str(name_or_path) == DEMO else None


def _open(name_or_path: str | Path) -> ModelSource:
    name = str(name_or_path)
    check_model_name(name)
    if name == DEMO:
        return _open_gguf(demo_file(), name)
    if name.startswith(DUMMY):
        return DummySource(name)
    path = Path(name).expanduser()
    if path.is_file():
        if path.name == CONFIG:
            return _open_folder(path.parent, name)
        return _open_gguf(path, name)
    if path.is_dir():
        return _open_folder(path, name)
    if is_hub_id(name):
        return HuggingFaceSource(hub_folder(name), name)
    raise CheckpointError(f"model {name!r}: it was there, and is gone.")


def load_model(
    name_or_path: str | Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool = False,
    transformer_impl: str = "local",
    with_mtp: bool = False,
) -> LoadedModel:
    """Build a model and fill it.

    Args:
        name_or_path: see `open_model`.
        dtype: of the weights and of the computation.
        device: where the weights go.
        progress: show a progress bar on stderr.
        transformer_impl: see `build_model`.
        with_mtp: read its layers of multi-token prediction too.

    Raises:
        ConfigurationError: `transformer_impl` is unknown or cannot run here.
        CheckpointError: see `open_model` and `ModelSource.load_weights`.
    """
    # Megatron takes seconds to import, and a look at what a model is does not need it.
    from megatron_async.models.hybrid import build_model

    source = open_model(name_or_path)
    model = build_model(source.architecture, dtype, device, transformer_impl, with_mtp=with_mtp)
    source.load_weights(model, progress)
    return LoadedModel(model, source.tokenizer, source.architecture)


def _open_gguf(file: Path, name: str) -> ModelSource:
    from megatron_async.checkpoints.gguf import GGUFSource  # imports a package of 40 modules

    return GGUFSource(file, name)


def _open_folder(folder: Path, name: str) -> ModelSource:
    if (folder / CONFIG).is_file() and (has_weights(folder) or not is_megatron(folder)):
        return HuggingFaceSource(folder, name)
    if is_megatron(folder):
        # torch's distributed checkpoints take half a second to import, and few models are any.
        from megatron_async.checkpoints.torch_dist import TorchDistSource

        return TorchDistSource(folder, name)
    raise no_model(folder, name)
