"""A round of new weights is a fresh load bit for bit, whatever its buckets, names and ranks; what
is not whole or not the model's is refused, and the old weights stay."""

import os
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_async.checkpoints.convert import convert
from megatron_async.checkpoints.mapping import Shard, weights
from megatron_async.checkpoints.registry import DummySource
from megatron_async.checkpoints.safetensors_file import SafetensorsFile
from megatron_async.compat.models.served_model import serve_model
from megatron_async.devices import CpuDevice
from megatron_async.errors import UpdateError
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.models.pipeline import Stage
from megatron_async.updates.incoming import GPT, HUGGINGFACE, MEGATRON, NameTable
from megatron_async.updates.weight_round import WeightRound
from megatron_async.updates.writes import Copies, checked
from tests.support.compat_models import gpt_model

Tensors = dict[str, Tensor]
FAMILIES = {
    name: DUMMY_SHAPES[name]
    for name in ("tiny", "tiny-moe", "tiny-hybrid-mtp", "tiny-gated-delta-mtp", "tiny-mtp")
} | {
    "qwen2 untied": replace(
        DUMMY_SHAPES["tiny"], model_type="qwen2", add_qkv_bias=True, tie_word_embeddings=False
    ),
    "qwen3.5": replace(DUMMY_SHAPES["tiny-gated-delta"], model_type="qwen3_5_moe"),
    "granite": replace(
        DUMMY_SHAPES["tiny"], model_type="granitemoehybrid", residual_multiplier=0.25
    ),
}
TINY = FAMILIES["tiny"]


class Trained(DummySource):
    """A trainer's model: random weights of a shape."""

    def __init__(self, architecture: ModelArchitecture) -> None:
        self._architecture, self._is_uniform = architecture, False


def parameters(a: ModelArchitecture, shard: Shard) -> Tensors:
    """What a rank of a fresh load has."""
    tensors = {w.name: torch.full(w.shape, 7.0) for w in weights(a, shard)}
    Trained(a).load_into(tensors, shard)
    return tensors


def sent(a: ModelArchitecture, kind: str, whole: Tensors, modules: bool = False) -> Tensors:
    """Tensors that make up a whole model, by names of one kind, of several ways one by chance; with
    `modules` as transformers' modules hold them, all experts in one."""
    shard, chance = Shard(with_mtp=bool(a.mtp_pattern)), random.Random(0)
    table, found = NameTable(kind, a, shard), Tensors()
    for weight in weights(a, shard, modules, modules):
        if kind == HUGGINGFACE:
            found |= weight.split(whole[weight.name])
            continue
        pieces = table.pieces(weight, whole[weight.name])
        names = table.names(weight)
        ways = [[n] for n in names if names[n].shape == weight.whole_shape]
        numbered = [n for n in names if n[-1].isdigit()]
        ways += [numbered, [local_expert(n) for n in numbered]]
        ways += [[n for n in names if n.startswith(weight.stored + ".")]]
        for name in chance.choice([way for way in ways if way]):
            known = table.find(name)
            assert known is not None, name
            found[name] = torch.zeros(known.shape)
            for region, place, is_alone in pieces.of(known).pieces:
                if not is_alone:
                    found[name][region] = place
    return found


def local_expert(name: str) -> str:
    """Another name of one expert's part, by which modules of single experts know it."""
    return re.sub(r"(linear_fc[12]\.weight)(\d+)$", r"local_experts.\2.\1", name)


