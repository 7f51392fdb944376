"""Tokenizers of letters: bytes of ASCII, for tests of grammars; one for the tiny model; and one for
`AttentionModel`'s vocabulary, with grammars and stop words."""

import itertools

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from megatron_async.text.tokenizer import Tokenizer
from tests.support.attention_model import VOCABULARY

EOS = 127


def make_ascii_tokenizer() -> Tokenizer:
    """Bytes from 0 to 126, and an end."""
    letters = _byte_alphabet()
    backend = Backend(models.BPE(vocab={letters[i]: i for i in range(EOS)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, {"eos_token": "<eos>"}, [EOS], None, "test")


HARMONY = (
    "<|call|>", "<|start|>", "<|endoftext|>", "<|channel|>", "<|message|>", "<|reserved|>",
    "<|return|>", "<|constrain|>", "<|end|>",
)  # fmt: skip
CHANNELS = """
{%- macro message(header, channel, text, end) -%}
<|start|>{{ header }}<|channel|>{{ channel }}<|message|>{{ text }}<|{{ end }}|>
{%- endmacro -%}
<|start|>system<|message|>Reasoning: {{ reasoning_effort | default("medium") }}<|end|>
{%- if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}
{%- set called = namespace(name="") %}
{%- for m in messages %}
{%- if m.role == "tool" -%}
{{ message("functions." ~ called.name ~ " to=assistant", "commentary", m.content | tojson, "end") }}
{%- elif m.role != "assistant" -%}
<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- else %}
{%- if m.thinking %}{{ message("assistant", "analysis", m.thinking, "end") }}{% endif %}
{%- if m.tool_calls -%}
{%- if m.content %}{{ message("assistant", "analysis", m.content, "end") }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{%- set called.name = call.name -%}
{{ message("assistant to=functions." ~ call.name, "commentary json", call.arguments | tojson,
           "call") }}
{%- else %}{{ message("assistant", "final", m.content, "end") }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
"""A template of harmony's messages with the names and limits of the models' own."""


def make_harmony_tokenizer() -> Tokenizer:
    """All bytes, and harmony's special tokens in an order of our own; one ends texts, by the
    files."""
    vocabulary = {letter: number for number, letter in enumerate(_byte_alphabet())}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(HARMONY))
    end = backend.token_to_id("<|return|>")
    return Tokenizer(backend, {"eos_token": "<|return|>"}, [end], CHANNELS, "test")


def _byte_alphabet() -> list[str]:
    """The letters that stand for bytes in byte-level BPE (GPT-2)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters, hidden = [""] * 256, 0
    for byte in range(256):
        if byte in shown:
            letters[byte] = chr(byte)
        else:
            letters[byte] = chr(256 + hidden)
            hidden += 1
    return letters


class Letters:
    """A tokenizer for the tiny model: each token is one character of its own."""

    eod = -1

    def tokenize(self, text: str) -> list[int]:
        return [ord(character) - 200 for character in text]

    def detokenize(self, tokens: list[int]) -> str:
        return "".join(chr(200 + token) for token in tokens)


class Pieces:
    """A tokenizer whose tokens are one or two of the letters a to d, so that stop words come often,
    and across tokens."""

    eod = -1
    eos_ids = (VOCABULARY - 1,)

    def __init__(self) -> None:
        self.backend = _backend()

    def tokenize(self, text: str) -> list[int]:
        return ["abcd".index(letter) for letter in text]

    def detokenize(self, tokens: list[int]) -> str:
        return "".join(PIECES[token] for token in tokens)


PIECES = ["".join(letters) for n in (1, 2, 3) for letters in itertools.product("abcd", repeat=n)]
PIECES = PIECES[:VOCABULARY]


def _backend() -> Backend:
    """The tokenizer's tokens, for grammars; the last one ends a text there."""
    vocabulary = {piece: token for token, piece in enumerate(PIECES[:-1])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return backend
