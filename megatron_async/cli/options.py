"""Options that several commands share, and how their help is laid out."""

from __future__ import annotations

import argparse
import logging
import sys
import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from megatron_async.cli.fields import add_fields, field_options, flag
from megatron_async.config import InferenceConfig

if TYPE_CHECKING:
    from megatron_async.llm import LLM

PROGRAM = "megatron-async"
MOST_PORT = 65535

MODEL_HELP = """one of
  smollm2              the demo model, SmolLM2-135M-Instruct (installed by scripts/setup.sh)
  PATH/TO/MODEL.gguf   a GGUF file
  PATH/TO/FOLDER       a Hugging Face folder (config.json, safetensors, tokenizer) or a
                       Megatron torch_dist checkpoint written by `megatron-async convert`
  ORG/NAME             a model on the Hugging Face Hub, from the cache or fetched: Qwen/Qwen3-0.6B
  dummy:SHAPE          random weights, to try a shape: smollm2-135m, qwen3-0.6b, llama-3.1-8b;
                       tiny and tiny-moe start at once (prompts are token ids)
  dummy:llama:SIZES    the same of sizes by hand: layers=2,hidden=64,heads=4,ffn=96,vocab=512
  dummy:SHAPE:uniform  the same, tokens spread evenly over the experts
  dummy:SHAPE:int4     weights of 4-bit numbers, or mxfp4, nvfp4, as of a quantised folder"""

DRAFT_LAYER_HELP = """a layer for multi-token prediction that was trained for the model
(scripts/train_draft_layer.py); with --speculative-method mtp. smollm2 has one"""

NOT_OPTIONS = {
    "async_sched_mode": "Megatron-Core's name for --lookahead",
    "materialize_only_last_token_logits": "a name of Megatron-Core's; False is refused",
    "check_integrity": "for tests",
}
"""Fields of `InferenceConfig` that are no options, and why."""


DEFAULTS = {
    "lookahead": "1; as many as there are pipeline stages",
    "max_sequence_length": "the model's context, as far as the KV pool holds it; on a GPU at most "
    "8192",
    "num_speculative_tokens": "1 with mtp, 3 with ngram",
    "speculative_method": "none",
    "enable_prefix_caching": "on",
}
"""What commands say of defaults that `LLM` chooses, or that a sentence says better."""


def engine_fields() -> list[str]:
    """Names of the fields of `InferenceConfig` that are options, the most used first."""
    first = ["device", "lookahead"]
    found = field_options(InferenceConfig).keys() - NOT_OPTIONS.keys()
    return [*first, *(name for name in field_options(InferenceConfig) if name in found - {*first})]


