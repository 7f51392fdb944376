"""Options that several commands share, and how their help is laid out."""

from __future__ import annotations

import argparse
import logging
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_async.llm import LLM

PROGRAM = "megatron-async"

MODEL_HELP = """one of
  smollm2              the demo model, SmolLM2-135M-Instruct (installed by scripts/setup.sh)
  PATH/TO/MODEL.gguf   a GGUF file
  PATH/TO/FOLDER       a Hugging Face folder (config.json, safetensors, tokenizer) or a
                       Megatron torch_dist checkpoint written by `megatron-async convert`
  dummy:SHAPE          random weights, to try a shape: smollm2-135m, qwen3-0.6b, llama-3.1-8b;
                       tiny and tiny-moe start at once (prompts are token ids)
  dummy:SHAPE:uniform  the same, tokens spread evenly over the experts"""

DRAFT_LAYER_HELP = """a layer for multi-token prediction that was trained for the model
(scripts/train_draft_layer.py); with --speculative-method mtp. smollm2 has one"""

ENGINE_OPTIONS: tuple[tuple[str, type, str, str], ...] = (
    ("device", str, "DEVICE", "cpu, cuda or cuda:N (default: a GPU where there is one)"),
    ("lookahead", int, "N", "steps launched ahead of bookkeeping: 0 is serial (default: 1)"),
    ("block_size_tokens", int, "N", "tokens in a KV block (default: 256)"),
    ("num_kv_blocks", int, "N", "KV blocks; overrides --buffer-size-gb"),
    ("buffer_size_gb", float, "GB", "KV pool (default: 1 on a CPU, most of what is free on a GPU)"),
    ("max_requests", int, "N", "requests served at once (default: 256, or --max-tokens)"),
    ("max_tokens", int, "N", "token budget of one STEP, not of an answer (default: 2048)"),
    ("max_sequence_length", int, "N", "longest prompt and answer together (default: 2560)"),
    (
        "attention_backend",
        str,
        "NAME",
        "prefill on a GPU: triton, flash_attn_4, flash_attn_3 or torch (default: the fastest)",
    ),
    (
        "enable_prefix_caching",
        bool,
        "",
        "let requests that begin alike share what is computed of them (default: on)",
    ),
    (
        "speculative_method",
        str,
        "NAME",
        "draft tokens: mtp (the model's own layer) or ngram (what the text repeats)",
    ),
    (
        "num_speculative_tokens",
        int,
        "N",
        "tokens drafted ahead (default: 1 with mtp, 3 with ngram)",
    ),
    (
        "draft_vocab_size",
        int,
        "N",
        "with mtp: draft only tokens with ids below N, to read less of the output layer",
    ),
    (
        "prefix_caching_mamba_gb",
        float,
        "GB",
        "snapshots of recurrent states (default: in the rows that no running request needs)",
    ),
    (
        "prefix_caching_mamba_interval",
        int,
        "N",
        "tokens between snapshots inside a prompt (default: they weigh what their KV cache weighs)",
    ),
    (
        "mamba_ssm_states_dtype",
        str,
        "DTYPE",
        "recurrent states: float32, or bfloat16 for half their memory (default: float32)",
    ),
    ("logging_step_interval", int, "N", "log a line every N steps (default: 0, none)"),
)
"""Options that are fields of `InferenceConfig`; those not given keep its defaults."""


def add_engine_options(group: Any) -> None:
    """The options of `ENGINE_OPTIONS`."""
    for name, type_, metavar, text in ENGINE_OPTIONS:
        if type_ is bool:
            group.add_argument(flag(name), action=argparse.BooleanOptionalAction, help=text)
        else:
            group.add_argument(flag(name), type=type_, metavar=metavar, help=text)


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Engine options that were given, as `InferenceConfig` takes them."""
    fields = {name: getattr(arguments, name) for name, *_ in ENGINE_OPTIONS}
    return {name: value for name, value in fields.items() if value is not None}


PARALLEL_OPTIONS: tuple[tuple[str, str], ...] = (
    ("tensor_model_parallel_size", "ranks that split each layer between them"),
    ("pipeline_model_parallel_size", "stages that split the layers between them"),
    ("expert_model_parallel_size", "replicas that split a MoE model's experts"),
)
"""Options under torchrun, by the names of `LLM`."""


def add_parallel(parser: Any) -> None:
    """The options of `PARALLEL_OPTIONS`, and `--sequence-parallel`."""
    group = parser.add_argument_group(
        "several ranks",
        "Start them with torchrun: `torchrun --nproc-per-node 2 -m megatron_async generate ...`.\n"
        "Ranks beyond one model's are data-parallel replicas, which divide the prompts.\n"
        "scripts/launch_node.sh and scripts/launch_nodes.sh call torchrun for you.",
    )
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
    """Line breaks as written, and the default where there is one to tell."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == []:
            return action.help
        return super()._get_help_string(action)


def flag(name: str) -> str:
    """The option of a field: `top_k` is `--top-k`."""
    return "--" + name.replace("_", "-")


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
