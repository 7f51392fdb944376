"""A checkpoint as Megatron-LM's training leaves it, and the arguments that describe its model.

Megatron's examples read nothing else. The weights are those of any dense model that this project
loads; they are put into Megatron's own `GPTModel`, by its local layer spec, and written by
Megatron's `dist_checkpointing` with the arguments beside them.
"""

import sys
from argparse import Namespace
from pathlib import Path

import torch

from megatron_async.checkpoints import load_model, open_model
from megatron_async.checkpoints.torch_dist_strategy import SynchronousSaveStrategy
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.hybrid import transformer_config
from megatron_async.models.parallel_state import ensure_process_groups

ITERATION = 1


def write_training_folder(model: str, folder: Path) -> None:
    """Write `model` (what `LLM` takes; dense) as a `GPTModel` in float32, its tokenizer beside it;
    a ValueError if it has experts, recurrent layers or no tokenizer."""
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    loaded = load_model(model, torch.float32, torch.device("cpu"))
    shape = loaded.architecture
    if shape.num_moe_experts or set(shape.pattern) - set("*-") or loaded.tokenizer is None:
        raise ValueError(f"{model}: only dense models with a tokenizer make a training checkpoint")
    ensure_process_groups()
    config = transformer_config(shape, torch.float32)
    config.num_layers = shape.num_layers
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=shape.qk_layernorm, normalization="RMSNorm"),
        shape.vocab_size,
        shape.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=int(shape.rotary_base),
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
    )
    of_loaded = dict(loaded.model.named_parameters())
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            parameter.copy_(of_loaded.pop(_hybrid_name(name, of_loaded)))
    assert not of_loaded, sorted(of_loaded)
    iteration = folder / f"iter_{ITERATION:07d}"
    iteration.mkdir(parents=True)
    state = gpt.sharded_state_dict(prefix="", metadata={"singleton_local_shards": False})
    state = {
        **state,
        "iteration": ITERATION,
        "checkpoint_version": 3.0,
        "args": Namespace(**_arguments(shape)),
    }
    dist_checkpointing.save(state, str(iteration), SynchronousSaveStrategy())
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{ITERATION}\n")
    loaded.tokenizer.save(folder)


def model_flags(model: str) -> list[str]:
    """What Megatron's command line must say of `model`."""
    shape = open_model(model).architecture
    flags = []
    for name, value in _arguments(shape).items():
        flag = "--" + name.replace("_", "-")
        if name == "add_bias_linear":
            flags.append("--disable-bias-linear")
        elif value is True:
            flags.append(flag)
        elif value is not False:
            flags += [flag, str(value)]
    return flags


def _arguments(shape: ModelArchitecture) -> dict[str, object]:
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "group_query_attention": True,
        "num_query_groups": shape.num_query_groups,
        "kv_channels": shape.kv_channels,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "norm_epsilon": shape.layernorm_epsilon,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "rotary_base": int(shape.rotary_base),
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": shape.add_qkv_bias,
        "qk_layernorm": shape.qk_layernorm,
        "untie_embeddings_and_output_weights": not shape.tie_word_embeddings,
        "max_position_embeddings": shape.max_position_embeddings,
    }


def _hybrid_name(name: str, known: dict[str, torch.Tensor]) -> str:
    """What our model, whose attention and feed-forward are layers of their own, calls a weight."""
    if name in known:
        return name
    if name.startswith("decoder.final_layernorm"):
        return name.replace("final_layernorm", "final_norm")
    decoder, layers, number, rest = name.split(".", 3)
    own = 2 * int(number) + (not rest.startswith(("self_attention", "input_layernorm")))
    return ".".join((decoder, layers, str(own), rest))


if __name__ == "__main__":
    write_training_folder(sys.argv[1], Path(sys.argv[2]))
