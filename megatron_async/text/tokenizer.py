"""`Tokenizer`: text to token ids and back, over the `tokenizers` library.

Method names are those that Megatron-Core's text generation controller calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.models import BPE

from megatron_async.errors import ConfigurationError
from megatron_async.text.byte_level import BytePieces, byte_level_pieces, is_byte_level
from megatron_async.text.chat_template import compile_chat_template

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
OTHER_FORMATS = ("tokenizer.model", "vocab.json", "merges.txt", "tekken.json")
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")

CONTROL, USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type` for tokens that are never merged from text."""

# The pre-tokenizers' published patterns: how text is cut into words before merging.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
GGUF_PRE_TOKENIZERS = ("llama-bpe", "qwen2", "smollm")
"""Values of `tokenizer.ggml.pre` that `Tokenizer.from_gguf` can rebuild."""


class TokenizerError(ConfigurationError):
    """A tokenizer that is missing, unreadable or not supported, or a chat without a template."""


class Tokenizer:
    """A model's tokenizer.

    Args:
        backend: the tokenizer proper.
        config: the fields of a `tokenizer_config.json` (special tokens by name, chat template).
        eos_ids: tokens that end a generation, the tokenizer's own first.
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
        self.eos_ids = tuple(eos_ids)
        self.chat_template = chat_template
        self.source = source
        self.generation_config = dict(generation_config or {})
        # Files may ask for them, and a prompt must never be cut or filled without a word.
        backend.no_truncation()
        backend.no_padding()

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
        try:
            backend = BackendTokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{file}: not a readable tokenizer ({error})") from error
        config = _read_json(folder / TOKENIZER_CONFIG)
        template_file = folder / CHAT_TEMPLATE
        if template_file.is_file():
            template: str | None = template_file.read_text(encoding="utf-8")
        else:
            template = _default_template(config.get("chat_template"))
        eos, generation = read_eos_ids(folder, backend), _read_json(folder / GENERATION_CONFIG)
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
        model = metadata.get("tokenizer.ggml.model")
        if model != "gpt2":
            raise TokenizerError(
                f"{source}: tokenizer.ggml.model = {model!r} is not supported (only 'gpt2', "
                "byte-level BPE); use the model's Hugging Face folder instead"
            )
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
        merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
        pre = metadata.get("tokenizer.ggml.pre")
        vocab = {token: index for index, token in enumerate(tokens)}
        # Llama 3 takes a word that is a token as it is, without going through the merges.
        backend = BackendTokenizer(BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
        _set_pre_tokenizer(backend, pre, source)
        backend.decoder = decoders.ByteLevel()
        backend.add_tokens(
            [
                AddedToken(token, normalized=False, special=kind == CONTROL)
                for token, kind in zip(tokens, kinds)
                if kind in (CONTROL, USER_DEFINED)
            ]
        )
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        ids: dict[str, int] = {}
        for name, key in zip(SPECIAL_NAMES, ("bos", "eos", "unknown", "padding")):
            token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
            if token_id is not None:
                ids[name] = int(token_id)
                config[name] = tokens[int(token_id)]
        adds_bos = metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")
        if adds_bos and "bos_token" in ids:
            bos = config["bos_token"]
            backend.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A",
                pair=f"{bos} $A {bos} $B",
                special_tokens=[(bos, ids["bos_token"])],
            )
        else:
            backend.post_processor = processors.ByteLevel(trim_offsets=False)
        eos = [ids["eos_token"]] if "eos_token" in ids else []
        for key in ("eot", "eom"):  # chat models end a turn with another token than a text
            token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
            if token_id is not None and int(token_id) not in eos:
                eos.append(int(token_id))
        return cls(backend, config, eos, metadata.get("tokenizer.chat_template"), source)

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: special tokens written out in it are recognised.
            add_special_tokens: add what the model expects around a text (often a BOS token); False
                for text that has it already, as a rendered chat has.
        """
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, num_tokens: int) -> list[bytes] | None:
        """Bytes that each of the tokens 0 .. num_tokens - 1 adds to a text; None where texts
        are not the bytes of their tokens in a row, and where a subclass has its own
        `detokenize`."""
        if getattr(self.detokenize, "__func__", None) is not Tokenizer.detokenize:
            return None
        return byte_level_pieces(self.backend, num_tokens)

    @cached_property
    def byte_pieces(self) -> Mapping[int, bytes] | None:
        """The bytes of `token_bytes`, computed for a token at its first use."""
        if getattr(self.detokenize, "__func__", None) is not Tokenizer.detokenize:
            return None
        return BytePieces(self.backend) if is_byte_level(self.backend) else None

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
        return {
            name: text
            for name in SPECIAL_NAMES
            if (text := _token_text(self.config.get(name))) is not None
        }

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
        _write_json(folder / TOKENIZER_CONFIG, config)
        eos = list(self.eos_ids)
        ids = {"bos_token_id": self.bos, "eos_token_id": eos[0] if len(eos) == 1 else eos}
        _write_json(
            folder / GENERATION_CONFIG,
            self.generation_config | {k: v for k, v in ids.items() if v not in (None, [])},
        )
        if self.chat_template is not None:
            (folder / CHAT_TEMPLATE).write_text(self.chat_template, encoding="utf-8")

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


def read_eos_ids(folder: Path, backend: BackendTokenizer | None = None) -> tuple[int, ...]:
    """Tokens that end a generation: the tokenizer's EOS, then those of the model's configuration.

    Args:
        folder: a Hugging Face folder; files may be missing.
        backend: the folder's tokenizer; None: only the model's configuration is read.

    Raises:
        TokenizerError: a file is corrupt.
    """
    ids: list[int] = []
    if backend is not None:
        own = _special_id(_read_json(folder / TOKENIZER_CONFIG), "eos_token", backend)
        ids += [] if own is None else [own]
    for name in (GENERATION_CONFIG, "config.json"):
        content = _read_json(folder / name)
        inside = content.get("text_config")  # of a model with a vision tower
        value = content.get("eos_token_id")
        if value is None and isinstance(inside, dict):
            value = inside.get("eos_token_id")
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) for token in values):
            raise TokenizerError(f"{folder / name}: eos_token_id = {value!r} must be token ids")
        ids += values
    return tuple(dict.fromkeys(ids))


def _set_pre_tokenizer(backend: BackendTokenizer, pre: str | None, source: str) -> None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre == "smollm")
    if pre == "smollm":
        first: Any = pre_tokenizers.Digits(individual_digits=True)
    elif pre == "llama-bpe":
        first = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
    elif pre == "qwen2":
        first = pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated")
        backend.normalizer = normalizers.NFC()
    else:
        raise TokenizerError(
            f"{source}: tokenizer.ggml.pre = {pre!r} is not supported; supported: "
            f"{', '.join(GGUF_PRE_TOKENIZERS)}. Use the model's Hugging Face folder instead"
        )
    backend.pre_tokenizer = pre_tokenizers.Sequence([first, byte_level])


def _token_text(value: Any) -> str | None:
    """A special token is written as text or as an object with its `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _special_id(config: Mapping[str, Any], name: str, backend: BackendTokenizer) -> int | None:
    text = _token_text(config.get(name))
    token_id: int | None = None if text is None else backend.token_to_id(text)
    return token_id


def _default_template(value: Any) -> str | None:
    """Some models have several templates, as a list of objects; the one called "default" counts."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value}
        return named.get("default")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: must hold a JSON object")
    return value


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
