"""Prefill backends against a gathered softmax in float64, and the choice among them."""

import os
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megatron_async import LLM, SamplingParams, choices
from megatron_async.choices import Choices
from megatron_async.config import ATTENTION_BACKENDS
from megatron_async.devices import CpuDevice
from megatron_async.errors import ConfigurationError
from megatron_async.ops.attention.backends import flash_attn, own_kernel, selection
from megatron_async.ops.attention.backends.base import (
    AttentionShape,
    BackendUnavailable,
    PrefillBackend,
    require_all_keys,
    require_tensor_core_shape,
)
from megatron_async.ops.attention.backends.selection import (
    BACKENDS,
    CALLS,
    STEP_CLASSES,
    PrefillChoice,
    choose_prefill,
    layers_of_step,
)
from tests.support.ranks import run_ranks
from tests.unit_tests.ops.attention.decode_batch import processors
from tests.unit_tests.ops.attention.prefill_batch import PrefillBatch, random_chunks

OURS = ("triton", "warpgroup")


def shape_of(batch: PrefillBatch) -> AttentionShape:
    heads, dim = batch.query.shape[1:]
    blocks = batch.tables.size(1)
    return AttentionShape(
        heads, batch.keys.size(2), dim, batch.block_size, blocks, batch.query.dtype,
        batch.query.device, window=batch.window, softcap=batch.softcap,
        has_sinks=batch.sinks is not None,
    )  # fmt: skip


def attend(backend, batch, rows):
    """Two layers: the first makes its own output, the second writes where it is told."""
    backend.begin_step(rows)
    arguments = batch.query, batch.keys, batch.values, batch.scale
    new = backend.attend(*arguments, scales=batch.scales, sinks=batch.sinks)
    assert backend.attend(*arguments, batch.out, batch.scales, batch.sinks) is batch.out
    return new


def test_names():
    assert tuple(BACKENDS) == ATTENTION_BACKENDS
    with pytest.raises(ConfigurationError, match=r"flash_attn_5.* is unknown: use one of triton"):
        LLM("dummy:tiny", device="cpu", attention_backend="flash_attn_5")


def test_gpu_backend_on_a_cpu():
    with pytest.raises(ConfigurationError, match="'triton' needs a GPU: on a CPU leave it out"):
        LLM("dummy:tiny", device="cpu", attention_backend="triton")


def test_parts_of_one_length_are_ours():
    """Others refuse them by name."""
    device = CpuDevice()
    shape = AttentionShape(4, 2, 64, 64, 4, torch.bfloat16, device.torch_device, part=512)
    with pytest.raises(BackendUnavailable, match=r"torch.* no parts of 512 keys"):
        choose_prefill("torch", shape, device, Choices("measure", device))
    for name in (None, "triton"):
        choice = choose_prefill(name, shape, device, Choices("measure", device))
        assert {backend.name for backend in choice.backends} == {"triton"}


