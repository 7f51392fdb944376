"""Options of `generate` that become a request's `SamplingParams`."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from megatron_async.cli.early_checks import check_structure
from megatron_async.cli.fields import add_fields, field_options, flag
from megatron_async.cli.files import read_text
from megatron_async.ops.sampling.slot_records import FILTERS
from megatron_async.requests.defaults import NUM_TOKENS
from megatron_async.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from megatron_async.text.structured_output import StructuredOutput

REPEATED = {
    "stop_token_ids": ("--stop-token-id", int, "ID"),
    "stop_words": ("--stop-word", str, "TEXT"),
    "bad_words": ("--bad-word", str, "TEXT"),
}
"""Fields that are lists: the option for one element, its type and metavar."""
BY_OTHER_NAMES = {
    "num_tokens_to_generate": "--max-new-tokens",
    "termination_id": "--ignore-eos is -1",
    "return_log_probs": "--log-probs and --prompt-log-probs",
    "skip_prompt_log_probs": "--log-probs without --prompt-log-probs",
    "structured_output": "--json-schema, --regex, --grammar, --choice",
    "num_speculative_tokens": "an engine's option",
    "num_tokens_total": "--max-new-tokens says it of the answer",
    "add_BOS": "tokenizers say it themselves",
    "detokenize_stop_sequence": "for programs",
    "logit_bias": "for programs",
    "cache_salt": "prompts of one command line are one user's",
    "forced_routing": "for programs",
    "return_routing": "for programs",
    "echo": "a switch",
}
"""Fields that have options of other names or none, and why."""
FIELDS = sorted(
    (f.name for f in fields(SamplingParams) if f.name not in {*REPEATED, *BY_OTHER_NAMES}),
    key=lambda name: "logprobs" in name,
)
"""Fields that are options by their own names, those of log probs last."""
_FILTERS = ", ".join(map(flag, FILTERS.values()))

DEFAULTS = {
    name: f"the model's own, else {told}"
    for name, told in {
        "temperature": f"0; 1 with {' or '.join(_FILTERS.rsplit(', ', 1))}",
        **dict.fromkeys(FILTERS.values(), "0"),
        "repetition_penalty": "1",
    }.items()
}
"""What the help says of numbers that a model may have defaults of (`requests/defaults.py`)."""

STRUCTURES = {
    "json_schema": "answer with JSON of this schema: a file, or the schema itself",
    "regex": "answer with a text that matches this regular expression",
    "grammar": "answer with a text of this grammar (Lark): a file, or the grammar itself",
}


def add_sampling_options(generate: argparse.ArgumentParser, most: int = NUM_TOKENS) -> None:
    """The groups "choosing tokens" and "structured output"."""
    sampling = generate.add_argument_group("choosing tokens")
    sampling.add_argument(
        "-n", "--max-new-tokens", "--num-tokens-to-generate", dest="num_tokens_to_generate",
        type=int, metavar="N",
        help=f"most tokens in an answer (default: the model's own, else {most})",
    )  # fmt: skip
    generate.set_defaults(most_tokens=most)
    add_fields(sampling, SamplingParams, FIELDS, DEFAULTS)
    told = field_options(SamplingParams)
    for name, (option, kind, metavar) in REPEATED.items():
        text = told[name].help if name in told else "text that the answer must not contain"
        sampling.add_argument(
            option, type=kind, action="append", metavar=metavar, dest=name,
            help=f"{text}; may be repeated",
        )  # fmt: skip
    sampling.add_argument(
        "--log-probs", action="store_true", help="log probs of the answers' tokens (with --json)"
    )
    sampling.add_argument(
        "--prompt-log-probs", action="store_true", help="and of the prompts' tokens (with --json)"
    )
    sampling.add_argument("--echo", action="store_true", help="put the prompt before its answer")
    sampling.add_argument(
        "--ignore-eos", action="store_true", help="go on after the model's end-of-text token"
    )
    structured = generate.add_argument_group("structured output (one of them)")
    only_one = structured.add_mutually_exclusive_group()
    for name, text in STRUCTURES.items():
        only_one.add_argument(flag(name), metavar="TEXT_OR_FILE", help=text)
    only_one.add_argument(
        "--choice", action="append", metavar="TEXT", help="answer with one of these; repeat it"
    )


def given_sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of `SamplingParams` that the options name, checked before a model is loaded.

    Raises:
        ValueError: a value out of range, or two that exclude each other.
    """
    named = (*FIELDS, *REPEATED, "num_tokens_to_generate")
    values = ((name, getattr(arguments, name)) for name in named)
    given = {name: value for name, value in values if value is not None} | {
        "return_log_probs": arguments.log_probs or arguments.prompt_log_probs,
        "skip_prompt_log_probs": arguments.log_probs and not arguments.prompt_log_probs,
        "echo": arguments.echo,
        "termination_id": -1 if arguments.ignore_eos else None,
        "structured_output": structured_output(arguments),
    }
    # Checked as they are written: a value that a model's defaults would hide is still wrong. Token
    # ids are checked again by the engine, against the model's own vocabulary.
    sampling = SamplingParams(**given)
    sampling.validate(vocab_size=2**31)
    if sampling.is_greedy and any(
        getattr(sampling, name) > (name == "top_k") for name in FILTERS.values()
    ):
        raise ValueError(
            f"{' and '.join(_FILTERS.rsplit(', ', 1))} choose among samples, but this is greedy "
            f"(temperature {sampling.temperature:g}): give --temperature 1, for example."
        )
    return given


def structured_output(arguments: argparse.Namespace) -> StructuredOutput | None:
    """What answers are held to, or None."""
    from megatron_async.text.structured_output import StructuredOutput

    for name in STRUCTURES:
        text = getattr(arguments, name)
        if text is not None:
            given: dict[str, Any] = {name: text if name == "regex" else _text_or_file(name, text)}
            found = StructuredOutput(**given)
            check_structure(flag(name), found)
            return found
    return None if arguments.choice is None else StructuredOutput(choice=arguments.choice)


def _text_or_file(name: str, given: str) -> str:
    """A schema or grammar, given as it is or by a file's name.

    Raises:
        ValueError: it is neither.
    """
    option = flag(name)
    if os.path.isfile(given):
        text, where = read_text(option, given), f"{option} {given}"
    else:
        is_text = given.lstrip().startswith("{") if name == "json_schema" else ":" in given
        if not is_text:
            kind = "JSON object" if name == "json_schema" else "grammar (it has no rule)"
            raise ValueError(f"{option} {given}: there is no such file, and it is no {kind}.")
        text, where = given, option
    if name == "json_schema":
        try:
            json.loads(text)
        except ValueError as error:
            raise ValueError(f"{where}: the schema is no JSON: {error}.") from error
    return text
