"""The public names of Megatron-Core 0.19.2's context, engine and controller, what each is here, and
where a newer Megatron differs.

A test reads the names from Megatron's source, and docs/megatron_names.md is made of these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, wraps
from inspect import signature
from typing import TYPE_CHECKING, Any

from megatron_async.config import InferenceConfig
from megatron_async.other_names import answers_keywords, hint, no_attribute

BY_COMPAT = "the class of `megatron_async.compat.inference` has it"
A_SETTING = "`context.config` of `megatron_async.compat.inference` has it"
A_GROUP = "the model's own process groups serve: ask the model or `parallel_state`"
A_STEP = (
    "`engine.step_modern()` or `async_step()`; its halves are `engine.launch_step()` and "
    "`engine.resolve_step()`"
)
GRAPHS = "whole steps are captured, by `controller.create_cuda_graphs()`"
STATIC = "batches are always dynamic: `engine.generate(prompts, sampling_params)`"


@dataclass(frozen=True)
class ClassNames:
    """The public names of one class of Megatron's, those of its base class and of instances too.

    Attributes:
        own: what our class has, and so the class of `compat` too.
        compat: what the class of `compat` alone has.
        otherwise: what exists, but does something else: what -> names.
        absent: what to do instead, or why there is nothing to do -> names.
    """

    own: str = ""
    compat: str = ""
    otherwise: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def answers(self) -> dict[str, str]:
        """What to say of each name that our class or the class of `compat` lacks."""
        found = dict.fromkeys(self.compat.split(), BY_COMPAT)
        for text, names in self.absent.items():
            found |= dict.fromkeys(names.split(), text)
        return found


CLASSES = {
    "DynamicInferenceContext": ClassNames(
        own="block_size_tokens config has_unfinished_requests max_requests max_sequence_length "
        "max_tokens",
        compat="DEFAULT_MAX_TOKENS active_token_count async_sched_compaction_step_count "
        "async_sched_step_count block_size_bytes cuda_graph_batch_dimensions_list "
        "cuda_graph_token_counts enable_chunked_prefill enable_prefix_caching "
        "get_active_request_count get_kvcache_utilization_stats is_chunked_prefill_enabled "
        "is_decode_only is_dynamic_batching is_hybrid_model is_static_batching "
        "kv_block_allocator kv_cache_management_mode lifetime_prefill_token_count "
        "max_kv_block_count num_decode_requests num_prefill_requests num_speculative_tokens "
        "params_dtype paused_request_count reset static_kv_memory_pointers step_count "
        "total_request_count unified_memory_level using_cuda_graph_this_step",
        otherwise={
            "with other arguments, for the engine alone: call `engine.add_request`, and a step "
            "(`engine.step_modern()`) for its books": "add_request transfer_bookkeeping_to_gpu "
            "update_requests",
            "the device's snapshot of one plan, with other tensors": "gpu_view",
        },
        absent={
            "requests are booked by slot: `context.slots` has NumPy arrays of all, "
            "`engine.get_request(id)` one": "active_request_metadata chunked_prefill_request_id "
            "get_active_sequence_lengths get_index_of_chunked_prefill_request "
            "get_max_sequence_lengths paused_speculative_tokens paused_tokens request_ids "
            "request_in_prefill_status_tensor request_kv_block_counts request_kv_length_offsets "
            "request_last_kv_block_id request_last_kv_block_offset request_metadata "
            "request_output_lengths request_query_lengths request_to_kv_block_ids",
            "a step's inputs follow from its plan (`engine.launch_step().plan`) on the device, in "
            "`context.gpu_view`": "active_attn_metadata active_logit_idxs "
            "active_request_last_token_idxs batch_dimensions build_active_slices "
            "cu_kv_lengths cu_query_lengths current_input_and_position_ids graph_attn_metadata "
            "last_token_logits moe_routing_metadata mtp_decoder_hidden_states "
            "non_graph_attn_metadata num_last_token_logits pad_active_slices "
            "padded_active_request_count padded_active_token_count padded_batch_dimensions "
            "padding_slice speculative_required_logit_indices token_to_block_idx "
            "token_to_input_ids token_to_local_position_within_kv_block token_to_pos_ids "
            "token_to_position_in_request token_to_request_idx",
            "layers write and read `context.gpu_view`, which turns queries and keys and has the "
            "`kv_cache`": "append_key_value_cache apply_fused_qk_rotary_emb apply_rotary_emb_key "
            "apply_rotary_emb_query key_value_cache memory_buffer",
            "recurrent states lie in `context.gpu_view.states`; snapshots are rows of the same "
            "pools": "mamba_chunk_size mamba_conv_states mamba_conv_states_dtype "
            "mamba_conv_states_shape mamba_intermediate_conv_states mamba_intermediate_ssm_states "
            "mamba_metadata mamba_slot_allocator mamba_ssm_states mamba_ssm_states_dtype "
            "mamba_ssm_states_shape mamba_states_cache max_mamba_intermediate_states_per_step",
            "`engine.suspend()` gives memory back, `engine.resume()` takes it again": "TMS_TAG "
            "deallocate_inference_state_buffers initialize_all_tensors is_tensor_state_allocated "
            "reinitialize_inference_state_buffers unified_memory_mempool",
            "`engine.reset()` of `megatron_async.compat.inference` begins anew":
            "reset_attention_state reset_mamba_state reset_metadata reset_tensors",
            A_STEP: "can_prepare_requests check_availability commit_sampled_tokens "
            "copy_async_sched_sample_to_forward evict_overflow_paused_requests "
            "initialize_attention_state prepare_requests "
            "release_memory_blocks_from_request_indexes resolve_requests resume_paused_requests",
            "a step without requests is `engine.launch_dummy_step()`":
            "add_dummy_requests_for_expert_parallel_step add_dummy_requests_parallel "
            "set_ep_zmq_communicator",
            GRAPHS: "add_dummy_requests_for_cudagraph_capture inference_cuda_graph_scope "
            "is_creating_cuda_graphs",
            "nothing is rounded; the padded shapes are `context.graph_shapes`": "REQUEST_ROUNDER "
            "TOKEN_ROUNDER round_up_requests round_up_tokens",
            "`SamplingParams(return_log_probs=True)`": "calculate_log_probs "
            "calculate_log_probs_tensors",
            "`engine.stats()` counts (docs/observing.md)": "prefix_cache_blocks_matched "
            "prefix_cache_hits prefix_cache_lru_clock prefix_cache_prefill_computed_tokens "
            "prefix_cache_prefill_skipped_tokens",
            A_SETTING: "prefix_caching_coordinator_policy prefix_caching_eviction_policy "
            "prefix_caching_routing_alpha request_metadata_types "
            "use_cuda_graphs_for_non_decode_steps use_flashinfer_fused_rope",
            "`context.model_config` describes the model": "cache_mla_latent hidden_size "
            "hidden_size_per_attention_head inference_grouped_gemm_backend kv_reduced_dim "
            "layer_map moe_enable_routing_replay num_attention_heads_per_partition "
            "num_attention_layers num_mamba_layers",
            A_GROUP: "expert_model_parallel_group pipeline_parallel_group",
            "of static batches; with dynamic ones Megatron's does nothing: leave the call out":
            "increment_batch_size_offset increment_sequence_len_offset reset_batch_size_offset",
        },
    ),
    "DynamicInferenceEngine": ClassNames(
        own="add_request async_step context controller generate get_request "
        "has_unfinished_requests resume run_engine state step_modern suspend",
        compat="capture_stats create_cuda_graphs decode_only enable_chunked_prefill "
        "engine_loop_task evicted_request_count finished_request_count "
        "get_prefix_coordination_metrics logging_step_interval "
        "materialize_only_last_token_logits metrics_writer num_speculative_tokens "
        "pg_collection reset run_engine_with_coordinator shutdown "
        "start_listening_to_data_parallel_coordinator step step_legacy suspend_resume_ctx "
        "track_generated_token_events track_paused_request_events "
        "unified_memory_level use_coordinator wait_until waiting_request_ids",
        otherwise={
            "a registry of unfinished requests, no dictionary of records": "requests",
        },
        absent={
            A_STEP: "async_bookkeep async_forward post_process_requests schedule_chunked_prefill "
            "schedule_non_chunked_prefill schedule_waiting_requests",
            "`engine.get_request(id)` has an unfinished request, the report those that ended":
            "chunked_prefill_request_id failed_request_ids request_counter resume_request_ids",
            "`SamplingParams(stop_words=...)`, matched on the text": "stop_word_being_finished_ids "
            "stop_word_finished_request_ids",
            "`report['step_time']`, and `logging_step_interval` for times on the device":
            "step_end_event step_start_event",
            "a run of `metrics_writer` counts from 1 (docs/megatron.md)":
            "inference_step_offset",
            A_SETTING: "cuda_graph_all_prefills disable_ep_consensus ep_consensus_interval "
            "use_synchronous_zmq_collectives",
            GRAPHS: "cuda_graph_impl cuda_graph_modules inference_cuda_graph_scope",
            A_GROUP: "ep_rank ep_world_size rank",
            "`engine_loop_task`, which `start_listening_to_data_parallel_coordinator` of "
            "`megatron_async.compat.inference` starts, takes the coordinator's messages in; "
            "`add_request` gives requests of this process":
            "expert_parallel_zmq_communicator inference_coordinator_process is_dp_coordinator "
            "is_mp_coordinator model_parallel_publisher_socket model_parallel_subscriber_socket "
            "schedule_requests socket_for_receiving_requests world_zmq_communicator zmq_context "
            "zmq_sockets",
        },
    ),
    "TextGenerationController": ClassNames(
        own="inference_wrapped_model tokenizer vocab_size",
        compat="detokenize model_config num_speculative_tokens sampling_rng",
        otherwise={
            "our class's takes a text; the one of `compat` takes a tokenizer first, as Megatron's":
            "tokenize_prompt",
        },
        absent={
            A_STEP: "async_generate_output_tokens_dynamic_batch "
            "generate_output_tokens_dynamic_batch",
            "a step without requests is `engine.launch_dummy_step()`": "dummy_forward",
            "`SamplingParams`: sampling is part of a step": "sample_from_logits",
            "`SamplingParams(stop_words=...)`, matched on the text":
            "set_stop_word_finished_ids_callback",
            "`SamplingParams(return_segments=True)` of `megatron_async.compat.inference`":
            "detokenize_generations",
            "`engine.stream(id)`": "stream_tokens",
            STATIC: "generate_all_output_tokens_static_batch pad_input_prompt_tokens "
            "prep_inference_input unpad_input_prompt_tokens update_generation_status",
            "`context.config.num_speculative_tokens`": "num_mtp_depths",
            A_GROUP: "dp_group model_is_pipeline_parallel pp_group",
        },
    ),
}  # fmt: skip
"""By the name of the class."""


MAIN = "d98e8a64"
"""Megatron-LM's main of 22 Aug 2026. What `OF_MAIN` has is there with 0.19.2 too."""
NO_HANDOFF = "prefill and decode are not divided among engines here: leave it out"
OF_MAIN = {
    "DynamicInferenceEngine": ClassNames(
        compat="local_metadata_ledger local_metadata_ledger_enabled",
        absent={
            NO_HANDOFF: "add_request_with_kv_handoff has_admittable_kv_import "
            "pending_kv_import_count pending_kv_push_count push_handoff_kv release_handoff_blocks "
            "setup_kv_transfer",
        },
    ),
    "DynamicInferenceContext": ClassNames(
        absent={
            "replicas tell the coordinator what they hold (docs/serving.md)": "dynamo_helper",
            "only text is served": "add_vlm_request_data remove_vlm_request_data",
        }
    ),
    "InferenceClient": ClassNames(
        compat="abort_request add_request_streaming",
        absent={
            NO_HANDOFF: "add_request_with_kv_handoff add_request_with_kv_handoff_streaming "
            "release_handoff",
        },
    ),
    "KVBlockCounts": ClassNames(compat="get_allocatable_count paused_limit pool_size"),
    "MegatronLLM": ClassNames(compat="run_sync serve submit"),
    "MegatronAsyncLLM": ClassNames(compat="run_sync submit"),
}
"""Names of main by the name of our class."""
PARAMS_OF_MAIN = {"streaming": "", "streaming_interval": "", "do_kv_handoff": NO_HANDOFF}
"""Fields of main's `SamplingParams` that ours lack: "" has no effect on an answer that is whole, a
text says why True is refused. (`seed`, which threads speak of and main lacks, is ours by name.)"""