class Operations(TorchDispatchMode):
    """Counts torch's operations, views too."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    device.close()


@pytest.fixture
def begin(device: CpuDevice) -> Any:
    def make(a: ModelArchitecture = TINY, shard: Shard | None = None, **options: Any) -> Any:
        shard = shard or Shard(with_mtp=bool(a.mtp_pattern))
        old = {w.name: torch.full(w.shape, 7.0) for w in weights(a, shard)}
        return old, WeightRound(old, shard, a, device, lambda: False, **options)

    return make


def bring(new: WeightRound, tensors: Iterable[tuple[str, Tensor]]) -> None:
    new.load(tensors)
    new.finish()


def commit(new: WeightRound, device: CpuDevice) -> None:
    """And wait until the copies are done."""
    assert new.commit() is False
    device.caller_waits()


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def buckets(tensors: Tensors, seed: int = 0) -> list[list[tuple[str, Tensor]]]:
    each = list(tensors.items())
    random.Random(seed).shuffle(each)
    return [each[start : start + 7] for start in range(0, len(each), 7)]


@pytest.mark.parametrize("modules", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_shuffled_buckets_are_a_fresh_load(family: str, modules: bool, begin, device) -> None:
    a = FAMILIES[family]
    whole = parameters(a, Shard(with_mtp=bool(a.mtp_pattern)))
    tensors = {name: t.clone() for name, t in sent(a, HUGGINGFACE, whole, modules).items()}
    old, new = begin(a)
    for bucket in buckets(tensors):
        new.load(bucket)
        for _, tensor in bucket:
            tensor.zero_()  # a sender's buffer is used again
    new.finish()
    assert all((tensor == 7).all() for tensor in old.values()), "not before the commit"
    commit(new, device)
    assert_equal(old, whole)
    assert new.plan.num_bytes == sum(tensor.nbytes for tensor in old.values())


SHARDS = {
    "tp": [Shard(rank, 2) for rank in range(2)],
    "ep tp": [Shard(rank % 2, 2, rank // 2, 2) for rank in range(4)],
    "pp": [Shard(stage=Stage(0, 2, 0, "")), Shard(stage=Stage(1, 2, 2, ""))],
}
SHARED = ("tiny", "tiny-moe", "tiny-hybrid", "tiny-gated-delta")


def of_stage(shard: Shard, a: ModelArchitecture) -> Shard:
    """The shard with the layers of its stage: the first two, or the others."""
    if shard.stage is None:
        return shard
    pattern = a.pattern[2:] if shard.stage.index else a.pattern[:2]
    return replace(shard, stage=replace(shard.stage, pattern=pattern))


@pytest.mark.parametrize("kind", [HUGGINGFACE, "modules", MEGATRON, GPT])
@pytest.mark.parametrize("family", SHARED)
@pytest.mark.parametrize("way", SHARDS)
def test_each_rank_takes_its_part(way: str, family: str, kind: str, begin, device) -> None:
    a = replace(DUMMY_SHAPES[family], vocab_size=131)  # which ranks do not divide
    if (way == "ep tp" and not a.num_moe_experts) or (kind == GPT and a.layers_per_block == 1):
        return
    modules, kind = kind == "modules", HUGGINGFACE if kind == "modules" else kind
    tensors = sent(a, kind, parameters(a, Shard()), modules)
    for shard in SHARDS[way]:
        shard = of_stage(shard, a)
        old, new = begin(a, shard, names=kind)
        for bucket in buckets(tensors, shard.tensor_rank):
            new.load(bucket)
        new.finish()
        commit(new, device)
        assert_equal(old, parameters(a, shard))


@pytest.mark.parametrize("family", SHARED)
def test_a_rank_s_own_shard(family: str, begin, device) -> None:
    """A trainer with the same sizes sends what each rank holds: Megatron's weights as they are, of
    Hugging Face's tensors those of one region."""
    a = DUMMY_SHAPES[family]
    whole = sent(a, HUGGINGFACE, parameters(a, Shard()))
    for shard in SHARDS["tp"]:
        mine = parameters(a, shard)
        parts = dict(whole)
        for weight in weights(a, shard):
            if not weight.strips:
                parts |= {name: whole[name][weight.held(name)] for name in weight.parts}
        for kind, tensors in ((MEGATRON, mine), (HUGGINGFACE, parts)):
            old, new = begin(a, shard, names=kind, staging="direct")
            bring(new, tensors.items())
            commit(new, device)
            assert_equal(old, mine)


USERS = ModelArchitecture("megatron", 2, 32, 4, 2, 16, 48, 96, tie_word_embeddings=False)
USERS_EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}


