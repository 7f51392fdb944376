"""Settings by the names that vLLM, SGLang, llama.cpp, TGI, Hugging Face, RTP-LLM and Megatron-LM's
own command line give them, and what to write here.

One table for Python and the command line (`cli/parser.py`), which writes the same names as options.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from megatron_async.errors import ConfigurationError

logger = logging.getLogger(__name__)

LIKE = 0.75
"""Names that are less alike (0 to 1, of difflib) are other names, not misspelt ones."""
SHORT_BUDGET = 256
"""A smaller `max_tokens` of an engine was most likely meant for an answer."""

ENGINE_NAMES = {
    # Lengths and numbers of requests
    "max_model_len": "max_sequence_length",
    "max_seq_len": "max_sequence_length",
    "context_length": "max_sequence_length",
    "ctx_size": "max_sequence_length",
    "n_ctx": "max_sequence_length",
    "max_total_tokens": "max_sequence_length",
    "max_seq_length": "max_sequence_length",
    "max_tokens_to_oom": "max_sequence_length",
    "max_num_seqs": "max_requests",
    "max_running_requests": "max_requests",
    "max_batch_size": "max_requests",
    "max_concurrent_requests": "max_requests",
    "concurrency_limit": "max_requests",
    "parallel": "max_requests",
    "max_num_batched_tokens": "max_tokens",
    "max_batch_prefill_tokens": "max_tokens",
    "max_prefill_tokens": "max_tokens",
    "chunked_prefill_size": "max_tokens",
    "batch_size": "max_tokens",
    "enable_mixed_chunk": "enable_chunked_prefill",
    # Memory
    "block_size": "block_size_tokens",
    "page_size": "block_size_tokens",
    "seq_size_per_block": "block_size_tokens",
    "gpu_memory_utilization": "buffer_size_gb",
    "mem_fraction_static": "buffer_size_gb",
    "cuda_memory_fraction": "buffer_size_gb",
    "kv_cache_memory_bytes": "buffer_size_gb",
    "num_gpu_blocks_override": "num_kv_blocks",
    "max_batch_total_tokens": "num_kv_blocks",
    "reuse_cache": "enable_prefix_caching",
    "enable_radix_cache": "enable_prefix_caching",
    "disable_radix_cache": "enable_prefix_caching=False",
    "prefix_caching": "enable_prefix_caching",
    "no_prefix_caching": "enable_prefix_caching=False",
    "mamba_inference_ssm_states_dtype": "mamba_ssm_states_dtype",
    # Steps
    "async_scheduling": "lookahead=1",
    "enable_async_scheduling": "lookahead=1",
    "no_async_scheduling": "lookahead=0",
    "disable_overlap_schedule": "lookahead=0",
    "enforce_eager": "num_cuda_graphs=0",
    "disable_cuda_graph": "num_cuda_graphs=0",
    "cuda_graphs": "num_cuda_graphs",
    "cuda_graph_bs": "num_cuda_graphs",
    "cuda_graph_sizes": "num_cuda_graphs",
    "cuda_graph_max_bs": "num_cuda_graphs",
    "enable_cuda_graph": "num_cuda_graphs",
    "external_cuda_graph": "num_cuda_graphs",
    "cuda_graph_impl": "num_cuda_graphs",
    "decode_only_cuda_graphs": "use_cuda_graphs_for_non_decode_steps=False",
    "speculative_config": "speculative_method",
    "speculative_algorithm": "speculative_method",
    "speculative_model": "draft_layer",
    "model_draft": "draft_layer",
    "speculate": "num_speculative_tokens",
    "draft_max": "num_speculative_tokens",
    "speculative_num_steps": "num_speculative_tokens",
    "speculative_num_draft_tokens": "num_speculative_tokens",
    "gen_num_per_cycle": "num_speculative_tokens",
    "gen_num_per_circle": "num_speculative_tokens",
    "sp_type": "speculative_method",
    "sp_checkpoint_path": "draft_layer",
    "random_seed": "inference_sampling_seed",
    "nvtx_ranges": "nvtx",
    # The model, its arithmetic and its ranks
    "torch_dtype": "dtype",
    "quantize": "quantization",
    "load_in_8bit": "quantization='int8'",
    "load_in_4bit": "quantization='auto'",
    "attn_implementation": "attention_backend",
    "device_map": "device",
    "n_gpu_layers": "device='cuda'",
    "gpu_layers": "device='cuda'",
    "ngl": "device='cuda'",
    "tensor_parallel_size": "tensor_model_parallel_size",
    "tp_size": "tensor_model_parallel_size",
    "tp": "tensor_model_parallel_size",
    "num_shard": "tensor_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "pp_size": "pipeline_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "expert_parallel_size": "expert_model_parallel_size",
    "enable_expert_parallel": "expert_model_parallel_size",
    "ep_size": "expert_model_parallel_size",
    "ep": "expert_model_parallel_size",
}
"""Settings of an engine: name elsewhere -> name here, with its value where that is another."""

NOTES = {
    "gpu_memory_utilization": "GiB of the KV pool, not a share of the memory",
    "mem_fraction_static": "GiB of the KV pool, not a share of the memory",
    "cuda_memory_fraction": "GiB of the KV pool, not a share of the memory",
    "kv_cache_memory_bytes": "in GiB",
    "max_batch_total_tokens": "in blocks of block_size_tokens",
    "batch_size": "tokens of a step",
    "max_num_batched_tokens": "tokens of a step",
}
"""Where the unit or the meaning is another one too."""

KV_DTYPE = "the KV cache has the dtype of the weights, such as dtype='bfloat16'"
OF_THE_HUB = "Hugging Face's own variables say it: HF_TOKEN, HF_HOME, HF_HUB_OFFLINE"
ONLY_TEXT = "only text is made, from text: leave it out"
LOGGING = "the program's logging says it (logger 'megatron_async'): leave it out"
GRAPHS = "the engine measures which shapes pay, and captures whole steps of those: leave it out"
REPLICAS = "a coordinator knows load and shared prefixes (docs/serving.md): leave it out"
AGREEMENT = "ranks that share experts agree once a step, on the CPU: leave it out"
OF_MEGATRON = "it goes with Megatron's own objects: megatron_async.compat.inference takes it"
ENGINE_ADVICE = {
    "data_parallel_size": "replicas are processes: `megatron-async serve --replicas N`",
    "dp_size": "replicas are processes: `megatron-async serve --replicas N`",
    "dp": "replicas are processes: `megatron-async serve --replicas N`",
    "trust_remote_code": "no code of a model's folder is run, and none is needed",
    "enable_lora": "LoRA is not served: merge it into the weights",
    "lora": "LoRA is not served: merge it into the weights",
    "lora_modules": "LoRA is not served: merge it into the weights",
    "swap_space": "nothing is swapped: paused requests are computed again",
    "cpu_offload_gb": "weights are not offloaded: try a quantized model or more ranks",
    "kv_cache_dtype": KV_DTYPE,
    "cache_type_k": KV_DTYPE,
    "cache_type_v": KV_DTYPE,
    "load_format": "the format is told by the files",
    "tokenizer": "the tokenizer is read from the model's folder",
    "tokenizer_path": "the tokenizer is read from the model's folder",
    "revision": "write it behind the model's id: ORG/NAME@REVISION",
    "n_threads": "threads of a CPU: set OMP_NUM_THREADS in the environment",
    "threads": "threads of a CPU: set OMP_NUM_THREADS in the environment",
    "flash_attn": "the fastest attention that runs here is chosen: attention_backend names one",
    "compilation_config": "kernels are compiled as they are needed: there is nothing to set",
    "rope_scaling": "write it into the model's config.json",
    "hf_overrides": "write it into the model's config.json",
    "generation_config": "a request's own parameters count, then the model's "
    "generation_config.json: leave it out",
    "override_generation_config": "each request says it, else the model's generation_config.json: "
    "write it there",
    "tokenizer_mode": "the tokenizer is read from the model's folder",
    "skip_tokenizer_init": "prompts may be token ids: leave it out",
    "mlock": "weights are read into memory: leave it out",
    "mmap": "weights are read into memory: leave it out",
    "no_mmap": "weights are read into memory: leave it out",
    "max_loras": "LoRA is not served: merge it into the weights",
    **dict.fromkeys(("hf_token", "token", "download_dir", "cache_dir"), OF_THE_HUB),
    **dict.fromkeys(("limit_mm_per_prompt", "mmproj", "embedding", "task", "runner"), ONLY_TEXT),
    **dict.fromkeys(("verbose", "disable_log_stats", "log_level"), LOGGING),
    "chat_template": "write it into the model's folder as chat_template.jinja",
    "finished_sync_period": "every step that is resolved tells which requests ended: leave it out",
    "dynamic_batching": "it is always so: leave it out",
    "use_legacy_static_engine": "there is one engine, with dynamic batches: leave it out",
    "batch_times_seqlen_threshold": "pipeline stages take turns with parts of the requests: leave "
    "it out",
    "mamba_memory_ratio": "max_requests says it: recurrent states take what so many requests need, "
    "KV blocks the rest",
    "unified_memory_level": "the KV cache lies in device memory alone: leave it 0, or out",
    "use_flashinfer_fused_rope": "rope is fused into the engine's own kernel: leave it out",
    "mamba_inference_conv_states_dtype": "inputs of convolutions keep the dtype of activations: "
    "leave it out",
    "prefix_caching_eviction_policy": "blocks are kept until they are needed (LRU): leave it out",
    "prefix_caching_coordinator_policy": REPLICAS,
    "prefix_caching_routing_alpha": REPLICAS,
    "kv_cache_management_mode": "engine.suspend(free_kv_cache=True) says it: leave it out",
    "sampling_backend": "sampling has kernels of its own: leave it out",
    "logprobs_mode": "each request says it: SamplingParams(logprobs_mode=...)",
    "request_metadata_types": "requests have no tensors on the device but their records: leave it "
    "out",
    "wandb_logging": "`metrics_writer` of megatron_async.compat's InferenceConfig takes a run of "
    "wandb; a server has /metrics",
    "shards": "each model is a replica of its own (docs/serving.md); a replica both prefills and "
    "decodes",
    **dict.fromkeys(
        ("cuda_graph_all_prefills", "cuda_graph_max_tokens", "cuda_graph_sizing_distribution",
         "cuda_graph_scope", "cuda_graph_modules"),
        GRAPHS,
    ),
    **dict.fromkeys(
        ("use_synchronous_zmq_collectives", "disable_ep_consensus", "ep_consensus_interval"),
        AGREEMENT,
    ),
    **dict.fromkeys(
        ("use_same_sampling_seed_across_dp_ranks", "offset_sampling_seed_by_dp_rank"),
        "a request's samples do not depend on the replica: leave it out",
    ),
    **dict.fromkeys(
        ("mamba_inference_state_config", "static_kv_memory_pointers", "pg_collection",
         "metrics_writer", "track_paused_request_events", "track_generated_token_events"),
        OF_MEGATRON,
    ),
    **dict.fromkeys(("output_bert_embeddings", "bert_embedder_type"), ONLY_TEXT),
}  # fmt: skip
"""Settings that exist elsewhere and have no name here, with what to do."""

SAMPLING_NAMES = {
    "max_tokens": "num_tokens_to_generate",
    "max_new_tokens": "num_tokens_to_generate",
    "n_predict": "num_tokens_to_generate",
    "predict": "num_tokens_to_generate",
    "max_length": "num_tokens_total",
    "temp": "temperature",
    "repeat_penalty": "repetition_penalty",
    "stop": "stop_words",
    "stop_strings": "stop_words",
    "stop_sequences": "stop_words",
    "random_seed": "seed",
    "min_new_tokens": "min_tokens",
    "eos_token_id": "termination_id",
    "logprobs": "return_log_probs=True, top_n_logprobs",
    "prompt_logprobs": "return_log_probs=True, skip_prompt_log_probs=False",
    "include_stop_str_in_output": "detokenize_stop_sequence",
    "structured_outputs": "structured_output",
    "guided_decoding": "structured_output",
    "response_format": "structured_output",
    "json_schema": "structured_output",
    "regex": "structured_output",
    "guided_json": "structured_output",
    "guided_regex": "structured_output",
    "guided_choice": "structured_output",
    "guided_grammar": "structured_output",
}
"""Parameters of a request: name elsewhere -> what to write here."""

SAMPLING_ADVICE = {
    "n": "give the prompt n times, each with a seed of its own",
    "best_of": "give the prompt several times, each with a seed of its own",
    "do_sample": "temperature=0 takes the likeliest token, temperature=1.0 samples",
    "num_return_sequences": "give the prompt several times, each with a seed of its own",
    "num_beams": "beam search is not served",
    "length_penalty": "beam search is not served",
    "early_stopping": "beam search is not served",
    "pad_token_id": "nothing is padded: leave it out",
    "allowed_token_ids": "structured_output says what an answer may be",
    "typical_p": "it is not served: use top_p or min_p",
    "mirostat": "it is not served: use top_p or min_p",
    "use_beam_search": "beam search is not served",
    "ignore_eos": "write termination_id=-1",
    "skip_special_tokens": "generated_text has no special tokens; generated_tokens has all",
}
"""Parameters that exist elsewhere and have no name here, with what to do."""


MEGATRONS_PREFIX = re.compile(r"^(no_)?inference_(?:dynamic_batching_)?")


def without_prefix(name: str) -> str:
    """A name as it is without what Megatron-LM's command line writes before most settings of its
    engine: `inference_dynamic_batching_max_tokens` is `max_tokens`."""
    bare = MEGATRONS_PREFIX.sub(r"\1", name)
    return bare if bare == name or bare in ENGINE_NAMES else bare.removeprefix("no_")


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


def check_engine_names(
    given: Mapping[str, Any], known: Sequence[str], of_request: Collection[str]
) -> None:
    """Check the settings of an `LLM`, and say of a step's budget what it is.

    Args:
        given: by the names that were written.
        known: settings that there are, in the order in which they are told.
        of_request: fields of `SamplingParams`.

    Raises:
        ConfigurationError: there is no such setting; the message says what was meant.
    """
    for name in given:
        if name not in known:
            raise ConfigurationError(
                f"{name!r} is not a setting of LLM or InferenceConfig."
                f"{hint(name, known, of_request)} "
                f"The settings are: {', '.join(known)}."
            )
    budget = given.get("max_tokens")
    if isinstance(budget, int) and budget < SHORT_BUDGET:
        logger.warning(
            "max_tokens=%d is the budget of one step of the engine, as in Megatron-Core. For the "
            "length of an answer: SamplingParams(num_tokens_to_generate=%d).", budget, budget,
        )  # fmt: skip


@contextmanager
def budgets_named_by_options() -> Iterator[None]:
    """Inside, nothing is said of a step's budget: the command line's option has the right name."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def hint(name: str, known: Iterable[str], of_request: Collection[str]) -> str:
    """What to say of an unknown setting: a sentence after a blank, or nothing.

    Args:
        name: as it was written.
        known: settings that there are.
        of_request: fields of `SamplingParams`.
    """
    name = without_prefix(name)
    if name in ENGINE_ADVICE:
        return f" Here {ENGINE_ADVICE[name]}."
    if name in SAMPLING_ADVICE and name not in ENGINE_NAMES:
        return f" It belongs to a request: {SAMPLING_ADVICE[name]}."
    of_its = name if name in of_request else SAMPLING_NAMES.get(name)
    if of_its is not None:
        return f" It belongs to a request: SamplingParams({of_its}=...)."
    meant = meant_by(name, known, ENGINE_NAMES)
    note = f" ({NOTES[name]})" if name in NOTES else ""
    return "" if meant is None else f" Did you mean {meant!r}{note}?"