OF_THE_MODEL = (
    "params_dtype num_layers kv_channels num_attention_heads num_query_groups layer_type_list "
    "kv_lora_rank qk_pos_emb_head_dim mamba_conv_states_shape mamba_ssm_states_shape "
    "tensor_model_parallel_size pipeline_model_parallel_size"
)
"""What contexts of older versions took and `model_config` says."""


class NamesOfMegatron:
    """Says of a missing attribute, or an unknown argument of the constructor and of the methods
    that take requests, what is here instead, where Megatron's class has it (or one of its older
    versions), or another tool has a setting of this name."""

    def __init_subclass__(cls) -> None:
        for name in vars(cls).keys() & {"add_request", "generate"}:
            setattr(cls, name, answers_keywords(vars(cls)[name]))

    if not TYPE_CHECKING:  # else every attribute and argument would exist

        def __new__(cls, *args: Any, **values: Any) -> Any:
            taken = signature(cls.__init__).parameters
            hands_on = any(each.kind is each.VAR_KEYWORD for each in taken.values())
            for name in () if hands_on else values.keys() - taken.keys():
                said = _of_argument(_names_of(cls), name)
                raise TypeError(f"{cls.__name__}() takes no argument {name!r}{said}")
            return super().__new__(cls)

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property, whose own error this is
                return object.__getattribute__(self, name)
            answer = _names_of(type(self)).answers.get(name)
            said = f", which Megatron's has: {answer} (docs/megatron_names.md)" if answer else ""
            raise no_attribute(self, name, said)


