"""Options of `generate` that become a request's `SamplingParams`."""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING, Any

from megatron_async.cli.files import read_text
from megatron_async.cli.options import flag

if TYPE_CHECKING:
    from megatron_async.requests.sampling_params import SamplingParams
    from megatron_async.text.structured_output import StructuredOutput

Options = tuple[tuple[str, type, str, Any, str], ...]

SAMPLING_OPTIONS: Options = (
    ("temperature", float, "T", 0.0, "0 takes the likeliest token; higher is more varied"),
    ("top_k", int, "K", 0, "sample among the K likeliest tokens; 0 is off"),
    ("top_p", float, "P", 0.0, "sample among the fewest tokens that reach probability P; 0 is off"),
    ("min_p", float, "P", 0.0, "drop tokens less likely than P times the likeliest; 0 is off"),
    ("seed", int, "N", None, "repeat the same samples"),
    ("frequency_penalty", float, "X", 0.0, "-2 to 2: less of what came, each time; 0 is off"),
    ("presence_penalty", float, "X", 0.0, "-2 to 2: less of what came at all; 0 is off"),
    ("repetition_penalty", float, "X", 1.0, "over 1: less of what is there already; 1 is off"),
    ("min_tokens", int, "N", 0, "nothing ends an answer before N tokens"),
    ("top_n_logprobs", int, "N", 0, "the N likeliest tokens at each place (with --log-probs)"),
)
"""Fields of `SamplingParams`: name, type, metavar, default, help."""

STRUCTURES = {
    "json_schema": "answer with JSON of this schema: a file, or the schema itself",
    "regex": "answer with a text that matches this regular expression",
    "grammar": "answer with a text of this grammar (Lark): a file, or the grammar itself",
}


def add_sampling_options(generate: argparse.ArgumentParser) -> None:
    """The groups "choosing tokens" and "structured output"."""
    sampling = generate.add_argument_group("choosing tokens")
    sampling.add_argument(
        "--max-new-tokens", "--num-tokens-to-generate", dest="num_tokens_to_generate",
        type=int, default=64, metavar="N", help="most tokens in an answer",
    )  # fmt: skip
    for name, type_, metavar, default, text in SAMPLING_OPTIONS:
        sampling.add_argument(flag(name), type=type_, metavar=metavar, default=default, help=text)
    sampling.add_argument(
        "--stop-token-id", type=int, action="append", metavar="ID", dest="stop_token_ids",
        help="token that ends an answer, besides the model's own; may be repeated",
    )  # fmt: skip
    sampling.add_argument(
        "--stop-word", action="append", metavar="TEXT", dest="stop_words",
        help="text that ends an answer, and is left out of it; may be repeated",
    )  # fmt: skip
    sampling.add_argument(
        "--bad-word", action="append", metavar="TEXT", dest="bad_words",
        help="text that an answer must not contain; may be repeated",
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


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """The sampling options, checked before a model is loaded."""
    from megatron_async.requests.sampling_params import SamplingParams

    sampling = SamplingParams(
        **{name: getattr(arguments, name) for name, *_ in SAMPLING_OPTIONS},
        stop_token_ids=arguments.stop_token_ids,
        stop_words=arguments.stop_words,
        bad_words=arguments.bad_words,
        return_log_probs=arguments.log_probs or arguments.prompt_log_probs,
        skip_prompt_log_probs=arguments.log_probs and not arguments.prompt_log_probs,
        echo=arguments.echo,
        num_tokens_to_generate=arguments.num_tokens_to_generate,
        termination_id=-1 if arguments.ignore_eos else None,
        structured_output=structured_output(arguments),
    )
    # Token ids are checked again by the engine, against the model's own vocabulary.
    sampling.validate(vocab_size=2**31)
    if sampling.is_greedy and (sampling.top_k > 1 or sampling.top_p or sampling.min_p):
        raise ValueError(
            "--top-k, --top-p and --min-p choose among samples, but this is greedy "
            f"(temperature {sampling.temperature:g}): give --temperature 1, for example."
        )
    return sampling


def structured_output(arguments: argparse.Namespace) -> StructuredOutput | None:
    """What answers are held to, or None."""
    from megatron_async.text.structured_output import StructuredOutput

    for name in STRUCTURES:
        text = getattr(arguments, name)
        if text is not None:
            given: dict[str, Any] = {name: text if name == "regex" else _text_or_file(name, text)}
            return StructuredOutput(**given)
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
