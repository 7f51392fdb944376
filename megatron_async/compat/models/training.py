"""Training with the engine's arithmetic: a forward of the engine's ops, Megatron's own gradients.

Rollouts and training that round differently disagree on the log probs of the same tokens, and a
correction of the loss has to make up for it. Here a model keeps its modules, parameters and
names, but the values of its layers, of its final norm and of its logits come from the engine's
layers on the same parameters (`own_layers.py`). Backward runs Megatron's own layer again from the
same input, as Megatron's activation checkpointing does, and takes that layer's gradients. So
whatever works beside activation checkpointing works here: `DistributedDataParallel` with its
`main_grad`, optimizers, checkpoints. What is added to memory is a layer's input a layer, and copies
of weights that the engine wants in another form (experts).

On a GPU the forward keeps the promise "invariant" (`ops/op.py`): a token's log prob is to have the
bits that generation and `score` of an engine with `batch_invariant_mode` give. On a CPU there is no
such promise: they agree to float32's rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, override
from weakref import ref

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor, nn

from megatron_async.compat.models.refusals import gaps, parts_of, unwrapped
from megatron_async.compat.models.served_model import serve_model
from megatron_async.compat.models.training_view import TrainingView
from megatron_async.config import InferenceConfig
from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import ATTENTION, EXPERTS, MLP
from megatron_async.models.attention import PagedSelfAttention
from megatron_async.models.batch_invariance import check_batch_invariance
from megatron_async.models.decoder_layer import LAYER_KINDS
from megatron_async.models.fitness import check_invariant_layers, check_model
from megatron_async.models.layer_ops import bind_ops
from megatron_async.models.norm import fold_norms, normalised
from megatron_async.models.partition import layer_windows
from megatron_async.models.step_routing import StepRouting
from megatron_async.ops.all_ops import Ops
from megatron_async.ops.linear.stream import Stream
from megatron_async.ops.sampling.log_probs import empty_log_probs
from megatron_async.ops.sampling.logits_processing import ProcessingRows, TokenMemory
from megatron_async.ops.sampling.sampling import FilterCuts
from megatron_async.ops.sampling.slot_records import RECORD_WORDS, RowFeature

TRAINABLE = (ATTENTION, MLP, EXPERTS)
"""Kinds of layers that are trained so."""
ALONE: dict[str, tuple[Any, ...]] = {
    "tensor_model_parallel_size": (1,),
    "pipeline_model_parallel_size": (1,),
    "expert_model_parallel_size": (1,),
    "hidden_dropout": (0.0,),
    "attention_dropout": (0.0,),
    "mtp_num_layers": (None, 0),
    "no_rope_freq": (None,),
    "use_mup": (False,),
    "moe_enable_routing_replay": (False,),
    "moe_router_fusion": (False,),
    "moe_input_jitter_eps": (None, 0.0),
    "cuda_graph_impl": ("none",),
    "enable_cuda_graph": (False,),
    "cpu_offloading": (False,),
}
"""Fields of the configuration and the values of each that can be trained so."""


def use_engine_forward(model: Any) -> nn.Module:
    """Let a model compute its forward by the engine's ops; from then on its logits, and what is
    made from them, have the engine's values, in training and in evaluation.

    Args:
        model: Megatron-Core's `GPTModel` or `HybridModel`, as `serve_model` takes it, with its
            weights on the device where it is trained; wrappers around it are looked through. It is
            changed in place: call this once, before its first forward. Its batches are `[rows,
            length]` of sequences that begin at the first column, perhaps padded behind; masks are
            None or causal.

    Returns:
        the model without its wrappers.

    Raises:
        ConfigurationError: a property of it that is not served, or not trained so; by name.
    """
    found: Any = unwrapped(model)
    config = found.config
    refused = [
        f"{name}={getattr(config, name)!r}"
        for name, values in ALONE.items()
        if getattr(config, name, values[0]) not in values
    ]
    if isinstance(found.output_layer, _EngineForward):
        refused.append("an engine's forward that it has already")
    if not refused:
        kinds = {part.kind for part in parts_of(found)} - set(TRAINABLE)
        refused += [f"layers of kind {kind!r}" for kind in sorted(kinds)]
    _refuse(refused)
    engine, decoder = _Engine(found), found.decoder
    for number, layer in enumerate(decoder.layers):
        _give(layer, True, partial(engine.layer, number))
    is_gpt = isinstance(found, GPTModel)
    _give(decoder.final_layernorm if is_gpt else decoder.final_norm, False, engine.norm)
    _give(found.output_layer, True, engine.project)
    return found


def _refuse(reasons: list[str]) -> None:
    if reasons:
        raise ConfigurationError(
            f"this model is not trained with the engine's forward, because of "
            f"{'; '.join(reasons)}. Change that, or train it with Megatron-Core's own forward."
        )


def token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log probs of tokens by the op of generation and `score`; differentiable in the logits.

    Args:
        logits: `[..., vocabulary]`, bfloat16, float16 or float32; of a padded vocabulary give the
            columns that the engine has.
        tokens: int64 `[...]`: ids to be scored, each by the logits at its place.

    Returns:
        float32 `[...]`.

    Raises:
        ValueError: shapes differ, or an id is not in the vocabulary.
    """
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(
            f"logits are {list(logits.shape)} and tokens {list(tokens.shape)}: give one token for "
            "each row of logits."
        )
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < logits.size(-1):
        raise ValueError(
            f"tokens are between {int(tokens.min())} and {int(tokens.max())}, where logits have "
            f"{logits.size(-1)} columns: replace ids of padding, and mask their log probs."
        )

    def ours(given: Tensor) -> Tensor:
        rows, ids = given.detach().flatten(0, -2).contiguous(), tokens.flatten()
        nowhere = ids.new_zeros(len(ids), dtype=torch.int32)
        features, floats = nowhere + int(RowFeature.LOG_PROBS), rows.new_empty(1, 1).float()
        records = nowhere.new_zeros(1, RECORD_WORDS)
        asked = ProcessingRows(
            nowhere.long(), nowhere, records, features, TokenMemory(records, records)
        )
        cuts = FilterCuts(floats[0], features, floats[0])
        ring = empty_log_probs(1, len(ids), rows.device)
        ops_of(rows.device).log_probs(rows, floats, ids, cuts, asked, ring, nowhere.new_zeros(1))
        return ring[0, :, 0].view(torch.float32).clone().view(tokens.shape)

    def stock(given: Tensor) -> Tensor:
        return given.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]

    return _recomputed(ours, stock, logits)


