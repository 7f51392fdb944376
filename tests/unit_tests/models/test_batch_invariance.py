"""`batch_invariant_mode`: what it is not served with is refused by name, and what it is served with
runs on kernels of one order alone."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import nn

from megatron_async import LLM, InferenceConfig
from megatron_async.cli import main as cli
from megatron_async.compat.conversions.settings import to_settings
from megatron_async.errors import ConfigurationError
from megatron_async.models.batch_invariance import check_batch_invariance
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.fitness import check_invariant_layers
from megatron_async.models.hybrid import build_model
from megatron_async.ops.attention.backends.base import INVARIANT_PART
from megatron_async.ops.attention.decode_attention import decode_tile
from megatron_async.serving.model_card import ModelCard, decode_card
from megatron_async.step.step_graphs import mixed_question

GPU, META = torch.device("cuda", 0), torch.device("meta")
MODEL = {
    "params_dtype": torch.bfloat16, "tensor_model_parallel_size": 1,
    "hybrid_layer_pattern": "*-M-", "mamba_num_groups": 8,
}  # fmt: skip


def check(monkeypatch, capability=(9, 0), device=GPU, model=(), **settings):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    config = InferenceConfig(batch_invariant_mode=True, **settings)
    check_batch_invariance(SimpleNamespace(**MODEL | dict(model)), config, device)


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ({"device": torch.device("cpu")}, "device='cpu', whose loops .* needs a Hopper GPU"),
        ({"capability": (8, 0)}, r"capability 8.x: it was tried on 9.0 alone"),
        ({"capability": (10, 0)}, r"capability 10.x: it was tried on 9.0 alone"),
        ({"model": {"params_dtype": torch.float32}}, "dtype='float32': use 'bfloat16'"),
        *(({"attention_backend": name}, f"attention_backend='{name}': use 'triton' or 'w")
          for name in ("flash_attn_3", "flash_attn_4", "torch")),
        ({"quantization": "int8"}, "quantization='int8'"),
        ({"mamba_ssm_states_dtype": "bfloat16"}, "mamba_ssm_states_dtype='bfloat16': use 'float"),
        ({"model": {"tensor_model_parallel_size": 4, "sequence_parallel": True}},
         "sequence_parallel=True over 4 ranks: leave it out"),
        ({"model": {"tensor_model_parallel_size": 2, "mamba_num_groups": 1}},
         "mamba_num_groups=1, whose norm 2 ranks share"),
    ],
)  # fmt: skip
def test_what_the_mode_is_not_served_with(case, told, monkeypatch):
    """Break it: leave out a line of `_unserved`."""
    with pytest.raises(ConfigurationError, match=f"batch_invariant_mode=True is not .* {told}"):
        check(monkeypatch, **case)


def test_what_it_is_served_with(monkeypatch):
    check(monkeypatch)
    check(monkeypatch, attention_backend="triton", quantization="auto")
    check(monkeypatch, model={"params_dtype": torch.float16, "tensor_model_parallel_size": 4})
    check(monkeypatch, model={"mamba_num_groups": 1})
    check(monkeypatch, model={"hybrid_layer_pattern": "*-"}, mamba_ssm_states_dtype="bfloat16")
    check(monkeypatch, device=META, capability=None)  # a simulation computes nothing


def test_all_that_is_in_the_way_is_named_at_once():
    with pytest.raises(ConfigurationError) as refused:
        LLM("dummy:tiny", device="cpu", batch_invariant_mode=True)
    assert "device='cpu'" in str(refused.value)
    assert "dtype='float32'" in str(refused.value)


def with_unread_rows(model):
    weight = model.decoder.layers[1].mlp.linear_fc1.weight
    weight.data = torch.empty(weight.shape[::-1], dtype=weight.dtype, device=META).t()


def with_a_layer_of_torch(model):
    model.decoder.layers[1].mlp.linear_fc1 = nn.Linear(64, 256, device=META)


def with_layers_of_others(model):
    model.decoder.__class__ = type("TransformerEngineHybridStack", (type(model.decoder),), {})


def with_another_output_layer(model):
    model.output_layer.__class__ = ColumnParallelLinear


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (with_unread_rows, r"'decoder.layers.1.mlp.linear_fc1': .* bfloat16 weight of \(256, 64\)"),
        (with_a_layer_of_torch, "'decoder.layers.1.mlp.linear_fc1': a Linear multiplies by its"),
        (with_layers_of_others, "'decoder': a TransformerEngineHybridStack"),
        (with_another_output_layer, "'output_layer': a ColumnParallelLinear multiplies"),
    ],
)
def test_layers_of_another_order(changed, told):
    """Break it: `is_tied` weights are not asked for, or classes that are not ours pass."""
    model = build_model(DUMMY_SHAPES["tiny"], torch.bfloat16, META)
    check_invariant_layers(model, 9)
    changed(model)
    with pytest.raises(ConfigurationError, match=f"not served with the layer {told}"):
        check_invariant_layers(model, 9)


@pytest.mark.parametrize("shape", [*DUMMY_SHAPES])
def test_all_known_shapes_are_served(shape):
    check_invariant_layers(build_model(DUMMY_SHAPES[shape], torch.bfloat16, META), 9)
    if shape == "tiny":
        for dtype, major in ((torch.float32, 9), (torch.bfloat16, 8)):
            with pytest.raises(ConfigurationError, match="no kernel of one order"):
                check_invariant_layers(build_model(DUMMY_SHAPES[shape], dtype, META), major)


def test_a_part_is_whole_tiles_of_keys():
    """Tiles of decode and of prefill, whose borders would else differ."""
    assert all(INVARIANT_PART % decode_tile(dim) == 0 for dim in (16, 64, 128, 192, 256))


@pytest.mark.parametrize("own", [True, False])
def test_the_flag_of_a_megatron_model_means_the_mode(own):
    """A `TransformerConfig` that has trained with it asks its engine for the same."""
    for flag in (True, False):
        settings = to_settings(
            SimpleNamespace(batch_invariant_mode=flag), InferenceConfig(batch_invariant_mode=own)
        )
        assert settings.batch_invariant_mode is (own or flag)


FOUND = """
import json, sys
import torch
from megatron_async import InferenceConfig
from megatron_async.lab import absent_gpu
from megatron_async.checkpoints.kernel_program import program_of
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
for facts, shape, settings in json.loads(sys.argv[1]):
    config = InferenceConfig(batch_invariant_mode=True, max_requests=130, **settings)
    program = program_of(DUMMY_SHAPES[shape], torch.bfloat16, config)
    for source, _ in absent_gpu.kernels_of(facts | program):
        names = source.fn.arg_names
        kept = {names[at[0]]: value for at, value in source.constants.items()}
        told = {"part", "splits", "share", "replays"} & {*kept}
        values = {name: kept[name] for name in told}
        print(json.dumps([source.fn.__name__, values]))
