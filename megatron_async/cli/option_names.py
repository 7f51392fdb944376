"""What an option or a command of another tool is called here: `other_names.py` in options."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import fields

from megatron_async.cli.fields import flag
from megatron_async.cli.options import PARALLEL_OPTIONS, engine_fields
from megatron_async.cli.sampling_options import FIELDS as SAMPLED
from megatron_async.other_names import (
    ENGINE_ADVICE,
    ENGINE_NAMES,
    NOTES,
    without_prefix,
)
from megatron_async.requests.parameter_names import SAMPLING_ADVICE, SAMPLING_NAMES, nearest
from megatron_async.requests.sampling_params import SamplingParams

OPTIONS = {
    "num_tokens_to_generate": "--max-new-tokens",
    "num_tokens_total": "--max-new-tokens",
    "stop_words": "--stop-word",
    "bad_words": "--bad-word",
    "stop_token_ids": "--stop-token-id",
    "termination_id": "--stop-token-id",
    "return_log_probs": "--log-probs",
    "return_log_probs=True, top_n_logprobs": "--log-probs --top-n-logprobs N",
    "return_log_probs=True, skip_prompt_log_probs=False": "--prompt-log-probs",
    "structured_output": "--json-schema, --regex, --grammar or --choice",
    "max_unfinished": "--max-unfinished",
    "max_tokens_in_flight": "--max-tokens-in-flight",
    "max_unfinished_of_owner": "--max-unfinished-per-key",
    "max_tokens_of_owner": "--max-tokens-per-key",
    "skip_prompt_log_probs": "--log-probs without --prompt-log-probs",
    "skip_prompt_log_probs=False": "--prompt-log-probs",
}
"""Where an option is not called as its field."""
OF_COMMANDS = {
    "buffer_size_gb": ("kv_gb",), "num_tokens_to_generate": ("output_len", "tokens"),
    "num_tokens_total": ("output_len", "tokens"),
}  # fmt: skip
"""Options of single commands (simulate-fleet, bench, check) that stand for a setting."""
COMMAND_LINE_NAMES = {
    "async_sched_mode": "--lookahead",
    "prefix_caching_coordinator_policy": "--policy",
    "system_prompt": "--system",
    "sys": "--system",
    "seed": "--inference-sampling-seed",
    "file": "--prompts-file",
    "prompts": "--prompt",
    "num_tokens_to_prompt": "--input-len",
    "hostname": "--host",
    "alias": "--served-model-name",
    "tool_call_parser": "--tool-parser",
    "data_parallel_size": "--replicas",
    "dp_size": "--replicas",
    "dp": "--replicas",
    "max_queued_requests": "--max-unfinished",
    "no_cnv": "--raw",
    "workers": "--api-processes",
    "api_server_count": "--api-processes",
    "disable_log_requests": "--no-request-log",
    "ssl_cert_file": "--ssl-certfile",
    "ssl_key_file": "--ssl-keyfile",
    "dist_init_addr": "--coordinator",
    "otlp_traces_endpoint": "--otlp-endpoint",
}
"""Options of programs, which `LLM` has not: name elsewhere -> option."""
SHORT = {
    "-c": "ctx_size", "-ngl": "ngl", "-np": "parallel", "-b": "batch_size", "-ub": "batch_size",
    "-tp": "tp", "-pp": "pp", "-dp": "dp", "-ep": "ep", "-t": "threads", "-fa": "flash_attn",
    "-ctk": "cache_type_k", "-ctv": "cache_type_k", "-md": "model_draft", "-sys": "system_prompt",
    "-s": "seed", "-f": "file", "-a": "alias", "-q": "quantize", "-O": "compilation_config",
    "-no-cnv": "no_cnv",
}  # fmt: skip
"""Short options of llama.cpp and vLLM. Some begin as ours do: `-ngl` is no `-n gl`."""
ADVICE = {
    "enable_auto_tool_choice": "tools are always served: leave it out",
    "jinja": "the model's chat template is always used: leave it out",
    "cont_batching": "it is always so: leave it out",
    "metrics": "it is always so: leave it out",
    "enable_metrics": "it is always so: leave it out",
    "reasoning_parser": "thoughts are found by the model's chat template: leave it out",
    "conversation": "that is `megatron-async chat`",
    "cnv": "that is `megatron-async chat`",
    "interactive": "that is `megatron-async chat`",
    "nnodes": "start a `coordinator`, and a `replica` on each host",
    "node_rank": "start a `coordinator`, and a `replica` on each host",
    "log_json": "lines of log have one form: DATE TIME LEVEL PROCESS: TEXT",
    "uds": "it listens at an address and a port: leave it out",
    "chat_template_kwargs": "each request says it",
    "default_chat_template_kwargs": "each request says it",
    "guided_decoding_backend": "llguidance is always used: leave it out",
    "enable_log_requests": "each request of a server is logged: leave it out",
    "text_gen_server_logging": "each request of a server is logged: leave it out",
    "flask_server_logging": "each request of a server is logged: leave it out",
    "logprobs_mode": "each request says it",
    "output_path": "`generate --json >FILE` writes the answers to a file",
    "coordinator_port": "that is `megatron-async coordinator --bind tcp://HOST:PORT`",
    "verbose": "--debug shows the traceback of an error",
    "log_level": "there is one level: leave it out",
    "stream": "answers are streamed where a client asks for it",
}
"""What to do in words."""
REQUEST_ADVICE = {
    "skip_special_tokens": "texts are shown without special tokens; --json has all token ids",
    "do_sample": "--temperature 0 takes the likeliest token, --temperature 1 samples",
    "n": "a prompt has one answer: repeat the prompt",
    **{
        name: SAMPLING_ADVICE[name]
        for name in (
            "num_beams",
            "use_beam_search",
            "length_penalty",
            "early_stopping",
            "pad_token_id",
            "typical_p",
            "mirostat",
        )
    },
}
"""What to do, in words, about options that a server leaves to each request."""
OF_REQUESTS = frozenset(field.name for field in fields(SamplingParams))
MODEL_NAMES = (
    "model",
    "m",
    "model_path",
    "model_id",
    "model_name_or_path",
    "load",
    "hf_repo",
    "hf",
)
COMMANDS = {
    "run": "chat", "talk": "chat", "ask": "generate", "complete": "generate", "query": "generate",
    "predict": "generate", "infer": "generate", "launch_server": "serve", "launch": "serve",
    "server": "serve", "start": "serve", "api_server": "serve", "deploy": "serve",
    "benchmark": "bench", "perf": "bench", "show": "info", "inspect": "info", "ps": "replicas",
    "export": "convert", "save": "convert", "create": "convert", "worker": "replica",
    "router": "coordinator", "trace": "profile", "shell-completion": "completion",
    "autotune": "tune",
}  # fmt: skip
"""Commands of other tools -> command here."""
COMMAND_ADVICE = {
    **dict.fromkeys(
        ("pull", "download", "download-weights"),
        "a model of the Hugging Face Hub is fetched when it is first named: `chat ORG/NAME`",
    ),
    **dict.fromkeys(
        ("ls", "list", "models"),
        "nothing is kept in a store: `info MODEL` says what a model is",
    ),
    "rm": "nothing is kept in a store: delete the model's folder",
    "stop": "Ctrl-C or SIGTERM ends a `serve`",
    "quantize": "weights are quantized while they are loaded: `chat MODEL --quantization auto`",
    "help": "write `megatron-async --help`",
    "version": "write `megatron-async --version`",
    "env": "write `megatron-async --version`",
}
"""What to do where no command stands for it."""


ELSEWHERE = {
    "--" + name.replace("_", "-")
    for names in (COMMAND_LINE_NAMES, ENGINE_NAMES, SAMPLING_NAMES, ADVICE, ENGINE_ADVICE)
    for name in names
} | {"--max-tokens"}
"""Options that are not taken for the beginning of another one: `--stop` is no `--stop-token-id`."""


def option_meant(option: str, known: Collection[str]) -> str:
    """What to say of an option that a command does not have: words behind a full stop, or none."""
    name = SHORT.get(option, option.lstrip("-").replace("-", "_"))
    if name == "max_tokens":
        return _max_tokens(known)
    name = without_prefix(name)
    of_field = flag(name)
    if of_field in known:  # --max_sequence_length
        return f". Did you mean {of_field}?"
    note = f" ({NOTES[name].replace('block_size_tokens', 'tokens')})" if name in NOTES else ""
    absent = f". Other commands have {as_option(name)}" if name in SETTINGS else ""
    for names in (COMMAND_LINE_NAMES, OPTIONS, ENGINE_NAMES, SAMPLING_NAMES):
        if name not in names:
            continue
        are_options = names is COMMAND_LINE_NAMES or names is OPTIONS
        meant = names[name] if are_options else as_option(names[name])
        if meant.partition(" ")[0].rstrip(",") in known:
            return f". Here that is {meant}{note}"
        absent = absent or f". Here that is {meant}, which this command does not have"
    if name in MODEL_NAMES:
        return ". The model's name stands by itself, without an option"
    if (words := ADVICE.get(name) or ENGINE_ADVICE.get(name)) is not None:
        return f". Here {in_options(words)}"
    if name in SAMPLING_NAMES or name in SAMPLING_ADVICE or name in OF_REQUESTS:
        words = REQUEST_ADVICE.get(name, "there is no option for it: see docs/python.md")
        is_here = "--max-new-tokens" in known
        return f". Here {in_options(words) if is_here else 'each request says it, not the command'}"
    if absent:
        return absent
    near = nearest(option, known)
    return f". Did you mean {near}?" if near else ""


SETTINGS = frozenset(
    {*engine_fields(), *SAMPLED, *OPTIONS, *(name for name, _ in PARALLEL_OPTIONS)}
    | {"sequence_parallel", "draft_layer", "dtype"}
)
WRITTEN = re.compile(
    r"(?<!SamplingParams\()\b(?P<name>[a-z]+(?:_[a-z]+)*)(?:=(?P<value>'[^']*'|-?\w+(?:\.\w+)*(?::\w+)*))?(?![\w(])"
)
"""A setting as errors of `LLM` write it: `lookahead=100`, or its name alone."""

NO_VALUE = re.compile(r", (or|not) None\b")
"""On a command line nobody writes None."""


def in_options(text: str, of_command: Collection[str] = ()) -> str:
    """A message about settings of `LLM` and parameters of a request, in options: `lookahead=100` is
    `--lookahead 100`. A name of one word without a value may be a word.

    Args:
        text: of the message.
        of_command: names of further settings, which a command has for itself.
    """

    def option(found: re.Match[str]) -> str:
        name, value = found["name"], found["value"]
        if (name not in SETTINGS and name not in of_command) or (value is None and "_" not in name):
            return found[0]
        if value in ("True", "False"):
            return as_option(name if value == "True" else f"{name}=False")
        name = next((own for own in OF_COMMANDS.get(name, ()) if own in of_command), name)
        of_field = OPTIONS.get(name, flag(name))
        return of_field if value is None else f"{of_field} {value.strip(chr(39))}"

    text = NO_VALUE.sub(lambda found: ", or leave it out" if found[1] == "or" else "", text)
    return WRITTEN.sub(option, text)


def command_meant(command: str, known: Collection[str]) -> str:
    """What to say of a command that there is not: words behind a full stop, or none."""
    if command in COMMAND_ADVICE:
        return f". Here {COMMAND_ADVICE[command]}"
    meant = COMMANDS.get(command) or nearest(command, known)
    return "" if meant is None else f". Did you mean {meant}?"


def as_option(setting: str) -> str:
    """A setting of `other_names` as an option: `lookahead=0` is `--lookahead 0`."""
    if setting in OPTIONS:
        return OPTIONS[setting]
    name, equals, value = setting.partition("=")
    if value == "False":
        return "--no-" + flag(name).removeprefix("--")
    return flag(name) + (f" {value.strip(chr(39))}" if equals else "")


def _max_tokens(known: Collection[str]) -> str:
    """`--max-tokens` is the length of an answer elsewhere, and was a step's budget here."""
    answer = "-n (--max-new-tokens) is the length of an answer"
    step = f"{flag('max_tokens')} the budget of one step"
    parts = [answer] * ("-n" in known) + [step] * (flag("max_tokens") in known)
    if not parts:
        return ""
    if len(parts) == 1 and parts[0] == step:
        parts = ["the length of an answer is said by each request", step]
    return ". Here " + ", and ".join(parts)
