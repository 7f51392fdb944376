"""Options come from the fields of dataclasses: none is forgotten, and help says what fields say."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

import pytest

from megatron_async import InferenceConfig, SamplingParams
from megatron_async.cli import options
from megatron_async.cli import sampling_options as sampling
from megatron_async.cli.fields import add_fields, field_options
from megatron_async.cli.main import build_parser
from megatron_async.requests.defaults import default_sampling_params, generation_defaults


@dataclass
class Made:
    """An example."""

    tea_gb: float | None = None
    """Memory for tea, in GiB. Further words. None: as `much_tea` says. More."""
    much_tea: int = 3
    """Cups."""
    is_hot: bool = True
    """Whether it is hot (40 % or more)."""
    kinds: list[str] | None = None
    """Kinds of tea."""
    pot: dict[str, int] | None = None
    """No option can say it."""


def test_help_is_the_first_sentence_and_the_default() -> None:
    found = field_options(Made)
    assert {name: field.help for name, field in found.items()} == {
        "tea_gb": "memory for tea, in GiB (default: as --much-tea says)",
        "much_tea": "cups (default: 3)",
        "is_hot": "whether it is hot (40 %% or more) (default: on)",
        "kinds": "kinds of tea",
    }
    assert [found[name].metavar for name in ("tea_gb", "much_tea")] == ["GB", "N"]


def test_what_is_not_given_is_none() -> None:
    parser = argparse.ArgumentParser()
    add_fields(parser, Made, field_options(Made), {"much_tea": "all"})
    assert vars(parser.parse_args([])) == dict.fromkeys(field_options(Made))
    given = parser.parse_args(["--tea-gb", "2", "--no-is-hot", "--kinds", "a", "--kinds", "b"])
    assert (given.tea_gb, given.is_hot, given.kinds) == (2.0, False, ["a", "b"])
    assert "cups (default: all)" in parser.format_help()
    assert "40 % or more" in parser.format_help()


def test_every_field_is_an_option_or_says_why_not() -> None:
    of_engine = {*options.engine_fields(), *options.NOT_OPTIONS}
    assert {field.name for field in fields(InferenceConfig)} == of_engine
    of_request = {*sampling.FIELDS, *sampling.REPEATED, *sampling.BY_OTHER_NAMES, "echo"}
    assert {field.name for field in fields(SamplingParams)} == of_request


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "replica"])
def test_options_that_are_not_given_leave_the_engine_its_defaults(command: str) -> None:
    arguments = build_parser().parse_args([command, "dummy:tiny"])
    assert options.engine_options(arguments) == {}
    words = ["--no-chunked-prefill", "--lookahead", "0", "--num-state-snapshots", "7"]
    given = options.engine_options(build_parser().parse_args([command, "dummy:tiny", *words]))
    assert given == {"enable_chunked_prefill": False, "lookahead": 0, "num_state_snapshots": 7}
    assert InferenceConfig(**given).lookahead == 0


def test_sampling_options() -> None:
    words = "--top-p 0.9 --temperature 1 --stop-word a --stop-word b --logprobs-mode processed"
    given = sampling.given_sampling(build_parser().parse_args(["generate", "m", *words.split()]))
    found = default_sampling_params(generation_defaults(None), **given)
    assert found == SamplingParams(
        top_p=0.9, stop_words=["a", "b"], logprobs_mode="processed", num_tokens_to_generate=256
    )
