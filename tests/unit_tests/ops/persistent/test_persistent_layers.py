import re
import subprocess
from functools import lru_cache, partial

import pytest
import torch
import triton
from programs_emulator import Words, run_programs
from test_persistent_plan import SHAPES
from test_resident_kernel import HOPPER, TOOLS, spilled_bytes
from triton.experimental.gluon._runtime import GluonASTSource
from triton_interpreter import INTERPRETED

from megatron_async.ops.persistent.persistent_attention import join_parts
from megatron_async.ops.persistent.persistent_kernel import persistent_layers_kernel
from megatron_async.ops.persistent.persistent_layers import LayerWeights, PersistentLayers
from megatron_async.ops.persistent.persistent_plan import (
    TILE,
    WARPS,
    LayerSizes,
    PersistentPlan,
    plan_layers,
)

BLOCK = 16


def next_power(number):
    return 1 << (number - 1).bit_length()


def random_numbers(generator, *shape, scale=1.0):
    return (torch.randn(*shape, generator=generator) * scale).bfloat16()


@lru_cache(maxsize=1)
def weights_of(sizes, layers, seed):
    """Of each layer; kept, as some take seconds to draw."""
    draw = partial(random_numbers, torch.Generator().manual_seed(seed))
    hidden, ffn, heads = sizes.hidden, sizes.ffn, sizes.heads * sizes.dim
    shapes = [(sizes.qkv, hidden), (hidden, heads), (2 * ffn, hidden), (hidden, ffn)]
    return [
        [draw(*shape, scale=shape[1] ** -0.5) for shape in shapes]
        + [1 + draw(hidden, scale=0.1) for _ in range(2)]
        for _ in range(layers)
    ]