def names_what_is_meant[T: type](made: T) -> T:
    """A decorator of a dataclass of sampling parameters: an unknown keyword raises a TypeError that
    names the right one."""

    def meant(name: str, value: Any, known: Collection[str]) -> str:
        advice = SAMPLING_ADVICE.get(name)
        if advice is None and (right := meant_by(name, known, SAMPLING_NAMES)) is not None:
            advice = f"did you mean {right}={value!r}?"
        return f": {advice}" if advice else f". Its parameters are: {', '.join(known)}."

    return _refusing(made, "parameter", meant)


def no_attribute(owner: object, name: str, said: str = "") -> AttributeError:
    """The error of a missing attribute, with what is `said` of it; without that it names our
    setting where another tool has one of this name."""
    if not said and (name in ENGINE_NAMES or name in ENGINE_ADVICE):
        said = f".{hint(name, (), ())}"
    message = f"{type(owner).__name__!r} object has no attribute {name!r}{said}"
    return AttributeError(message, name=name, obj=owner)


def _missing(self: object, name: str) -> Any:
    raise no_attribute(self, name)


def names_settings_that_are_meant[T: type](made: T) -> T:
    """A decorator of a dataclass of an engine's settings, as `names_what_is_meant`; so are names of
    attributes that are read."""
    made.__getattr__ = _missing  # type: ignore[attr-defined]
    return _refusing(made, "setting", lambda name, _, known: f".{hint(name, known, ())}")


def _refusing[T: type](made: T, what: str, meant: Callable[[str, Any, Collection[str]], str]) -> T:
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
