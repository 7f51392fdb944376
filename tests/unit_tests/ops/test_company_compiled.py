"""What a row's company can change in the machine code of the kernels that promise not to depend on
it. The interpreter shows orders of sums that a kernel's text says; only the compiler shows those
that it makes of them."""

import json
import re
import subprocess
import sys

import pytest
import torch

from megatron_async import InferenceConfig
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.ops.experts import expert_exchange as exchanged
from megatron_async.ops.experts import expert_routing, few_token_chains, shared_gate
from megatron_async.ops.experts.expert_plan import LayerShape, plan_few_chains
from megatron_async.ops.experts.expert_routing import BLOCK_TOKENS
from megatron_async.ops.linear import rms_norm
from megatron_async.ops.linear.stream import Stream
from megatron_async.ops.ranks import symmetric_all_reduce as reduced
from megatron_async.ops.ranks.symmetric_memory import Meeting
from tests.support.compiled_kernels import record
from tests.unit_tests.ops.experts.test_few_tokens import make_layer
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles")


@pytest.mark.parametrize("hidden", [400, 4096])
def test_parts_of_logits_begin_at_nought_wherever_they_are_added(hidden, monkeypatch):
    """The second kernel adds the parts of few tokens, which are stored; the first those of many.

    Break it: add a share by `+`, which Triton makes the product's first sums where a share is one
    step.
    """
    (recorder, _) = record(
        monkeypatch, (expert_routing, "_logits_kernel"), (expert_routing, "_choose_kernel")
    )
    monkeypatch.setattr(expert_routing, "MOST_TILES", 2)
    weight = torch.zeros(40, hidden, dtype=torch.bfloat16)
    codes = {}
    for tokens in (1, 2, 16, 17, 32, 33, 4096):
        x = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
        expert_routing.route_invariant_gpu(x, weight, 4, False)
        launch = recorder.launches[-1]
        if launch.key not in codes:
            codes[launch.key] = launch.compiled().asm
    stored, joined = (len(re.findall(r"(?:add|fma)\S*\.f32", c["ptx"])) for c in codes.values())
    assert (stored, joined) == (0, BLOCK_TOKENS * 64 // 128), "one for each sum of a thread"


WALK = """
import json, re, sys
from collections import defaultdict
import triton
from megatron_async.lab.absent_gpu import kernels_of
from tests.support.compiled_kernels import HOPPER
programs, of_codes, same = json.loads(sys.argv[1])
differ, codes = defaultdict(set), defaultdict(lambda: defaultdict(list))
def float_code(source, options):
    lines = triton.compile(source, target=HOPPER, options=options).asm["ptx"].splitlines()
    return [line.split()[0] for line in lines if re.match(r"\\s+\\w\\S*\\.f32\\s", line)]
for number, program in enumerate(programs):
    kernels = defaultdict(list)
    for source, options in kernels_of(program):
        row = {"num_warps": str(options["num_warps"])}
        for place, name in enumerate(source.fn.arg_names):
            kind, value = source.signature[name], source.constants.get((place,))
            row[name] = f"{kind} {value} {source.attrs.get((place,), [])}"
        kernels[source.name].append(row)
        if source.name in same:
            code = str([row.get(name) for name in of_codes])
            codes[source.name][number, code].append(float_code(source, options))
    for name, rows in kernels.items():
        differ[name] |= {key for key in rows[0] if len({row.get(key) for row in rows}) > 1}
equal = {
    name: [len(each) for each in found.values() if all(code == each[0] != [] for code in each)]
    for name, found in codes.items()
}
counts = {name: [len(each) for each in found.values()] for name, found in codes.items()}
print(json.dumps([{name: sorted(each) for name, each in differ.items()}, counts, equal]))
"""
WALKED = "llama-3.1-8b", "nemotron-3-nano-30b"
OF_LAYERS = ["has_residual", "n", "k", "pairs_per_row", "gated", "squared"]
"""Arguments that say of which layer a kernel is."""
DIVIDED = {"divides", "part_output", "part_maximum", "part_total", "arrived"}
"""Arguments of prompts whose last program joins parts: other code, which has the same bits
(`test_a_query_has_the_bits_of_a_decode_row`)."""
SAME_CODE = {
    "_add_rms_norm_kernel": {"early"},
    "_gated_rms_norm_kernel": {"early"},
    "_flush_kernel": {"block"},
    "_parts_kernel": {"is_beside"},
    "_prefill_kernel": {"is_settled"} | DIVIDED,
    "warpgroup_attention_kernel": {"is_settled"},
}
"""When a kernel waits, and how many rows it walks over: the instructions on floats are equal."""
TILES = {
    "grouped_product_kernel": {"block_m", "block_n", "last_n", "block_k", "by_rows", "halves"},
    "streamed_kernel": {
        "x_strips", "weights_0", "weights_1", "weights_2", "chunks", "pieces", "ring",
    },
    "tile_kernel": {
        "rows", "block_m", "block_n", "block_k", "swap", "in_blocks", "ahead", "num_warps",
    },
}  # fmt: skip
"""Tiles of products, whose sums are in one order by any instruction: tests on a GPU compare them
(`test_roundings.py`, `test_products.py`, `test_expert_mlp.py`). `rows` make masks."""
OF_WHOLE_NUMBERS = {"_schedule_kernel", "_sort_kernel", "_unpack_kernel", "_next_bases_kernel"}
OF_SAMPLING = {"_bounds", "_choose", "best_of_tile"}
"""Logits of either dtype are compared, one row at a time."""


def test_what_a_step_may_change_in_compiled_kernels(tmp_path, monkeypatch):
    """All kernels of engines in the mode, for steps of any size. Each argument by which two kernels
    of one name differ is on a list, with the reason why it moves no bit.

    Break it: let the number of warps of a norm follow the tokens.
    """
    monkeypatch.setenv("MEGATRON_ASYNC_CACHE", str(tmp_path / "cache"))
    config = InferenceConfig(
        max_requests=64, max_tokens=512, max_sequence_length=1024, batch_invariant_mode=True
    )
    program = {
        "capability": [9, 0], "processors": 132, "gpu": "NVIDIA H200", "dtype": "bfloat16",
        "config": {name: value for name, value in vars(config).items() if name != "device"},
        "transformer_impl": "local",
    }  # fmt: skip
    programs = [program | {"architecture": DUMMY_SHAPES[name].to_dict()} for name in WALKED]
    job = json.dumps([programs, [*OF_LAYERS, "divides"], [*SAME_CODE]])
    done = subprocess.run([sys.executable, "-c", WALK, job], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    differ, counts, equal = json.loads(done.stdout.splitlines()[-1])
    assert {*SAME_CODE, *TILES} <= {*differ}, "a kernel of the lists is none of these engines'"
    assert counts == equal
    may = SAME_CODE | TILES
    surprises = {
        name: each
        for name, found in differ.items()
        if name not in OF_WHOLE_NUMBERS | OF_SAMPLING
        and (each := {*found} - {*OF_LAYERS} - may.get(name, set()))
    }
    assert surprises == {}


@pytest.mark.parametrize("hidden", [2688, 4096])
@pytest.mark.parametrize(
    ("module", "ranks"), [(reduced, 2), (reduced, 4), (exchanged, 2)], ids=["2", "4", "experts"]
)
def test_a_sum_over_ranks_is_normed_as_any_row(module, ranks, hidden, monkeypatch):
    """Few rows are summed and normed by one kernel, others by two: from the residual's sum on, the
    instructions on floats are those of the norm alone.

    Break it: give the one kernel half the warps.
    """
    name = "_all_reduce_add_rms_norm_kernel" if module is reduced else "_combine_kernel"
    kernels = (rms_norm, "_add_rms_norm_kernel"), (module, name)
    recorders = record(monkeypatch, *kernels)
    for module, _ in kernels:
        monkeypatch.setattr(module, "launch_options", lambda _: {"overlap": True})
    weight = torch.zeros(hidden, dtype=torch.bfloat16)
    x = torch.zeros(4, hidden, dtype=torch.bfloat16)
    flags = torch.zeros(8, dtype=torch.int32)
    meeting = Meeting(torch.zeros(ranks, dtype=torch.int64), flags, 0, 64)
    rms_norm.add_rms_norm_gpu(x, x, weight, 1e-6)
    if module is reduced:
        reduced.all_reduce_add_rms_norm(x, x, weight, 1e-6, meeting)
    else:
        exchanged.combine_add_rms_norm(torch.cat([x, x]), x, weight, 1e-6, meeting)
    norm, both = (
        re.findall(
            r"^\s+(?!ld)(\w\S*f32\S*|shfl\S*)\s", one.launches[0].compiled().asm["ptx"], re.M
        )
        for one in recorders
    )
    norm = norm[norm.index("add.f32") :]  # behind the loads' conversions
    assert any("rsqrt" in each for each in norm)
    assert len(norm) > 20
    assert both[-len(norm) :] == norm


@pytest.mark.parametrize("hidden", [2048, 2688])
def test_a_lone_token_of_experts_is_normed_and_gated_as_any_row(hidden, monkeypatch):
    """The kernel of its logits has the instructions on floats, up to the sums over threads, of the
    norm's kernel and of the gate's.

    Break it: give it half the warps.
    """
    kernels = [(rms_norm, "_add_rms_norm_kernel"), (shared_gate, "_add_shared_expert_kernel")]
    names = "chain_logits_kernel", "chain_up_kernel", "chain_down_kernel"
    recorders = record(monkeypatch, *kernels, *((few_token_chains, name) for name in names))
    layer = make_layer(LayerShape(16, 2, hidden, 64, 64, True, 2), torch.bfloat16, "cpu", True)
    x = torch.zeros(1, hidden, dtype=torch.bfloat16)
    rms_norm.add_rms_norm_gpu(x, x, x[0], 1e-6)
    shared_gate.add_shared_expert_gpu(x, x, x, x, rounds=True)
    few_token_chains.few_token_chains(
        Stream(x, x, x[0], 1e-6), layer, plan_few_chains(1, layer.shape)
    )
    norm, gate, both = (
        re.findall(
            r"^\s+((?!ld|st|cvt|selp|mov)\w\S*f32|shfl\S*|bar\S*)\s",
            one.launches[0].compiled().asm["ptx"],
            re.M,
        )
        for one in recorders[:3]
    )
    norm = norm[norm.index("mul.f32") : norm.index("rsqrt.approx.ftz.f32") + 1]
    gate = gate[gate.index("mul.f32") : gate.index("sub.f32")]
    assert gate == norm[: len(gate)]
    assert len(gate) > 25
    at = both.index("mul.f32")
    assert both[at : at + len(norm)] == norm
    rest = " ".join(both[at + len(norm) :])
    assert " ".join(gate) in rest