class Model:
    """Layers of random numbers, a cache and a row in it, and what they should give."""

    def __init__(self, hidden, ffn, kv_heads, group, dim, layers, length, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.sizes = LayerSizes(hidden, ffn, kv_heads, group, dim)
        self.length, self.layers = length, layers
        self.weights = weights_of(self.sizes, layers, seed)
        blocks = -(-length // BLOCK)
        self.table = torch.randperm(blocks + 3, generator=self.generator)[:blocks].int()
        self.cache = self.random(layers, 2, blocks + 3, BLOCK, kv_heads, dim)
        angle = torch.rand(length, dim // 2, generator=self.generator).repeat(1, 2) * 6
        self.cos, self.sin = angle.cos(), angle.sin()
        self.x = self.random(1, hidden)

    def random(self, *shape):
        return random_numbers(self.generator, *shape)

    @property
    def new_place(self):
        last = self.length - 1
        return int(self.table[last // BLOCK]) * BLOCK + last % BLOCK

    def reference(self):
        """The stream behind the last layer, and the cache as it is then, both float32."""
        kv_heads, group, dim = self.sizes.kv_heads, self.sizes.group, self.sizes.dim
        stream, cache = self.x[0].float(), self.cache.clone()
        for layer, (qkv, proj, fc1, fc2, norm1, norm2) in enumerate(self.weights):
            mixed = (qkv.float() @ rms(stream, norm1)).view(kv_heads, group + 2, dim)
            turned = mixed[:, : group + 1]
            first, second = turned.chunk(2, -1)
            cos, sin = self.cos[self.length - 1], self.sin[self.length - 1]
            turned = turned * cos + torch.cat((-second, first), -1) * sin
            places = cache[layer].view(2, -1, kv_heads, dim)
            flat = (self.table[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[: self.length]
            keys, values = places[:, flat].float()
            keys[-1], values[-1] = turned[:, group], mixed[:, group + 1]
            places[:, self.new_place] = torch.stack((keys[-1], values[-1])).bfloat16()
            scores = torch.einsum("hgd,thd->hgt", turned[:, :group], keys) * dim**-0.5
            out = torch.einsum("hgt,thd->hgd", scores.softmax(-1), values)
            stream = stream + proj.float() @ out.flatten()
            gate, up = (fc1.float() @ rms(stream, norm2)).chunk(2)
            stream = stream + fc2.float() @ (torch.nn.functional.silu(gate) * up)
        return stream, cache


def rms(x, factors):
    return x * torch.rsqrt((x * x).mean() + 1e-5) * factors.float()


def run(model, words, step, plan, tile=32, warps=4, seed=0):
    """One step; `words` and `step` are kept for the next one."""
    table = torch.tensor([[w.data_ptr() for w in layer] for layer in model.weights])
    weights = {w.data_ptr(): w.flatten() for layer in model.weights for w in layer}
    out, cache = torch.full_like(model.x, torch.nan), model.cache.clone()
    arguments = [
        model.x, out, table, words, step, model.cos, model.sin,
        torch.tensor([model.length - 1]), torch.tensor([model.new_place]), cache, model.table,
        cache.stride(0), cache.stride(1), model.layers, 1e-5, model.sizes.dim**-0.5,
    ]  # fmt: skip
    constants = plan.constants(model.sizes, BLOCK) | {"tile": tile, "warps": warps}
    run_programs(
        persistent_layers_kernel, plan.programs, arguments, constants, weights,
        stored_again=(4, 9), seed=seed,
    )  # fmt: skip
    return out[0].float(), cache


def divided(sizes, programs=6, parts=3, slots=3, unit_chunks=1):
    unit = unit_chunks * 256
    lengths = (sizes.hidden, sizes.heads * sizes.dim, sizes.ffn)
    padded = [next_power(-(-length // unit) * unit) for length in lengths]
    return PersistentPlan(programs, parts, slots, unit_chunks, *padded)


@pytest.mark.parametrize(
    ("sizes", "layers", "length", "options"),
    [
        ((320, 50, 2, 3, 64), 2, 40, {}),
        ((320, 50, 2, 3, 64), 2, 1, {}),
        ((320, 600, 1, 2, 64), 2, 600, {"parts": 4, "unit_chunks": 2}),
        ((528, 90, 2, 1, 128), 2, 290, {"unit_chunks": 3, "slots": 5}),
        ((320, 50, 2, 3, 64), 3, 70, {"slots": 11}),
        ((320, 24, 1, 2, 64), 3, 70, {"slots": 16, "unit_chunks": 2}),
    ],
)
def test_against_plain_layers(sizes, layers, length, options):
    model = Model(*sizes, layers, length)
    expected, cache = model.reference()
    plan = divided(model.sizes, **options)
    words, step = Words.zeros(plan.words(model.sizes)), torch.zeros(1, dtype=torch.int64)
    for seed in range(2):
        found, after = run(model, words, step, plan, seed=seed)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(after.float(), cache.float(), rtol=1e-2, atol=1e-2)
        assert step.item() == seed + 1


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen3-0.6b"])
def test_layers_as_on_a_gpu(name):
    """Of real size, with the plan for an H200."""
    sizes = SHAPES[name]
    model = Model(sizes.hidden, sizes.ffn, sizes.kv_heads, sizes.group, sizes.dim, 2, 300)
    plan = plan_layers(sizes, 132, 232448)
    words, step = Words.zeros(plan.words(sizes)), torch.zeros(1, dtype=torch.int64)
    found, _cache = run(model, words, step, plan, TILE, WARPS)
    torch.testing.assert_close(found, model.reference()[0], rtol=1e-2, atol=1e-2)


def test_parts_that_are_not_used_have_no_weight():
    """Sums of weights may be small: an unused part must not count as one of 1."""
    part_words, sum_words, out_words = (Words.zeros(size) for size in (4 * 64, 4, 64))
    part_words.values[: 2 * 64] = torch.arange(2.0).repeat_interleave(64)
    sum_words.values[:2] = torch.tensor([-40.0, -40.0])
    part_words.epochs[: 2 * 64] = sum_words.epochs[:2] = 7
    constants = {"parts": 4, "parts_padded": 4, "dim": 64, "layout": None}
    run_programs(join_parts, 1, [part_words, sum_words, out_words, 0, 2, 7], constants, {})
    assert out_words.epochs.eq(7).all()
    torch.testing.assert_close(out_words.values, torch.full((64,), 0.5))


def compiled(sizes):
    plan = plan_layers(sizes, 132, 232448)
    constants = plan.constants(sizes, 64)
    kernel = persistent_layers_kernel
    types = {"eps": "fp32", "scale": "fp32", "block_table": "*i32"}
    types |= dict.fromkeys(("cos", "sin"), "*fp32")
    types |= dict.fromkeys(("table", "words", "step", "position_ids", "write_index"), "*i64")
    types |= {"layers": "i32", "layer_elements": "i64", "value_offset": "i64"}
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "*bf16") for n in names}
    whole = [n for n in names if signature[n].startswith("*") or signature[n] == "i64"]
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in whole}
    source = GluonASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=HOPPER, options={"num_warps": WARPS})


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
def test_compiled(sizes, tmp_path):
    """Break it: a warp's threads leave the loop of `_poll` one by one (without the vote)."""
    kernel = compiled(sizes)
    assert kernel.metadata.shared <= 232448
    assert spilled_bytes(kernel.asm, tmp_path) == 0
    (tmp_path / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    command = [TOOLS / "nvdisasm", "-c", tmp_path / "kernel.cubin"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "COLLECTIVE" not in text  # shuffles of threads that may have diverged
    # Polls of each product's inputs, of a group's heads, and of a head's parts.
    assert len(re.findall(r"VOTE\.ANY", text)) >= 7
    weights = re.findall(r"LDGSTS\S*", text)
    assert sum("128" in copy for copy in weights) > 0.9 * len(weights)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 257, 1000, 9000])
    @pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
    def test_against_plain_layers(self, sizes, length):
        model = Model(sizes.hidden, sizes.ffn, sizes.kv_heads, sizes.group, sizes.dim, 3, length)
        expected, cache = model.reference()
        layers, arguments = on_gpu(model)
        for _ in range(3):
            arguments["cache"].copy_(model.cache)
            found = layers.run(**arguments)
            torch.testing.assert_close(found[0].float().cpu(), expected, rtol=2e-2, atol=2e-2)
            after = arguments["cache"].float().cpu()
            torch.testing.assert_close(after, cache.float(), rtol=1e-2, atol=1e-2)

    def test_replays_have_the_same_bits(self):
        model = Model(576, 1536, 3, 3, 64, 30, 700)
        layers, arguments = on_gpu(model)
        expected = layers.run(**arguments).clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = layers.run(**arguments)
        for _ in range(200):
            graph.replay()
        assert torch.equal(found, expected)


def on_gpu(model):
    """Layers of a model, and the arguments of its step."""
    weights = [LayerWeights(*(weight.cuda() for weight in layer)) for layer in model.weights]
    layers = PersistentLayers(weights, model.sizes, 1e-5, model.sizes.dim**-0.5)
    numbers = {
        "hidden_states": model.x, "cos": model.cos, "sin": model.sin,
        "position_ids": torch.tensor([model.length - 1]),
        "write_index": torch.tensor([model.new_place]), "cache": model.cache,
        "block_table": model.table,
    }  # fmt: skip
    return layers, {name: number.cuda() for name, number in numbers.items()}