@pytest.mark.parametrize("changes", [{}, USERS_EXPERTS], ids=["dense", "experts"])
def test_a_trainers_gpt_model_by_its_own_names(changes: dict, begin, device) -> None:
    """The model has Megatron-Core's local spec; "auto" sees how its layers are counted."""
    trained = gpt_model(changes, {"share_embeddings_and_output_weights": False})
    served = serve_model(trained)
    assert served.weights is not None
    served.weights.bind()
    pattern = "*E*E" if changes else "*-*-"
    old, new = begin(replace(USERS, pattern=pattern, **changes))
    named = trained.named_parameters()
    bring(new, ((f"module.module.{name}", tensor) for name, tensor in named))
    commit(new, device)
    assert_equal(old, {name: each.detach() for name, each in served.served.named_parameters()})


def test_auto_cannot_count_layers(begin) -> None:
    with pytest.raises(UpdateError, match="say names='megatron' or names='megatron_gpt'"):
        begin()[1].load(parameters(TINY, Shard()).items())


NAME = "model.layers.1.self_attn.k_proj.weight"
GOOD = sent(TINY, HUGGINGFACE, parameters(TINY, Shard()))
SHAPE = GOOD[NAME].shape


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.9.self_attn.k_proj.weight", GOOD[NAME], "did you mean 'model.layers."),
        ("model.layers.1.self_attn.k_proj.lora_A.weight", GOOD[NAME], "merge adapters"),
        (NAME + "_scale_inv", GOOD[NAME], "not quantised"),
        ("x" * 100_000, GOOD[NAME], "not part of this model"),
        (NAME.encode(), GOOD[NAME], "must be a text"),
        (NAME, GOOD[NAME][:, :-1], r"wrong shape: expected \[32, 64\], got \[32, 63\]"),
        (NAME, GOOD[NAME][None], "wrong shape"),
        (NAME, GOOD[NAME].t(), "wrong shape"),
        (NAME, GOOD[NAME].int(), "is torch.int32; send torch.float32"),
        (NAME, GOOD[NAME].to(torch.float8_e4m3fn), "float8"),
        (NAME, GOOD[NAME].to_sparse(), "sparse forms and deltas are not served"),
        (NAME, GOOD[NAME].to("meta"), "meta device"),
        (NAME, GOOD[NAME].tolist(), "is a list and no tensor"),
        (NAME, torch.full(SHAPE, float("nan")), "NaN or infinite"),
        (NAME, GOOD[NAME].double().fill_(1e300), r"infinite numbers \(in torch.float32\)"),
    ],
    ids=lambda value: str(value)[-24:] if isinstance(value, str) else "",
)
@pytest.mark.parametrize("staging", ["device", "direct"])
def test_what_is_not_the_model_s(name: Any, tensor: Any, message: str, staging: str, begin) -> None:
    old, new = begin(staging=staging, checks_finite=True)
    rest = [(each, GOOD[each]) for each in GOOD if each != name]
    with pytest.raises(UpdateError, match=message):
        bring(new, [(name, tensor), *rest])
    with pytest.raises(UpdateError, match="torn by a fault: drop it"):
        new.finish()
    new.drop()
    assert all((each == 7).all() for each in old.values()) or staging == "none"
    assert new.is_torn is (
        staging == "none" and not (old["embedding.word_embeddings.weight"] == 7).all()
    )


@pytest.mark.parametrize("kind", [HUGGINGFACE, MEGATRON])
def test_what_came_not_at_all_or_twice(kind: str, begin, device) -> None:
    tensors = sent(TINY, kind, parameters(TINY, Shard()))
    lost = sorted(tensors)[3]
    left = [(name, tensor) for name, tensor in tensors.items() if name != lost]
    _, new = begin(names=kind)
    new.load(left)
    with pytest.raises(UpdateError, match=f"tensor '{lost}' .one of 1. was not sent"):
        new.finish()
    _, new = begin(names=kind)
    new.load([*tensors.items(), (lost, tensors[lost])])
    with pytest.raises(UpdateError, match=f"tensor '{lost}' .one of 1. was written twice"):
        new.finish()
    old, new = begin(names=kind, partial=True)
    bring(new, left[:1])
    commit(new, device)
    assert (
        sum(int((each == 7).sum()) for each in old.values())
        == sum(each.numel() for each in old.values()) - left[0][1].numel()
    ), "the others keep their numbers"


