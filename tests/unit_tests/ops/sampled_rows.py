"""Rows to be sampled, of parameters given one by one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_async.ops.sampling.sampling import SamplingRows
from megatron_async.ops.sampling.slot_records import HEADER, RECORD_WORDS, Header, pack_record

Numbers = float | Sequence[float] | Tensor


def rows_asking(
    count: int,
    device: str | torch.device = "cpu",
    *,
    seeds: Sequence[int] | Tensor,
    positions: Sequence[int] | Tensor,
    **numbers: Numbers,
) -> SamplingRows:
    """Rows in random slots; the last slot's record is that of dummy rows. `numbers` are words of
    the header in small letters, `[rows]` or one for all."""
    columns = {
        name: torch.as_tensor(value).expand(count).tolist() for name, value in numbers.items()
    }
    columns["seed_low"], columns["seed_high"] = (
        torch.as_tensor(seeds, device="cpu").view(-1, 1).view(torch.int32).T.tolist()
    )
    slots = torch.randperm(count + 2)[:count]
    records = torch.full((count + 3, RECORD_WORDS), -7, dtype=torch.int32)
    records[-1] = 0
    for row, slot in enumerate(slots.tolist()):
        header = {Header[name.upper()]: column[row] for name, column in columns.items()}
        records[slot, :HEADER] = torch.from_numpy(pack_record(header))
    return SamplingRows(
        slots.to(device),
        torch.as_tensor(positions, dtype=torch.int32).to(device),
        records.to(device),
    )
