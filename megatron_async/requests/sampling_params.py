"""`SamplingParams`: how one request chooses its tokens and when it ends."""

from __future__ import annotations

import math
import numbers
import reprlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_async.errors import RequestError
from megatron_async.ops.sampling.slot_records import FILTERS, MAX_TOP_N
from megatron_async.requests.parameter_names import check_attributes, names_what_is_meant
from megatron_async.text.structured_output import StructuredOutput

LOGPROBS_MODES = ("raw", "processed")
MAX_STOP_TOKEN_IDS = 128
"""The limit is low because each token is compared with as many ids as the largest request has."""
MAX_STOP_WORDS = 64
MAX_WORD_LENGTH = 256
"""Most characters of a stop word, or of a bad word that is a text."""
NUMBERS = (
    "temperature", *FILTERS.values(), "top_n_logprobs", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "min_tokens",
)  # fmt: skip
NUMBERS_OR_NONE = (
    "seed", "num_tokens_to_generate", "num_tokens_total", "termination_id",
    "num_speculative_tokens", "max_version_lag",
)  # fmt: skip
PLAIN = frozenset({int, float})
"""Python's own types of numbers: the classes of `numbers` take ten times as long to ask, and a
request's first token waits for some 70 such checks."""
OF_ANSWERS = (
    "frequency_penalty", "presence_penalty", "repetition_penalty", "bad_words", "structured_output",
)  # fmt: skip
LARGEST, SMALLEST = sys.float_info.max, 5e-324
"""The largest finite number, and the smallest above 0."""
REALS = (
    ("temperature", 0, LARGEST, "0 (greedy) or more"),
    *((name, 0, 1, "between 0 (off) and 1") for name in FILTERS.values() if name != "top_k"),
    ("frequency_penalty", -2, 2, "-2 to 2 (0 is off)"),
    ("presence_penalty", -2, 2, "-2 to 2 (0 is off)"),
    ("repetition_penalty", SMALLEST, 100, "more than 0 and at most 100 (1 is off)"),
)
"""Name, smallest and largest value, and both in words. One loop over tables runs where caches are
cold; a call and a function for each field took three times as much code."""
INTEGERS = (
    ("top_k", 0, math.inf, "0 (off) or more"),
    ("top_n_logprobs", 0, MAX_TOP_N, f"0 (off) to {MAX_TOP_N}"),
    ("min_tokens", 0, math.inf, "0 (off) or more"),
    ("prompt_log_probs_from", 0, math.inf, "0 (all) or more"),
)
INTEGERS_OR_NONE = (
    ("seed", 0, 2**63 - 1, "between 0 and 2**63 - 1"),
    ("num_tokens_to_generate", 0, math.inf, "0 (nothing, to score the prompt) or more"),
    ("num_tokens_total", 1, math.inf, "1 or more"),
    ("num_speculative_tokens", 0, math.inf, "0 (none) or more"),
    ("max_version_lag", 0, math.inf, "0 (its first weights alone) or more"),
)