def test_the_faster_of_ours_serves_parts_of_one_length(monkeypatch, tmp_path):
    """On Hopper. Break it: the first candidate alone, or FlashAttention too, which has no parts."""
    monkeypatch.setenv("MEGATRON_ASYNC_CACHE", str(tmp_path))
    monkeypatch.setattr(own_kernel, "is_supported", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    times = {"triton": 9.0, "warpgroup": 8.0}
    monkeypatch.setattr(selection, "time_backend", lambda backend, *_: times.pop(backend.name))
    monkeypatch.setattr(selection, "STEP_CLASSES", STEP_CLASSES[:1])
    device = CpuDevice()
    shape = AttentionShape(4, 2, 64, 64, 4, torch.bfloat16, device.torch_device, part=256)
    choice = choose_prefill(None, shape, device, Choices("measure", device))
    assert [backend.name for backend in choice.backends] == ["warpgroup"]
    assert not times


def test_keys_and_values_in_fp8_are_ours_and_torch_s():
    """Others refuse them by name, and no clock chooses off a GPU."""
    device = CpuDevice()
    shape = AttentionShape(4, 2, 64, 64, 4, torch.bfloat16, device.torch_device, is_narrow=True)
    with pytest.raises(BackendUnavailable, match=r"flash_attn_4.* no keys and values in fp8; use "):
        require_tensor_core_shape("flash_attn_4", shape, 256)
    for name in (None, "triton", "torch"):
        choice = choose_prefill(name, shape, device, Choices("measure", device))
        assert {backend.name for backend in choice.backends} == {name or "triton"}


@pytest.mark.parametrize("change", [{"window": 9}, {"has_sinks": True}, {"softcap": 2.0}])
def test_windows_sinks_and_softcaps_are_refused_by_name(change):
    """By backends without them: softcaps are Triton's and torch's alone."""
    device = CpuDevice()
    shape = AttentionShape(4, 2, 64, 64, 4, torch.bfloat16, device.torch_device, **change)
    words = {"window": "windows", "has_sinks": "sinks", "softcap": "softcaps"}[next(iter(change))]
    with pytest.raises(BackendUnavailable, match=rf"flash_attn_3.* it has no {words}; use"):
        require_all_keys("flash_attn_3", shape)
    refusal = "has no softcaps; use" if "softcap" in change else "is not a Hopper GPU"
    with pytest.raises(BackendUnavailable, match=rf"warpgroup.* {refusal}"):
        choose_prefill("warpgroup", shape, device, Choices("measure", device))
    choice = choose_prefill(None, shape, device, Choices("measure", device))
    assert {backend.name for backend in choice.backends} == {"triton"}


@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize(
    ("first", "is_narrow", "window"), [(0, False, 0), (5, False, 0), (5, True, 0), (5, False, 17)]
)
def test_torch_backend(block_size, first, is_narrow, window):
    sizes = 65, 4, 70, block_size, 2, 3, 32, torch.float32, torch.device("cpu")
    changes = {"unused_block": 0} if window else {}
    batch = PrefillBatch(
        *sizes, is_narrow=is_narrow, window=window, has_sinks=window > 0, **changes
    )
    chunks = batch.refill([(20, 20), (1, 33), (30, 70), (9, 10)], first=first)
    backend = BACKENDS["torch"](shape_of(batch))
    new = attend(backend, batch, batch.rows(chunks))
    batch.check(padding_is_left_alone=False)
    own = slice(batch.first, batch.tokens)
    assert torch.equal(new[own], batch.out[own])


def test_flash_attention_3_is_checked_before_use(monkeypatch):
    """A stand-in for the import only: a module of another version."""
    shape = AttentionShape(4, 2, 64, 64, 4, torch.bfloat16, torch.device("cpu"))
    package, module = ModuleType("flash_attn_3"), ModuleType(flash_attn.MODULES[0])
    module.__version__ = "2.9"
    module.flash_attn_with_kvcache = lambda q, k_cache, v_cache, cache_seqlens, block_table: None
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    message = r"2.9 has no flash_attn_with_kvcache that takes page_table, .*build FlashAttention-3"
    with pytest.raises(BackendUnavailable, match=message):
        BACKENDS["flash_attn_3"](shape)


def test_warpgroups_are_for_hopper():
    shape = AttentionShape(4, 2, 64, 64, 4, torch.bfloat16, torch.device("cpu"))
    with pytest.raises(BackendUnavailable, match=r"cpu is not a Hopper GPU; use .*'triton'"):
        BACKENDS["warpgroup"](shape)


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ((4, 2, 64, 64, 4, torch.float32), "not torch.float32; change dtype or use"),
        ((4, 2, 96, 64, 4, torch.bfloat16), "dimension 96 with blocks of 64 tokens are not heads"),
        ((4, 2, 64, 48, 4, torch.bfloat16), "blocks of a multiple of 64; change block_size_tokens"),
    ],
)
def test_shapes_that_warpgroups_do_not_serve(shape, problem, monkeypatch):
    """The message comes before anything touches the device."""
    monkeypatch.setattr(own_kernel, "is_supported", lambda device: True)
    with pytest.raises(BackendUnavailable, match=problem):
        BACKENDS["warpgroup"](AttentionShape(*shape, torch.device("cuda", 0)))


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("flash_attn_4", "pip install 'flash-attn-4"), ("flash_attn_3", "build FlashAttention-3")],
)
def test_package_that_is_not_installed(name, remedy, monkeypatch):
    for module in ("flash_attn", "flash_attn.cute", "flash_attn_3", "flashattn_hopper"):
        monkeypatch.setitem(sys.modules, module, None)  # makes the import fail
    shape = AttentionShape(4, 2, 64, 64, 4, torch.bfloat16, torch.device("cpu"))
    with pytest.raises(BackendUnavailable, match=f"{name}.* cannot be imported .*{remedy}"):
        BACKENDS[name](shape)