@cache
def ops_of(device: torch.device) -> Ops:
    """The ops of training on a device: on a GPU those that keep the promise "invariant"."""
    promises = {"invariant"} if device.type == "cuda" else set[str]()
    return Ops(device, frozenset(promises))


class _Recomputed(torch.autograd.Function):
    """`ours` of a tensor; backward runs `stock` and takes its gradient."""

    @staticmethod
    def forward(
        ctx: Any, ours: Callable[[Tensor], Tensor], stock: Callable[[Tensor], Tensor], x: Tensor
    ) -> Tensor:
        ctx.stock = stock
        ctx.save_for_backward(x)
        return ours(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor | None]:
        # Parameters get their gradients on the way, so that hooks of theirs run as always.
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "torch.autograd.grad (or backward(inputs=...)) was called through a forward of the "
                "engine's ops, which gives parameters their gradients in backward() alone: call "
                "loss.backward()."
            )
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.stock(x)
        torch.autograd.backward(y, grads[0].to(y.dtype))
        return None, None, x.grad


def _recomputed(
    ours: Callable[[Tensor], Tensor], stock: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    if not torch.is_grad_enabled():
        return ours(x)
    # Parameters behind a frozen embedding want gradients too.
    x = x if x.requires_grad else x.detach().requires_grad_()
    y: Tensor = _Recomputed.apply(ours, stock, x)
    return y


class _Chosen:
    """In the place of Megatron's `RouterReplay`: tokens go to the experts that the engine chose."""

    def __init__(self, experts: Tensor) -> None:
        self._experts = experts

    def get_replay_topk(self, scores: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """Scores of the chosen experts, and these."""
        return scores.gather(1, self._experts), self._experts


class _EngineForward(nn.Module):
    """Goes before a module's class: its forward by the engine, its gradients by its class."""

    _ours: Callable[[Tensor, dict[str, Any]], tuple[Tensor, Tensor | None]]
    _gives_two: bool

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The arguments of the module's class, and its result."""
        x: Tensor = args[0] if args else kwargs.pop("hidden_states")
        run, chosen = super().forward, list[Tensor]()

        def ours(x: Tensor) -> Tensor:
            y, experts = self._ours(x, kwargs)
            chosen.extend([] if experts is None else [experts])
            return y

        def stock(x: Tensor) -> Tensor:
            routers: list[Any] = [self.mlp.router] if chosen else []  # type: ignore[union-attr]
            for router in routers:
                router.router_replay = _Chosen(chosen[0])
            try:
                found = run(x, *args[1:], **kwargs)
            finally:
                for router in routers:
                    router.router_replay = None
            y: Tensor = found[0] if isinstance(found, tuple) else found
            return y

        y = _recomputed(ours, stock, x)
        return (y, None) if self._gives_two else y


def _give(module: Any, gives_two: bool, ours: Callable[..., Any]) -> None:
    """Let a module run `ours`. Its class keeps its name, because its parameters and what they mean
    stay: the same model can be served."""
    base = type(module)
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    module.__class__ = type(base.__name__, (_EngineForward, base), names)
    vars(module).update(_ours=ours, _gives_two=gives_two)


class _Engine:
    """The engine's layers on the parameters of a model: what its modules run."""

    def __init__(self, model: Any) -> None:
        served = serve_model(model)
        device, config = next(model.parameters()).device, served.config
        if served.weights is None:
            _refuse(gaps(model.config, model.position_embedding_type))
        is_gpu = device.type == "cuda"
        settings = InferenceConfig(
            max_sequence_length=model.max_sequence_length, batch_invariant_mode=is_gpu
        )
        if is_gpu:
            check_batch_invariance(config, settings, device)
        check_model(served.served, config, settings)
        assert served.weights is not None, "refused above"
        self._weights, self._model = served.weights, served.served
        self._weights.bind()
        self._ops, self._causal_mask = ops_of(device), ref(next(model.parameters()))
        bind_ops(self._model, self._ops)
        if self._ops.is_invariant:
            check_invariant_layers(self._model, self._ops.major)
        self._view = TrainingView(self._model, config, self._ops, device)
        layers = [each for each in self._model.modules() if isinstance(each, PagedSelfAttention)]
        windows = (window for stage in layer_windows(config) for window in stage)
        for module, window in zip(layers, windows, strict=True):
            module.kv_layer_index = self._view.windows.index(window)
        decoder: Any = self._model.decoder
        kinds = zip(decoder.layer_type_list, decoder.layers, strict=True)
        self._layers: list[list[tuple[str, Any]]] = [[] for _ in model.decoder.layers]
        for part, layer in zip(parts_of(model), kinds, strict=True):
            self._layers[int(part.path.rpartition(".")[2])].append(layer)

    def layer(self, number: int, x: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """A layer's output, `[length, rows, hidden]` as its input, and the experts that its tokens
        go to, int64 `[length * rows, topk]`, where it has experts."""
        self._check(x, given)
        if number == 0:
            self._weights.refresh()
            fold_norms(self._model)
        (length, rows, hidden), view = x.shape, self._view
        view.lay_out(rows, length)
        view.routing = routing = StepRouting()
        stream = Stream(x.transpose(0, 1).reshape(-1, hidden))
        for kind, layer in self._layers[number]:
            stream = LAYER_KINDS[kind](layer, stream, view, False)
        total = stream.value if stream.residual is None else stream.value + stream.residual
        experts = None
        for found in routing.experts:
            experts = found.view(rows, length, -1).transpose(0, 1).flatten(0, 1).long()
        return total.view(rows, length, hidden).transpose(0, 1).contiguous(), experts

    def norm(self, x: Tensor, _: dict[str, Any]) -> tuple[Tensor, None]:
        """The final norm, `[..., hidden]`."""
        decoder: Any = self._model.decoder
        normed, _total = normalised(self._ops, Stream(x.flatten(0, -2)), decoder.final_norm)
        return normed.view(x.shape), None

    def project(self, x: Tensor, _: dict[str, Any]) -> tuple[Tensor, None]:
        """Logits, `[..., vocabulary]`, of `[..., hidden]`."""
        model: Any = self._model
        is_tied = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if is_tied else None
        logits = model.output_layer(x.flatten(0, -2)[:, None], weight=weight)[0]
        return logits.view(*x.shape[:-1], -1), None

    def _check(self, x: Tensor, given: dict[str, Any]) -> None:
        """Refuse what this forward would ignore."""
        for name in ("packed_seq_params", "inference_context", "inference_params", "context"):
            if given.get(name) is not None:
                raise ConfigurationError(
                    f"{name} is not taken by a forward of the engine's ops: give [rows, length] "
                    "batches of whole sequences, padded behind."
                )
        mask = given.get("attention_mask")
        if mask is None or mask is self._causal_mask():
            return
        length = x.size(0)
        causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).triu(1)
        if mask.shape[-2:] != causal.shape or not bool((mask.bool() == causal).all()):
            raise ConfigurationError(
                f"an attention_mask of shape {list(mask.shape)} is not causal for {length} tokens: "
                "give None, and sequences that begin at the first column, padded behind."
            )
        self._causal_mask = ref(mask)
