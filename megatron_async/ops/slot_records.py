"""What a request asks of the sampling step beyond temperature and filters, as int32 words.

A request's *features* are bits that every step carries for its row. Their numbers (penalties, the
tokens whose logits are edited, bad words) are its *record*: packed once on the host, sent with the
request's first chunk, and kept on the device by slot. Host and kernels share the constants here.

A record: `HEADER` words (float32 numbers by their bits), then the edits, then the bad words.
- An edit is (token, float32 to add, until): added to the token's logit while the token to be
  sampled stands at a position below `until`.
- A bad word is `WINDOW` tokens, its own at the end and `NO_TOKEN` before them: its last token is
  banned where the tokens generated before it are its others.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, IntFlag

import numpy as np
from numpy.typing import NDArray


class RowFeature(IntFlag):
    """Bits of a row."""

    PENALTIES = 1
    EDITS = 2
    """Logit bias, or stop tokens banned under min_tokens."""
    BAD_WORDS = 4
    LOG_PROBS = 8
    PROCESSED_LOG_PROBS = 16
    """Its log probs are of the processed logits."""
    CONSTRAINED = 32
    """A grammar says what may come next: the row is sampled apart, once its mask is known."""
    PRODUCES = 256
    """Of this step: the sample is a token of the request."""
    STARTS = 512
    """Of this step: the request's first chunk since it got its slot."""


STEP_FEATURES = RowFeature.PRODUCES | RowFeature.STARTS
"""Bits that a slot does not keep."""


class Header(IntEnum):
    """Words of a record's header."""

    FREQUENCY = 0
    PRESENCE = 1
    REPETITION = 2
    TOP_N = 3
    PROMPT_LENGTH = 4
    NUM_EDITS = 5
    NUM_BAD_WORDS = 6


HEADER = 8
EDIT_WORDS = 3
WINDOW = 16
"""Longest bad word, tokens; as many recent tokens are kept on the device."""
MAX_EDITS = 512
MAX_BAD_WORDS = 64
RECORD_WORDS = HEADER + MAX_EDITS * EDIT_WORDS + MAX_BAD_WORDS * WINDOW
MAX_TOP_N = 20
"""Most alternatives of a token, as in vLLM."""
NO_TOKEN = -1
FOREVER = int(np.iinfo(np.int32).max)
OUT_WORDS = 1 + 2 * MAX_TOP_N
"""Log probs of a row: of its token, then the ids of the likeliest tokens, then their log probs."""

Edit = tuple[int, float, int]


def pack_record(
    penalties: tuple[float, float, float],
    top_n: int,
    prompt_length: int,
    edits: Sequence[Edit] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> NDArray[np.int32]:
    """A request's record.

    Args:
        penalties: frequency, presence and repetition penalty.
        top_n: alternatives whose log probs are wanted.
        prompt_length: tokens.
        edits: at most `MAX_EDITS`; of one token at most one that adds a finite number.
        bad_words: at most `MAX_BAD_WORDS`, of at most `WINDOW` tokens each.
    """
    words = np.zeros(HEADER + len(edits) * EDIT_WORDS + len(bad_words) * WINDOW, dtype=np.int32)
    words[: len(penalties)].view(np.float32)[:] = penalties
    words[Header.TOP_N] = top_n
    words[Header.PROMPT_LENGTH] = prompt_length
    words[Header.NUM_EDITS] = len(edits)
    words[Header.NUM_BAD_WORDS] = len(bad_words)
    start = HEADER + len(edits) * EDIT_WORDS
    table = words[HEADER:start].reshape(-1, EDIT_WORDS)
    for row, (token, value, until) in zip(table, edits, strict=True):
        row[0], row[1:2].view(np.float32)[0], row[2] = token, value, until
    for row, word in zip(words[start:].reshape(-1, WINDOW), bad_words, strict=True):
        row[:] = NO_TOKEN
        row[WINDOW - len(word) :] = word
    return words
