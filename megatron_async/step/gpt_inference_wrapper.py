"""The model as the controller sees it: a function from a step's device view to logits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import megatron_async.models.compile_later  # noqa: F401  # isort: skip  # before Megatron-Core
from megatron.core.inference.utils import InferenceMode
from torch import Tensor, nn

from megatron_async.devices import makes_ordinary_tensors
from megatron_async.errors import ConfigurationError
from megatron_async.models.attention import stamp_kv_layers
from megatron_async.models.derived_copies import DerivedCopies, Joined
from megatron_async.models.embedding import InferenceOutputLayer
from megatron_async.models.fitness import check_invariant_layers, check_model
from megatron_async.models.layer_ops import bind_ops
from megatron_async.models.linear import linear
from megatron_async.models.parallel_state import ensure_process_groups
from megatron_async.models.pipeline import stage_of
from megatron_async.models.rotary import take_over_positions
from megatron_async.names_of_megatron import NamesOfMegatron
from megatron_async.ops.experts.expert_exchange import exchange_of
from megatron_async.ops.ranks.tensor_collectives import collectives_of

if TYPE_CHECKING:
    from megatron_async.device_state.gpu_view import ContextGPUView
    from megatron_async.planning.dynamic_context import DynamicInferenceContext

_mode_lock = threading.Lock()
_mode_users = 0


@contextmanager
def inference_mode_active() -> Iterator[None]:
    """Megatron's process-wide `InferenceMode`, counted: two engines may be inside at once."""
    global _mode_users
    with _mode_lock:
        _mode_users += 1
        InferenceMode.set_active()
    try:
        yield
    finally:
        with _mode_lock:
            _mode_users -= 1
            if _mode_users == 0:
                InferenceMode.unset_active()


