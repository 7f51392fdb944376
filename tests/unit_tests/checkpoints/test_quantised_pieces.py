"""Weights that stay as a quantised folder has them: for every format, family and rank what is kept
is what the folder means; and which blocks of scales stay blocks."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import megatron_async.ops.linear.stored_weight as stored_weight
from megatron_async.checkpoints import CheckpointError, open_model
from megatron_async.checkpoints.convert import convert
from megatron_async.checkpoints.huggingface import HuggingFaceSource
from megatron_async.checkpoints.mapping import Shard, Weight, weights
from megatron_async.checkpoints.model_names import dummy_shape
from megatron_async.checkpoints.quantised_pieces import on_grid
from megatron_async.errors import ConfigurationError
from megatron_async.models.held_weight import Operand, is_linear
from megatron_async.ops.linear.quantised_weight import QuantisedWeight, widened
from tests.support.quantised_folders import FORMATS, MODEL, Format, is_matrix, quantised_folder

CPU, WHOLE = torch.device("cpu"), Shard()
ODD = "dummy:qwen3:layers=1,hidden=256,heads=4,groups=2,head=96,ffn=384,vocab=64"
"""Keys have 192 rows; two ranks cut rows and columns within blocks of 128."""
EVEN = "dummy:qwen3:layers=1,hidden=256,heads=4,groups=2,head=128,ffn=256,vocab=64"
"""All parts on all of two ranks are blocks."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory):
    """Folders of a dummy model, in float32."""
    found: dict[str, Path] = {}

    def make(shape: str) -> Path:
        if shape not in found:
            found[shape] = tmp_path_factory.mktemp("plain") / "m"
            convert(shape, found[shape], to="huggingface", dtype="float32")
        return found[shape]

    return make


def kept(
    folder: Path,
    shard: Shard = WHOLE,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    rounds_rows: bool = False,
) -> dict[str, Operand]:
    """A rank's weights, as they are kept."""
    source = open_model(folder)
    assert isinstance(source, HuggingFaceSource)
    layouts = source.layouts(shard, rounds_rows)
    held: dict[str, Operand] = {
        w.name: layouts[w.name].empty(w.shape, dtype, device)
        if w.name in layouts
        else torch.empty(w.shape, dtype=dtype, device=device)
        for w in source.held_weights(shard)
    }
    for weight in held.values():
        for _, tensor in weight.tensors() if isinstance(weight, QuantisedWeight) else ():
            tensor.view(-1).view(torch.uint8).fill_(77)
    source.load_into(held, shard)
    return held


def decoded(folder: Path, shard: Shard = WHOLE) -> dict[str, Tensor]:
    """A rank's weights, decoded."""
    source = open_model(folder)
    held = {w.name: torch.empty(w.shape) for w in weights(source.architecture, shard)}
    source.load_into(held, shard)
    return held


def assert_kept(held: dict[str, Operand], expected: dict[str, Tensor], rtol: float = 0.0) -> None:
    assert held.keys() == expected.keys()
    for name, weight in held.items():
        torch.testing.assert_close(widened(weight), expected[name], rtol=rtol, atol=0, msg=name)


def forms(held: dict[str, Operand]) -> dict[str, str]:
    return {
        name.removeprefix("decoder.layers."): weight.form.words
        for name, weight in held.items()
        if isinstance(weight, QuantisedWeight)
    }


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_kept_is_what_the_files_mean(
    kind: str, ranks: int, plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_weight, "SLICE_VALUES", 1 << 14)  # many pieces
    folder = quantised_folder(plain(ODD), tmp_path / "m", kind)
    shard = Shard(ranks - 1, ranks)
    held, expected = kept(folder, shard), decoded(folder, shard)
    # 1 / divisor is rounded.
    assert_kept(held, expected, 3e-7 if kind == "compressed nvfp4" else 0.0)
    linear = {name for name in held if is_linear(name)}
    assert {n for n, w in held.items() if isinstance(w, QuantisedWeight)} == linear
    bits = (
        8
        * sum(w.nbytes for n, w in held.items() if n in linear)
        / sum(expected[n].numel() for n in linear)
    )
    assert bits < (8.8 if "fp8" in kind or kind.split()[-1] in ("tensor", "channel", "blocks")
                   or kind in ("fbgemm", "compressed mxfp8") else 5.1), bits  # fmt: skip


