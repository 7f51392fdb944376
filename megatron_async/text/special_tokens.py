"""Special and added tokens of a Hugging Face folder: four files and a dozen spellings of them.

A `tokenizer.json` has most tokens. `tokenizer_config.json`, `special_tokens_map.json` and
`added_tokens.json` may name more, and say which are special. They are read in the order in which
transformers 5.17 reads them, so that a text has the same tokens here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as BackendTokenizer

from megatron_async.errors import ConfigurationError
from megatron_async.json_objects import read_object

logger = logging.getLogger("megatron_async")

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
SPECIAL_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
"""Names of special tokens that every tokenizer may have."""
EXTRA, OLD_EXTRA, NAMED = (
    "extra_special_tokens",
    "additional_special_tokens",
    "model_specific_special_tokens",
)
"""Further ones: a list without names, or an object with names of the model's own."""
DECODER = "added_tokens_decoder"
IS_OLD = "is_old"
"""Mark of what `ADDED_TOKENS` has: what `tokenizer.json` says of a token counts more."""
FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")

_QWEN = "<|endoftext|>"
DEFAULTS = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": {"eos_token": _QWEN, "unk_token": _QWEN, "pad_token": _QWEN},
    "GPT2Tokenizer": {"bos_token": _QWEN, "eos_token": _QWEN, "unk_token": _QWEN},
    "GPTNeoXTokenizer": {
        "bos_token": _QWEN, "eos_token": _QWEN, "unk_token": _QWEN, "pad_token": "<|padding|>",
    },
}  # fmt: skip
"""Special tokens of classes of transformers, where no file names others."""
CLASSES = {
    **dict.fromkeys(
        ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe",
         "qwen3_5_moe_text"), "Qwen2Tokenizer"),
    "mamba2": "GPTNeoXTokenizer",
}  # fmt: skip
"""The class of a family's tokenizers, by `model_type`, where no file names one."""
FIXED_CLASSES = {"qwen2": "Qwen2Tokenizer", "mistral": "", "mixtral": "", "granitemoehybrid": ""}
"""The class whatever a file names, as published files name wrong ones; "": one without defaults."""

IN_THE_FILE = "tokenizer.json says it by its own parts"
OF_THE_CALLER = "it is about lengths, padding or types of batches, of which there are none here"
OF_A_FORM = "it says how the files were made or are found"
HARMLESS = {
    **dict.fromkeys(
        ("add_prefix_space", "add_bos_token", "add_eos_token", "legacy", "trim_offsets", "errors",
         "do_lower_case", "strip_accents", "tokenize_chinese_chars", "sp_model_kwargs", "unk_id",
         "spaces_between_special_tokens", "vocab_size"), IN_THE_FILE),
    **dict.fromkeys(
        ("model_max_length", "max_len", "max_length", "stride", "truncation_side",
         "truncation_strategy", "padding_side", "pad_to_multiple_of", "pad_token_type_id",
         "model_input_names", "padding", "truncation", "return_token_type_ids"), OF_THE_CALLER),
    **dict.fromkeys(
        ("tokenizer_class", "processor_class", "feature_extractor_type", "auto_map", "backend",
         "name_or_path", "special_tokens_map_file", "tokenizer_file", "vocab_file", "merges_file",
         "from_slow", "is_local", "local_files_only", "files_loaded", "init_inputs", "is_fast",
         "fast_tokenizer_files", "tokenizer_type", "transformers_version", "_commit_hash",
         "use_fast", "trust_remote_code", "_from_auto", "added_tokens_file", "device_map",
         "response_schema", "response_template", "verbose", "tie_word_embeddings"), OF_A_FORM),
    **dict.fromkeys(
        ("chat_template", DECODER, EXTRA, OLD_EXTRA, NAMED, "split_special_tokens",
         "clean_up_tokenization_spaces", *SPECIAL_NAMES), "it is read"),
    "use_default_system_prompt": "only templates of before 2023 asked for it",
}  # fmt: skip
"""Keys of `tokenizer_config.json` that are read, or that change no token, and why. The first kind
is compared with what `tokenizer.json` does where a difference would show (`_tell_contradictions`).
"""
BLANKS = ("\u2581", "\u0120")
"""How vocabularies write a blank."""
CLEAN_UP_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"