class GPTInferenceWrapper(NamesOfMegatron):
    """Wraps a Megatron model whose attention is `PagedSelfAttention`.

    Args:
        model: a `HybridModel` or `GPTModel` on the context's device. Its rotary embedding is taken
            over: from here on `PagedSelfAttention` applies it.
        inference_context: the context that it will run in.

    Attributes:
        collectives: of the ranks that hold the model's layers between them.
        exchange: of the ranks that share its experts.
        derived: what steps read beside the model's parameters.
        shard: the columns of the logits that this rank computes; None where they are all, and on a
            pipeline stage that is not the last.

    Raises:
        ConfigurationError: the model's attention layers are not paged, or their number differs from
            what the context has a KV cache for; or the model has a property that is not served.
    """

    _joined: Joined | None = None

    @makes_ordinary_tensors
    def __init__(self, model: nn.Module, inference_context: DynamicInferenceContext) -> None:
        self.model = model.eval()
        self.inference_context = inference_context
        layers = stamp_kv_layers(model)
        cache = inference_context.gpu_view.kv_cache
        if len(layers) != cache.num_layers:
            raise ConfigurationError(
                f"the model has {len(layers)} PagedSelfAttention layers, but the context's KV "
                f"cache is for {cache.num_layers}: build the model with "
                "megatron_async.models.hybrid (or with PagedSelfAttention in its layer spec), and "
                "the context from its configuration."
            )
        cache.take_scales([layer.cache_scales for layer in layers])
        check_model(model, inference_context.model_config, inference_context.config)
        device = inference_context.device.torch_device
        rotary = take_over_positions(model, inference_context.max_sequence_length, device)
        if rotary is not None:
            rotary.others = inference_context.gpu_view.rotary.others
            inference_context.gpu_view.rotary = rotary
        self._is_last_stage = stage_of(inference_context.model_config).is_last
        ops = inference_context.gpu_view.ops
        bind_ops(model, ops)
        if ops.is_invariant:
            check_invariant_layers(model, ops.major)
        self.derived = DerivedCopies(
            model,
            inference_context.device,
            inference_context.model_config.params_dtype,
            inference_context.config.quantization,
            self._joined,
        )
        self.vocab_size: int = model.vocab_size  # type: ignore[assignment]
        groups = getattr(model, "pg_collection", None) or ensure_process_groups()
        self.collectives = collectives_of(groups.tp)
        self.exchange = exchange_of(groups.ep)
        config, settings = inference_context.model_config, inference_context.config
        most = settings.max_requests * settings.decode_width + settings.max_tokens
        hidden, dtype = config.hidden_size, config.params_dtype
        device = inference_context.device.torch_device
        self.collectives.prepare(most, hidden, dtype, device)
        output: Any = getattr(model, "output_layer", None)
        self.shard = output.shard if isinstance(output, InferenceOutputLayer) else None
        if self.shard is not None:
            self.collectives.prepare_choice(settings.max_sample_rows, device)
        if config.num_moe_experts:
            # A draft model's pass has a token more of each chunk.
            most += settings.most_mixed_prefill_rows if settings.draft_places else 0
            self.exchange.prepare(most, hidden, config.moe_router_topk, dtype, device)
        if ops.is_invariant and device.type == "cuda":
            self.collectives.check_order()
            if config.num_moe_experts:
                self.exchange.check_order()

    def set_input_tensor(self, hidden_states: Tensor) -> None:
        """Give the next `forward` what the pipeline stage before computed, `[tokens, 1, hidden]`;
        Megatron's name."""
        model: Any = self.model
        model.set_input_tensor(hidden_states)

    def forward(self, view: ContextGPUView) -> Tensor:
        """Logits `[sample rows, vocabulary]` of the step in `view`, in the model's dtype: of this
        rank's columns where there is a `shard`; or, of a pipeline stage that is not the last,
        hidden states `[tokens, 1, hidden]`.

        Runs inside launched work.
        """
        with inference_mode_active():
            output: Tensor = self.model(
                view.step.token_ids[None],
                view.step.positions[None],
                attention_mask=None,
                inference_context=view,
                runtime_gather_output=True,
            )
        return output.squeeze(0) if self._is_last_stage else output

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings `[tokens, 1, hidden]` of token ids, int64 `[tokens]`.

        Runs inside launched work.
        """
        model: Any = self.model
        with inference_mode_active():
            found: Tensor = model.embedding(input_ids=token_ids[None], position_ids=None)
        return found

    def project(self, hidden_states: Tensor) -> Tensor:
        """Logits `[tokens, vocabulary]` of hidden states `[tokens, hidden]` after the last norm.

        Runs inside launched work.
        """
        logits = self.project_columns(hidden_states)
        return logits if self.shard is None else self.shard.gather(logits)

    def project_columns(self, hidden_states: Tensor, tokens: int | None = None) -> Tensor:
        """`project`, of this rank's columns where there is a `shard`.

        Args:
            hidden_states: as for `project`.
            tokens: only of so many tokens, those with the lowest ids; for a model without a
                `shard`. None: of all.
        """
        model: Any = self.model
        weight = None
        if model.share_embeddings_and_output_weights:
            weight = model.shared_embedding_or_output_weight()
        config = self.inference_context.model_config
        layer = model.output_layer  # a model that others have built has its own
        is_ours = isinstance(layer, InferenceOutputLayer)
        is_scaled = config.use_mup and config.mup_output_mult != 1
        has_cap = getattr(config, "final_logit_softcapping", None) is not None
        if is_ours and tokens is None and is_scaled and not has_cap:
            scaled = layer.scaled(hidden_states, weight, config.mup_output_mult)
            if scaled is not None:
                return scaled
        if tokens is not None:
            weight = model.output_layer.weight if weight is None else weight
            ops = self.inference_context.gpu_view.ops
            kept = layer.packed_weight.first(tokens) if weight.is_meta else None
            logits = linear(ops, hidden_states[:, None], weight[:tokens], None, kept)
        else:
            with inference_mode_active():
                logits, _ = model.output_layer(
                    hidden_states[:, None], weight=weight, runtime_gather_output=True
                )
        if config.use_mup:
            logits = model._scale_logits(logits)
        if cap := getattr(config, "final_logit_softcapping", None):
            logits = (logits / cap).tanh() * cap
        return logits[:, 0]