def test_choice_by_class():
    shape = AttentionShape(4, 2, 64, 64, 4, torch.bfloat16, torch.device("cpu"))
    ours, reference = BACKENDS["triton"](shape), BACKENDS["torch"](shape)
    times = {"triton": 9.0, "torch": 70.0}, {"triton": 20.0, "torch": 10.0}
    backends = (ours, reference, ours, reference, ours, ours)
    by_class = tuple(times[backend is reference] for backend in backends)
    choice = PrefillChoice(backends, by_class, ("flash_attn_4 failed (OSError: no)",))
    for step_class, backend in zip(STEP_CLASSES, backends, strict=True):
        beside = step_class.decode_rows > 0
        assert choice.pick(step_class.least_query, beside) is backend
    for beside, longer in ((False, reference), (True, ours)):
        assert choice.pick(STEP_CLASSES[0].least_query - 1, beside) is longer
    assert (choice.pick(10**6, False), choice.pick(10**6, True)) == (ours, reference)
    assert not choice.captures
    assert str(choice) == (
        "attention: prefill chunks triton (9 us a layer; torch 70), short chunks torch "
        "(10 us a layer; triton 20), short prompts triton (9 us a layer; torch 70); beside decode "
        "rows chunks torch (10 us a layer; triton 20), short chunks triton (9 us a layer; torch "
        "70), short prompts triton (9 us a layer; torch 70); flash_attn_4 failed (OSError: no)"
    )


@pytest.mark.parametrize("decode_rows", [0, 3])
def test_layers_that_are_timed(decode_rows, device):
    """A step of chunks, and of decode rows if asked for: everything that it writes is a number."""
    place = torch.device(device)
    shape = AttentionShape(4, 2, 16, 16, 5, torch.float32, place)
    with processors(4):
        layers = layers_of_step(
            BACKENDS["triton"](shape), shape, [(90, 90), (3, 40)], decode_rows, 20
        )
    outputs = []

    def note(*arguments, **options):
        made = empty_like(*arguments, **options)
        outputs.append(made.fill_(torch.nan))
        return made

    empty_like = torch.empty_like
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", note)
        layers()
    assert len(outputs) == CALLS
    for out in outputs:
        assert out.shape == (decode_rows + 80 + 3, 4, 16)  # a sequence is cut at 80 tokens
        assert out.isfinite().all()


@pytest.mark.parametrize(
    ("others", "wanted"),
    [
        ({"warpgroup": 9.0, "flash_attn_4": 9.4}, "warpgroup"),
        ({"warpgroup": 9.4, "flash_attn_4": 9.0}, "flash_attn_4"),
        ({"warpgroup": 9.6, "flash_attn_4": 30.0}, "triton"),  # as fast but for noise
        ({}, "triton"),
    ],
)
def test_the_fastest_by_more_than_noise(others, wanted):
    assert selection._fastest({"triton": 10.0, **others}) == wanted


@pytest.fixture
def two_candidates(monkeypatch, tmp_path):
    """Times of two backends, by name and whether there are decode rows, as a GPU would tell."""
    monkeypatch.setattr(selection, "CANDIDATES", ("triton", "torch"))
    times = {}

    def time_backend(backend, shape, device, chunks, decode_rows):
        found = times[backend.name, decode_rows > 0]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(selection, "time_backend", time_backend)
    monkeypatch.setenv("MEGATRON_ASYNC_CACHE", str(tmp_path))
    return times


def chosen():
    shape = AttentionShape(4, 2, 64, 64, 4, torch.bfloat16, torch.device("cpu"))
    device = CpuDevice()
    choice = choose_prefill(None, shape, device, Choices("measure", device))
    return choice, [[choice.pick(length, beside).name for length in (8, 4096)]
                    for beside in (False, True)]  # fmt: skip


def test_steps_with_decode_rows_are_a_class_of_their_own(two_candidates):
    two_candidates |= {
        ("triton", False): 10.0, ("torch", False): 8.0, ("triton", True): 11.0,
        ("torch", True): 12.0,
    }  # fmt: skip
    choice, names = chosen()
    assert names == [["torch"] * 2, ["triton"] * 2]
    assert "chunks torch (8 us a layer; triton 10)" in str(choice)
    assert "beside decode rows chunks triton (11 us a layer; torch 12)" in str(choice)


