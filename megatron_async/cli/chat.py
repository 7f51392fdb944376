"""`megatron-async chat`: talk to a model in the terminal."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_async.checkpoints.model_names import DEMO, DUMMY
from megatron_async.cli.early_checks import check_early
from megatron_async.cli.files import check_writable
from megatron_async.cli.options import (
    DRAFT_LAYER_HELP,
    MODEL_HELP,
    PROGRAM,
    add_engine_options,
    engine_options,
)
from megatron_async.cli.ranks import has_other_ranks
from megatron_async.cli.sampling_options import add_sampling_options, given_sampling
from megatron_async.cli.terminal import (
    WordWrap,
    importing_engine,
    raise_interrupts,
    unseen_keys,
)
from megatron_async.requests.defaults import default_sampling_params

if TYPE_CHECKING:
    from megatron_async.cli.chat_session import Answer, ChatSession

PROMPT = ">>> "
BLOCK_SIZE_TOKENS = 32
"""A turn finds what earlier turns computed in whole blocks: small ones leave less to do again."""
ANSWER_TOKENS = 1024
COMMANDS = """/help           this list
/reset          forget the conversation
/system TEXT    forget it, and begin another with this system message
/save FILE      write the conversation as JSON, messages as OpenAI's protocol has them
/stats          tokens and times of the last answer
/quit           end (as Ctrl-D does)
\"\"\"             begins a message of several lines, and ends it
Ctrl-C          stops an answer; what there is of it stays in the conversation"""


def add_chat(commands: Any, common: argparse.ArgumentParser) -> None:
    """Options of `chat`."""
    chat = commands.add_parser(
        "chat",
        run=run_chat,
        parents=[common],
        help="talk to a model in the terminal",
        description="Talk to a model in the terminal. Answers appear as they are made.\n"
        f"In the chat:\n\n{COMMANDS}",
        epilog=f"""examples:
  {PROGRAM} chat
  {PROGRAM} chat ./model.gguf --quantization int8
  {PROGRAM} chat ./my-llama --system "You answer in one sentence." --temperature 0.7
  printf 'What is 2 + 3?\\nAnd times 4?\\n' | {PROGRAM} chat""",
    )
    source = chat.add_argument_group("model")
    source.add_argument("model", nargs="?", default=DEMO, metavar="MODEL", help=MODEL_HELP)
    source.add_argument("--system", metavar="TEXT", help="system message")
    source.add_argument("--draft-layer", metavar="FILE", help=DRAFT_LAYER_HELP)
    add_sampling_options(chat, ANSWER_TOKENS)
    add_engine_options(chat)


def run_chat(arguments: argparse.Namespace) -> int:
    """Chat until the input ends.

    Raises:
        ValueError: torchrun started several processes.
    """
    if has_other_ranks():
        raise ValueError(
            f"chat runs as one process. For a model of several ranks: `{PROGRAM} serve`, and its "
            "page in a browser."
        )
    given = given_sampling(arguments)
    options = {"block_size_tokens": BLOCK_SIZE_TOKENS, **engine_options(arguments)}
    check_early(arguments.model, options, draft_layer=arguments.draft_layer)
    if arguments.model.startswith(DUMMY):
        raise ValueError(
            f"{arguments.model} has no tokenizer, so nobody can talk to it: `{PROGRAM} chat "
            f"{DEMO}`, or `{PROGRAM} generate {arguments.model} -p '1 2 3'`."
        )

    with importing_engine():
        from megatron_async.cli.chat_session import ChatSession
        from megatron_async.llm import LLM
        from megatron_async.models.linear import bits_of_weights

    llm = LLM(
        arguments.model,
        dtype=arguments.dtype,
        progress=sys.stderr.isatty(),
        draft_layer=arguments.draft_layer,
        **options,
    )
    raise_interrupts()
    with llm:
        most = arguments.most_tokens
        sampling = default_sampling_params(llm.generation_defaults, most, **given)
        session = ChatSession(llm, sampling, arguments.system)
        try:
            bits = bits_of_weights(llm.engine.controller.inference_wrapped_model.model)
            return Terminal(session, arguments.model, bits, llm.dtype).run()
        finally:
            session.close()


class Terminal:
    """Reads turns and prints answers. Without a terminal at its ends it prints answers alone."""

    def __init__(
        self, session: ChatSession, name: str, bits: Sequence[int] = (), dtype: object = None
    ) -> None:
        self._session = session
        weights = " and ".join(map(str, bits))
        self._name = name
        if bits:
            self._name += f", weights of {weights} bits (--quantization none: "
            self._name += f"{str(dtype).removeprefix('torch.')})"
        self._reads_person = sys.stdin.isatty()
        self._is_terminal = sys.stdout.isatty()
        self._has_colours = self._is_terminal and "NO_COLOR" not in os.environ
        self._last: Answer | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(COMMANDS),
            "/reset": lambda _: self._reset(None),
            "/system": self._begin_anew,
            "/save": self._save,
            "/stats": lambda _: self._print_statistics(),
        }

    def run(self) -> int:
        """Take turns until the input ends.

        Returns:
            exit status: 1 if a turn could not be answered and nobody was there to see it.
        """
        if self._reads_person:
            # Lines can then be edited, and the arrow keys bring earlier ones back.
            import readline  # noqa: F401

            print(
                _filled(
                    f"{self._name}. /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends."
                )
            )
        failed = False
        while (turn := self._read()) is not None:
            word, _, rest = turn.partition(" ")
            if word in ("/quit", "/exit"):
                break
            if word.startswith("/") and word[1:].isalpha():
                self._command(word, rest.strip())
            elif turn.strip():
                failed |= not self._answer(turn)
        return 1 if failed and not self._reads_person else 0

    def _read(self) -> str | None:
        """The next turn, or None at the end of the input."""
        try:
            line = self._line(PROMPT)
            if not line.startswith('"""'):
                return line
            lines = [line[3:]]
            while not lines[-1].rstrip().endswith('"""'):
                lines.append(self._line("... "))
            return "\n".join(lines).rstrip().removesuffix('"""').strip("\n")
        except EOFError:
            if self._reads_person:
                print()
            return None
        except KeyboardInterrupt:  # drops the line, as in a shell
            print()
            return ""

    def _line(self, prompt: str) -> str:
        return input(prompt if self._reads_person else "")

    def _answer(self, turn: str) -> bool:
        """Print the answer; whether there is one."""

        def show(text: str) -> None:
            print(text, end="", flush=True)

        wrap = WordWrap(show) if self._is_terminal else None
        try:
            with unseen_keys():
                self._last = answer = self._session.answer(turn, wrap.show if wrap else show)
        except (ValueError, RuntimeError) as error:
            print(f"{PROGRAM}: {error}", file=sys.stderr, flush=True)
            return False
        if wrap:
            wrap.end()
        print(flush=True)
        if answer.left_out:
            self._say(
                f"the context of {self._session.context_tokens} tokens was full: the oldest "
                f"{answer.left_out} messages were left out"
            )
        if answer.end == "length":
            self._say("cut: --max-new-tokens N, or --max-sequence-length N, allows more")
        if self._is_terminal:
            self._say(
                f"{answer.tokens} tokens, {answer.tokens_per_second:.0f} tokens/s, first after "
                f"{answer.first_s:.2f} s, {answer.prompt_tokens + answer.tokens} of "
                f"{self._session.context_tokens} in the context"
            )
        return True

    def _say(self, text: str) -> None:
        """A remark that is no part of an answer: dimmed, or to stderr where answers are kept."""
        if not self._is_terminal:
            print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)
        elif self._has_colours:
            print(f"\x1b[2m{_filled(f'[{text}]')}\x1b[0m", flush=True)
        else:
            print(_filled(f"[{text}]"), flush=True)

    def _command(self, word: str, rest: str) -> None:
        run = self._commands.get(word)
        if run is None:
            self._say(f"there is no {word}; /help lists the commands")
            return
        run(rest)

    def _reset(self, system: str | None) -> None:
        first = self._session.messages[:1]
        if system is None and first and first[0]["role"] == "system":
            system = first[0]["content"]
        self._session.begin(system)
        self._say("a new conversation")

    def _begin_anew(self, text: str) -> None:
        if not text:
            self._say("write /system TEXT")
            return
        self._reset(text)

    def _save(self, file: str) -> None:
        if not file:
            self._say("write /save FILE")
            return
        try:
            check_writable("/save", file)
            with open(file, "w", encoding="utf-8") as target:
                json.dump(self._session.messages, target, indent=2, ensure_ascii=False)
        except (OSError, ValueError) as error:
            self._say(str(error))
            return
        self._say(f"wrote {len(self._session.messages)} messages to {file}")

    def _print_statistics(self) -> None:
        answer = self._last
        if answer is None:
            self._say("there was no answer yet")
            return
        width = shutil.get_terminal_size().columns
        rows = (
            ("conversation", f"{answer.prompt_tokens + answer.tokens} tokens with the answer"),
            ("computed in earlier turns", f"{answer.cached_tokens} of these"),
            ("first token after", f"{answer.first_s:.3f} s"),
            ("answer", f"{answer.tokens} tokens in {answer.seconds:.2f} s ({answer.end})"),
            ("tokens a second", f"{answer.tokens_per_second:.1f}"),
        )
        for name, value in rows:
            print(f"{name:<26}  {value}"[:width])


def _filled(text: str) -> str:
    """A line of ours, broken between words at the terminal's edge."""
    return textwrap.fill(text, shutil.get_terminal_size().columns - 1, break_on_hyphens=False)