def read_config(folder: Path, error: type[ConfigurationError]) -> dict[str, Any]:
    """The fields of a folder's `tokenizer_config.json`, with the special tokens that other files
    name; files may be missing. `error` is the class of what is raised."""

    def content(name: str) -> dict[str, Any]:
        return read_object(folder / name, error) if (folder / name).is_file() else {}

    config = content(TOKENIZER_CONFIG)
    if OLD_EXTRA in config:
        config.setdefault(EXTRA, config.pop(OLD_EXTRA))
    _name_extra(config)
    if DECODER in config:
        return config
    for name, value in content(SPECIAL_TOKENS_MAP).items():
        known = config.get(EXTRA)
        if name == OLD_EXTRA:
            config.setdefault(EXTRA, value)
            continue
        if name == EXTRA and isinstance(value, list) and isinstance(known, list):
            value = known + [token for token in value if token not in known]
        if isinstance(config.get(name), str) and name not in SPECIAL_NAMES:
            continue  # a token of the model's own
        config[name] = {**value, "special": True} if _is_token(value) else value
    _name_extra(config)
    # A token with a "__type" is not looked at here, as in transformers.
    values = [*(config.get(name) for name in SPECIAL_NAMES), *_extra(config)]
    special = {
        token_text(value)
        for value in values
        if isinstance(value, str) or (isinstance(value, Mapping) and "__type" not in value)
    }
    decoder = {}
    for text, number in content(ADDED_TOKENS).items():
        is_special = text in special
        decoder[str(number)] = {
            "content": text, "special": is_special, "normalized": not is_special, IS_OLD: True,
        }  # fmt: skip
    return {**config, DECODER: decoder} if decoder else config


def class_name(folder: Path, config: Mapping[str, Any], error: type[ConfigurationError]) -> str:
    """The class that transformers takes for a folder's tokenizer, "" for one of no family."""
    file = folder / "config.json"
    model = read_object(file, error) if file.is_file() else {}
    family = str(model.get("model_type"))
    named = config.get("tokenizer_class") or model.get("tokenizer_class")
    found = FIXED_CLASSES.get(family, named or CLASSES.get(family, ""))
    return str(found).removesuffix("Fast")


def add_special_tokens(
    backend: BackendTokenizer,
    config: dict[str, Any],
    kind: str,
    where: str,
    error: type[ConfigurationError],
) -> dict[str, Any]:
    """Add the tokens that a configuration names to a tokenizer.

    Args:
        backend: of the folder's `tokenizer.json`.
        config: what `read_config` gives.
        kind: `class_name`.
        where: the folder, for messages.
        error: what is raised for a malformed token.

    Returns:
        the configuration with the special tokens that its class has by itself, and without those
        that have no name: the tokenizer has them now.
    """
    try:
        own = {
            name: text
            for name, text in DEFAULTS.get(kind, {}).items()
            if name not in config and backend.token_to_id(text) is not None
        }
        config = {**own, **config}
        _add(backend, config, where, is_qwen=kind == "Qwen2Tokenizer")
    except (TypeError, ValueError, AttributeError, OverflowError) as problem:
        raise error(
            f"{where}: the special or added tokens of {TOKENIZER_CONFIG} or {SPECIAL_TOKENS_MAP} "
            f"are malformed ({problem}); save the tokenizer again with transformers"
        ) from problem
    _tell_contradictions(backend, config, where)
    return {key: value for key, value in config.items() if key != DECODER}


def special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name ("bos_token"), those of the model's own too."""
    found = {name: token_text(value) for name, value in _named(config).items()}
    return {name: text for name, text in found.items() if text is not None}