@pytest.mark.parametrize(
    ("family", "kind", "shard"),
    [
        ("qwen3-moe", "fp8 blocks", Shard(1, 2, 1, 2)),
        ("qwen3-moe", "modelopt nvfp4", WHOLE),
        ("nemotron-3", "modelopt fp8", Shard(1, 2, 1, 2)),
        ("qwen3.5-moe", "compressed channel", WHOLE),
        ("qwen3.5-moe", "fp8 blocks", Shard(0, 2, 1, 2)),
        ("granite-moe", "compressed channel", WHOLE),
    ],
)
def test_experts_and_hybrids(
    family: str, kind: str, shard: Shard, family_folder, hybrid_folder, tmp_path: Path
) -> None:
    """Experts one by one or in one tensor, strips of mixers, rows in another order, a multiplier
    of the model's (Granite's), which becomes part of the scales."""
    plain = (family_folder if family.startswith("qwen3-") else hybrid_folder)(family)
    folder = quantised_folder(plain, tmp_path / "m", kind)
    held = kept(folder, shard)
    is_scaled = any(w.scale != 1 for w in weights(open_model(folder).architecture))
    assert_kept(held, decoded(folder, shard), 3e-7 if is_scaled else 0.0)
    assert forms(held)


def test_blocks_stay_blocks_where_all_parts_begin_with_one(plain, tmp_path: Path) -> None:
    """Else a scale for each row, the same on all ranks. A scale of a whole tensor becomes one of
    each block."""
    blocks, rows = "FP8, scales: blocks of 128 x 128", "FP8, scales: groups of 128"
    name = "0.self_attention.linear_"
    even = quantised_folder(plain(EVEN), tmp_path / "even", "fp8 blocks")
    for shard in (WHOLE, Shard(0, 2), Shard(1, 2)):
        found = forms(kept(even, shard))
        assert set(found.values()) == {blocks}
        assert found.keys() >= {name + "qkv.weight", "1.mlp.linear_fc2.weight"}
    one = quantised_folder(plain(EVEN), tmp_path / "one", "modelopt fp8")
    assert set(forms(kept(one)).values()) == {blocks}
    assert_kept(kept(one, Shard(1, 2)), decoded(one, Shard(1, 2)))
    odd = quantised_folder(plain(ODD), tmp_path / "odd", "fp8 blocks")
    found = forms(kept(odd))
    assert found[name + "qkv.weight"] == rows
    assert found[name + "proj.weight"] == found["1.mlp.linear_fc1.weight"] == blocks
    for rank in range(2):
        found = forms(kept(odd, Shard(rank, 2)))
        assert found["1.mlp.linear_fc1.weight"] == rows
        assert found["1.mlp.linear_fc2.weight"] == "FP8, scales: groups of 64"


def test_groups_that_ranks_cut_are_refused_with_a_remedy(tmp_path: Path) -> None:
    convert(ODD.replace("ffn=384", "ffn=264"), tmp_path / "plain", to="huggingface")
    folder = quantised_folder(tmp_path / "plain", tmp_path / "m", "fp8 blocks")
    assert_kept(kept(folder), decoded(folder))
    with pytest.raises(ConfigurationError, match=r"fc2.* 132 of its 264 inputs .*='none'"):
        kept(folder, Shard(0, 2))


def test_parts_of_several_forms_are_decoded_and_told(plain, tmp_path: Path, caplog) -> None:
    """Keys that are not quantised, beside queries and values that are."""
    folder = quantised_folder(
        plain(EVEN), tmp_path / "m", "fp8 blocks",
        lambda name, tensor: is_matrix(name, tensor) and "k_proj" not in name,
    )  # fmt: skip
    held = kept(folder)
    assert isinstance(held["decoder.layers.0.self_attention.linear_qkv.weight"], Tensor)
    assert "1 weights, such as 'decoder.layers.0.self_attention.linear_qkv.weight'" in caplog.text
    assert_kept(held, decoded(folder))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_scale_of_inputs_is_the_largest_of_all_parts(
    rank: int, hybrid_folder, tmp_path: Path
) -> None:
    """On all ranks; not of experts, whose products round no rows."""
    form = FORMATS["modelopt fp8"]

    def encode(w: Tensor) -> Any:
        tensors, values = form.encode(w)
        return tensors | {".input_scale": w.abs().mean()}, values

    folder = quantised_folder(
        hybrid_folder("nemotron-3"), tmp_path / "m", form._replace(encode=encode)
    )
    shard = Shard(rank, 2, rank, 2)
    held = kept(folder, shard, rounds_rows=True)
    parts = {n: float(t) for n, t in load_file(folder / MODEL).items() if n.endswith("input_scale")}
    rounded = 0
    for weight in open_model(folder).held_weights(shard):
        if isinstance(operand := held[weight.name], QuantisedWeight):
            largest = max(parts[p.replace("weight", "input_scale")] for p in weight.held_parts)
            is_rounded = "experts." not in weight.name
            found = operand.input_scale
            assert (found is not None) == operand.form.rounds_rows == is_rounded
            assert found is None or float(found) == largest
            rounded += is_rounded
    assert rounded >= 4