EXPERTS = "decoder.layers.1.mlp.experts.linear_fc1.weight"
LOCAL = "decoder.layers.1.mlp.experts.local_experts.{}.linear_fc1.weight"


def test_single_experts_not_at_all_or_twice(begin, device) -> None:
    a, shard = FAMILIES["tiny-moe"], Shard(1, 2, 1, 2)
    whole, mine = parameters(a, Shard()), parameters(a, shard)
    here = a.num_moe_experts // 2
    rest = {name: tensor for name, tensor in mine.items() if name != EXPERTS}
    ours = {f"{EXPERTS}{here + row}": tensor for row, tensor in enumerate(mine[EXPERTS])}
    all_of_them = {LOCAL.format(n): tensor for n, tensor in enumerate(whole[EXPERTS])}
    for experts in (ours, all_of_them):
        old, new = begin(a, shard, names=MEGATRON)
        bring(new, (rest | experts).items())
        commit(new, device)
        assert_equal(old, mine)
    lost, last = dict(all_of_them), f"{EXPERTS}{a.num_moe_experts - 1}"
    del lost[LOCAL.format(here)]
    for sent_twice in (
        lost | {last: whole[EXPERTS][-1]},  # by both of its names
        lost | {last: ours[last]},  # and as this rank's shard
        {last: ours[last], EXPERTS: mine[EXPERTS]},
    ):
        _, new = begin(a, shard, names=MEGATRON)
        new.load((rest | sent_twice).items())
        with pytest.raises(UpdateError, match=r"'decoder.layers.1.mlp.exp.* was written twice"):
            new.finish()
    _, new = begin(a, shard, names=MEGATRON)
    new.load((rest | lost).items())
    with pytest.raises(UpdateError, match=f"'{EXPERTS}{here}' .one of 1. was not sent"):
        new.finish()
    for unknown in (f"{EXPERTS}{2 * here}", f"{EXPERTS}0{here}", LOCAL.format(-1)):
        told = rf"is not part of this model .* Experts are 0 to {2 * here - 1}\."
        with pytest.raises(UpdateError, match=told):
            begin(a, shard, names=MEGATRON)[1].load([(unknown, whole[EXPERTS][0])])


def test_a_tensor_of_all_experts_takes_no_work_for_each(begin, device) -> None:
    works = []
    for experts in (4, 16):
        a = replace(FAMILIES["tiny-moe"], num_moe_experts=experts)
        tensors = parameters(a, Shard(1, 2))
        _, new = begin(a, Shard(1, 2), names=MEGATRON, staging="direct")
        with Operations() as operations:
            bring(new, tensors.items())
        works.append(operations.count)
        commit(new, device)
    assert works[0] == works[1]


def test_without_staging_a_model_is_torn_until_a_whole_round(begin, device) -> None:
    old, new = begin(staging="none")
    new.load(buckets(GOOD)[0])
    assert new.is_torn
    assert any(not (each == 7).all() for each in old.values())
    with pytest.raises(UpdateError, match="was not sent"):
        new.finish()
    new.drop()
    assert new.is_torn
    again = WeightRound(old, Shard(), TINY, device, lambda: False, staging="none")
    bring(again, GOOD.items())
    commit(again, device)
    assert not again.is_torn
    assert_equal(old, parameters(TINY, Shard()))


def test_half_of_a_joined_weight_is_named_or_kept(begin, device) -> None:
    part = {name: tensor for name, tensor in GOOD.items() if "up_proj" not in name}
    _, new = begin()
    new.load(part.items())
    with pytest.raises(UpdateError, match=r"'model.layers.0.mlp.up_proj.weight' \(one of 2\)"):
        new.finish()
    old, new = begin(partial=True, staging="host")
    bring(new, part.items())
    commit(new, device)
    gate, up = old["decoder.layers.1.mlp.linear_fc1.weight"].chunk(2)
    assert torch.equal(gate, GOOD["model.layers.0.mlp.gate_proj.weight"])
    assert (up == 7).all()


