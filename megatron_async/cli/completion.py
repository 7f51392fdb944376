"""`completion`, and the words that shells offer: options, choices, names of models, files.

argcomplete asks the parser itself at each TAB, so a script that was installed once never names an
option that is gone. (shtab writes the options into the script; the script is then as old as its
installation, and its bash part stops at the colon of `dummy:tiny`.) A TAB takes as long as
`--help`: nothing heavy may be imported by `build_parser`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_async.cli.options import PROGRAM
from megatron_async.config import (
    ATTENTION_BACKENDS,
    CACHE_DTYPES,
    CHOICES,
    INVALIDATION_POLICIES,
    LOOKAHEAD_OF_MODE,
    QUANTIZATIONS,
    SPECULATIVE_METHODS,
    STATE_DTYPES,
)
from megatron_async.requests.sampling_params import LOGPROBS_MODES

SHELLS = ("bash", "zsh", "fish")
VALUES: dict[str, tuple[str, ...]] = {
    "device": ("cpu", "cuda"),
    "async_sched_mode": tuple(LOOKAHEAD_OF_MODE),
    "attention_backend": ATTENTION_BACKENDS,
    "choices": CHOICES,
    "invalidation": INVALIDATION_POLICIES,
    "kv_cache_dtype": CACHE_DTYPES,
    "logprobs_mode": LOGPROBS_MODES,
    "mamba_ssm_states_dtype": STATE_DTYPES,
    "quantization": QUANTIZATIONS,
    "speculative_method": ("none", *SPECULATIVE_METHODS),
}
"""Values that are offered for options without `choices`, by the option's field."""
MODELS = ("model", "model_name", "source")
"""Fields whose value is a model. (`bench serve --model` is not one: a server knows its names.)"""
FILES = ("FILE", "FOLDER", "TEXT_OR_FILE", "TARGET")
"""Metavars that stand for a file's or a folder's name."""


def add_completion(commands: Any, common: argparse.ArgumentParser) -> None:
    """Options of `completion`."""
    completion = commands.add_parser(
        "completion",
        run=run_completion,
        parents=[common],
        help="print the completion script of a shell",
        description="Print a script with which TAB completes commands, options, models and files.",
        epilog=f"""installation, once:
  {PROGRAM} completion bash >> ~/.bashrc
  {PROGRAM} completion zsh >> ~/.zshrc      # after compinit
  {PROGRAM} completion fish > ~/.config/fish/completions/{PROGRAM}.fish""",
    )
    completion.add_argument("shell", choices=SHELLS, help="whose script to print")


def run_completion(arguments: argparse.Namespace) -> int:
    """Print the script."""
    from argcomplete import shellcode

    print(shellcode([PROGRAM], shell=arguments.shell))
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell and exit, if a shell asks what may come next; else do nothing."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    from argcomplete import autocomplete
    from argcomplete.completers import SuppressCompleter

    for action in _actions(parser):
        if not hasattr(action, "completer") and (completer := _completer(action)) is not None:
            action.completer = completer  # type: ignore[attr-defined]
    autocomplete(parser, always_complete_options=False, default_completer=SuppressCompleter())


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)


def _completer(action: argparse.Action) -> Any:
    """What offers values for an option or argument; None: its choices, or nothing."""
    from argcomplete.completers import ChoicesCompleter, DirectoriesCompleter, FilesCompleter

    if action.choices is not None or action.nargs == 0:
        return None
    if action.dest in MODELS and action.metavar != "NAME":
        return model_words
    if action.metavar == "DIR":
        return DirectoriesCompleter()
    if action.metavar in FILES:
        return FilesCompleter()
    if action.dest in VALUES:
        return ChoicesCompleter(dict.fromkeys(VALUES[action.dest], ""))
    return None


def model_words(prefix: str, **_: Any) -> list[str]:
    """Names of models, ids in the Hugging Face cache, and files and folders."""
    from argcomplete.completers import FilesCompleter

    from megatron_async.checkpoints.model_names import DEMO, DUMMY
    from megatron_async.models.dummy_shapes import DUMMY_SHAPES

    names = [DEMO, *(DUMMY + shape for shape in DUMMY_SHAPES), *cached_ids()]
    return [*(n for n in names if n.startswith(prefix)), *FilesCompleter()(prefix)]


def cached_ids() -> list[str]:
    """Ids of the models in the Hugging Face cache, in alphabetical order."""
    from huggingface_hub.constants import HF_HUB_CACHE

    found = Path(HF_HUB_CACHE).glob("models--*")
    return sorted(folder.name.removeprefix("models--").replace("--", "/") for folder in found)
