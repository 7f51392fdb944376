"""Folders of models whose answers change from token to token, so that wrong states show."""

from collections.abc import Callable
from pathlib import Path

from megatron_async.checkpoints.huggingface import save_huggingface
from megatron_async.models.architecture import ModelArchitecture
from tests.support.harness import make_model

Tokens = list[list[int]]


def store_lively(
    models: dict[str, ModelArchitecture], root: Path, answer: Callable[[str], Tokens]
) -> dict[str, tuple[str, Tokens]]:
    """Store models with random weights.

    Args:
        models: by name.
        root: an empty folder; each model has a folder of its own in it.
        answer: what the model in a folder says, by request.

    Returns:
        by name the folder and what was said.

    Raises:
        AssertionError: a model says few different tokens, which would hide wrong states.
    """
    found = {}
    for name, architecture in models.items():
        folder = root / name.replace(" ", "-")
        folder.mkdir()
        save_huggingface(make_model(architecture), architecture, None, folder)
        tokens = answer(str(folder))
        assert min(len(set(row)) for row in tokens) > 5, f"{name} is dull"
        found[name] = str(folder), tokens
    return found