@pytest.mark.parametrize("staging", ["device", "direct"])
def test_a_tied_output_layer_may_come_too(staging: str, begin, device) -> None:
    embedding = "model.embed_tokens.weight"
    for first, second in ((embedding, "lm_head.weight"), ("lm_head.weight", embedding)):
        rest = {name: tensor for name, tensor in GOOD.items() if name != embedding}
        old, new = begin(staging=staging)
        bring(new, [(first, GOOD[embedding]), *rest.items(), (second, GOOD[embedding].clone())])
        commit(new, device)
        assert_equal(old, parameters(TINY, Shard()))
        _, new = begin(staging=staging)
        other = [(first, GOOD[embedding]), *rest.items(), (second, GOOD[embedding] + 1)]
        with pytest.raises(UpdateError, match=f"'{first}' and '{second}' differ"):
            bring(new, other)
        _, new = begin(staging=staging)
        again = [(first, GOOD[embedding]), *rest.items(), *2 * [(second, GOOD[embedding].clone())]]
        with pytest.raises(UpdateError, match=f"'{second}' .* was written twice"):
            bring(new, again)


def test_layers_of_mtp_are_chosen(begin, device) -> None:
    a = FAMILIES["tiny-hybrid-mtp"]
    tensors = sent(a, HUGGINGFACE, parameters(a, Shard(with_mtp=True)))
    draft = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
    target = {name: tensor for name, tensor in tensors.items() if name not in draft}
    for selector, mine, other in (("target", target, draft), ("draft", draft, target)):
        old, new = begin(a, selector=selector)
        bring(new, mine.items())
        commit(new, device)
        changed = {name for name, each in old.items() if not (each == 7).all()}
        assert {name.startswith("mtp.") for name in changed} == {selector == "draft"}
        with pytest.raises(UpdateError, match=f"with selector='{selector}'"):
            begin(a, selector=selector)[1].load(other.items())
    _, new = begin(a)
    new.load(target.items())
    with pytest.raises(UpdateError, match="selector='target'"):
        new.finish()
    _, new = begin(a, Shard())  # a model that was built without
    bring(new, tensors.items())
    with pytest.raises(UpdateError, match="selector='draft', but the engine has no layers"):
        begin(selector="draft")


def test_bytes_are_told_or_refused_before_one_moves(begin, device, monkeypatch) -> None:
    with pytest.raises(UpdateError, match="is no pair of a name and a tensor"):
        begin()[1].load(GOOD)
    with pytest.raises(UpdateError, match="folder' is no tensors: a folder is read by load_"):
        begin()[1].load("./folder")
    _, new = begin(staging="direct")
    assert asdict(new.plan) | {"free_bytes": 0} == {
        "staging": "direct", "num_bytes": 427264, "spare_bytes": 0,
        "free_bytes": 0, "weights": 14, "why": "asked for: no second memory",
    }  # fmt: skip
    assert begin()[1].plan.spare_bytes == 427264
    monkeypatch.setattr(CpuDevice, "free_memory", lambda _: 470_000)
    with pytest.raises(UpdateError, match=r"427,264 bytes .* the device has 470,000 of"):
        begin()
    for wrong in (
        {"staging": "disk"}, {"names": "gguf"}, {"selector": "both"}, {"partial": "no"},
    ):  # fmt: skip
        with pytest.raises(UpdateError, match=f"{next(iter(wrong))}=.* is unknown: use one of"):
            begin(**wrong)


@pytest.mark.parametrize("to", ["huggingface", "torch_dist"])
def test_a_folder(to: str, begin, device, tmp_path) -> None:
    convert("dummy:tiny", tmp_path / "new", to=to, dtype="float32")
    old, new = begin()
    new.load_folder(tmp_path / "new")
    new.finish()
    commit(new, device)
    assert_equal(old, parameters(TINY, Shard()))
    convert("dummy:tiny-moe", tmp_path / "other", to=to)
    for folder, message in (
        ("other", "is of another model: its "),
        ("none", "no such folder"),
    ):
        _, new = begin()
        with pytest.raises(UpdateError, match=message):
            new.load_folder(tmp_path / folder)
    for file in (tmp_path / "new").iterdir():
        if file.suffix in (".safetensors", ".distcp"):
            file.write_bytes(b"")
    old, new = begin()
    with pytest.raises(UpdateError):
        new.load_folder(tmp_path / "new")
    assert all((each == 7).all() for each in old.values())
    for settings in ({"staging": "direct"}, {"names": "huggingface"}):
        ((name, value),) = settings.items()
        with pytest.raises(UpdateError, match=f"cannot be read with .*{name}='{value}'"):
            begin(**settings)[1].load_folder(tmp_path / "new")


