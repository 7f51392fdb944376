"""`GPTInferenceWrapper` for models that Megatron built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron_async.compat.models.served_model import fit_context, serve_model
from megatron_async.devices import makes_ordinary_tensors
from megatron_async.errors import ConfigurationError
from megatron_async.step import gpt_inference_wrapper as core

if TYPE_CHECKING:
    from megatron_async.planning.dynamic_context import DynamicInferenceContext


class GPTInferenceWrapper(core.GPTInferenceWrapper):
    """Megatron's wrapper: a user's own `GPTModel` or `HybridModel`, served.

    The user's model is not changed: it can be trained, saved and called as before. What runs the
    steps is `model`, a tree of modules of its own whose parameters are the user's memory, except
    for weights that the engine wants in another form (`docs/megatron_models.md` lists them).

    Args:
        model: Megatron's, of its local or its TransformerEngine spec; on the context's device. One
            that this package built is served as it is.
        inference_context: made from the model's configuration, `model.config`. Where that does not
            tell the model's layers (a `HybridModel`, pipeline stages), the context is made again
            from what does, unless it was made from `serving_config(model.config, model=model)`.

    Attributes:
        user_model: the user's, without `DistributedDataParallel` and `Float16Module`.
        config: its configuration.

    Raises:
        ConfigurationError: something about the model is not served, or the context is for another;
            named in the message.
    """

    @makes_ordinary_tensors
    def __init__(self, model: Any, inference_context: DynamicInferenceContext) -> None:
        found = serve_model(model)
        self.user_model: nn.Module = found.user_model
        self.config: Any = found.user_model.config
        self._joined = found.weights
        _check_place(found.user_model, inference_context)
        fit_context(inference_context, found.config, found.weights)
        super().__init__(found.served, inference_context)

    def prep_model_for_inference(self) -> None:
        """Megatron's call before the first step. What it would do is done: the served modules are
        in eval mode, whatever mode the user's are in."""

    def refresh_weights(self) -> bool:
        """Serve what the user's parameters are now, after training has changed them in place or
        given them other memory. No step may be in flight; `resume` of the engine calls it.

        Shared weights need nothing. Copies are made again in the same memory: experts that were
        joined, factors of norms, blocked weights on a CPU.

        What the KV cache holds is of the old weights: free it, or forget what blocks hold
        (`context.reset_prefix_cache()`).

        Returns:
            whether weights lie elsewhere now. Captured steps are to be captured again then
            (`controller.recapture_cuda_graphs()`), because they read the old memory.
        """
        self.inference_context.device.fence()
        return self.derived.refresh()


def _check_place(model: nn.Module, context: DynamicInferenceContext) -> None:
    """Check that a model's parameters are where the context's steps run, in its dtype."""
    wanted, dtype = context.device.torch_device, context.model_config.params_dtype
    for name, parameter in model.named_parameters():
        device = parameter.device
        elsewhere = device.type != wanted.type
        if device.type == "cuda" and wanted.index is not None:
            elsewhere = elsewhere or device.index != wanted.index
        if elsewhere:
            raise ConfigurationError(
                f"the model's {name!r} is on {device}, but the context runs on {wanted}: move the "
                "model there first, or give the InferenceConfig another device."
            )
    weight = next((p for n, p in model.named_parameters() if n.endswith("linear_qkv.weight")), None)
    if isinstance(weight, torch.Tensor) and weight.dtype != dtype:
        raise ConfigurationError(
            f"the model's weights are {weight.dtype}, but its configuration's params_dtype is "
            f"{dtype}: set params_dtype (and bf16 or fp16) to what the weights are."
        )
