"""Which of Megatron-LM's inference tests are run, and which are not, each with its reason."""

FOLDER = "tests/unit_tests/inference/"

SERVED = "served here, refused by Megatron"
DATA = "Megatron's own data classes"
OWN = "Megatron's own, by the mirror's fall-through"
ENGINE = "this engine's classes"

PUBLIC: dict[str, tuple[str, dict[str, str]]] = {
    "test_inference_config.py": (DATA, {}),
    "test_common_inference_params.py": (DATA, {}),
    "test_inference_request.py": (DATA, {}),
    "test_stop_words.py": (DATA, {}),
    "engines/test_dynamic_events.py": (DATA, {}),
    "test_batch_dimension_utils.py": (OWN, {}),
    "test_async_stream.py": (OWN, {}),
    "test_async_sched_output_metrics.py": (OWN, {}),
    "test_openai_streaming.py": (OWN, {}),
    "high_level_api/test_apis.py": (
        ENGINE,
        {
            "*test_async_llm_requires_use_coordinator": f"async direct mode: {SERVED}",
            "*test_sync_lifecycle_raises_in_direct_mode*": f"pause in direct mode: {SERVED}",
            "*test_sync_serve_primary_rank_starts_frontend": "patches a module that it names in a "
            "string, which the import hook does not see",
        },
    ),
}
"""Files below `FOLDER`: what they exercise with the hook, and their tests (by pattern) that do not
count, each with its reason."""

ON_A_GPU: dict[str, tuple[str, dict[str, str]]] = {"engines/test_dynamic_engine.py": (ENGINE, {})}
"""The same, for files that import TransformerEngine and compute on a GPU."""

LAYOUT = "white box: the layout of Megatron's buffers and private methods of its bookkeeping"
STATIC = "static batching is Megatron's own engine, with and without the hook"
HANDOFF = "prefill and decode are not divided among engines here"
LAYERS = "Megatron's layers and kernels, which are not asked for here"

OUT = {
    "test_inference_client.py": "white box: bytes of Megatron's messages on a ZMQ socket that is "
    "a stand-in; ours are others (tests/functional_tests/compat/test_megatron_coordinator.py)",
    "test_data_parallel_inference_coordinator.py": "white box: an engine made without __init__, "
    "whose step speaks Megatron's messages (the same test of ours)",
    "test_dynamic_prefix_caching_coordinator.py": "white box: private methods and tables of "
    "Megatron's routing; ours is another (tests/unit_tests/serving)",
    "high_level_api/test_event_loop_manager.py": "white box: a private class",
    "engines/test_async_zmq_communicator.py": "white box: instances made by __new__",
    "contexts/test_dynamic_context.py": LAYOUT,
    "contexts/test_dynamic_prefix_caching.py": LAYOUT,
    "contexts/test_fused_kv_append_kernel.py": LAYOUT,
    "contexts/test_gpu_view.py": LAYOUT,
    "contexts/test_kv_block_allocator.py": LAYOUT,
    "contexts/test_routing_metadata.py": LAYOUT,
    "contexts/attention_metadata/test_mamba_metadata.py": LAYOUT,
    "contexts/attention_metadata/test_metadata_base.py": LAYOUT,
    "contexts/attention_metadata/test_mha_metadata.py": LAYOUT,
    "contexts/attention_metadata/test_tensor_ops.py": LAYOUT,
    "engines/test_cg_admission_gating.py": LAYOUT,
    "engines/test_dynamic_engine_async_sched.py": LAYOUT,
    "engines/test_hybrid_prefix_caching_e2e.py": LAYOUT,
    "engines/test_prefix_caching_cuda_graphs.py": LAYOUT,
    "test_wandb_logging.py": LAYOUT,
    "text_generation_controllers/test_text_generation_controller.py": LAYOUT,
    "text_generation_controllers/test_mtp_utils.py": LAYOUT,
    "test_mtp_cuda_graph_inference.py": LAYOUT,
    "engines/test_static_engine.py": STATIC,
    "model_inference_wrappers/gpt/test_gpt_inference_wrapper.py": STATIC,
    "model_inference_wrappers/t5/test_t5_inference_wrapper.py": STATIC,
    "text_generation_controllers/test_encoder_decoder_text_generation_controller.py": STATIC,
    "text_generation_controllers/test_vlm_text_generation_controller.py": STATIC,
    "test_scheduler.py": STATIC,
    "test_flash_decode.py": STATIC,
    "test_communication_utils.py": LAYERS,
    "test_inference_client_streaming.py": "white box: bytes of Megatron's messages, as in "
    "test_inference_client.py (test_dynamo in tests/functional_tests/compat/test_caller_dynamo.py)",
    "contexts/test_kv_event_publication.py": "events of KV blocks for a router of other services: "
    "replicas tell the coordinator what they hold",
    "test_kv_allocator_observers.py": LAYOUT,
    "test_disagg_handoff_lifecycle.py": HANDOFF,
    "test_kv_transfer_backends.py": HANDOFF,
    "test_nccl_transfer_backend.py": HANDOFF,
    "test_ssm_reshard.py": HANDOFF,
    "test_vllm_fused_moe_batch_invariant.py": LAYERS,
    "engines/test_gdp_cuda_graph_e2e.py": "layers of a kind (Gated Delta Product) that no model "
    "here has",
    "test_dynamic_sink_attention.py": LAYERS,
    "test_dynamic_sink_attention_e2e.py": "attention sinks are refused by name",
    "test_hybrid_moe.py": LAYERS,
    "test_inference_shards.py": LAYERS,
    "test_inference_utils.py": LAYERS,
    "test_kv_reshard.py": HANDOFF,
    "test_mamba_reshard.py": HANDOFF,
    "test_moe_dispatching_and_routing.py": LAYERS,
    "test_moe_permute.py": LAYERS,
    "test_mxfp8_utils.py": LAYERS,
    "test_vllm_fused_moe.py": LAYERS,
}
"""Files below `FOLDER` that are not run."""


def unlisted(files: list[str]) -> list[str]:
    """Of test files below `FOLDER`, those that no table here names (a newer Megatron has some)."""
    return sorted(set(files) - set(PUBLIC) - set(ON_A_GPU) - set(OUT))
