"""A layer for multi-token prediction in plain torch, with gradients.

It computes what `megatron_async.models.mtp` computes with kernels, and names its source. Served:
dense layers with RMSNorm, SwiGLU and rotary embedding.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_async.checkpoints.mapping import mtp_weights
from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import ATTENTION, MLP, ModelArchitecture
from megatron_async.ops.attention.rope_append import apply_rotary_reference

PATTERN = ATTENTION + MLP
NOISE = 0.02
"""Standard deviation of what `eh_proj` begins with for the embedding."""
DEPTH = "mtp.layers.0."
MIXER = f"{DEPTH}mtp_model_layer.layers.0."
DENSE = f"{DEPTH}mtp_model_layer.layers.1."


class DraftLayer(nn.Module):
    """Parameters are fused as the engine's, under their names.

    Args:
        architecture: of the model, with the layer.
        weights: of the model, by the engine's names: the layer begins as a copy of the last one.
        cos, sin: `[positions, rotated]` of the rotary embedding.

    Raises:
        ConfigurationError: the model has what this layer does not compute.
    """

    def __init__(
        self,
        architecture: ModelArchitecture,
        weights: Mapping[str, Tensor],
        cos: Tensor,
        sin: Tensor,
    ) -> None:
        super().__init__()
        self._a, self.cos, self.sin = architecture, cos, sin
        self.values = nn.ParameterDict()
        last = max(int(name.split(".")[2]) for name in weights if name.startswith("decoder.layers"))
        places = {MIXER: f"decoder.layers.{last - 1}.", DENSE: f"decoder.layers.{last}."}
        names = {weight.name: weight.shape for weight in mtp_weights(architecture)}
        for name, shape in names.items():
            self.values[_key(name)] = self._first(name, shape, weights, places)
        known = {f"{MIXER}{n}" for n in ("input_layernorm.weight", *QKV)} | {
            f"{DENSE}{n}" for n in ("pre_mlp_layernorm.weight", *FFN)
        }
        known |= {f"{DEPTH}{n}.weight" for n in ("enorm", "hnorm", "final_layernorm", "eh_proj")}
        strange = sorted(set(names) - known) or [architecture.activation]
        if strange != ["silu"]:
            raise ConfigurationError(
                f"a draft layer for {architecture.model_type} would need {strange[0]!r}, which "
                "this script does not train: take a model of dense SwiGLU layers without biases or "
                "norms of query and key heads."
            )

    def _first(
        self, name: str, shape: tuple[int, ...], weights: Mapping[str, Tensor],
        places: Mapping[str, str],
    ) -> Tensor:  # fmt: skip
        for ours, theirs in places.items():
            if name.startswith(ours):
                return weights[theirs + name.removeprefix(ours)].detach().float().clone()
        if name.endswith("eh_proj.weight"):
            # The hidden state passes, the embedding is learnt: a layer on top of the model.
            hidden = shape[0]
            return torch.cat((NOISE * torch.randn(hidden, hidden), torch.eye(hidden)), dim=1)
        if name.endswith("final_layernorm.weight"):
            return weights["decoder.final_norm.weight"].detach().float().clone()
        return torch.ones(shape)

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Hidden states after the final norm, `[texts, entries, hidden]`.

        Args:
            embedded: `[texts, entries, hidden]`, of the tokens at the entries' places.
            hidden: `[texts, entries, hidden]`, of the places before.
            positions: int64 `[entries]`: the places.
        """
        w = self._weight
        joined = torch.cat(
            (self._norm(embedded, "enorm", DEPTH), self._norm(hidden, "hnorm", DEPTH)), dim=-1
        )
        x = F.linear(joined, w(f"{DEPTH}eh_proj.weight"))
        x = x + self._attention(self._norm(x, "input_layernorm", MIXER), positions)
        gate, up = F.linear(
            self._norm(x, "pre_mlp_layernorm", DENSE), w(f"{DENSE}mlp.linear_fc1.weight")
        ).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * up, w(f"{DENSE}mlp.linear_fc2.weight"))
        return self._norm(x, "final_layernorm", DEPTH)

    def _attention(self, x: Tensor, positions: Tensor) -> Tensor:
        a, (texts, entries, _) = self._a, x.shape
        groups, dim = a.num_query_groups, a.kv_channels
        each = a.num_attention_heads // groups
        mixed = F.linear(x, self._weight(f"{MIXER}self_attention.linear_qkv.weight"))
        by_group = mixed.view(texts, entries, groups, each + 2, dim)
        query = by_group[..., :each, :].reshape(texts, entries, groups * each, dim)
        key, value = by_group[..., each, :], by_group[..., each + 1, :]
        turn = self.cos[positions][:, None], self.sin[positions][:, None]
        query, key = apply_rotary_reference(query, key, *turn)
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
            is_causal=True, enable_gqa=True,
        )  # fmt: skip
        flat = attended.transpose(1, 2).flatten(2)
        return F.linear(flat, self._weight(f"{MIXER}self_attention.linear_proj.weight"))

    def _norm(self, x: Tensor, name: str, prefix: str) -> Tensor:
        weight = self._weight(f"{prefix}{name}.weight")
        return F.rms_norm(x, weight.shape, weight, self._a.layernorm_epsilon)

    def _weight(self, name: str) -> Tensor:
        return self.values[_key(name)]

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The layer by the names of `checkpoints/family_names.py`, in a dtype, on the host."""
        found: dict[str, Tensor] = {}
        for weight in mtp_weights(self._a):
            parameter = self._weight(weight.name).detach().cpu().to(dtype)
            for part, _region, place in weight.pieces(parameter):
                found[part] = place.reshape(weight.parts[part]).clone()
        return found


QKV = ("self_attention.linear_qkv.weight", "self_attention.linear_proj.weight")
FFN = ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")


def _key(name: str) -> str:
    return name.replace(".", "/")  # a ParameterDict takes no dots
