"""Names of tensors in Hugging Face's families.

`weights` in `checkpoints/mapping.py` asks here for each layer of a model. The names are those of
published files, which transformers writes too; where its modules hold other tensors (all experts
in one, another prefix), a file of these is read as well.

Of multi-token prediction (MTP): the layers inside a depth bear the names that the family's other
layers have. Checked against the loaders of vLLM (`qwen3_next_mtp`,
`qwen3_5_mtp`, `nemotron_h_mtp`, `mimo_mtp`) and lists of the tensors of published models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class FamilyNames:
    """Tensor names of one family; those of a layer without the layer's prefix.

    `{e}` in a name is the number of an expert; without it one tensor holds all experts.
    """

    layer: str = "model.layers.{}."
    """Prefix of a layer, as the family counts them."""
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    output: str = "lm_head.weight"
    mixer_norm: str = "input_layernorm.weight"
    """Before attention or a recurrent mixer."""
    ffn_norm: str = "post_attention_layernorm.weight"
    """Before an MLP or experts."""
    post_norms: tuple[str, str] = (
        "post_attention_layernorm.weight",
        "post_feedforward_layernorm.weight",
    )
    """Behind attention and behind an MLP, where there are any."""
    attention: str = "self_attn."
    """Prefix of its projections."""
    mamba: str = "mamba."
    """Prefix of a Mamba-2 mixer."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """What follows these two prefixes, where it is not Hugging Face's, by Hugging Face's."""
    delta: str = "linear_attn."
    """Prefix of a Gated DeltaNet mixer."""
    delta_in_proj: tuple[str, ...] = (
        "in_proj_qkv.weight",
        "in_proj_z.weight",
        "in_proj_b.weight",
        "in_proj_a.weight",
    )
    """The first matrices: query, key and value in one; z; beta; alpha. Or two, of query, key, value
    and z and of beta and alpha, each with a key head's rows together."""
    gate_up: tuple[str, ...] = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
    """Weights of an MLP: gate and up, both in one tensor, or up alone where the family has no
    gate."""
    down: str = "mlp.down_proj.weight"
    router: str = "mlp.gate.weight"
    router_bias: str = "mlp.router.bias"
    expert_bias: str = ""
    expert_gate_up: tuple[str, ...] = (
        "mlp.experts.{e}.gate_proj.weight",
        "mlp.experts.{e}.up_proj.weight",
    )
    expert_down: str = "mlp.experts.{e}.down_proj.weight"
    expert_biases: tuple[str, str] = (
        "mlp.experts.gate_up_proj_bias",
        "mlp.experts.down_proj_bias",
    )
    """Biases of both products, of all experts."""
    alternates: bool = False
    """Rows of gate and up stand in turns where one tensor holds both."""
    sinks: str = "sinks"
    """Scores of attention's heads that have no value, behind `attention`."""
    shared_gate_up: tuple[str, ...] = ()
    """Weights of the shared expert, as in `gate_up`."""
    shared_down: str = ""
    shared_gate: str = "mlp.shared_expert_gate.weight"
    """Weight of the shared expert's gate, if it has one."""


