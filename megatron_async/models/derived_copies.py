"""What steps read beside a model's parameters, and what follows from them: one owner for all.

| copy | of which weights |
| --- | --- |
| joined experts and other forms (`Joined`) | a user's own model whose memory has another form |
| factors of norms (`norm.fold`) | norms that multiply by 1 + weight |
| blocked and 8-bit weights (`KeptWeight`) | linear layers on a CPU |
| `CompiledLayers` | a dense decoder on a CPU, by addresses |

Decays of recurrent layers are computed from `A_log` in each step, so there is no copy of them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from megatron_async.devices import Device, makes_ordinary_tensors
from megatron_async.errors import ConfigurationError, UpdateError
from megatron_async.models.compiled_layers import compile_layers
from megatron_async.models.held_weight import quantised_weights
from megatron_async.models.hybrid_stack import PagedHybridStack
from megatron_async.models.kept_weights import check_has_numbers
from megatron_async.models.linear import pack_weights, repack_weights, weights_on_cpu
from megatron_async.models.norm import InferenceRMSNorm, fold_norms


class Joined(Protocol):
    """Weights of a served model that are made from those of a user's model."""

    def check(self) -> None:
        """Raise `ConfigurationError` where the user's weights have another shape or dtype now."""

    def shared_addresses(self) -> list[int]:
        """Where the user's weights lie of which the served model has no copy."""

    def refresh(self) -> None:
        """Make the served weights the user's present ones."""


class DerivedCopies:
    """The derived copies of one model; making this object makes them.

    Args:
        model: on the device, its weights filled.
        device: where steps run.
        dtype: of the model.
        quantization: as `InferenceConfig` has it.
        joined: what the model's weights are made from; None: they are the model's own.

    Raises:
        ConfigurationError: 8-bit weights on a GPU, or of a model that is not float32.
        OutOfMemoryError: 8-bit weights do not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        device: Device,
        dtype: torch.dtype,
        quantization: str | None = None,
        joined: Joined | None = None,
    ) -> None:
        self._model, self._device, self._joined = model, device, joined
        place = device.torch_device
        is_float_on_cpu = place.type == "cpu" and dtype == torch.float32
        if quantization == "fp8" and not any(quantised_weights(model)):
            raise ConfigurationError(
                "quantization='fp8' rounds weights that megatron_async loads, and this model was "
                "given without: leave it None."
            )
        if quantization == "int8" and not is_float_on_cpu:
            raise ConfigurationError(
                f"quantization={quantization!r} is for float32 models on a CPU, not for {dtype} on "
                f"{place}: leave it None, or use device='cpu' and dtype='float32'."
            )
        fold_norms(model)
        pack_weights(model, device.free_memory(), quantization)
        self._stacks = [each for each in model.modules() if isinstance(each, PagedHybridStack)]
        self._compile()
        # Steps wait for `refresh`, so it walks through no modules in which nothing is derived.
        self._parameters = [each._parameters for each in model.modules() if each._parameters]
        norms = (each for each in model.modules() if isinstance(each, InferenceRMSNorm))
        self._norms = [norm for norm in norms if norm.is_zero_centered]
        self._is_packed = any(m.packed_weight is not None for m, _ in weights_on_cpu(model))
        self._stacks = [stack for stack in self._stacks if stack.compiled is not None]
        self._addresses = self._present_addresses()

    def refresh(self) -> bool:
        """Enqueue on the compute stream that all copies are made again, in the same memory where a
        captured step reads them; between two launches, on the thread that launches steps.

        Returns:
            whether parameters lie elsewhere now, so that captured steps must be captured again.

        Raises:
            ConfigurationError: the user's weights have another shape or dtype now; nothing is done.
        """
        if self._joined is not None:
            self._joined.check()
        before, self._addresses = self._addresses, self._present_addresses()
        self._device.compute.launch(self._make_again)
        return before != self._addresses

    def check_open(self) -> None:
        """Raise `UpdateError` where parameters do not hold the weights' numbers, so that nobody can
        write new ones there."""
        check_has_numbers(self._model)
        if (found := next(quantised_weights(self._model), None)) is not None:
            raise UpdateError(
                f"weight {found[0]!r} is kept as {found[1].form.words}, so nobody can write numbers"
                " into the parameter: use update_weights, or quantization='none'."
            )

    def stale(self) -> list[str]:
        """Names of modules whose copies are not what their weights give; for a model at rest. 8-bit
        and blocked weights are compared by a product."""
        found = []
        for name, module in self._model.named_modules():
            if isinstance(module, InferenceRMSNorm) and not module.is_folded_from_weight:
                found.append(name)
        names = {id(module): name for name, module in self._model.named_modules()}
        for module, weight in weights_on_cpu(self._model):
            kept = module.packed_weight
            if kept is None:
                continue
            probe = torch.linspace(-1, 1, weight.size(1))[None]
            if not torch.equal(kept.product(probe), type(kept)(weight.detach()).product(probe)):
                found.append(names[id(module)])
        return found

    @makes_ordinary_tensors
    def _make_again(self) -> None:
        if self._joined is not None:
            self._joined.refresh()
        for norm in self._norms:
            norm.fold()
        if self._is_packed:
            repack_weights(self._model)
        self._compile()

    def _compile(self) -> None:
        for stack in self._stacks:
            stack.compiled = compile_layers(stack)

    def _present_addresses(self) -> list[int]:
        if self._joined is not None:
            return self._joined.shared_addresses()
        return [
            each.data_ptr()
            for held in self._parameters
            for each in held.values()
            if each is not None
        ]
