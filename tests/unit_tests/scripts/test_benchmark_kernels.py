"""The table of kernel cases: its floors, its names and its errors; times need a GPU."""

import json
import re

import benchmark_kernels
import pytest
import torch
from kernel_cases import decode_attention, fused_ops, linear, prefill_attention, recurrent
from kernel_cases.case import (
    BANDWIDTH,
    MATRIX_RATE,
    OURS,
    Case,
    Chain,
    Family,
    Hardware,
    Need,
    Shelf,
    Work,
)
from kernel_cases.experts import ExpertSizes

from megatron_async.models.dummy_shapes import DUMMY_SHAPES

FAMILIES = {
    "linear", "experts", "recurrent", "decode_attention", "prefill_attention", "fused_ops"
}  # fmt: skip


def listed(capsys, *options):
    benchmark_kernels.main(["--list", *map(str, options)])
    return [line.split(": ", 1) for line in capsys.readouterr().out.splitlines()]


def test_the_list_names_every_family_and_each_case_once(capsys):
    lines = listed(capsys)
    assert {family for family, _case in lines} == FAMILIES
    assert len({(family, case) for family, case in lines}) == len(lines)


def test_options_choose_cases(capsys):
    options = ("--family", "linear", "recurrent", "--shapes", "llama-3.1-8b", "qwen3-next")
    lines = listed(capsys, *options, "--rows", 4, "--prompts", "2x64", "--widths", 1)
    assert [case for family, case in lines if family == "linear"] == [
        f"llama-3.1-8b 4 {name}" for name in ("qkv", "proj", "fc1", "fc2", "vocabulary", "layer")
    ]
    cases = [case for family, case in lines if family == "recurrent"]
    assert cases == ["qwen3-next decode 4 x 1", "qwen3-next prefill 2x64"]
    found = listed(capsys, "--case", "llama-3.1-8b 16 fc", "8k")
    assert [case for _family, case in found] == [
        "llama-3.1-8b 16 fc1", "llama-3.1-8b 16 fc2", "smollm2-135m 8k", "smollm2-135m 128 over 8k",
        "llama-3.1-8b 8k", "llama-3.1-8b 128 over 8k",
    ]  # fmt: skip


def test_kernels_for_few_tokens_are_left_out_where_they_take_none(capsys):
    one = listed(capsys, "--family", "experts", "--rows", 1, 8192)
    assert [case.split(maxsplit=1)[1] for _family, case in one] == [
        "1 grouped", "1 few", "8192 grouped"
    ]  # fmt: skip
    assert len(listed(capsys, "--family", "experts", "--rows", 1, 8192, "--ranks", 2)) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--family", "lineer"], "invalid choice: 'lineer'.*linear.*experts.*fused_ops"),
        (["--family", "experts", "--shapes", "tiny"], "no chosen family has the shape 'tiny': use"),
        (["--case", "nonsense"], "leave no case: see --list"),
    ],
)
def test_wrong_options_are_named(capsys, options, message):
    with pytest.raises(SystemExit) as stop:
        benchmark_kernels.main(options)
    assert stop.value.code == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))


def test_without_a_gpu_one_line_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        benchmark_kernels.main([])
    assert stop.value.code == 1
    expected = "benchmark_kernels: needs a CUDA device, and torch finds none.\n"
    assert capsys.readouterr().err == expected


def test_a_floor_is_the_larger_of_two_times():
    assert Hardware().floor_us(Need(BANDWIDTH, MATRIX_RATE / 2)) == pytest.approx(1e6)
    assert Hardware().floor_us(Need(BANDWIDTH / 2, MATRIX_RATE)) == pytest.approx(1e6)
    assert Hardware(1e12, 1e12).floor_us(Need(3e6, 2e6)) == pytest.approx(3)


def test_linear_needs_its_weights():
    needs = linear.needs(DUMMY_SHAPES["llama-3.1-8b"], 16, 2)
    assert needs["qkv"] == Need(6144 * 4096 * 2, 2 * 16 * 6144 * 4096)
    assert needs["vocabulary"].moved == 128256 * 4096 * 2
    weights = (6144 + 4096 + 3 * 14336) * 4096
    assert needs["layer"] == Need(2 * weights, 2 * 16 * weights)


