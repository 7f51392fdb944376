"""Models by their id on the Hugging Face Hub ("Qwen/Qwen3-0.6B"): from the cache, or fetched."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.model_names import HUB_ID

FILES = ["*.json", "*.safetensors", "*.jinja", "*.model"]
"""Files from which a model is read: configuration, weights, tokenizer, chat templates (also those
of a folder `additional_chat_templates`). A `tokenizer.model` alone is not read, but named."""
LEFT_OUT = ["*/*.json", "*/*.safetensors", "*/*.model", "consolidated*"]
"""Copies of the weights in other formats, which some repositories have."""


def hub_folder(name: str) -> Path:
    """The folder with a model's files: from Hugging Face's cache where they are all there, else
    fetched into the cache.

    A model in the cache is not asked for again. `HF_HUB_OFFLINE`, `HF_HUB_CACHE`, `HF_ENDPOINT` and
    `HF_TOKEN` mean what they mean to `huggingface_hub`, the library that does it.

    Args:
        name: an id, `organisation/model` or `organisation/model@revision`.

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
