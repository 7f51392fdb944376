"""The prompts of `generate`: where they come from, and what the model is given."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_async.checkpoints.model_names import DUMMY
from megatron_async.cli.files import read_text
from megatron_async.cli.ranks import has_other_ranks

if TYPE_CHECKING:
    from megatron_async.llm import LLM


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """The prompts of `--prompt` and then of `--prompts-file`, whose empty lines are left out."""
    prompts = list(arguments.prompt)
    if arguments.prompts_file == "-" and has_other_ranks():
        raise ValueError("--prompts-file -: ranks share one standard input; give a file's name.")
    if arguments.prompts_file is not None:
        text = _text_of(arguments.prompts_file)
        prompts += [line for line in text.splitlines() if line.strip()]
        if not prompts:
            raise ValueError(f"--prompts-file {arguments.prompts_file}: every line of it is empty.")
    if not prompts:
        raise ValueError("there is no prompt: give --prompt TEXT or --prompts-file FILE.")
    if arguments.system is not None and arguments.raw:
        raise ValueError("--system is part of the chat template, which --raw leaves out.")
    return prompts


def check_prompts(arguments: argparse.Namespace, prompts: Sequence[str]) -> None:
    """Check prompts of a model that is known to have no tokenizer.

    Raises:
        ValueError: a text, or a chat.
    """
    if not arguments.model.startswith(DUMMY):
        return
    for prompt in prompts:
        token_ids(prompt)
    if arguments.chat or arguments.system is not None:
        raise ValueError(
            f"{arguments.model} has no tokenizer, and so no chat template: leave --chat and "
            "--system out."
        )


def _text_of(file: str) -> str:
    if file != "-":
        return read_text("--prompts-file", file)
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts-file -: standard input is no UTF-8 ({error}).") from error


def model_prompts(
    llm: LLM, prompts: Sequence[str], arguments: argparse.Namespace
) -> Sequence[str | list[int]]:
    """What the model is given: token ids of chats if it has a chat template, or must have one
    (`--chat`, `--system`); else texts, or token ids where there is no tokenizer."""
    has_template = getattr(llm.tokenizer, "chat_template", None) is not None
    is_chat = arguments.chat or arguments.system is not None or has_template
    if is_chat and not arguments.raw:
        return chat_prompts(llm, prompts, arguments.system)
    return [token_ids(prompt) for prompt in prompts] if llm.tokenizer is None else prompts


def chat_prompts(llm: LLM, prompts: Sequence[str], system: str | None) -> list[list[int]]:
    """Token ids of each prompt as a conversation of one turn, by the model's chat template."""
    from megatron_async.text.tokenizer import conversation_tokens

    first = [] if system is None else [{"role": "system", "content": system}]
    return [
        conversation_tokens(llm.tokenizer, [*first, {"role": "user", "content": prompt}])
        for prompt in prompts
    ]


def token_ids(prompt: str) -> list[int]:
    """Token ids written as numbers: the prompt of a model that has no tokenizer."""
    try:
        return [int(word) for word in prompt.replace(",", " ").split()]
    except ValueError:
        raise ValueError(
            f"this model has no tokenizer, so a prompt is token ids such as '1 2 3', not {prompt!r}"
        ) from None
