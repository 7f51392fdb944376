"""`Tokenizer`: text to token ids and back, over the `tokenizers` library.

Method names are those that Megatron-Core's text generation controller calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer as BackendTokenizer

from megatron_async.errors import ConfigurationError, RequestError
from megatron_async.json_objects import MIB, read_object, write_object
from megatron_async.text.byte_level import (
    BytePieces,
    ByteRuns,
    byte_runs,
    is_byte_level,
)
from megatron_async.text.chat_template import (
    CHAT_TEMPLATE,
    compile_chat_template,
    folder_template,
)
from megatron_async.text.gguf_tokenizer import read_gguf
from megatron_async.text.harmony import ends_of
from megatron_async.text.special_tokens import (
    TOKENIZER_CONFIG,
    add_special_tokens,
    class_name,
    read_config,
    special_texts,
    token_text,
)

INTERRUPTS = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)
"""Exceptions that go to the caller, and are nobody's fault."""


def error_of(raised: BaseException, what: str) -> BaseException:
    """The error to raise for what a library has raised when something (`what`) could not be done: a
    `RequestError` for a panic (such as of a tokenizer's regular expression that tried too often) or
    a bare `Exception`, else itself."""
    is_own = isinstance(raised, Exception) and type(raised) is not Exception
    if is_own or isinstance(raised, INTERRUPTS):
        return raised
    return RequestError(f"{what}: {type(raised).__name__}: {raised}.")


logger = logging.getLogger("megatron_async")

TOKENIZER = "tokenizer.json"
GENERATION_CONFIG = "generation_config.json"
OTHER_FORMATS = (
    "tokenizer.model", "tekken.json", "vocab.json", "merges.txt", "vocab.txt", "spiece.model",
    "tiktoken.model",
)  # fmt: skip
LARGEST_TOKENIZER = 256 * MIB
"""Bytes of a `tokenizer.json`; published ones have up to 35 MiB."""


class TokenizerError(ConfigurationError):
    """A tokenizer that is missing, unreadable or not supported, or a chat without a template."""