STACKED = FamilyNames(
    expert_gate_up=("mlp.experts.gate_up_proj",), expert_down="mlp.experts.down_proj"
)
"""Experts of the other families in transformers' modules."""
GPT_OSS = replace(STACKED, router="mlp.router.weight", alternates=True)
"""Without the form of numbers, which tensors of MXFP4 have at the end of their names."""
GEMMA = FamilyNames(ffn_norm="pre_feedforward_layernorm.weight")
MIXTRAL = FamilyNames(
    router="block_sparse_moe.gate.weight",
    expert_gate_up=(
        "block_sparse_moe.experts.{e}.w1.weight",
        "block_sparse_moe.experts.{e}.w3.weight",
    ),
    expert_down="block_sparse_moe.experts.{e}.w2.weight",
)
NEMOTRON_H = FamilyNames(
    layer="backbone.layers.{}.",
    embedding="backbone.embeddings.weight",
    final_norm="backbone.norm_f.weight",
    mixer_norm="norm.weight",
    ffn_norm="norm.weight",
    attention="mixer.",
    mamba="mixer.",
    gate_up=("mixer.up_proj.weight",),
    down="mixer.down_proj.weight",
    router="mixer.gate.weight",
    expert_bias="mixer.gate.e_score_correction_bias",
    expert_gate_up=("mixer.experts.{e}.up_proj.weight",),
    expert_down="mixer.experts.{e}.down_proj.weight",
    shared_gate_up=("mixer.shared_experts.up_proj.weight",),
    shared_down="mixer.shared_experts.down_proj.weight",
)
NEMOTRON_H_GATED = replace(
    NEMOTRON_H,
    gate_up=("mixer.gate_proj.weight", "mixer.up_proj.weight"),
    expert_gate_up=("mixer.experts.{e}.gate_proj.weight", "mixer.experts.{e}.up_proj.weight"),
    shared_gate_up=(
        "mixer.shared_experts.gate_proj.weight",
        "mixer.shared_experts.up_proj.weight",
    ),
)
"""In no published file: hybrids of Megatron-LM with gates have no other names here either."""
NEMOTRON_H_MODULES = replace(
    NEMOTRON_H,
    layer="model.layers.{}.",
    embedding="model.embeddings.weight",
    final_norm="model.norm_f.weight",
    expert_gate_up=("mixer.experts.up_proj",),
    expert_down="mixer.experts.down_proj",
)
GRANITE = FamilyNames(
    gate_up=("shared_mlp.input_linear.weight",),
    down="shared_mlp.output_linear.weight",
    router="block_sparse_moe.router.layer.weight",
    expert_gate_up=("block_sparse_moe.input_linear.weight",),
    expert_down="block_sparse_moe.output_linear.weight",
    shared_gate_up=("shared_mlp.input_linear.weight",),
    shared_down="shared_mlp.output_linear.weight",
)
GRANITE_MODULES = replace(
    GRANITE,
    router="block_sparse_moe.router.weight",
    expert_gate_up=("block_sparse_moe.experts.gate_up_proj",),
    expert_down="block_sparse_moe.experts.down_proj",
)
BAMBA = FamilyNames(
    final_norm="model.final_layernorm.weight",
    ffn_norm="pre_ff_layernorm.weight",
    gate_up=("feed_forward.gate_proj.weight", "feed_forward.up_proj.weight"),
    down="feed_forward.down_proj.weight",
)
MAMBA2 = FamilyNames(
    layer="backbone.layers.{}.",
    embedding="backbone.embeddings.weight",
    final_norm="backbone.norm_f.weight",
    mixer_norm="norm.weight",
    mamba="mixer.",
)
QWEN3_5 = FamilyNames(
    shared_gate_up=("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
    shared_down="mlp.shared_expert.down_proj.weight",
)
QWEN3_5_MODULES = replace(
    QWEN3_5, expert_gate_up=STACKED.expert_gate_up, expert_down=STACKED.expert_down
)
MEGATRON = replace(QWEN3_5, expert_bias="mlp.gate.e_score_correction_bias")
"""In no file: transformers trained with Megatron-LM whose features no family has together."""
MEGATRON_UNGATED = replace(
    MEGATRON,
    gate_up=("mlp.up_proj.weight",),
    expert_gate_up=("mlp.experts.{e}.up_proj.weight",),
    shared_gate_up=("mlp.shared_expert.up_proj.weight",),
)
QWEN3_NEXT = replace(QWEN3_5, delta_in_proj=("in_proj_qkvz.weight", "in_proj_ba.weight"))
QWEN3_NEXT_MODULES = replace(QWEN3_5_MODULES, delta_in_proj=QWEN3_NEXT.delta_in_proj)

GGUF = FamilyNames(
    layer="blk.{}.",
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    output="output.weight",
    mixer_norm="attn_norm.weight",
    ffn_norm="ffn_norm.weight",
    attention="attn_",
    mamba="ssm_",
    renamed={
        **{f"{part}_proj.{k}": f"{part}.{k}" for part in "qkv" for k in ("weight", "bias")},
        "o_proj.weight": "output.weight",
        "in_proj.weight": "in.weight",
        "out_proj.weight": "out.weight",
        "dt_bias": "dt.bias",
        "A_log": "a",
        "D": "d",
    },
    gate_up=("ffn_gate.weight", "ffn_up.weight"),
    down="ffn_down.weight",
    router="ffn_gate_inp.weight",
    expert_bias="exp_probs_b.bias",
    expert_gate_up=("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    expert_down="ffn_down_exps.weight",
    shared_gate_up=("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
    shared_down="ffn_down_shexp.weight",
    shared_gate="ffn_gate_inp_shexp.weight",
)
"""Names in GGUF files, of all families but the next (gguf-py's `TENSOR_NAMES`)."""
GGUF_NEMOTRON_H = replace(
    GGUF,
    ffn_norm=GGUF.mixer_norm,
    gate_up=GGUF.gate_up[1:],
    expert_gate_up=GGUF.expert_gate_up[1:],
    shared_gate_up=GGUF.shared_gate_up[1:],
)

PUBLISHED = {
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "mixtral": MIXTRAL,
    "gpt_oss": GPT_OSS,
    "nemotron_h": NEMOTRON_H,
    "granitemoehybrid": GRANITE,
    "bamba": BAMBA,
    "mamba2": MAMBA2,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5,
    "megatron": MEGATRON,
}
"""Names in published files, by `ModelArchitecture.model_type`; all others have the default."""
MODULES = {
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "gpt_oss": GPT_OSS,
    "nemotron_h": NEMOTRON_H_MODULES,
    "granitemoehybrid": GRANITE_MODULES,
    "bamba": BAMBA,
    "mamba2": MAMBA2,
    "qwen3_next": QWEN3_NEXT_MODULES,
    "qwen3_5": QWEN3_5_MODULES,
    "qwen3_5_moe": QWEN3_5_MODULES,
}
"""Names in transformers' modules, where all others have `STACKED`."""


def names_of(model_type: str, modules: bool, gated: bool) -> FamilyNames:
    """The names of a family: of published files, or of transformers' modules; `gated`: MLPs and
    experts have a gate."""
    if gated and model_type == "nemotron_h":
        return NEMOTRON_H_GATED
    if not gated and model_type == "megatron":
        return MEGATRON_UNGATED
    if modules:
        return MODULES.get(model_type, STACKED)
    return PUBLISHED.get(model_type, FamilyNames())


def is_transposed(model_type: str, name: str) -> bool:
    """Whether files of 16 bits hold a tensor as `[experts, in, out]`."""
    return model_type == "gpt_oss" and name.endswith(("experts.gate_up_proj", "experts.down_proj"))


@dataclass(frozen=True)
class MtpNames:
    """Tensor names of one family.

    In a name stand for numbers: `{depth}` the depth's; `{first}` and `{last}` its first and
    last layer's, `{layer}` any layer's, where layers of all depths are counted on.
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
    depths: str = "num_nextn_predict_layers"
    """Key of `config.json` with the number of depths."""


QWEN = MtpNames(
    "mtp.",
    enorm="mtp.pre_fc_norm_embedding.weight",
    hnorm="mtp.pre_fc_norm_hidden.weight",
    eh_proj="mtp.fc.weight",
    final_layernorm="mtp.norm.weight",
    inside="mtp.layers.{depth}.",
    has_shared_ends=True,
)
QWEN_3_5 = replace(QWEN, depths="mtp_num_hidden_layers")
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
    "qwen3_5": QWEN_3_5,
    "qwen3_5_moe": QWEN_3_5,
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