@names_what_is_meant
@dataclass
class SamplingParams:
    """Sampling and stopping of one request. Field names and "off" values are Megatron-Core's.

    Filters apply in this order: temperature, top_k, top_p (over what top_k left), min_p.

    Raises:
        RequestError: a value that must be a number is none. The range of numbers is checked when a
            request is added, so that one bad request of many fails alone.
    """

    temperature: float = 1.0
    """Divides the logits: higher values give more varied text, 0 takes the likeliest token."""
    top_k: int = 0
    """Sample among the k likeliest tokens, 0 for all. 1 is greedy."""
    top_p: float = 0.0
    """Sample among the fewest tokens whose probabilities reach P, 0 for all. So is 1."""
    min_p: float = 0.0
    """Drop tokens less likely than P times the likeliest one, 0 for none."""
    seed: int | None = None
    """Seed of the request's random numbers. The same seed and prompt give the same tokens in any
    batch. None: `InferenceConfig.inference_sampling_seed` mixed with the request's id."""
    num_tokens_to_generate: int | None = None
    """Most tokens to generate. None: until `max_sequence_length`. 0: none, for the prompt's log
    probs alone (a *score*), or its echo."""
    num_tokens_total: int | None = None
    """Most tokens of prompt and generation together; give this or num_tokens_to_generate."""
    termination_id: int | None = None
    """Token that ends the request. None: the tokenizer's end-of-document token. -1: no such
    token."""
    stop_token_ids: list[int] | None = None
    """Tokens that end the answer besides the model's own. At most 128."""
    add_BOS: bool = False
    """Put the tokenizer's beginning-of-sequence token before a text prompt that lacks it."""
    detokenize_stop_sequence: bool = False
    """Keep the token or stop word that ended the request in `generated_text`."""
    echo: bool = False
    """Put the prompt's text before the answer's. In a stream too, before its first text."""
    return_log_probs: bool = False
    """Give the log prob of every generated token, and of the prompt's unless
    `skip_prompt_log_probs`."""
    skip_prompt_log_probs: bool = False
    """Leave out the prompt's log probs, which cost a projection to the vocabulary a token."""
    prompt_log_probs_from: int = 0
    """First token of the prompt whose log prob is wanted; tokens before it may come from the prefix
    cache."""
    top_n_logprobs: int = 0
    """The N likeliest tokens at each place with their log probs, at most 20. With
    `return_log_probs`."""
    logprobs_mode: str = "raw"
    """Log probs of the model's logits (raw), or of the distribution that the token is drawn from
    (processed): with penalties, biases, bans, temperature and filters. vLLM's names. A prompt's
    log probs are raw, but for a score, which has no penalties and bans."""
    frequency_penalty: float = 0.0
    """Make generated tokens less likely each time they occur: -2 to 2, 0 is off. Subtracted from
    the logit for each occurrence."""
    presence_penalty: float = 0.0
    """Make generated tokens less likely: -2 to 2, 0 is off. Subtracted from the logit once."""
    repetition_penalty: float = 1.0
    """Make tokens of prompt and answer less likely: over 1, 1 is off. Divides positive logits, and
    multiplies negative ones."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these tokens, each -100 to 100. At most 512, stop tokens under
    min_tokens included."""
    min_tokens: int = 0
    """Nothing ends the answer before N tokens: no token and no stop word."""
    bad_words: list[str | list[int]] | None = None
    """Words that the answer must not contain. Texts (needs a tokenizer; also with a space before
    them) or token ids; at most 64 of at most 16 tokens (and 256 characters)."""
    stop_words: list[str] | None = None
    """Texts that end the answer and are left out of it. They are matched on text, across the
    borders of tokens. At most 64 of at most 256 characters. Needs a tokenizer."""

    cache_salt: str | None = None
    """Requests share blocks of equal beginnings only with requests of the same salt, such as a
    tenant's name: the time to first token can reveal that a prompt was seen before."""
    max_version_lag: int | None = None
    """Updates of the weights that the request may outlive after its first token; with one more it
    ends with what it has (finish reason "stale"). None: any number."""
    num_speculative_tokens: int | None = None
    """Most tokens that are drafted ahead for this request: up to the engine's own number, which is
    the default. 0: none. It never changes the tokens; requests with `structured_output` have no
    drafts."""
    forced_routing: Any = None
    """Experts that the prompt's tokens go to, whatever the router prefers: integers `[positions,
    layers with experts, experts of a token]` for its first positions, such as a request's
    `routing_indices`, or their int16 bytes. -1 in all places of a layer: the router's choice. The
    weights are computed from the router's scores (docs/rl.md)."""
    return_routing: bool = False
    """Send the experts of each token to the client of a replica, which has `enable_routing_replay`.
    (In one process a request has them in any case, as `routing_indices`.)"""
    structured_output: StructuredOutput | None = None
    """JSON schema, regular expression, grammar or choice that the text must match; the request ends
    when no further token is allowed. Needs the model's tokenizer."""

    def __post_init__(self) -> None:
        for name in NUMBERS:
            value = getattr(self, name)
            if type(value) not in PLAIN and not isinstance(value, numbers.Real):
                raise _no_number(name, value)
        for name in NUMBERS_OR_NONE:
            value = getattr(self, name)
            if value is None or type(value) in PLAIN:
                continue
            if not isinstance(value, numbers.Real):
                raise _no_number(name, value)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def is_score(self) -> bool:
        """Whether nothing is generated."""
        return self.num_tokens_to_generate == 0

    def scoring(self, start: int = 0) -> SamplingParams:
        """A copy that asks for the log probs of the prompt's tokens from `start` on, and for
        nothing else."""
        found = self.copy()
        found.num_tokens_to_generate, found.num_tokens_total = 0, None
        found.return_log_probs, found.skip_prompt_log_probs = True, False
        found.prompt_log_probs_from = start
        if found.logprobs_mode == "raw":  # else its bans are refused by name
            found.min_tokens = 0
        return found

    def copy(self) -> SamplingParams:
        """An independent copy: a request's own parameters never change under it."""
        # Without checks: `validate` is for the engine to call, for this request alone.
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        if self.stop_token_ids is not None and isinstance(self.stop_token_ids, Iterable):
            copied.stop_token_ids = list(self.stop_token_ids)
        if isinstance(self.stop_words, list):
            copied.stop_words = list(self.stop_words)
        if isinstance(self.logit_bias, dict):
            copied.logit_bias = dict(self.logit_bias)
        if isinstance(self.bad_words, list):
            copied.bad_words = list(self.bad_words)
        return copied

    def validate(self, vocab_size: int) -> None:
        """Check every value.

        Raises:
            RequestError: names the field, its value and the allowed values.
        """
        check_attributes(self)
        for name, low, high, allowed in REALS:
            _check_number(name, getattr(self, name), low, high, allowed)
        for name, low, high, allowed in INTEGERS:
            _check_integer(name, getattr(self, name), low, high, allowed)
        for name, low, high, allowed in INTEGERS_OR_NONE:
            if (value := getattr(self, name)) is not None:
                _check_integer(name, value, low, high, allowed)
        if self.num_tokens_to_generate is not None and self.num_tokens_total is not None:
            raise RequestError(
                f"num_tokens_to_generate={self.num_tokens_to_generate} and "
                f"num_tokens_total={self.num_tokens_total} were both given: give one of them."
            )
        if self.termination_id is not None:
            _token("termination_id", self.termination_id, vocab_size, allow_off=True)
        most = self.num_tokens_to_generate
        if most is not None and self.min_tokens > most:
            raise RequestError(
                f"min_tokens={self.min_tokens} is more than num_tokens_to_generate={most}: lower "
                "it, or raise the limit."
            )
        self._validate_log_probs()
        # Most requests have none of these.
        if self.stop_token_ids is not None or self.stop_words is not None:
            self._validate_stops(vocab_size)
        if self.logit_bias is not None:
            self._validate_biases(vocab_size)

    def _validate_stops(self, vocab_size: int) -> None:
        tokens, words = self.stop_token_ids, self.stop_words
        if not isinstance(tokens, list | None):
            raise RequestError(
                f"stop_token_ids={tokens!r} is not allowed: it must be a list of token ids."
            )
        _at_most("stop_token_ids", tokens, MAX_STOP_TOKEN_IDS, "tokens")
        for token in tokens or ():
            _token("stop_token_ids", token, vocab_size, allow_off=False)
        if isinstance(words, list):
            _at_most("stop_words", words, MAX_STOP_WORDS, "words")
        if not isinstance(words, list | None) or not all(
            isinstance(word, str) and word for word in words or ()
        ):
            raise RequestError(
                f"stop_words={words!r} is not allowed: it must be a list of strings, none empty."
            )
        for word in words or ():
            check_word_length("stop_words", word)

    def _validate_log_probs(self) -> None:
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise RequestError(
                f"logprobs_mode={self.logprobs_mode!r} is not allowed: it must be one of "
                f"{', '.join(map(repr, LOGPROBS_MODES))}."
            )
        for name in ("return_log_probs", "skip_prompt_log_probs", "echo"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(
                    f"{name}={getattr(self, name)!r} is not allowed: it must be True or False."
                )
        if self.is_score and self.logprobs_mode == "processed":
            for name in OF_ANSWERS:  # they depend on the tokens before
                if getattr(self, name) != getattr(SamplingParams, name):
                    raise RequestError(
                        f"{name}={getattr(self, name)!r} is not served with processed log probs of "
                        "a score (num_tokens_to_generate=0): leave it out, or take raw ones."
                    )
        is_silent = self.skip_prompt_log_probs or not self.return_log_probs
        if self.is_score and is_silent and not self.echo:
            raise RequestError(
                "num_tokens_to_generate=0 generates nothing: it must be 1 or more, or set "
                "return_log_probs=True, skip_prompt_log_probs=False for the prompt's log probs."
            )
        if self.top_n_logprobs and not self.return_log_probs:
            raise RequestError(
                f"top_n_logprobs={self.top_n_logprobs} was given without log probs: set "
                "return_log_probs=True too."
            )

    def _validate_biases(self, vocab_size: int) -> None:
        if not isinstance(self.logit_bias, dict | None):
            raise RequestError(
                f"logit_bias={self.logit_bias!r} is not allowed: it must be a dict of token id to "
                "bias."
            )
        for token, bias in (self.logit_bias or {}).items():
            _token("a token of logit_bias", token, vocab_size, allow_off=False)
            _check_number(f"logit_bias of token {token}", bias, -100, 100, "-100 to 100")


def scoring_params(
    count: int, start: int | Sequence[int], params: SamplingParams | None
) -> list[SamplingParams]:
    """Parameters of `count` scores; see `DynamicInferenceEngine.score`."""
    starts = list(start) if isinstance(start, Iterable) else [start] * count
    if len(starts) != count:
        raise RequestError(
            f"{len(starts)} starts were given for {count} sequences: give one for all, or one for "
            "each."
        )
    return [(params or SamplingParams()).scoring(each) for each in starts]


def check_word_length(name: str, word: str) -> None:
    """Raise RequestError if a word of the field `name` is too long a text."""
    if len(word) > MAX_WORD_LENGTH:
        raise RequestError(
            f"{name} has the word {reprlib.repr(word)} of {len(word)} characters: at most "
            f"{MAX_WORD_LENGTH} are served."
        )


def _at_most(name: str, values: list[Any] | None, most: int, kind: str) -> None:
    if values is not None and len(values) > most:
        raise RequestError(f"{name} has {len(values)} {kind}: at most {most} are served.")


def _no_number(name: str, value: Any) -> RequestError:
    return RequestError(f"{name}={value!r} is not allowed: it must be a number.")


def _check_number(name: str, value: Any, low: float, high: float, allowed: str) -> None:
    found = value
    if type(value) not in PLAIN:
        is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
        found = float(value) if is_real else math.nan  # NumPy would round the limits, too
    if not low <= found <= high:  # NaN is in no range
        raise RequestError(f"{name}={value!r} is not allowed: it must be {allowed}.")


def _check_integer(name: str, value: Any, low: float, high: float, allowed: str) -> None:
    kind = type(value)
    is_integer = kind is int or (kind is not bool and isinstance(value, numbers.Integral))
    if not is_integer or not low <= value <= high:
        raise RequestError(f"{name}={value!r} is not allowed: it must be an integer, {allowed}.")


def _token(name: str, value: Any, vocab_size: int, *, allow_off: bool) -> None:
    least, off = (-1, " (or -1 for none)") if allow_off else (0, "")
    allowed = f"a token id from 0 to {vocab_size - 1}{off}"
    _check_integer(name, value, least, vocab_size - 1, allowed)