def add_engine_options(parser: Any) -> Any:
    """The group "engine": the fields of `InferenceConfig`, of which those that are not given keep
    its defaults, and `--dtype`."""
    group = parser.add_argument_group("engine")
    add_fields(group, InferenceConfig, engine_fields(), DEFAULTS)
    group.add_argument(
        "--no-chunked-prefill", dest="enable_chunked_prefill", action="store_false", default=None,
        help=argparse.SUPPRESS,
    )  # fmt: skip
    add_dtype(group)
    return group


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Engine options that were given, as `InferenceConfig` takes them."""
    fields = {name: getattr(arguments, name) for name in engine_fields()}
    return {name: value for name, value in fields.items() if value is not None}


PARALLEL_OPTIONS: tuple[tuple[str, str], ...] = (
    ("tensor_model_parallel_size", "ranks that split each layer between them"),
    ("pipeline_model_parallel_size", "stages that split the layers between them"),
    ("expert_model_parallel_size", "replicas that split a MoE model's experts"),
)
"""By the names of `LLM`."""


Rows = Sequence[tuple[str, Any, str | None, Any, str | None]]
"""Options, a row each: the option, or the field that it names, and a short form behind a space;
type, a tuple of choices, bool (no value), `BooleanOptionalAction`, list (may be repeated) or a list
of a type (several values); what stands for the value; default; help."""


def add_rows(group: Any, rows: Rows) -> None:
    """Options that a command has for itself."""
    for name, kind, metavar, default, text in rows:
        names = name.split() if name.startswith("-") else [flag(name)]
        told: dict[str, Any] = {} if name.startswith("-") else {"dest": name}
        if kind is bool:
            told |= {"action": "store_true"}
        elif kind is argparse.BooleanOptionalAction:
            told |= {"action": kind, "default": default}
        elif kind is list:
            told |= {"action": "append", "default": [], "metavar": metavar}
        elif isinstance(kind, list):
            told |= {"nargs": "+", "type": kind[0], "default": default, "metavar": metavar}
        elif isinstance(kind, tuple):
            told |= {"choices": kind, "default": default}
        else:
            told |= {"type": kind, "default": default, "metavar": metavar}
        group.add_argument(*names, **told, help=text)


ON_REPLICA_DEATH = (
    "--on-replica-death", ("retry", "fail"), None, "retry",
    "serve a lost replica's requests again elsewhere, or fail them",
)  # fmt: skip
GPUS: dict[str, dict[str, Any]] = {
    "a100": {"gpu": "NVIDIA A100-SXM4-80GB", "capability": [8, 0], "processors": 108},
    "b200": {"gpu": "NVIDIA B200", "capability": [10, 0], "processors": 148},
    "h100": {"gpu": "NVIDIA H100 80GB HBM3", "capability": [9, 0], "processors": 132},
    "h200": {"gpu": "NVIDIA H200", "capability": [9, 0], "processors": 132},
}
"""GPUs that commands know by name, as `ops.compile_kernels.describe_gpu` describes them."""
LAYERS = (
    "--transformer-impl", ("local", "transformer_engine"), None, "local",
    "layers of torch and our kernels, or TransformerEngine's (GPU; must be installed)",
)  # fmt: skip
NO_PROGRESS = ("--no-progress", bool, None, False, "no progress bar")
NO_BARS = ("--no-progress", bool, None, False, "no progress bars")
DEVICE = (
    "--device", str, None, None, "cpu, cuda or cuda:N (default: a GPU where there is one)",
)  # fmt: skip
JSON = ("--json", bool, None, False, "one JSON document on stdout")
FIGURES = ("--json", str, "FILE", None, "write the figures as JSON")


def port(text: str) -> int:
    """A port, as argparse takes it."""
    if not text.isascii() or not text.isdigit() or int(text) > MOST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: give 0 to {MOST_PORT}")
    return int(text)


RANKS_TEXTS = {
    "generate": "Start them with torchrun: `torchrun --nproc-per-node 2 -m megatron_async generate "
    "...`.\nRanks beyond one model's are data-parallel replicas, which divide the prompts.\n"
    "scripts/launch_node.sh and scripts/launch_nodes.sh call torchrun for you.",
    "check": "Start them with torchrun; each replica serves all cases.",
    "tune": "Start them with torchrun, as many as a start will have; rank 0 keeps its times.",
    "serve": "`serve` starts them itself, on this host's GPUs: `serve MODEL "
    "--tensor-model-parallel-size 2`\nneeds two, and with --replicas each engine as many more. "
    "On several hosts: a\n`coordinator`, a `replica` on each, and `serve --coordinator ADDRESS`.",
    "replica": "Start them with torchrun: `torchrun --nproc-per-node 2 -m megatron_async replica "
    "MODEL\n--tensor-model-parallel-size 2 ...`. Ranks beyond one model's are further replicas.\n"
    "`serve` starts all of it on one host.",
}
"""By command: what starts the processes of a model that is split."""


def add_parallel(parser: Any, command: str = "generate") -> None:
    """The options of `PARALLEL_OPTIONS`, and `--sequence-parallel`."""
    group = parser.add_argument_group("several ranks", RANKS_TEXTS[command])
    for name, text in PARALLEL_OPTIONS:
        group.add_argument(flag(name), type=int, default=1, metavar="N", help=text)
    group.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="divide tokens between tensor-parallel ranks outside attention and MLP",
    )


def parallel_sizes(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `add_parallel`'s options are to `LLM`."""
    names = [*(name for name, _ in PARALLEL_OPTIONS), "sequence_parallel"]
    return {name: getattr(arguments, name) for name in names}


class HelpFormatter(argparse.RawTextHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Line breaks as written, a single line wrapped, and the default where there is one to tell."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        lines = text.splitlines()
        return textwrap.wrap(text, width, break_on_hyphens=False) if len(lines) == 1 else lines

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, "", [], [None]) or "(default: " in (action.help or ""):
            return action.help
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        return super()._get_help_string(action)


def add_dtype(parser: Any) -> None:
    """The `--dtype` option, the same wherever a model is loaded."""
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="precision of the weights (default: float32 on a CPU, bfloat16 on a GPU)",
    )


def metrics_server(llm: LLM, port: int | None) -> AbstractContextManager[object]:
    """The server behind `--metrics-port`, as a context manager: one for each replica, at ports that
    follow each other; none without a port."""
    if port is None or not llm.is_primary_rank:
        return nullcontext()
    from megatron_async.observe.metrics import serve_metrics

    return serve_metrics(llm.engine, port + llm.data_parallel_rank)


class _AboveTheBar(logging.Handler):
    """Writes to stderr without tearing a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        tqdm.write(self.format(record), file=sys.stderr)


def show_logged_steps() -> None:
    """Let the engine's log lines (`--logging-step-interval`) be seen."""
    logger = logging.getLogger("megatron_async")
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _AboveTheBar) for handler in logger.handlers):
        logger.addHandler(_AboveTheBar())