def test_weights_of_fewer_bits_need_less():
    shape = DUMMY_SHAPES["llama-3.1-8b"]
    whole, half, quarter = (linear.needs(shape, 16, 2, name) for name in ("model", "fp8", "int4"))
    assert half["fc2"].moved == whole["fc2"].moved * (0.5 + 4 / 2 / 4096)
    assert quarter["fc2"].moved == whole["fc2"].moved * (0.25 + 2 / 2 / 128)
    assert quarter["vocabulary"] == whole["vocabulary"]
    assert quarter["fc2"].operations == whole["fc2"].operations
    sizes = [ExpertSizes(DUMMY_SHAPES["qwen3-30b-a3b"], 2, name) for name in ("model", "int4")]
    assert sizes[1].expert_bytes == sizes[0].expert_bytes * 4.125 / 16
    assert sizes[1].always_bytes == sizes[0].always_bytes


def test_experts_need_those_that_are_hit():
    sizes = ExpertSizes(DUMMY_SHAPES["qwen3-30b-a3b"], 2)
    expert = 3 * 2048 * 768
    need = sizes.need(hit=50, pairs=64, tokens=8)
    assert need == Need(2 * (50 * expert + 128 * 2048), 2 * 64 * expert)


def test_decode_attention_reads_each_key_and_value():
    assert decode_attention.kv_lengths(3, 100, None) == [90, 95, 100]
    assert decode_attention.kv_lengths(3, 100, 7000) == [90, 7000, 100]
    need = decode_attention.need("llama-3.1-8b", [100, 200])
    assert need.moved == 300 * 2 * 8 * 128 * 2
    assert Hardware().floor_us(need) == pytest.approx(need.moved / BANDWIDTH * 1e6)


def test_prefill_attention_counts_what_each_query_sees():
    shape = prefill_attention.AttentionShape(6, 2, 32, 16, 8, torch.bfloat16, None)
    chunks = [(3, 50), (7, 7)]
    seen = sum(kv - query + 1 + i for query, kv in chunks for i in range(query))
    operations = 2 * 2 * 6 * 32 * seen  # two products of two operations each
    assert prefill_attention.need(shape, chunks) == Need(57 * 2 * 2 * 32 * 2, operations)


def test_recurrent_layers_move_their_states():
    layer = recurrent.SHAPES["nemotron-3-nano"]
    need, more = (recurrent.decode_need(layer, rows, 1) for rows in (1, 64))
    assert more.moved == pytest.approx(64 * need.moved, rel=1e-4)
    assert need.moved > 64 * 64 * 128 * 4
    prefill = recurrent.prefill_need(layer, [8192])
    assert prefill.operations == 8192 * (64 * (2 * 128 * 64 + 4 * 64 * 128) + 2 * 128 * 8 * 128)
    other = recurrent.prefill_need(recurrent.SHAPES["qwen3-next"], [64] * 4)
    assert other.operations == 256 * 32 * (4 * 64 * 128 + 4 * 64 * 128 + 6 * 128 * 128)


def test_fused_ops_count_what_goes_in_and_out():
    moved = fused_ops.block_bytes(fused_ops.SHAPES["llama-3.1-8b"], 16)
    assert moved["swiglu"] == 16 * 3 * 14336 * 2
    assert moved["rope_append"] == 2 * 16 * 6144 * 2 + 16 * 128 * 4
    alone = 16 * (4096 + 6144) * 2 + 4096 * 6144 * 2
    assert moved["qkv, rope_append"] == alone + 16 * 128 * 4
    assert set(moved) == set(fused_ops.BLOCK_OPS)


def test_a_shelf_keeps_one_thing():
    shelf, made = Shelf(), []
    for key in ("a", "a", "b", "a"):
        shelf.take(key, lambda key=key: made.append(key) or key)
    assert made == ["a", "b", "a"]