class Tokenizer:
    """A model's tokenizer.

    Args:
        backend: the tokenizer proper.
        config: the fields of a `tokenizer_config.json` (special tokens by name, chat template).
        eos_ids: tokens that end a generation, the tokenizer's own first. Harmony's are
            added.
        chat_template: jinja2 source, or None.
        source: what error messages call it.
        generation_config: what the model says of its sampling, by the names of a
            `generation_config.json` (`requests/defaults.py` reads it).
    """

    def __init__(
        self,
        backend: BackendTokenizer,
        config: Mapping[str, Any],
        eos_ids: Sequence[int],
        chat_template: str | None,
        source: str,
        generation_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.backend = backend
        self.config = dict(config)
        self.eos_ids = tuple(dict.fromkeys((*eos_ids, *ends_of(backend))))
        self.chat_template = chat_template
        self.source = source
        self.generation_config = dict(generation_config or {})
        # Files may ask for them, and a prompt must never be cut or filled without a word.
        backend.no_truncation()
        backend.no_padding()
        # Of the configuration alone: a tokenizer.json does not keep it.
        backend.encode_special_tokens = bool(self.config.get("split_special_tokens"))

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether the folder holds a tokenizer of any kind (perhaps one that is not supported)."""
        return any((folder / name).is_file() for name in (TOKENIZER, *OTHER_FORMATS))

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """The tokenizer in a Hugging Face or `torch_dist` folder.

        Raises:
            TokenizerError: it is missing, of another format, or corrupt.
        """
        folder = Path(path)
        file = folder / TOKENIZER
        if not file.is_file():
            other = [name for name in OTHER_FORMATS if (folder / name).is_file()]
            hint = (
                f"it has only {other[0]}: save it with transformers' "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
                if other
                else "copy the tokenizer.json and tokenizer_config.json of the model into it"
            )
            raise TokenizerError(f"{folder}: has no {TOKENIZER}; {hint}")
        if file.stat().st_size > LARGEST_TOKENIZER:
            raise TokenizerError(
                f"{file}: is larger than {LARGEST_TOKENIZER // MIB} MiB, so it is no tokenizer"
            )
        try:
            backend = BackendTokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{file}: not a readable tokenizer ({error})") from error
        config = read_config(folder, TokenizerError)
        files = config.get("fast_tokenizer_files") or [TOKENIZER]
        if files != [TOKENIZER]:
            raise TokenizerError(
                f"{folder / TOKENIZER_CONFIG}: fast_tokenizer_files = {files!r:.200} is "
                f"not read (only {TOKENIZER}); save the tokenizer again with transformers"
            )
        kind = class_name(folder, config, TokenizerError)
        config = add_special_tokens(backend, config, kind, str(folder), TokenizerError)
        template = folder_template(folder, config, TokenizerError)
        eos = read_eos_ids(folder, _special_id(config, "eos_token", backend))
        file = folder / GENERATION_CONFIG
        generation = read_object(file, TokenizerError) if file.is_file() else {}
        return cls(backend, config, eos, template, str(folder), generation)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], source: str) -> Tokenizer:
        """The tokenizer in the metadata of a GGUF file.

        Args:
            metadata: key -> value of the file's `tokenizer.*` fields.
            source: the file's name, for error messages.

        Raises:
            TokenizerError: a kind of tokenizer or pre-tokenizer that cannot be rebuilt exactly.
        """
        return cls(*read_gguf(metadata, source, TokenizerError), source)

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: special tokens written out in it are recognised.
            add_special_tokens: add what the model expects around a text (often a BOS token); False
                for text that has it already, as a rendered chat has.

        Raises:
            RequestError: the tokenizer cannot do that; say, its regular expression gave up.
        """
        try:
            ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            raise error_of(error, "the text cannot be tokenized") from error
        return ids

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            RequestError: the tokenizer cannot do that.
        """
        try:
            return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
        except BaseException as error:
            raise error_of(error, "the tokens cannot be made a text") from error

    def token_bytes(self, num_tokens: int) -> list[bytes] | None:
        """Bytes that each of the tokens 0 .. num_tokens - 1 adds to a text; None where texts
        are not the bytes of their tokens in a row, and where a subclass has its own
        `detokenize`."""
        pieces = self.byte_pieces
        return None if pieces is None else list(map(pieces.__getitem__, range(num_tokens)))

    @cached_property
    def byte_pieces(self) -> Mapping[int, bytes] | None:
        """The bytes of `token_bytes`, computed for a token at its first use."""
        is_known = self._detokenizes_itself and is_byte_level(self.backend)
        return BytePieces(self.backend) if is_known else None

    @cached_property
    def byte_runs(self) -> ByteRuns | None:
        """Tokens of single bytes whose text is certain only after them; None where there are
        none."""
        return byte_runs(self.backend) if self._detokenizes_itself else None

    def drop_ends_from(self, rows: int) -> None:
        """Forget end tokens that a model cannot make: its embedding has no rows for them."""
        beyond = [number for number in self.eos_ids if not 0 <= number < rows]
        if beyond:
            logger.warning(
                "%s: end token %d is not used: the model has tokens 0 to %d.",
                self.source, beyond[0], rows - 1,
            )  # fmt: skip
        self.eos_ids = tuple(number for number in self.eos_ids if 0 <= number < rows)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included (the model's embedding may have more rows)."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @property
    def eod(self) -> int | None:
        """Id of the token that ends a text (Megatron's name for EOS), None if there is none."""
        return self.eos_ids[0] if self.eos_ids else None

    @property
    def bos(self) -> int | None:
        """Id of the token that begins a text, None if there is none."""
        return _special_id(self.config, "bos_token", self.backend)

    @property
    def special_texts(self) -> dict[str, str]:
        """Special tokens by name ("bos_token"), as chat templates get them."""
        return special_texts(self.config)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation as the text that the model was trained on.

        Tokenize the result with `add_special_tokens=False`: the template writes them out.

        Args:
            messages: each with "role" ("system", "user" or "assistant") and "content".
            add_generation_prompt: end with the beginning of the assistant's answer.
            tools: functions that the model may call, as OpenAI writes them.
            variables: further variables of the template.

        Raises:
            TokenizerError: the model has no chat template, or the template rejects the messages.
        """
        template = self._template
        try:
            return template.render(
                messages=[dict(message) for message in messages],
                **{
                    "tools": None if tools is None else [dict(tool) for tool in tools],
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                    **self.special_texts,
                    **(variables or {}),
                },
            )
        except Exception as error:  # a template is code, it can raise anything
            raise TokenizerError(
                f"{self.source}: the chat template rejects the messages: {error}"
            ) from error

    def save(self, folder: str | Path) -> None:
        """Write the files that `from_folder` and transformers' `AutoTokenizer` read."""
        folder = Path(folder)
        self.backend.save(str(folder / TOKENIZER))
        config = {key: value for key, value in self.config.items() if key != "chat_template"}
        config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        write_object(folder / TOKENIZER_CONFIG, config)
        eos = list(self.eos_ids)
        ids = {"bos_token_id": self.bos, "eos_token_id": eos[0] if len(eos) == 1 else eos}
        write_object(
            folder / GENERATION_CONFIG,
            self.generation_config | {k: v for k, v in ids.items() if v not in (None, [])},
        )
        if self.chat_template is not None:
            (folder / CHAT_TEMPLATE).write_text(self.chat_template, encoding="utf-8")

    @property
    def _detokenizes_itself(self) -> bool:
        """Whether no subclass has its own `detokenize`."""
        return getattr(self.detokenize, "__func__", None) is Tokenizer.detokenize

    @cached_property
    def _template(self) -> jinja2.Template:
        if self.chat_template is None:
            raise TokenizerError(
                f"{self.source}: the model has no chat template (it is not a chat model, or its "
                f"{CHAT_TEMPLATE} is missing); give it plain prompts"
            )
        try:
            return compile_chat_template(self.chat_template)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(f"{self.source}: invalid chat template: {error}") from error


def read_eos_ids(folder: Path, own: int | None = None) -> tuple[int, ...]:
    """Tokens that end a generation: the tokenizer's own EOS, if it is known, then those of a
    folder's files, which may be missing."""
    ids: list[int] = [] if own is None else [own]
    for name in (GENERATION_CONFIG, "config.json"):
        content = read_object(folder / name, TokenizerError) if (folder / name).is_file() else {}
        inside = content.get("text_config")  # of a model with a vision tower
        value = content.get("eos_token_id")
        if value is None and isinstance(inside, dict):
            value = inside.get("eos_token_id")
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int for token in values):
            raise TokenizerError(f"{folder / name}: eos_token_id = {value!r} must be token ids")
        ids += values
    return tuple(dict.fromkeys(ids))


def _special_id(config: Mapping[str, Any], name: str, backend: BackendTokenizer) -> int | None:
    text = token_text(config.get(name))
    token_id: int | None = None if text is None else backend.token_to_id(text)
    return token_id


type Conversation = Sequence[Mapping[str, Any]]
"""Messages, each with "role" ("system", "user", "assistant" or "tool") and "content"."""

RAW_CHAT = (
    "generate() goes on from a text as it is, and this model was trained on chats: "
    "llm.chat([{'role': 'user', 'content': ...}]) asks it by its chat template."
)
"""What is said once of an LLM that is given such prompts."""


def is_raw_chat(tokenizer: Tokenizer | None, prompts: Sequence[Any]) -> bool:
    """Whether a prompt is a text without any mark of the model's chat template: poor answers. Token
    ids are nobody's mistake."""
    if getattr(tokenizer, "chat_template", None) is None or tokenizer is None:
        return False
    # A prompt of a template that was rendered before has its special tokens in the text.
    marks = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()]
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    return any(not any(mark in text for mark in marks) for text in texts)


def conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """One conversation, or several, as a list of conversations.

    Raises:
        TokenizerError: `messages` is neither.
    """
    if isinstance(messages, str | Mapping):
        raise TokenizerError(
            f"messages={messages!r} is no conversation: give a list of messages such as "
            '[{"role": "user", "content": "Hello"}], or a list of such lists.'
        )
    found: list[Any] = list(messages)
    return [found] if found and isinstance(found[0], Mapping) else found


def conversation_tokens(
    tokenizer: Tokenizer | None,
    messages: Conversation,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation.

    Args:
        tokenizer: of the model; None has no template.
        messages: the conversation.
        tools: functions that the model may call, as OpenAI writes them.
        add_generation_prompt: end with the beginning of the assistant's answer.
        variables: further variables of the template.

    Raises:
        TokenizerError: there is no tokenizer, no template, or the template rejects the messages.
    """
    if tokenizer is None:
        raise TokenizerError(
            "this model has no tokenizer, and so no chat template: give its prompts as token ids."
        )
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TokenizerError(
                f"{message!r} is no message: write one as "
                '{"role": "user", "content": "Hello"}; roles are system, user, assistant and tool.'
            )
    text = tokenizer.apply_chat_template(messages, add_generation_prompt, tools, variables)
    # The template writes the special tokens itself.
    return tokenizer.tokenize(text, add_special_tokens=False)
