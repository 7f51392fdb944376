"""The *record* of a request: its sampling parameters as int32 words.

Packed once on the host (`requests/sampling_record.py`), sent with the request's first chunk, kept
on the device by slot, and read there by the kernels through a row's slot. Host and kernels share
the constants here. The *features* are bits that say which parts of the sampling step look at a row.

A record: `HEADER` words (float32 numbers by their bits), then the edits, then the bad words; later
words are undefined, from an earlier owner of the slot.
- An edit is (token, float32 to add, until): added to the token's logit while the token to be
  sampled stands at a position below `until`.
- A bad word is `WINDOW` tokens, its own at the end and `NO_TOKEN` before them: its last token is
  banned where the tokens generated before it are its others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class RowFeature(IntFlag):
    """Bits of a row: those of its request's record, and three that hold for one step."""

    PENALTIES = 1
    EDITS = 2
    """Logit bias, or stop tokens banned under min_tokens."""
    BAD_WORDS = 4
    LOG_PROBS = 8
    PROCESSED_LOG_PROBS = 16
    """The request's log probs are of the processed logits."""
    CONSTRAINED = 32
    """A grammar says what may come next: the row is sampled apart, once its mask is known."""
    PRODUCES = 256
    """For this step: the sample is a token of the request."""
    STARTS = 512
    """For this step: the request's first chunk since it got its slot."""
    REPEATS = 1024
    """For this step: the chunk is one token, the last one of a shared block. It is computed again
    for its logits; its keys and values are read from that block, which nobody may write."""


class Header(IntEnum):
    """Words of a record's header. All zeros are a greedy row without further parameters."""

    FEATURES = 0
    """Bits of `RowFeature`."""
    TEMPERATURE = 1
    """float32; 0 is greedy."""
    TOP_K = 2
    """0 is off, 1 is greedy."""
    TOP_P = 3
    """float32; 0 is off."""
    MIN_P = 4
    """float32; 0 is off."""
    SEED_LOW = 5
    """Seed of the request's random numbers; the seed is not negative."""
    SEED_HIGH = 6
    MAX_LENGTH = 7
    """Sequence length, tokens, at which the request ends."""
    FREQUENCY = 8
    PRESENCE = 9
    REPETITION = 10
    """float32 penalties, each."""
    TOP_N = 11
    """Alternatives whose log probs are wanted."""
    PROMPT_LENGTH = 12
    NUM_EDITS = 13
    NUM_BAD_WORDS = 14
    DRAFTS = 15
    """Most drafts of the request that a step verifies; 0 under a grammar, because the mask of a
    token needs the token before it."""


FILTERS = {Header.TOP_K: "top_k", Header.TOP_P: "top_p", Header.MIN_P: "min_p"}
"""Words of a row's filters: the fields of `SamplingParams`. All but top_k are floats from 0 (off)
to 1."""
FLOAT_WORDS = frozenset((
    Header.TEMPERATURE, *FILTERS, Header.FREQUENCY, Header.PRESENCE, Header.REPETITION,
)) - {Header.TOP_K}  # fmt: skip
"""Words of the header that are float32."""
HEADER = 16
EDIT_WORDS = 3
WINDOW = 16
"""Longest bad word, tokens; as many recent tokens are kept on the device."""
MAX_EDITS = 512
MAX_BAD_WORDS = 64
RECORD_WORDS = HEADER + MAX_EDITS * EDIT_WORDS + MAX_BAD_WORDS * WINDOW
MAX_TOP_N = 20
"""Most alternatives of a token, as in vLLM."""
NO_TOKEN = -1
"""No token has this id. As a sample: the row's logits leave none to choose
(`ops/sampling/sampling.py`)."""
PROMPT_TOKEN = 1 << 30
"""Bit of a token's count: it is in the prompt. The bits below count it among the generated ones."""
FOREVER = 2**31 - 1
OUT_WORDS = 1 + 2 * MAX_TOP_N
"""Log probs of a row: of its token, then the ids of the likeliest tokens, then their log probs."""

Edit = tuple[int, float, int]


def pack_record(
    numbers: Mapping[Header, float],
    edits: Sequence[Edit] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> NDArray[np.int32]:
    """A record, int32 `[words]`.

    Args:
        numbers: of the header; what is left out is 0. The counts of edits and bad words follow from
            these.
        edits: at most `MAX_EDITS`; of one token at most one that adds a finite number.
        bad_words: at most `MAX_BAD_WORDS`, of at most `WINDOW` tokens each.
    """
    # Imported here, because the command line reads this module's limits for `--help`.
    import numpy as np

    words = np.zeros(HEADER + len(edits) * EDIT_WORDS + len(bad_words) * WINDOW, dtype=np.int32)
    floats = words.view(np.float32)
    for place, number in numbers.items():
        (floats if place in FLOAT_WORDS else words)[place] = number
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
