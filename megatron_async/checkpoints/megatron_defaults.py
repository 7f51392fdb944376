"""What the training arguments of Megatron-LM mean where they are silent, which values are served,
and which arguments may be passed over.

An argument that `megatron_args` asks for is not among the harmless. Every other option of the
parser and every field of `TransformerConfig` (Megatron-Core 0.19.2; an argument of a field's name
is that field) stands here, with the values that are served or with the reason why it changes no
answer: a test walks them. What stands nowhere is unknown.
"""

from __future__ import annotations

import re
from fnmatch import translate
from typing import Any

from megatron_async.models.sizes import CONV_KERNEL

SUPPORTED: dict[str, tuple[Any, ...]] = {
    "normalization": ("RMSNorm",),
    "position_embedding_type": ("rope", "none", "yarn"),
    "add_bias_linear": (False, True),
    "rotary_interleaved": (False,),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "rope_type": (None, "rope"),
    "no_rope_freq": (None,),
    "softmax_type": ("vanilla", "learnable", "off-by-one"),
    "softmax_scale": (None,),
    "apply_residual_connection_post_layernorm": (False,),
    "openai_gelu": (False,),
    "moe_mlp_glu_interleave_size": (None,),
    "moe_shared_expert_glu_interleave_size": (None,),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "heterogeneous_block_specs": (False,),
    "yaml_cfg": (None,),
    "decoder_num_layers": (None,),
    "retro_add_retriever": (False,),
    "experimental_attention_variant": (None, "gated_delta_net"),
    "moe_router_score_function": ("softmax", "sigmoid"),
    "moe_router_num_groups": (None,),
    "moe_router_group_topk": (None,),
    "moe_router_topk_limited_devices": (None,),
    "moe_router_force_load_balancing": (False,),
    "moe_router_force_biased": (None,),
    "moe_apply_probs_on_input": (False,),
    "moe_token_dropping": (False,),
    "moe_expert_capacity_factor": (None,),
    "moe_expert_rank_capacity_factor": (None,),
    "moe_latent_size": (None,),
    "multi_latent_attention": (False,),
    "qk_l2_norm": (False,),
    "linear_conv_kernel_dim": (CONV_KERNEL, None),
    "use_mup": (False,),
    "enable_mhc_connections": (False,),  # of a later Megatron-Core: several residual streams
}
"""Arguments that change the computation, and the values that are served. Absent is not set."""

MEGATRON_DEFAULTS: dict[str, Any] = {
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "add_bias_linear": True,
}
"""Values that absent arguments stand for, where these are not served either."""