"""
ADD_UP = {
    "streamed_kernel", "tile_kernel", "warpgroup_kernel", "grouped_product_kernel",
    "combine_kernel", "_logits_kernel", "_choose_kernel", "_add_rms_norm_kernel",
    "_gated_rms_norm_kernel", "_rope_append_kernel", "_swiglu_kernel", "_squared_relu_kernel",
    "_parts_kernel", "_prefill_kernel", "_conv_kernel", "_inputs_kernel", "_scan_kernel",
    "_replay_kernel", "_flush_kernel", "_process", "_bounds", "_choose", "_factors_kernel",
    "_gated_head_norm_kernel", "_add_shared_expert_kernel", "_output_gate_kernel",
    "chain_logits_kernel", "chain_up_kernel", "chain_down_kernel", "warpgroup_attention_kernel",
}  # fmt: skip
"""Kernels that add or round numbers, each of which keeps the promise."""
PLACE = {
    "_schedule_kernel", "_sort_kernel", "_place_kernel", "_count_kernel", "_next_bases_kernel",
    "_unpack_kernel", "_unpack_tokens_kernel", "_unpack_states_kernel", "_entries_kernel",
    "_vocab_embedding_kernel", "_reset_counts", "_count_chunks", "_count_tokens", "_edit",
    "_tiles", "_combine", "_finish", "_feed_back_kernel", "best_of_tile", "_match_kernel",
    "_copy_kernel", "_store_drafts_kernel",
}  # fmt: skip
"""Kernels that copy, count and compare."""


def test_an_engine_of_the_mode_has_no_kernel_of_another_order():
    """Kernels of decode steps, prompts and both, as an engine captures them on a GPU.

    Break it: let `Ops` have no promise, or attention no parts, or products be split.
    """
    facts = {"capability": [9, 0], "processors": 132, "gpu": "NVIDIA H200"}
    wanted = [
        (facts, "nemotron-3-nano-30b", {}),
        (facts, "qwen3-next-80b", {}),
        (facts, "tiny", {"speculative_method": "ngram", "choices": "shipped"}),
    ]
    command = [sys.executable, "-c", FOUND, json.dumps(wanted)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    names = {name for name, _ in found}
    assert names - ADD_UP - PLACE == set()
    attention = {"_prefill_kernel", "_parts_kernel", "warpgroup_attention_kernel"}
    assert attention | {"_replay_kernel", "streamed_kernel"} <= names
    for name, values in found:
        if name in attention:
            assert values["part"] == INVARIANT_PART
        if name == "tile_kernel":
            assert values["splits"] == 1
        assert values.get("replays", True), name
    shares = {values["share"] for name, values in found if name == "_logits_kernel"}
    # One a model with experts: its hidden size decides.
    assert len(shares) == 2, "the router's, of all numbers of tokens"


def test_the_mode_is_told(capsys):
    """`info` prints its kernels, and a service's card, which clients and `/v1/models` read, has
    it."""
    command = ["info", "dummy:tiny", "--batch-invariant-mode"]
    assert cli.main([*command, "--program", "--rows", "1", "--gpu", "h200"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert ", batch_invariant_mode, on a GPU" in first
    assert lines[0].startswith("layer 0: norm, qkv (tile), rope + append, attention, proj (tile)")
    assert cli.main([*command, "--program", "--gpu", "a100"]) == 2
    assert "no kernel of one order multiplies" in capsys.readouterr().err
    assert cli.main(command) == 2
    assert "--batch-invariant-mode is of --program" in capsys.readouterr().err
    card = {"model": "m", "max_sequence_length": 9, "vocab_size": 8, "block_size_tokens": 16}
    for mode in (True, False):
        made = decode_card(ModelCard(**card, batch_invariant_mode=mode).encode())
        assert made.batch_invariant_mode is mode


def test_the_times_of_a_fast_engine_do_not_choose_graphs_of_the_mode():
    def shape_asked(**settings):
        context = SimpleNamespace(
            graph_shapes=SimpleNamespace(mixed_sizes=[64]),
            model_config=SimpleNamespace(params_dtype=torch.bfloat16),
            gpu_view=SimpleNamespace(prefill_backends=["triton"]),
            config=InferenceConfig(attention_backend="triton", **settings),
        )
        return mixed_question(context, nn.Module(), 8).shape

    assert shape_asked() != shape_asked(batch_invariant_mode=True)