def test_a_backend_that_cannot_be_timed_is_left_out(two_candidates, caplog):
    two_candidates |= {("triton", False): 10.0, ("triton", True): 10.0}
    two_candidates[("torch", False)] = RuntimeError("made up")
    choice, names = chosen()
    assert names == [["triton"] * 2] * 2
    assert choice.dropped == ("torch failed (RuntimeError: made up)",)
    assert "attention backend torch could not be timed" in caplog.text


def test_ours_serves_if_it_cannot_be_timed(two_candidates, caplog):
    two_candidates |= {("triton", False): 10.0, ("torch", False): 1.0, ("torch", True): 1.0}
    two_candidates[("triton", True)] = RuntimeError("made up")
    choice, names = chosen()
    assert names == [["triton"] * 2] * 2
    assert choice.dropped == ("nothing was timed (RuntimeError: made up)",)
    assert "prefill chunks triton (not timed), short chunks triton (not timed)" in str(choice)
    assert "attention backend triton could not be timed" in caplog.text


def test_replicas_of_a_service_use_the_first_ones_backends(two_candidates, monkeypatch, tmp_path):
    """Though each measures, at the same time, and the other is the faster one on its GPU."""
    monkeypatch.setenv("MEGATRON_ASYNC_SERVICE_FOLDER", str(tmp_path / "service"))
    names = [(name, beside) for name in ("triton", "torch") for beside in (False, True)]
    two_candidates |= dict(zip(names, (9.0, 9.0, 5.0, 5.0), strict=True))
    find, second = Choices.find, []

    def find_before_the_other(mine, question):
        found = find(mine, question)
        monkeypatch.setattr(Choices, "find", find)
        second.append(chosen()[1])
        two_candidates.update(zip(names, (5.0, 5.0, 9.0, 9.0), strict=True))
        return found

    monkeypatch.setattr(Choices, "find", find_before_the_other)
    assert chosen()[1] == second[0] == [["torch"] * 2] * 2


def _chosen_on_rank(folder, failing):
    """Names of a rank whose own times would choose otherwise; a backend may fail on the second."""
    rank = int(os.environ["RANK"])
    os.environ["MEGATRON_ASYNC_CACHE"] = f"{folder}/{rank}"
    selection.CANDIDATES = ("triton", "torch")
    times = {"triton": (10.0, 5.0)[rank], "torch": (5.0, 10.0)[rank]}

    def time_backend(backend, *_):
        if rank and backend.name == failing:
            raise RuntimeError("made up")
        return times[backend.name]

    selection.time_backend = time_backend
    _, names = chosen()
    return names, len([*Path(folder).rglob("*.json")])


@pytest.mark.parametrize(("failing", "wanted"), [("", "torch"), ("torch", "triton")])
def test_ranks_use_the_leaders_backends(failing, wanted, tmp_path):
    """If they work on all of them; a choice that lacks one is measured again."""
    of_rank = [[wanted] * 2] * 2, int(not failing)
    assert run_ranks(2, _chosen_on_rank, str(tmp_path), failing) == [of_rank, of_rank]


@pytest.fixture
def backend_name(request) -> str:
    if request.param == "flash_attn_4":
        pytest.importorskip("flash_attn.cute")
    return request.param


def backend_of(name: str, batch: PrefillBatch) -> PrefillBackend:
    try:
        return BACKENDS[name](shape_of(batch))
    except BackendUnavailable as reason:
        pytest.skip(str(reason))


every_backend = pytest.mark.parametrize(
    "backend_name", ["triton", "warpgroup", "flash_attn_4", "torch"], indirect=True
)


