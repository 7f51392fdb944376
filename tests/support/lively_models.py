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
    """Store models with random weights in folders of their own in `root`; by name the folder and
    what its model says. An AssertionError if that is few different tokens, which would hide wrong
    states."""
    found = {}
    for name, architecture in models.items():
        folder = root / name.replace(" ", "-")
        folder.mkdir()
        save_huggingface(make_model(architecture), architecture, None, folder)
        tokens = answer(str(folder))
        assert min(len(set(row)) for row in tokens) > 5, f"{name} is dull"
        found[name] = str(folder), tokens
    return found