SIZE_DEFAULTS = {
    "mamba_head_dim": 64,
    "mamba_state_dim": 128,
    "mamba_num_groups": 8,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
"""Sizes of recurrent layers where the arguments are silent: Megatron-Core's."""

RENAMED = {
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
}
"""Arguments of Megatron-Core 0.19's parser, which has `TransformerConfig`'s names, and what they
were called before."""

ONLY_IN_SOME = (
    *SIZE_DEFAULTS, "mamba_num_heads", "linear_attention_freq",
    "num_layers", "num_query_groups", "rope_scaling_factor", "hybrid_override_pattern",
    "window_attn_skip_freq",
    "yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings", "yarn_beta_fast",
    "yarn_beta_slow", "yarn_mscale", "yarn_mscale_all_dim", "yarn_correction_range_round_to_int",
    "mtp_use_repeated_layer", "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk",
    "moe_router_topk_scaling_factor", "moe_router_load_balancing_type", "moe_router_pre_softmax",
    "moe_router_enable_expert_bias", "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate", *RENAMED.values(),
)  # fmt: skip
"""Arguments that are read of some models, and have no meaning for others."""

_REASONS: dict[str, str] = {
    "it means something only with another argument, of which no such value is served": """
        *yarn_* beta_fast beta_slow mscale mscale_all_dim mrope_section rotary_scaling_factor
        original_max_position_embeddings relative_attention_* q_lora_rank kv_lora_rank qk_head_dim
        qk_pos_emb_head_dim v_head_dim cache_mla_latents dsa_* gdp_* mup_* mhc_* retro_*
        moe_token_drop_policy moe_pad_expert_input_to_capacity""",
    "it is noise for training: no answer is better by it": """
        moe_input_jitter_eps""",
    "other arguments say the same": """
        add_position_embedding use_rotary_position_embeddings gated_linear_unit activation_func
        num_moe_experts encoder_num_layers hybrid_*_ratio model_type""",
    "it changes rounding alone: a model computes in the dtype that was asked for": """
        fp16 bf16 params_dtype pipeline_dtype *autocast* fp8* fp4* first_last_layers_bf16
        num_layers_at_*_in_bf16 tp_only_amax_red quant_recipe te_precision_config_file *kitchen*
        activation_func_fp8_input_store keep_fp8_* attention_softmax_in_fp32
        apply_query_key_layer_scaling fp32_residual_connection
        disable_bf16_reduced_precision_matmul moe_router_dtype moe_router_padding_for_*
        mamba_*_states_dtype logit_dtype""",
    "it says by which kernels, buffers and ranks the same is computed": """
        *_fusion *_fused_rope fused_* attention_backend flash_* use_flash_attn batch_invariant_*
        *persist_layer_norm memory_efficient_layer_norm use_te_* te_rng_tracker use_fused_*
        transformer_impl use_transformer_engine_op_fuser use_grouped_gemm_* moe_*grouped_*
        deterministic_mode *recompute* distribute_saved_activations onnx_safe disable_jit_fuser
        *mamba_mem_eff_path mlp_chunks_* clone_scatter_output_in_embedding
        disable_parameter_transpose_cache symmetric_ar_type nccl_* *cuda_graph* inference_*
        use_inference_optimized_layers use_legacy_static_engine *chunked_prefill
        num_speculative_tokens max_tokens_to_oom offset_sampling_seed_by_dp_rank *parallel_size
        *_model_parallel_* sequence_parallel *_context_parallel* max_seqlen_per_dp_cp_rank
        cp_comm_type tp_comm_* *_num_weight_shards *gtp_* *_pipeline_num_layers *_pipeline_stage
        *_virtual_stages_per_pipeline_rank *_per_vp_stage *_in_pipeline* mtp_standalone
        standalone_embedding_stage deallocate_pipeline_outputs variable_seq_lengths *p2p_*
        use_ring_exchange_p2p overlap_* delay_* ep_overlap_* align_* *offload* high_priority_*
        moe_extended_tp moe_token_dispatcher_type moe_flex_dispatcher_* moe_*deepep* moe_hybridep_*
        moe_ncclep_* moe_permute_* moe_paged_* moe_shared_expert_overlap moe_dispatch_*_dtype
        moe_combine_*_dtype moe_enable_routing_replay *use_mcore_models use_legacy_models
        enable_experimental config_logger_dir""",
    "only training reads it": """
        hidden_dropout attention_dropout *init_method* *_initialization init_model_with_meta_device
        calculate_per_token_loss *_loss_coeff *cross_entropy* mtp_loss_scaling_factor
        mtp_detach_heads mtp_hsm moe_router_bias_update_rate moe_router_quantile_balancing_ema
        qk_clip* moe_use_upcycling moe_upcycling_granularity freeze_all_layers *optim* adam_*
        *muon_* lion_* sgd_* soap_* lr lr_* *min_lr decoupled_lr *weight_decay* wd_* wsd_*
        apply_wd_* *warmup* clip_grad *loss_scale* hysteresis *grad_* *grads_* *_sync_func ddp_*
        *fsdp* main_*_dtype exp_avg*_dtype store_param_remainders create_all_gather_group *gloo*
        use_sharp sharp_enabled_group *pin_cpu* barrier_* *distributed* *_dp_sharding_strategy
        *data_parallel_* suggested_communication_unit_size enable_full_sharding_in_hsdp
        disable_symmetric_* use_layer_wise_* dump_param_to_param_group_map
        override_opt_param_scheduler use_tp_pp_dp_mapping preserve_fp32_weights *batch_size*
        train_* do_train do_valid do_test skip_train phase_transition_iterations iteration*
        curr_iteration consumed_* *_samples exit_* manual_gc* empty_unused_memory_level eval_*
        start_eval_at_iter *validation* num_floating_point_* timers no_load_* no_save_* finetune
        rl_* grpo_* langrl_* perform_rl_step refit_method sft logits_save_* logits_load_* fim_*
        rank local_rank lazy_mpu_init world_size test_mode""",
    "it says where the run's data, files and reports were": """
        data_path data_cache_path *_data_path *data_args_path data_sharding data_per_class_fraction
        dataloader_* split per_dataset_sequences_path mock_data mmap_bin_files seq_length
        *_seq_length mid_level_dataset_surplus num_dataset_builder_threads num_workers
        object_storage_cache_path allow_ambiguous_pad_tokens mask_prob short_seq_prob sample_rate
        reset_position_ids reset_attention_mask create_attention_mask_in_dataloader eod_mask_loss
        renormalize_blend_weights s3_cache_path save save_* load load_* *ckpt* *checkpoint* async_*
        non_persistent_* replication* verify_integrity seed log_* *tensorboard* wandb_*
        *one_logger* app_tag_* logging_level timing_* profile* use_*_profiler pytorch_profiler_*
        nvtx_ranges record_* memory_snapshot_path moe_per_layer_logging moe_routing_trace_* otel_*
        *straggler* *ft_timeouts enable_ft_package inprocess_* error_injection_* fault_injector_*
        rerun_mode check_for_* check_weight_hash_* flight_recorder_* gpu_sniff_* result_rejected_*
        *_msc* adlr_* run_workload_inspector_server fake_process_group""",
    "tokens are read where the tokenizer is, the size of the vocabulary where its tensor is": """
        *tokenizer* tiktoken_* vocab_* *vocab_size* merge_file special_tokens metadata_path
        trust_remote_code chat_template use_gigatoken""",
    "models of other kinds have it": """
        bert_* output_bert_embeddings biencoder_* ict_* query_in_block_prob use_one_sent_docs
        retriever_* embedding_path indexer_log_interval num_classes img_* num_channels patch_dim
        classes_fraction head_lr_mult vision_* swin_* mask_type mask_factor iter_per_epoch
        dino_*""",
}
"""Why arguments change no answer -> their names; "*" is any text."""
IS_HARMLESS = re.compile("|".join(map(translate, " ".join(_REASONS.values()).split()))).match
