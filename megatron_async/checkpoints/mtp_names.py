"""Names of tensors of multi-token prediction (MTP) in Hugging Face's families.

The layers inside a depth bear the names that the family's other layers have
(`checkpoints/family_names.py`). Checked against the loaders of vLLM (`qwen3_next_mtp`,
`qwen3_5_mtp`, `nemotron_h_mtp`, `mimo_mtp`) and lists of the tensors of published models.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MtpNames:
    """Tensor names of one family.

    In a name stand for numbers: `{depth}` that of the depth; `{first}` and `{last}` those of its
    first and last layer, `{layer}` that of one of them, where layers of all depths are counted on.
    """

    beginning: str
    """What all these names begin with, and no others of the family."""
    enorm: str
    """Norm of the embedding."""
    hnorm: str
    """Norm of the hidden state."""
    eh_proj: str
    final_layernorm: str
    inside: str
    """Prefix of a layer's names."""
    is_hidden_first: bool = False
    """`eh_proj` takes the hidden state first and then the embedding; Megatron-Core's, and ours, the
    embedding first."""
    has_shared_ends: bool = False
    """All depths have the same norms and `eh_proj`: only their layers are their own."""


QWEN = MtpNames(
    "mtp.",
    enorm="mtp.pre_fc_norm_embedding.weight",
    hnorm="mtp.pre_fc_norm_hidden.weight",
    eh_proj="mtp.fc.weight",
    final_layernorm="mtp.norm.weight",
    inside="mtp.layers.{depth}.",
    has_shared_ends=True,
)
NEMOTRON = MtpNames(
    "mtp.",
    enorm="mtp.layers.{first}.enorm.weight",
    hnorm="mtp.layers.{first}.hnorm.weight",
    eh_proj="mtp.layers.{first}.eh_proj.weight",
    final_layernorm="mtp.layers.{last}.final_layernorm.weight",
    inside="mtp.layers.{layer}.",
)
"""Nemotron 3 Super and Nemotron 3.5 Lightning: each character of the pattern is a layer."""
MIMO = MtpNames(
    "model.mtp_layers.",
    enorm="model.mtp_layers.{depth}.token_layernorm.weight",
    hnorm="model.mtp_layers.{depth}.hidden_layernorm.weight",
    eh_proj="model.mtp_layers.{depth}.input_proj.weight",
    final_layernorm="model.mtp_layers.{depth}.final_layernorm.weight",
    inside="model.mtp_layers.{depth}.",
    is_hidden_first=True,
)
MTP_NAMES = {
    "qwen3_next": QWEN,
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "nemotron_h": NEMOTRON,
    "mimo": MIMO,
}
"""By `ModelArchitecture.model_type`; no other family that is served is published with MTP."""
WITHOUT = MtpNames(
    "mtp.",
    enorm="mtp.layers.{depth}.enorm.weight",
    hnorm="mtp.layers.{depth}.hnorm.weight",
    eh_proj="mtp.layers.{depth}.eh_proj.weight",
    final_layernorm="mtp.layers.{depth}.final_layernorm.weight",
    inside="mtp.layers.{depth}.mtp_model_layer.layers.{layer}.",
)
"""In no Hugging Face folder: what stands in the table of a model of another family, whose MTP is in
a Megatron checkpoint, or random."""


def mtp_names_of(model_type: str) -> MtpNames:
    """The names of a family, by `ModelArchitecture.model_type`."""
    return MTP_NAMES.get(model_type, WITHOUT)
