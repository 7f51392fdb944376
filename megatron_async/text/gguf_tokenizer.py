"""The tokenizer in the metadata of a GGUF file: byte-level BPE, rebuilt for the `tokenizers`
library.

What the keys mean is llama.cpp's (src/llama-vocab.cpp, gguf-py/gguf/constants.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.models import BPE

from megatron_async.errors import ConfigurationError
from megatron_async.text.chat_template import DEFAULT, join_templates

logger = logging.getLogger("megatron_async")

CONTROL, USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type` for tokens that are never merged from text."""
IDS = {
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token",
    "seperator": "sep_token", "cls": "cls_token", "mask": "mask_token",
}  # fmt: skip
"""Name of a special token in `tokenizer.ggml.NAME_token_id`, with that typing error, and Hugging
Face's."""

# The pre-tokenizers' published patterns: how text is cut into words before merging.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class PreTokenizer(NamedTuple):
    """How a text is cut before merging.

    Attributes:
        pattern: of words; "": GPT-2's.
        digits: each digit is a word.
        is_composed: the text is in Unicode's form NFC.
        takes_words: a word that is a token is taken as it is, without going through the merges.
        adds_bos: where the file does not say.
    """

    pattern: str = ""
    digits: bool = False
    is_composed: bool = False
    takes_words: bool = False
    adds_bos: bool = False


PRE_TOKENIZERS = {
    "llama-bpe": PreTokenizer(_LLAMA3_SPLIT, takes_words=True, adds_bos=True),
    "dbrx": PreTokenizer(_LLAMA3_SPLIT),
    "qwen2": PreTokenizer(_QWEN2_SPLIT, is_composed=True),
    "tekken": PreTokenizer(_TEKKEN_SPLIT, takes_words=True, adds_bos=True),
    "smollm": PreTokenizer(digits=True),
    "refact": PreTokenizer(digits=True),
    "gpt-2": PreTokenizer(),
    "granite-docling": PreTokenizer(),
}
"""By `tokenizer.ggml.pre`; which is which: llama.cpp, src/llama-vocab.cpp."""
TEMPLATE = "tokenizer.chat_template"

READ = {
    f"tokenizer.ggml.{key}"
    for key in (
        "model", "pre", "tokens", "token_type", "merges", "add_bos_token", "add_eos_token",
        "eot_token_id", "eom_token_id", *(f"{name}_token_id" for name in IDS),
    )
}  # fmt: skip
HARMLESS = {
    **dict.fromkeys(
        ("tokenizer.ggml.scores", "tokenizer.ggml.add_space_prefix",
         "tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap"),
        "other kinds of tokenizers than byte-level BPE use it"),
    **dict.fromkeys(
        ("tokenizer.ggml.token_type_count", "tokenizer.ggml.add_sep_token"),
        "models that embed a pair of texts use it"),
    **dict.fromkeys(
        (f"tokenizer.ggml.{name}_token_id"
         for name in ("prefix", "suffix", "middle", "fim_pre", "fim_suf", "fim_mid", "fim_pad",
                      "fim_rep", "fim_sep")),
        "it is for filling in code between two texts, which clients write as text"),
    "tokenizer.chat_templates": "the names of the templates, each of which has a key",
}  # fmt: skip
"""Keys that change no token of the tokenizers that are read, and why."""


def read_gguf(
    metadata: Mapping[str, Any], source: str, error: type[ConfigurationError]
) -> tuple[BackendTokenizer, dict[str, Any], list[int], str | None]:
    """The tokenizer in the metadata of a GGUF file.

    Args:
        metadata: key -> value of the file's `tokenizer.*` fields.
        source: the file's name, for messages.
        error: what is raised for a tokenizer that cannot be rebuilt exactly, or metadata that do
            not fit together.

    Returns:
        the tokenizer proper; the fields of a `tokenizer_config.json`; tokens that end a generation;
        the chat template.
    """
    try:
        return _read(metadata, source, error)
    except error:
        raise
    except Exception as problem:  # the library raises bare Exception, odd values any other
        raise error(
            f"{source}: the metadata of its tokenizer do not fit together ({problem}); fetch the "
            "file again"
        ) from problem


def _read(
    metadata: Mapping[str, Any], source: str, error: type[ConfigurationError]
) -> tuple[BackendTokenizer, dict[str, Any], list[int], str | None]:
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise error(
            f"{source}: tokenizer.ggml.model = {model!r} is not supported (only 'gpt2', "
            "byte-level BPE); use the model's Hugging Face folder instead"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None or len(kinds) != len(tokens):
        lack = "merges" if merges is None else "token_type"
        raise error(
            f"{source}: tokenizer.ggml.{lack} is missing, or not of one entry a token; the file is "
            "incomplete"
        )
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise error(
            f"{source}: tokenizer.ggml.pre = {pre!r} is not supported; supported: "
            f"{', '.join(PRE_TOKENIZERS)}. Use the model's Hugging Face folder instead"
        )
    cut = PRE_TOKENIZERS[pre]
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    backend = BackendTokenizer(BPE(vocab, pairs, ignore_merges=cut.takes_words))
    _set_pre_tokenizer(backend, cut)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == CONTROL)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    ids: dict[str, int] = {}
    for name in (*IDS, "eot", "eom"):
        key = f"tokenizer.ggml.{name}_token_id"
        number = metadata.get(key)
        if number is not None and not 0 <= number < len(tokens):
            raise error(f"{source}: {key} = {number}, but there are {len(tokens)} tokens")
        if number is not None:
            ids[name] = int(number)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {IDS[name]: tokens[number] for name, number in ids.items() if name in IDS}
    adds = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", cut.adds_bos),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    bos, eos = ([tokens[ids[name]]] if adds[name] and name in ids else [] for name in adds)
    if bos or eos:
        single, second = [*bos, "$A", *eos], [*bos, "$B", *eos]
        backend.post_processor = processors.TemplateProcessing(
            single=single,
            pair=[*single, *(f"{part}:1" for part in second)],
            special_tokens=[(token, vocab[token]) for token in (*bos, *eos)],
        )
    else:
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
    # Chat models end a turn with another token than a text.
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if name in ids))
    template = join_templates(_templates(metadata))
    _tell_unread(metadata, source)
    return backend, config, ends, template


def _set_pre_tokenizer(backend: BackendTokenizer, cut: PreTokenizer) -> None:
    first: list[Any] = []
    if cut.digits:
        first = [pre_tokenizers.Digits(individual_digits=True)]
    elif cut.pattern:
        first = [pre_tokenizers.Split(Regex(cut.pattern), behavior="isolated")]
    if cut.is_composed:
        backend.normalizer = normalizers.NFC()
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not cut.pattern)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, last])


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    found = {DEFAULT: metadata[TEMPLATE]} if metadata.get(TEMPLATE) else {}
    more = {key: text for key, text in metadata.items() if key.startswith(f"{TEMPLATE}.")}
    return found | {key.removeprefix(f"{TEMPLATE}."): text for key, text in more.items()}


def _tell_unread(metadata: Mapping[str, Any], source: str) -> None:
    unread = sorted(
        key
        for key in metadata
        if key not in READ and key not in HARMLESS and not key.startswith(TEMPLATE)
    )
    if unread:
        logger.warning("%s: metadata of the tokenizer not read: %s.", source, ", ".join(unread))