@pytest.mark.parametrize("large", [0, 1 << 30])
@pytest.mark.parametrize("least_piece", [0, 1 << 30])
def test_copies_go_together_or_alone(
    large: int, least_piece: int, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every way copies the same; together go tensors that lie whole in memory, of one dtype."""
    monkeypatch.setattr("megatron_async.updates.writes.LARGE", large)
    monkeypatch.setattr("megatron_async.updates.writes.LEAST_PIECE", least_piece)
    told: list[tuple[Tensor, Tensor]] = []

    def note(places: list[Tensor], values: list[Tensor], non_blocking: bool) -> None:
        told.extend(zip(places, values, strict=True))
        copy(places, values, non_blocking)

    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", note)
    joined, transposed = torch.zeros(4, 6, 8), torch.zeros(5, 3).t()
    wide, half, empty = torch.zeros(6, 8), torch.zeros(16, dtype=torch.bfloat16), torch.zeros(0, 8)
    halves = [half[:7], half[7:9], half[10:14]]  # of an odd size, at an odd place, of whole words
    places = [joined[:, :3], joined[:, 3:5], transposed, wide, *halves, joined[:0], empty]
    places += [half[15:15], torch.zeros(8)]
    values = [torch.randn(place.shape).to(place.dtype) for place in places]
    values[3] = torch.randn(6, 8).bfloat16()  # is converted
    values[-1] = torch._neg_view(values[-1])
    sent_ones = [checked("", each) for each in values]
    Copies(device, zip(places, sent_ones, strict=True), []).run()
    for place, value in zip(places, values, strict=True):
        assert torch.equal(place, value.to(place.dtype))
    assert not joined[:, 5].any()
    assert all(a.is_contiguous() and b.is_contiguous() for a, b in told)
    pieces = 4 + 4 if least_piece == 0 else 0
    words = [a.dtype for a, _ in told if a.numel()].count(torch.int32)
    assert words == (pieces + 2 if large else 0)
    converted = [(a.dtype, b.dtype) for a, b in told].count((torch.float32, torch.bfloat16))
    assert converted == (1 if large else 0)


def test_a_gpu_copies_from_no_pageable_memory_between_steps(
    begin, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that the engine's thread would have to move are staged, or refused by name."""
    monkeypatch.setattr(device, "torch_device", torch.device("cuda", 0))
    tensors = sent(TINY, HUGGINGFACE, parameters(TINY, Shard()))
    _, new = begin(staging="direct")
    with pytest.raises(UpdateError, match="lies in the host's pageable memory: with staging='dir"):
        new.load(tensors.items())
    begin(staging="device")[1].load(tensors.items())


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda file: os.truncate(file, 1000), "new/model.safetensors: ends within tensor"),
        (lambda file: file.write_bytes(file.read_bytes()[:-4] + bytes(4)), "was written to while"),
    ],
)
def test_a_file_that_is_cut_or_written_while_it_is_read(
    harm: Any, message: str, begin, device, tmp_path, monkeypatch
) -> None:
    """The round fails alone: a mapped file would end the process."""
    convert("dummy:tiny", tmp_path / "new", to="huggingface", dtype="float32")
    file, fill = tmp_path / "new" / "model.safetensors", SafetensorsFile.fill
    whole, calls = file.read_bytes(), []

    def harmed(self: SafetensorsFile, name: str, start: int, place: Tensor) -> None:
        calls.append(name)
        if len(calls) == 3:
            harm(file)
        fill(self, name, start, place)

    old, new = begin()
    monkeypatch.setattr(SafetensorsFile, "fill", harmed)
    with pytest.raises(UpdateError, match=message):
        new.load_folder(tmp_path / "new")
    new.drop()
    assert all((each == 7).all() for each in old.values())
    file.write_bytes(whole)
    _, new = begin()
    new.load_folder(tmp_path / "new")
    new.finish()
