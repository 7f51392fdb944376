"""Settings by the names that vLLM, SGLang, llama.cpp, TGI, Hugging Face, RTP-LLM and Megatron-LM's
own command line give them, and what to write here.

One table for Python and the command line (`cli/parser.py`), which writes the same names as options.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import iscoroutinefunction, markcoroutinefunction, signature
from typing import Any

from megatron_async.errors import ConfigurationError
from megatron_async.requests.parameter_names import (
    SAMPLING_ADVICE,
    SAMPLING_NAMES,
    by_name,
    meant_by,
    refusing,
)
from megatron_async.requests.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

SHORT_BUDGET = 256
"""A smaller `max_tokens` of an engine was most likely meant for an answer."""


ENGINE_NAMES = by_name({
    # Lengths and numbers of requests
    "max_sequence_length": "max_model_len max_seq_len context_length ctx_size n_ctx "
    "max_total_tokens max_seq_length max_tokens_to_oom",
    "max_requests": "max_num_seqs max_running_requests max_batch_size max_concurrent_requests "
    "concurrency_limit parallel max_requests_override",
    "max_tokens": "max_num_batched_tokens max_batch_prefill_tokens max_prefill_tokens "
    "chunked_prefill_size batch_size max_tokens_override",
    "enable_chunked_prefill": "enable_mixed_chunk",
    # Memory
    "block_size_tokens": "block_size page_size seq_size_per_block chunk_size chunk_size_tokens",
    "buffer_size_gb": "gpu_memory_utilization mem_fraction_static cuda_memory_fraction "
    "kv_cache_memory_bytes active_buffer_size_gb",
    "kv_cache_dtype": "cache_type_k cache_type_v",
    "num_kv_blocks": "num_gpu_blocks_override max_batch_total_tokens",
    "enable_sleep_mode": "enable_memory_saver persist_cuda_graphs static_kv_memory_pointers",
    "enable_prefix_caching": "reuse_cache enable_radix_cache prefix_caching",
    "enable_prefix_caching=False": "disable_radix_cache no_prefix_caching",
    "mamba_ssm_states_dtype": "mamba_inference_ssm_states_dtype",
    # Steps
    "lookahead=1": "async_scheduling enable_async_scheduling",
    "lookahead=0": "no_async_scheduling disable_overlap_schedule",
    "num_cuda_graphs=0": "enforce_eager disable_cuda_graph",
    "num_cuda_graphs": "cuda_graphs cuda_graph_bs cuda_graph_sizes cuda_graph_max_bs "
    "enable_cuda_graph external_cuda_graph cuda_graph_impl",
    "use_cuda_graphs_for_non_decode_steps=False": "decode_only_cuda_graphs",
    "speculative_method": "speculative_config speculative_algorithm sp_type",
    "draft_layer": "speculative_model model_draft sp_checkpoint_path",
    "num_speculative_tokens": "speculate draft_max speculative_num_steps "
    "speculative_num_draft_tokens gen_num_per_cycle gen_num_per_circle",
    "enable_routing_replay": "enable_return_routed_experts moe_enable_routing_replay",
    "inference_sampling_seed": "random_seed",
    "nvtx": "nvtx_ranges",
    # The model, its arithmetic and its ranks
    "dtype": "torch_dtype params_dtype",
    "quantization": "quantize",
    "quantization='int8'": "load_in_8bit",
    "quantization='auto'": "load_in_4bit",
    "attention_backend": "attn_implementation",
    "batch_invariant_mode": "batch_invariant enable_deterministic_inference deterministic",
    "device": "device_map",
    "device='cuda'": "n_gpu_layers gpu_layers ngl",
    "tensor_model_parallel_size": "tensor_parallel_size tp_size tp num_shard",
    "pipeline_model_parallel_size": "pipeline_parallel_size pp_size pp",
    "expert_model_parallel_size": "expert_parallel_size enable_expert_parallel ep_size ep",
    "dtype='bfloat16'": "bf16",
    "dtype='float16'": "fp16",
})  # fmt: skip
"""Settings of an engine: name elsewhere -> name here, with its value where that is another."""

NOTES = by_name({
    "GiB of the KV pool, not a share of the memory": "gpu_memory_utilization mem_fraction_static "
    "cuda_memory_fraction",
    "in GiB": "kv_cache_memory_bytes",
    "in blocks of block_size_tokens": "max_batch_total_tokens",
    "tokens of a step": "batch_size max_num_batched_tokens",
})  # fmt: skip
"""Where the unit or the meaning is another one too."""

ENGINE_ADVICE = by_name({
    "replicas are processes: `megatron-async serve --replicas N`":
    "data_parallel_size dp_size dp",
    "no code of a model's folder is run, and none is needed": "trust_remote_code",
    "LoRA is not served: merge it into the weights": "enable_lora lora lora_modules max_loras",
    "nothing is swapped: paused requests are computed again": "swap_space",
    "weights are not offloaded: try a quantized model or more ranks": "cpu_offload_gb",
    "the format is told by the files": "load_format",
    "the tokenizer is read from the model's folder":
    "tokenizer tokenizer_path tokenizer_mode tokenizer_model tokenizer_type "
    "tokenizer_name_or_path",
    "write it behind the model's id: ORG/NAME@REVISION": "revision",
    "threads of a CPU: set OMP_NUM_THREADS in the environment": "n_threads threads",
    "the fastest attention that runs here is chosen: attention_backend names one":
    "flash_attn flash_decode",
    "kernels are compiled as they are needed: there is nothing to set": "compilation_config",
    "write it into the model's config.json": "rope_scaling hf_overrides",
    "a request's own parameters count, then the model's generation_config.json: leave it out":
    "generation_config",
    "each request says it, else the model's generation_config.json: write it there":
    "override_generation_config",
    "prompts may be token ids: leave it out": "skip_tokenizer_init",
    "weights are read into memory: leave it out": "mlock mmap no_mmap",
    "Hugging Face's own variables say it: HF_TOKEN, HF_HOME, HF_HUB_OFFLINE":
    "hf_token token download_dir cache_dir",
    "only text is made, from text: leave it out":
    "limit_mm_per_prompt mmproj embedding task runner output_bert_embeddings bert_embedder_type",
    "the program's logging says it (logger 'megatron_async'): leave it out":
    "verbose disable_log_stats log_level",
    "write it into the model's folder as chat_template.jinja": "chat_template",
    "every step that is resolved tells which requests ended: leave it out":
    "finished_sync_period",
    "it is always so: leave it out": "dynamic_batching",
    "there is one engine, with dynamic batches: leave it out": "use_legacy_static_engine",
    "pipeline stages take turns with parts of the requests: leave it out":
    "batch_times_seqlen_threshold",
    "max_requests says it: recurrent states take what so many requests need, KV blocks the "
    "rest": "mamba_memory_ratio",
    "the KV cache lies in device memory alone: leave it 0, or out": "unified_memory_level",
    "rope is fused into the engine's own kernel: leave it out": "use_flashinfer_fused_rope",
    "inputs of convolutions keep the dtype of activations: leave it out":
    "mamba_inference_conv_states_dtype",
    "blocks are kept until they are needed (LRU): leave it out": "prefix_caching_eviction_policy",
    "a coordinator knows load and shared prefixes (docs/serving.md): leave it out":
    "prefix_caching_coordinator_policy prefix_caching_routing_alpha",
    "engine.suspend(free_kv_cache=True) says it: leave it out": "kv_cache_management_mode",
    "sampling has kernels of its own: leave it out": "sampling_backend",
    "each request says it: SamplingParams(logprobs_mode=...)": "logprobs_mode",
    "requests have no tensors on the device but their records: leave it out":
    "request_metadata_types",
    "`metrics_writer` of megatron_async.compat's InferenceConfig takes a run of wandb; a "
    "server has /metrics": "wandb_logging",
    "each model is a replica of its own (docs/serving.md); a replica both prefills and "
    "decodes": "shards",
    "the engine measures which shapes pay, and captures whole steps of those: leave it out":
    "cuda_graph_all_prefills cuda_graph_max_tokens cuda_graph_sizing_distribution "
    "cuda_graph_scope cuda_graph_modules",
    "ranks that share experts agree once a step, on the CPU: leave it out":
    "use_synchronous_zmq_collectives disable_ep_consensus ep_consensus_interval",
    "a request's samples do not depend on the replica: leave it out":
    "use_same_sampling_seed_across_dp_ranks offset_sampling_seed_by_dp_rank",
    "it goes with Megatron's own objects: the InferenceConfig of "
    "megatron_async.compat.inference takes it":
    "mamba_inference_state_config pg_collection metrics_writer "
    "track_paused_request_events track_generated_token_events",
    "a request that finds no block is paused, or computed again: leave it out":
    "buffer_guaranteed_fraction",
    "max_requests and max_tokens say it": "buffer_overflow_factor",
    "latent attention is not served: leave it out": "cache_mla_latent",
    "engine.suspend(free_kv_cache=True, copies=['kv_cache']) does it: leave it out":
    "offload_kv_cache",
    "convolutions have a kernel of their own: leave it out": "mamba_triton_conv1d",
    "the model's configuration says it: leave it out": "inference_wrapper_config wrapper_config",
    "random numbers follow from a request's seed, without a state: leave it out": "rng_tracker",
    "experts are split as the rest is, over all ranks of tensor parallelism: leave it out":
    "expert_tensor_parallel_size",
})  # fmt: skip
"""Settings that exist elsewhere and have no name here, with what to do."""

MEGATRONS_PREFIX = re.compile(r"^(no_)?inference_(?:dynamic_batching_)?")


def without_prefix(name: str) -> str:
    """A name as it is without what Megatron-LM's command line writes before most settings of its
    engine: `inference_dynamic_batching_max_tokens` is `max_tokens`."""
    bare = MEGATRONS_PREFIX.sub(r"\1", name)
    return bare if bare == name or bare in ENGINE_NAMES else bare.removeprefix("no_")


def check_engine_names(given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Check the settings of an `LLM`, and say of a step's budget what it is.

    Args:
        given: by the names that were written.
        known: settings that there are, in the order in which they are told.

    Raises:
        ConfigurationError: there is no such setting; the message says what was meant.
    """
    for name in given:
        if name not in known:
            raise ConfigurationError(
                f"{name!r} is not a setting of LLM or InferenceConfig."
                f"{hint(name, known)} "
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


def hint(name: str, known: Collection[str]) -> str:
    """What to say of an unknown setting: a sentence after a blank, or nothing.

    Args:
        name: as it was written.
        known: settings that there are.
    """
    of_request = SamplingParams.__dataclass_fields__
    name = without_prefix(name)
    if name in known:
        return f" Did you mean {name!r}?"
    if name in ENGINE_ADVICE:
        return f" Here {ENGINE_ADVICE[name]}."
    of_its = name if name in of_request else SAMPLING_NAMES.get(name)
    if name not in ENGINE_NAMES and (name in SAMPLING_ADVICE or of_its is not None):
        advice = SAMPLING_ADVICE.get(name, f"SamplingParams({of_its}=...)")
        return f" It belongs to a request: {advice}."
    meant = meant_by(name, known, ENGINE_NAMES)
    note = f" ({NOTES[name]})" if name in NOTES else ""
    return "" if meant is None else f" Did you mean {meant!r}{note}?"


def answers_keywords[**P, R](method: Callable[P, R]) -> Callable[P, R]:
    """A decorator of a method that takes requests: the TypeError of an unknown keyword says where
    it belongs."""
    taken = signature(method).parameters.keys()

    @wraps(method)
    def call(*args: P.args, **values: P.kwargs) -> R:
        try:
            return method(*args, **values)
        except TypeError:
            for name in values.keys() - taken:
                raise TypeError(
                    f"{method.__qualname__}() takes no argument {name!r}.{hint(name, taken)}"
                ) from None
            raise

    return markcoroutinefunction(call) if iscoroutinefunction(method) else call


def no_attribute(owner: object, name: str, said: str = "") -> AttributeError:
    """The error of a missing attribute, with what is `said` of it; without that it names our
    setting where another tool has one of this name."""
    if not said and (name in ENGINE_NAMES or name in ENGINE_ADVICE):
        said = f".{hint(name, ())}"
    message = f"{type(owner).__name__!r} object has no attribute {name!r}{said}"
    return AttributeError(message, name=name, obj=owner)


def _missing(self: object, name: str) -> Any:
    raise no_attribute(self, name)


def _assign(self: Any, name: str, value: Any) -> None:
    known = self.__dataclass_fields__
    if name in known or name.startswith("_") or hasattr(type(self), name):
        object.__setattr__(self, name, value)
        return
    raise no_attribute(self, name, f".{hint(name, known)}")


def names_settings_that_are_meant[T: type](made: T) -> T:
    """A decorator of a dataclass of an engine's settings, as `names_what_is_meant`; so are names of
    attributes that are read or set."""
    made.__getattr__ = _missing  # type: ignore[attr-defined]
    made.__setattr__ = _assign  # type: ignore[assignment]
    return refusing(made, "setting", lambda name, _, known: f".{hint(name, known)}")