@pytest.mark.gpu
class TestOnGpu:
    pytestmark = pytest.mark.gpu

    @staticmethod
    def batch(name, tokens, rows, longest, block_size, *arguments, **rules):
        """FlashAttention-4 may look up blocks that a row does not use, and loads blocks of 128
        tokens whole (see there): block numbers must exist, unused cells of the latter and what is
        before a window be finite."""
        changes = {}
        if name == "flash_attn_4":
            is_read = block_size == 128 or rules.get("window")
            changes = {"unused_block": 0, "poison": 3e4 if is_read else float("nan")}
        sizes = tokens, rows, longest, block_size
        return PrefillBatch(*sizes, *arguments, "cuda", **changes, **rules)

    @every_backend
    @pytest.mark.parametrize(
        ("block_size", "kv_heads", "group", "dim"),
        [(16, 3, 3, 64), (64, 8, 4, 128), (128, 8, 4, 128), (256, 3, 3, 64), (64, 2, 2, 80)],
    )
    @pytest.mark.parametrize("window", [0, 128, 300])
    def test_random_batches(self, backend_name, window, block_size, kv_heads, group, dim):
        """With a window, and sinks too."""
        rng = random.Random(dim + block_size)
        batch = self.batch(
            backend_name, 980, 6, 2000, block_size, kv_heads, group, dim, torch.bfloat16,
            window=window, has_sinks=window > 0,
        )  # fmt: skip
        backend = backend_of(backend_name, batch)
        for number in range(12 if window else 30):
            chunks = random_chunks(rng, 6, 900, 2000)
            filled = batch.refill(chunks, first=rng.choice([0, 1, 80]))
            host_knows = number % 2 or not backend.captures
            attend(backend, batch, batch.rows(filled if host_knows else ()))
            batch.check(padding_is_left_alone=backend_name in OURS)

    @every_backend
    @pytest.mark.parametrize("block_size", [64, 128])
    def test_captured(self, backend_name, block_size):
        """Dummy rows, padding tokens, other lengths and tables at every replay."""
        rng = random.Random(1)
        batch = self.batch(backend_name, 512, 8, 2000, block_size, 8, 4, 128, torch.bfloat16)
        backend = backend_of(backend_name, batch)
        if not backend.captures:
            pytest.skip("is not captured")
        batch.refill([(3, 5)])
        attend(backend, batch, batch.rows())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend(backend, batch, batch.rows())
        for number in range(20):
            first = rng.choice([0, 3, 100])
            batch.refill(random_chunks(rng, 8, 512 - first, 2000) if number else [], first=first)
            graph.replay()
            batch.check(padding_is_left_alone=backend_name in OURS)

    @every_backend
    def test_engine(self, backend_name):
        """Tokens are the reference's, or near ties: here by their share."""
        settings = {"device": "cuda", "max_tokens": 256, "max_requests": 8, "num_kv_blocks": 64}
        prompts = [list(range(5, 5 + 37 * length)) for length in range(1, 9)]
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=8, termination_id=-1)
        found = {}
        # Warpgroups serve no heads of 16.
        model = "dummy:smollm2-135m" if backend_name == "warpgroup" else "dummy:tiny"
        for name in {"torch", backend_name}:
            with LLM(model, attention_backend=name, **settings) as llm:
                results = llm.generate(prompts, params)
                assert all(result.error is None for result in results)
                found[name] = [result.generated_tokens for result in results]
                assert llm.engine.context.gpu_view.attention_report == f"attention: prefill {name}"
        same = sum(a == b for a, b in zip(found["torch"], found[backend_name], strict=True))
        assert same >= len(prompts) // 2

    def test_choice_by_measurement(self, monkeypatch, tmp_path):
        from megatron_async.devices import make_device

        monkeypatch.setenv("MEGATRON_ASYNC_CACHE", str(tmp_path))
        device = make_device("cuda")
        shape = AttentionShape(9, 3, 64, 64, 40, torch.bfloat16, device.torch_device)
        choice = choose_prefill(None, shape, device, Choices("measure", device))
        if choice.microseconds:
            assert choice.source == "measured"
            for backend, times in zip(choice.backends, choice.microseconds, strict=True):
                assert times[backend.name] <= min(times.values()) / selection.WORTH
            monkeypatch.setattr(choices, "SHIPPED", tmp_path / "none")
            again = choose_prefill(None, shape, device, Choices("cached", device))
            assert (again.microseconds, again.source) == (choice.microseconds, "cached")
        else:
            assert {backend.name for backend in choice.backends} == {"triton"}, "the only one"
        assert choice.captures

    def test_unfit_shape(self):
        pytest.importorskip("flash_attn.cute")
        shape = AttentionShape(9, 3, 64, 64, 40, torch.float32, torch.device("cuda", 0))
        with pytest.raises(BackendUnavailable, match=r"not torch.float32; change dtype or use"):
            BACKENDS["flash_attn_4"](shape)
