"""A file of safetensors, beside the library: the same regions, of which little else is read; damage
is one kind of error."""

import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_async.checkpoints import CheckpointError
from megatron_async.checkpoints import safetensors_file as tested
from megatron_async.checkpoints.safetensors_file import SafetensorsFile
from megatron_async.checkpoints.tensor_files import SINGLE, TensorFiles

SHAPES: list[list[int]] = [[], [0], [7], [1, 9], [6, 5], [3, 0, 2], [4, 3, 5], [2, 3, 4, 2]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    kinds = list(tested.TORCH_TYPES.values())
    tensors = {
        str(shape): torch.randint(-99, 99, shape).to(kinds[number])
        for number, shape in enumerate(SHAPES)
    }
    save_file(tensors, tmp_path / "m.safetensors", metadata={"of": "a test"})
    return tmp_path / "m.safetensors"


@pytest.mark.parametrize("gap", [0, 16, 1 << 14])
def test_regions_are_those_of_the_library(gap: int, file: Path, monkeypatch) -> None:
    monkeypatch.setattr(tested, "GAP_BYTES", gap)
    monkeypatch.setattr(tested, "PIECE_VALUES", 7)
    ours, chance, read = SafetensorsFile(file), random.Random(0), list[int]()
    fill = SafetensorsFile.fill

    def counted(self: SafetensorsFile, name: str, start: int, place: Tensor) -> None:
        read.append(place.nbytes)
        fill(self, name, start, place)

    monkeypatch.setattr(SafetensorsFile, "fill", counted)
    with safe_open(file, framework="pt") as theirs:
        assert ours.metadata == theirs.metadata()
        assert ours.tensors.keys() == set(theirs.keys())
        for name, stored in ours.tensors.items():
            whole = theirs.get_tensor(name)
            assert torch.equal(stored.read(), whole)
            in_bytes = whole.view(-1).view(torch.uint8)
            assert torch.equal(torch.cat([in_bytes[:0], *stored.pieces()]), in_bytes)
            for _ in range(30):
                sizes = [sorted(chance.choices(range(size + 1), k=2)) for size in stored.shape]
                region = tuple(slice(*pair) for pair in sizes)
                expected = whole[region]
                read.clear()
                found = stored.read(region)
                assert found.dtype == whole.dtype
                assert torch.equal(found, expected), (name, region)
                rows = max(len(expected) if stored.shape else 1, 1)
                assert sum(read) <= expected.nbytes + rows * max(stored.shape, default=1) * gap
                place = torch.empty(expected.shape, dtype=torch.float64)
                if (start := stored.place_of(region)) is not None:
                    stored.copy_to(place, start)
                    assert torch.equal(place, expected.double())
                elif gap == 0 and expected.numel():
                    assert len(read) > 1, "what lies together is read by one call"


def test_damage_is_one_kind_of_error(file: Path) -> None:
    whole, chance = file.read_bytes(), random.Random(1)
    with safe_open(file, framework="pt") as theirs:
        names = theirs.keys()
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 1, 3))):
            data[chance.randrange(len(data) if chance.random() < 0.1 else 500)] = chance.randrange(
                256
            )
        file.write_bytes(data[: chance.choice((len(data), len(data), chance.randrange(len(data))))])
        try:
            ours = SafetensorsFile(file)
            for stored in ours.tensors.values():
                stored.read()
        except CheckpointError:
            continue
        assert len(ours.tensors) <= len(names)
    one = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    for header in (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[4,0]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}  ',
        b'{"a":{"dtype":"F4","shape":[1],"data_offsets":[0,1]}}',
        b"[]", b"{" * 5000, b"null", b'{"a":' + b"[" * 5000,
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}',  # a hole
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"U8","shape":[0,%d],"data_offsets":[0,0]},' % 2**63
        + b'"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"U8","shape":[' + b"1," * 99 + b'1],"data_offsets":[0,1]}}',
        b'{"__metadata__":{},"__metadata__":{},' + one,
        b'{"__metadata__":{},"__meta\\u0064ata__":{},' + one,
        b'{"__metadata__":0,' + one,
    ):  # fmt: skip
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(1))
        with pytest.raises(CheckpointError):
            SafetensorsFile(file).tensors["a"].read()


def test_closed_files_hold_no_descriptors(file: Path) -> None:
    files = TensorFiles(file.parent)
    file.rename(file.parent / SINGLE)
    stored = files.tensor("[7]")
    files.close()
    with pytest.raises(ValueError, match="closed"):
        stored.read()
    assert len(files.tensor("[7]").read()) == 7, "it is opened again"
