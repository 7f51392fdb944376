"""A GGUF file of random weights in a published shape, to measure with: benchmark_llama_cpp.py.

    python scripts/benchmarks/random_gguf.py granite-4.0-h-350m /tmp/granite.gguf --type Q4_K_M
    python scripts/benchmarks/random_gguf.py small-experts /tmp/experts.gguf

The tokenizer is the demo model's, with names of no use for the other tokens. Q4_K_M: what
llama-quantize chooses for these architectures, as far as it follows from a tensor's name; one type
for all is any that the gguf package knows.
"""

import argparse
from collections.abc import Iterator

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from megatron_async.checkpoints.gguf_families import GGUF_FAMILIES
from megatron_async.checkpoints.mapping import weights
from megatron_async.checkpoints.model_names import demo_file
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from tests.support.gguf_blocks import blocks_of
from tests.support.gguf_files import add_field, metadata_of

SHAPES = DUMMY_SHAPES | {
    "small-experts": ModelArchitecture(  # of Granite 3.1 1B A400M
        "qwen3_moe", 24, 1024, 16, 8, 64, 4096, 49152, 1e-6, 1000000.0, qk_layernorm=True,
        max_position_embeddings=4096, tie_word_embeddings=True, num_moe_experts=32,
        moe_router_topk=8, moe_ffn_hidden_size=512,
    ),
}  # fmt: skip
KINDS = {"granitemoehybrid": "granitehybrid", "qwen3_moe": "qwen3moe", "mistral": "llama"}
"""`general.architecture` of a family, where it is not the family's name."""
SCALE = 1e-4
"""Largest scale of a block: weights are some hundredths then."""


def type_of(name: str, layer: int, layers: int, asked: str) -> Kind:
    """The type of a tensor."""
    if asked != "Q4_K_M":
        return Kind[asked]
    has_more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    is_end = name in ("output.weight", "token_embd.weight")
    return (
        Kind.Q6_K
        if is_end or (has_more and ("attn_v" in name or "ffn_down" in name))
        else Kind.Q4_K
    )


def tensors(a: ModelArchitecture, kind: str, asked: str) -> Iterator[tuple[str, np.ndarray, Kind]]:
    """Name, data and type of each tensor."""
    generator = np.random.default_rng(0)
    for weight in weights(a, names=GGUF_FAMILIES[kind].names):
        for name, shape in weight.parts.items():
            stem, number = name.split(".")[-2], int(name.split(".")[1]) if "blk" in name else -1
            if name.endswith("ssm_a"):
                yield name, -generator.uniform(0.1, 1, (*shape, 1)).astype(np.float32), Kind.F32
            elif name.endswith("ssm_d"):
                yield name, np.ones((*shape, 1), np.float32), Kind.F32
            elif stem == "ssm_norm":
                yield (
                    name,
                    np.ones((a.mamba_num_groups, -(-shape[0] // a.mamba_num_groups)), np.float32),
                    Kind.F32,
                )
            elif len(shape) == 1 or stem in ("ssm_conv1d", "ffn_gate_inp"):
                mean = 1.0 if "norm" in stem else 0.0
                values = generator.normal(mean, 0.05, [n for n in shape if n > 1])
                yield name, values.astype(np.float32), Kind.F32
            else:
                chosen = type_of(name, number, a.num_layers, asked)
                rows = int(np.prod(shape[:-1]))
                data = blocks_of(chosen, rows, shape[-1], rows, SCALE)
                yield name, data.reshape(*shape[:-1], -1), chosen


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("file")
    parser.add_argument("--type", default="Q4_K_M")
    arguments = parser.parse_args()
    a = SHAPES[arguments.shape]
    kind = KINDS.get(a.model_type, a.model_type)
    writer = gguf.GGUFWriter(arguments.file, kind)
    demo = gguf.GGUFReader(demo_file())
    words = demo.fields["tokenizer.ggml.tokens"].contents()[: a.vocab_size]
    kinds = demo.fields["tokenizer.ggml.token_type"].contents()[: a.vocab_size]
    missing = a.vocab_size - len(words)
    fields = metadata_of(kind, a) | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": words + [f"[PAD{number}]" for number in range(missing)],
        "tokenizer.ggml.token_type": kinds + [5] * missing,
        "tokenizer.ggml.merges": demo.fields["tokenizer.ggml.merges"].contents(),
    }
    for key, value in fields.items():
        add_field(writer, key, value)
    for name, data, chosen in tensors(a, kind, arguments.type):
        writer.add_tensor(name, data, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