def answers_calls[T: type](kind: T) -> T:
    """A decorator of a class of `compat`: methods that are another thing here raise a TypeError
    with the words of their row, when they get Megatron's arguments, which are none of our classes.

    Our own classes go without it: a step calls these methods, and a wrapper is time.
    """
    for text, names in _names_of(kind).otherwise.items():
        for name in names.split():
            if callable(method := getattr(kind, name, None)):
                setattr(kind, name, _answered(method, text))
    return kind


def _answered(method: Callable[..., Any], text: str) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Any, *args: Any, **values: Any) -> Any:
        if not any(type(each).__module__.startswith("megatron_async.") for each in args[:1]):
            raise TypeError(
                f"{method.__name__}() is another thing here than Megatron's: {text} "
                "(docs/megatron_names.md)"
            )
        return method(self, *args, **values)

    return call


def _names_of(kind: type) -> ClassNames:
    found = [each.__name__ for each in kind.__mro__]
    name = next((name for name in found if name in CLASSES or name in OF_MAIN), "")
    known, newer = CLASSES.get(name, ClassNames()), OF_MAIN.get(name, ClassNames())
    return replace(known, absent={**known.absent, **newer.absent})


def _of_argument(names: ClassNames, name: str) -> str:
    """What to say of an argument that a constructor lacks."""
    settings = {field.name for field in fields(InferenceConfig)}
    if name in settings:
        return f": it is a setting, InferenceConfig({name}=...)."
    if name in OF_THE_MODEL.split():
        return ": model_config describes the model."
    if said := hint(name, settings):
        return f".{said}"
    answer = names.answers.get(name, BY_COMPAT)
    return "." if answer == BY_COMPAT else f": {answer}."