def test_damaged_scales_are_named(plain, tmp_path: Path) -> None:
    form = FORMATS["fp8 blocks"]

    def encode(w: Tensor) -> Any:
        tensors, values = form.encode(w)
        tensors[".weight_scale_inv"][0, 0] = float("nan")
        return tensors, values

    folder = quantised_folder(plain(EVEN), tmp_path / "m", Format(form.config, encode))
    with pytest.raises(CheckpointError, match=r"weight_scale_inv' has values that are no finite"):
        kept(folder)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [ODD, EVEN])
@pytest.mark.parametrize(
    "kind", ["fp8 blocks", "fp8 blocks e8m0", "modelopt fp8", "modelopt nvfp4", "compressed mxfp4",
             "compressed int4 zeros", "awq", "gptq zeros"],
)  # fmt: skip
def test_what_is_kept_on_a_gpu_is_what_is_kept_on_a_cpu(
    kind: str, shape: str, plain, tmp_path: Path
) -> None:
    folder = quantised_folder(plain(shape), tmp_path / "m", kind)
    found = kept(folder, dtype=torch.bfloat16, device=torch.device("cuda"))
    for name, weight in kept(folder, dtype=torch.bfloat16).items():
        on_gpu = found[name]
        if not isinstance(weight, QuantisedWeight) or not isinstance(on_gpu, QuantisedWeight):
            assert torch.equal(widened(on_gpu).cpu(), widened(weight))
            continue
        for (_, expected), (kind_of, tensor) in zip(
            weight.tensors(), on_gpu.tensors(), strict=True
        ):
            as_bytes = tensor.cpu().view(torch.uint8)
            assert torch.equal(as_bytes, expected.view(torch.uint8)), (name, kind_of)


def blocks_of(weight: Weight) -> set[tuple[str, int, int]] | None:
    """Stored blocks of 128 rows (part, expert, number) that blocks of 128 rows of an expert are
    made of, one each; None: some are made of several."""
    rows = torch.arange(math.prod(weight.shape[:-1])).view(*weight.shape[:-1], 1)
    of_expert = weight.shape[-2]
    stored: dict[int, set[tuple[str, int, int]]] = {}
    for name, region, place in weight.pieces(rows):
        experts = range(region[0].start, region[0].stop) if len(region) == 3 else range(1)
        own = range(region[-2].start, region[-2].stop)
        sources = [(name, e, row // 128) for e in experts for row in own]
        for at, source in zip(place.flatten().tolist(), sources, strict=True):
            expert, row = divmod(at, of_expert)
            stored.setdefault(expert * of_expert + row // 128, set()).add(source)
    found = [blocks.pop() for blocks in stored.values() if len(blocks) == 1]
    return set(found) if len(found) == len(stored) else None


@pytest.mark.parametrize(
    ("name", "ranks", "kept_blocks"),
    [
        ("llama-3.1-8b", 4, {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}),
        ("qwen3:layers=1,hidden=256,heads=2,groups=2,head=128,ffn=192,vocab=64", 1,
         {"linear_qkv", "linear_proj", "linear_fc2"}),
        ("qwen3:layers=1,hidden=320,heads=2,groups=1,head=128,ffn=256,vocab=64", 1,
         {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}),
        ("nemotron-3-nano-30b", 1, {"linear_qkv", "linear_proj", "in_proj", "out_proj",
                                    "linear_fc1", "linear_fc2"}),
        ("nemotron-3-nano-30b", 2, {"linear_qkv", "linear_proj", "out_proj", "linear_fc2"}),
        ("qwen3-next-80b", 1, {"linear_qkv", "linear_proj", "out_proj", "linear_fc1",
                               "linear_fc2"}),
    ],
)  # fmt: skip
def test_a_grid_of_blocks_is_one_of_stored_blocks(
    name: str, ranks: int, kept_blocks: set[str]
) -> None:
    """By the place of each row. A block at a part's end may be short if nothing follows it."""
    kept_here = set()
    seen = set[Any]()
    for weight in weights(dummy_shape(f"dummy:{name}")[0], Shard(ranks - 1, ranks)):
        module = weight.name.rsplit(".", 2)[-2]
        facts = (module, weight.shape, weight.groups)
        if not is_linear(weight.name) or facts in seen:
            continue
        seen.add(facts)
        if on_grid(weight, 128) is not None:
            assert blocks_of(weight) is not None, weight.name
            kept_here.add(module)
    assert kept_here == kept_blocks
