"""Valid names of models. This module does not import torch, so a wrong name is refused at once."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.models.dummy_shapes import DUMMY_SHAPES

DEMO = "smollm2"
DUMMY = "dummy:"
UNIFORM = "uniform"
"""After a dummy shape's name: tokens are spread over experts evenly."""
HUB_ID = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w./-]+))?")

ACCEPTED = (
    f"{DEMO} (the demo model), a .gguf file, a Hugging Face folder (config.json and safetensors), "
    "a model's id on the Hugging Face Hub (Qwen/Qwen3-0.6B), "
    f"a Megatron torch_dist folder, or {DUMMY}SHAPE (SHAPE: {', '.join(DUMMY_SHAPES)}; with "
    f":{UNIFORM} after it, tokens are spread evenly over experts)"
)


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of an id: `organisation/model`, with `@revision` or without."""
    return HUB_ID.fullmatch(name) is not None


def check_model_name(name: str) -> None:
    """Check that a name can be a model's: the demo model's, a known shape's, an existing path, or
    an id on the hub. What lies at the path is not looked at.

    Raises:
        CheckpointError: the name is none of these; the message has the nearest name, and what is
            accepted.
    """
    if name.startswith(DUMMY):
        check_dummy_name(name)
    elif name != DEMO and not Path(name).expanduser().exists() and not is_hub_id(name):
        known = [DEMO, *(DUMMY + shape for shape in DUMMY_SHAPES)]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise CheckpointError(
            f"model {name!r}: no such file, folder or name.{hint} Accepted: {ACCEPTED}."
        )


def check_dummy_name(name: str) -> None:
    """Check `dummy:SHAPE` or `dummy:SHAPE:uniform`.

    Raises:
        CheckpointError: no such shape; or it has no experts over which to spread tokens.
    """
    shape, colon, routing = name.removeprefix(DUMMY).partition(":")
    if shape not in DUMMY_SHAPES:
        raise CheckpointError(
            f"{name}: unknown shape {shape!r}; known: {', '.join(sorted(DUMMY_SHAPES))}"
        )
    if colon and routing != UNIFORM:
        raise CheckpointError(
            f"{name}: routing {routing!r} is unknown: write {DUMMY}{shape}:{UNIFORM}, or "
            f"{DUMMY}{shape}."
        )
    if colon and not DUMMY_SHAPES[shape].num_moe_experts:
        raise CheckpointError(
            f"{name}: {shape} has no experts over which to spread tokens: leave :{UNIFORM} out."
        )