def token_text(value: Any) -> str | None:
    """A special token is written as text or as an object with its `content`; an empty text is
    none."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) and text else None


def _add(backend: BackendTokenizer, config: Mapping[str, Any], where: str, is_qwen: bool) -> None:
    by_number = backend.get_added_tokens_decoder()
    present = {token.content: token for token in by_number.values()}
    wanted: list[str | AddedToken] = []
    numbers = {}
    decoder = config.get(DECODER)
    is_given = decoder is not None
    for number, value in sorted((int(n), v) for n, v in (decoder or {}).items()):
        token = _token(value)
        is_given = not value.get(IS_OLD)
        if not is_given and number in by_number:
            continue
        numbers[token.content] = number
        if repr(present.get(token.content)) != repr(token):
            wanted.append(token)
    known = {*present, *numbers}
    named = _named(config)
    for value in [*named.values(), *_extra(config)]:
        text = token_text(value)
        if text is None and value != "":
            raise ValueError(f"{value!r:.100} is no token")
        if text is None or text in known:
            continue
        # A token that is named again, as text alone, counts as text alone.
        one = text if isinstance(value, str) else _token(value, special="__type" not in value)
        if not any(type(one) is type(other) and repr(one) == repr(other) for other in wanted):
            wanted.append(one)
    # A token with a name is special. Of those that tokenizer.json has, transformers makes it so
    # where no decoder is given.
    last = {token if isinstance(token, str) else token.content: token for token in wanted}
    for text in special_texts(config).values():
        found = last.get(text)
        if found is None and (text in numbers or not is_given):
            found = present[text]
            wanted.append(found)
        if isinstance(found, AddedToken):
            found.special = True  # which leaves `normalized` to follow from it, where it is not set
    backend.add_tokens([_token(token) if isinstance(token, str) else token for token in wanted])
    if is_qwen:  # whose class does so
        extra = [text for value in _extra(config) if (text := token_text(value))]
        texts = dict.fromkeys([*special_texts(config).values(), *extra])
        backend.add_tokens([AddedToken(text, special=True) for text in texts])
    moved = [text for text, number in numbers.items() if backend.token_to_id(text) != number]
    if moved:
        logger.warning(
            "%s: %s says that token %r, one of %d, has id %d, but it has %s by tokenizer.json.",
            where, DECODER, moved[0], len(moved), numbers[moved[0]],
            backend.token_to_id(moved[0]),
        )  # fmt: skip


def _token(value: Any, special: bool = False) -> AddedToken:
    """A token from how JSON has it, with flags or without."""
    text = token_text(value)
    if not text:
        raise ValueError(f"{value!r} is no token")
    if not isinstance(value, Mapping):
        return AddedToken(text, special=True)
    given = {name: bool(value[name]) for name in FLAGS if value.get(name) is not None}
    return AddedToken(text, **({"special": special} | given))


def _name_extra(config: dict[str, Any]) -> None:
    """Further tokens with names are those of the model's own."""
    if isinstance(config.get(EXTRA), Mapping):
        config[NAMED] = {**(config.get(NAMED) or {}), **config.pop(EXTRA)}


def _is_token(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("content"), str)


def _named(config: Mapping[str, Any]) -> dict[str, Any]:
    """Special tokens that have a name, in transformers' order."""
    found = {name: config[name] for name in SPECIAL_NAMES if config.get(name) is not None}
    own = {k: v for k, v in config.items() if k.endswith("_token") and k not in SPECIAL_NAMES}
    found |= {name: value for name, value in own.items() if _is_token(value)}
    found |= {name: value for name, value in own.items() if isinstance(value, str)}
    return found | dict(config.get(NAMED) or {})


def _extra(config: Mapping[str, Any]) -> Iterator[Any]:
    value = config.get(EXTRA)
    if isinstance(value, list):
        yield from value


def _tell_contradictions(backend: BackendTokenizer, config: Mapping[str, Any], where: str) -> None:
    """Name the settings that are not what the tokenizer does, and those that nobody knows."""
    told = []
    for name in ("bos", "eos"):
        says, text = config.get(f"add_{name}_token"), special_texts(config).get(f"{name}_token")
        if says is None or text is None:
            continue
        ids = backend.encode("a", add_special_tokens=True).ids
        does = bool(ids) and ids[0 if name == "bos" else -1] == backend.token_to_id(text)
        if bool(says) != does:
            told.append(f"add_{name}_token = {says!r} (tokenizer.json does the contrary)")
    told += _told_blanks(backend, config)
    is_bpe = type(backend.model).__name__ == "BPE"
    if config.get("clean_up_tokenization_spaces") and (not is_bpe or config.get(CLEAN_UP_BPE)):
        told.append("clean_up_tokenization_spaces = True (texts keep their spaces)")
    if config.get("fix_mistral_regex"):
        told.append("fix_mistral_regex = True (save the tokenizer with transformers' correction)")
    read = {*HARMLESS, *_named(config), CLEAN_UP_BPE, "fix_mistral_regex"}
    told += [f"{key} (unknown)" for key in config.keys() - read if not key.endswith("_token")]
    if told:
        logger.warning(
            "%s: settings of %s that are not honoured: %s.",
            where, TOKENIZER_CONFIG, ", ".join(sorted(told)),
        )  # fmt: skip


def _told_blanks(backend: BackendTokenizer, config: Mapping[str, Any]) -> list[str]:
    """Where a blank is put before a text, or before each part behind a special token (`legacy`)."""

    def begins(*before: str) -> bool:
        tokens: list[str] = backend.encode("".join(before) + "a", add_special_tokens=False).tokens
        return len(tokens) > len(before) and tokens[len(before)].startswith(BLANKS)

    does = {"add_prefix_space": begins()}
    mark = special_texts(config).get("bos_token")
    if does["add_prefix_space"] and mark is not None:
        does["legacy"] = begins(mark)
    return [
        f"{name} = {config[name]!r} (tokenizer.json does the contrary)"
        for name, value in does.items()
        if isinstance(config.get(name), bool) and config[name] != value
    ]
