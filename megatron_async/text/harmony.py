"""Harmony, the format of gpt-oss's messages: its special tokens, by their names.

A message is `<|start|>`, a header, `<|message|>`, a content, and `<|end|>`, `<|call|>` (of a tool)
or `<|return|>` (the answer's last). Facts: openai/harmony, docs/format.md.
"""

from __future__ import annotations

import re

from tokenizers import Tokenizer as BackendTokenizer

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
RETURN, CALL, CONSTRAIN = "<|return|>", "<|call|>", "<|constrain|>"
MARKS = {
    name: chr(0xD800 + place)
    for place, name in enumerate((START, CHANNEL, MESSAGE, END, RETURN, CALL, CONSTRAIN))
}
"""Token -> the character that stands for it in texts that are read: half of a surrogate pair. The
bytes of no other tokens decode to one, so the name of a token, written out, is not taken for it."""
ENDS = (RETURN, CALL, "<|endoftext|>")
"""Tokens that end a generation."""
_NAMES = re.compile("|".join(map(re.escape, MARKS)))


def marks_of(backend: BackendTokenizer) -> dict[int, str]:
    """Token id -> character of `MARKS`; empty for a tokenizer that has not all of the tokens."""
    found: dict[int, str] = {}
    for name, character in MARKS.items():
        token = backend.token_to_id(name)
        if token is None:
            return {}
        found[token] = character
    return found


def ends_of(backend: BackendTokenizer) -> list[int]:
    """Ids of `ENDS`; none for a tokenizer that has not all of harmony's tokens."""
    ids = map(backend.token_to_id, ENDS) if marks_of(backend) else ()
    return [token for token in ids if token is not None]


def marked(text: str) -> str:
    """A text that was written for the tokenizer, with the characters of the tokens that are named
    in it."""
    return _NAMES.sub(lambda name: MARKS[name[0]], text)
