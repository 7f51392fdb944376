"""Parameters of a request by the names that other engines give them, and what to write here; and
the likeness of names, which `other_names.py` uses for an engine's settings."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import wraps
from typing import Any

from megatron_async.errors import RequestError

LIKE = 0.75
"""Names that are less alike (0 to 1, of difflib) are other names, not misspelt ones."""


def by_name(rows: Mapping[str, str]) -> dict[str, str]:
    """A table by name, of rows: what to say -> names, with blanks between."""
    return {name: said for said, names in rows.items() for name in names.split()}


SAMPLING_NAMES = by_name({
    "num_tokens_to_generate": "max_tokens max_new_tokens n_predict predict",
    "num_tokens_total": "max_length",
    "temperature": "temp",
    "repetition_penalty": "repeat_penalty",
    "stop_words": "stop stop_strings stop_sequences",
    "seed": "random_seed",
    "min_tokens": "min_new_tokens",
    "termination_id": "eos_token_id",
    "return_log_probs=True, top_n_logprobs": "logprobs return_prompt_top_n_logprobs",
    "add_BOS": "add_bos",
    "return_log_probs=True, skip_prompt_log_probs=False": "prompt_logprobs",
    "detokenize_stop_sequence": "include_stop_str_in_output",
    "structured_output": "structured_outputs guided_decoding response_format json_schema regex "
    "guided_json guided_regex guided_choice guided_grammar",
})  # fmt: skip
"""Parameters of a request: name elsewhere -> what to write here."""

SAMPLING_ADVICE = by_name({
    "give the prompt n times, each with a seed of its own": "n",
    "give the prompt several times, each with a seed of its own": "best_of num_return_sequences",
    "temperature=0 takes the likeliest token, temperature=1.0 samples": "do_sample",
    "beam search is not served": "num_beams length_penalty early_stopping use_beam_search",
    "nothing is padded: leave it out": "pad_token_id",
    "structured_output says what an answer may be": "allowed_token_ids",
    "it is not served: use top_p or min_p": "typical_p mirostat",
    "write termination_id=-1": "ignore_eos ignore_eod",
    "a request has its prompt_tokens: leave it out": "return_prompt_tokens",
    "records of megatron_async.compat.inference have it": "return_segments",
    "generated_text has no special tokens; generated_tokens has all": "skip_special_tokens",
})  # fmt: skip
"""Parameters that exist elsewhere and have no name here, with what to do."""


def meant_by(name: str, known: Iterable[str], elsewhere: Mapping[str, str]) -> str | None:
    """The name here that an unknown name most likely means, or None.

    Args:
        name: as it was written.
        known: names that exist here.
        elsewhere: names of other engines -> names here; they come before a likeness of letters.
    """
    return elsewhere.get(name) or nearest(name, known)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name that was most likely misspelt, or None. Leading hyphens do not make names alike."""
    bare = {each.lstrip("-"): each for each in reversed(list(known))}
    found = difflib.get_close_matches(name.lstrip("-"), list(bare), n=1, cutoff=LIKE)
    return bare[found[0]] if found else None


def names_what_is_meant[T: type](made: T) -> T:
    """A decorator of a dataclass of sampling parameters: an unknown keyword raises a TypeError that
    names the right one."""
    return refusing(made, "parameter", _parameter_meant)


def check_attributes(params: Any) -> None:
    """Refuse what was set beside a request's parameters: asked once a request, as an assignment
    that asks makes parameters three times as slow to create.

    Raises:
        RequestError: an attribute is no parameter; the message names the right one.
    """
    known: Mapping[str, Any] = params.__dataclass_fields__
    for name in vars(params).keys() - known.keys():
        answer = _parameter_meant(name, getattr(params, name), known.keys())
        raise RequestError(f"{type(params).__name__} has no parameter {name!r}{answer}")


def _parameter_meant(name: str, value: Any, known: Collection[str]) -> str:
    advice = SAMPLING_ADVICE.get(name)
    if advice is None and (right := meant_by(name, known, SAMPLING_NAMES)) is not None:
        advice = f"did you mean {right}={value!r}?"
    return f": {advice}" if advice else f". Its parameters are: {', '.join(known)}."


def refusing[T: type](made: T, what: str, meant: Callable[[str, Any, Collection[str]], str]) -> T:
    """`made`, a dataclass, whose unknown keywords raise a TypeError.

    Args:
        made: the class.
        what: its fields are.
        meant: from a name, its value and the known names to the end of the message.
    """
    init: Callable[..., None] = made.__init__  # type: ignore[misc]
    known = made.__dataclass_fields__.keys()  # type: ignore[attr-defined]

    @wraps(init)
    def checked(self: object, *args: Any, **values: Any) -> None:
        for name in values.keys() - known:
            answer = meant(name, values[name], known)
            raise TypeError(f"{made.__name__} has no {what} {name!r}{answer}")
        init(self, *args, **values)

    made.__init__ = checked  # type: ignore[misc]
    return made