def stub_family(chains, refused=None):
    work = Work(chains, 2.0, {"more": 1}, refused or {})
    case = Case("small 4", {"shape": "small", "rows": 4, "length": 8}, lambda: work)
    family = Family(
        "decode_attention", "", ["small"], ["small"], ("part",), ("other", "absent"),
        lambda group: None, lambda *arguments: iter([case]),
    )  # fmt: skip
    return family, case


def test_a_row_has_ours_others_and_the_floor(monkeypatch, capsys):
    """Times are made up; a reference may fail, and what is ours may not."""

    def made_up(chain, replays):
        chain.run()
        return 5.0 * chain.links

    def fails():
        raise RuntimeError("no kernel for it")

    monkeypatch.setattr(benchmark_kernels, "microseconds", made_up)
    good, bad = Chain(lambda: None, 1), Chain(fails)
    family, case = stub_family({OURS: good, "part": good, "other": bad}, {"absent": "not built"})
    figures = benchmark_kernels.measure(family, case, family.columns, 3)
    expected = {"shape": "small", "rows": 4, "length": 8, "more": 1, "floor_us": 2.0}
    assert figures == {"case": "small 4", **expected, "us": 5.0, "part_us": 5.0}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "small 4: other does not run: no kernel for it"
    assert lines[1] == "small 4: no absent: not built"
    cells = "decode_attention small 4 5.00 5.00 - - 2.00 2.50"
    assert lines[2].split() == cells.split()
    family, case = stub_family({OURS: good, "part": bad})
    with pytest.raises(RuntimeError, match="no kernel for it"):
        benchmark_kernels.measure(family, case, family.columns, 3)


def test_records_of_several_families_go_to_a_file_each(tmp_path):
    family = benchmark_kernels.FAMILIES["linear"]
    path = str(tmp_path / "found.json")
    assert benchmark_kernels.record_path(path, family, False).name == "found.json"
    assert benchmark_kernels.record_path(path, family, True).name == "found-linear.json"
    parser, attention = benchmark_kernels.make_parser(), benchmark_kernels.FAMILIES
    ragged = parser.parse_args(["--long-row", "9"])
    assert attention["decode_attention"].record_name(ragged) == "decode_attention_ragged"
    assert family.record_name(ragged) == "linear"


@pytest.mark.gpu
def test_every_family_is_timed(tmp_path, capsys):
    """The smallest case of each kind."""
    options = ["--rows", 1, "--replays", 1, "--prompts", 64, "--widths", 1, "--spread", 1]
    options += ["--lengths", 256, "--chunks", "128", "--json", tmp_path / "found.json"]
    options += ["--shapes", "smollm2-135m", "tiny-moe", "granite-4.0-h-350m", "qwen3-next"]
    options += ["--family", *sorted(FAMILIES)]
    parts = ["smollm2-135m 1", "tiny-moe 1 grouped", "tiny-moe 1 few", "decode", "prefill"]
    benchmark_kernels.main([*map(str, options), "--case", *parts, "smollm2-135m 128"])
    for family in FAMILIES:
        record = json.loads((tmp_path / f"found-{family}.json").read_text())
        assert record["benchmark"] == family
        for row in record["figures"]:
            assert row["us"] > 0
            assert row["floor_us"] > 0
    assert "ours/floor" in capsys.readouterr().out


@pytest.mark.gpu
def test_prompts_beside_decode_rows_are_timed(tmp_path):
    options = "--family prefill_attention --shapes smollm2-135m --chunks 512 --replays 1 --json"
    found = []
    for rows in (0, 64):
        path = tmp_path / f"{rows}.json"
        more = [str(path), "--decode-rows", str(rows), "--decode-keys", "2000"]
        benchmark_kernels.main([*options.split(), *more])
        found.append(json.loads(path.read_text())["figures"][0])
    alone, beside = found
    assert beside["floor_us"] > alone["floor_us"]
    assert beside["us"] > alone["us"]
