"""Forced acceptance: drafts of random weights never agree, so a benchmark says how often they do.

Between the sampler and the verification of a step its samples are changed: where a coin says that a
draft is accepted, the sample before it becomes the draft; elsewhere it becomes another token. The
coin is Philox of (the request's seed, position), so a run can be repeated. **The tokens that come
out are not the model's**; the step's own work stays as it is, but for one small kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_async.errors import ConfigurationError
from megatron_async.ops.dependent_launch import launch_options, wait_for_previous
from megatron_async.ops.sampling.philox import philox4x32
from megatron_async.ops.sampling.slot_records import RECORD_WORDS, Header

if TYPE_CHECKING:
    from megatron_async.device_state.gpu_view import ContextGPUView
    from megatron_async.engine.dynamic_engine import DynamicInferenceEngine
    from megatron_async.ops.sampling.sampling import SamplingMode
    from megatron_async.step.drafting import Drafter

TILE = 128
STREAM = 0x5EED
"""Word of the counter that tells these random numbers from the sampler's."""
WORDS = tl.constexpr(RECORD_WORDS)
SEED_LOW = tl.constexpr(int(Header.SEED_LOW))
STREAM_WORD = tl.constexpr(STREAM)


def force_acceptance(engine: DynamicInferenceEngine, chances: Sequence[float]) -> None:
    """Let every decode step of an engine be wide, and accept its drafts by chance alone.

    Args:
        engine: an idle one with `num_speculative_tokens` of as many as there are chances; its
            drafter runs on, for its time. Graphs are captured again.
        chances: that a draft is accepted, given those before it in its row were.

    Raises:
        ConfigurationError: another number of chances.
    """
    controller, context = engine.controller, engine.context
    count = context.config.num_speculative_tokens
    if len(chances) != count or controller.drafting is None or context.drafts is None:
        raise ConfigurationError(
            f"forced acceptance of {len(chances)} drafts wants an engine with "
            f"num_speculative_tokens={len(chances)}, not {count}."
        )
    context.drafts.chooses_widths = False
    sample = _Forced(controller.sampler.sample, context.gpu_view, chances, controller.vocab_size)
    controller.drafting.drafter = _AlwaysSome(controller.drafting.drafter)
    controller.sampler.sample = sample  # type: ignore[assignment]
    controller.recapture_cuda_graphs()


class _AlwaysSome:
    """A drafter that proposes something where another one proposes nothing."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def propose(self, view: ContextGPUView, count: int) -> Tensor:
        return self._drafter.propose(view, count).clamp(min=0)


class _Forced:
    """A sampler's `sample`, and then the coin."""

    def __init__(
        self,
        sample: Callable[[Tensor, SamplingMode], Tensor],
        view: ContextGPUView,
        chances: Sequence[float],
        vocab_size: int,
    ) -> None:
        self._sample, self._view, self._vocab_size = sample, view, vocab_size
        device = view.slots.last_token.device
        self._chances = torch.tensor(chances, dtype=torch.float32, device=device)

    def __call__(self, output: Tensor, mode: SamplingMode) -> Tensor:
        sampled, view = self._sample(output, mode), self._view
        if view.dims.width > 1:
            step, records = view.step, view.slots.records
            force = force_samples if sampled.is_cuda else force_samples_reference
            force(
                sampled, step.token_ids, step.slots, step.sample_positions, records, self._chances,
                view.dims.decode_rows, view.dims.width, self._vocab_size,
            )  # fmt: skip
        return sampled


def force_samples(
    sampled: Tensor,
    token_ids: Tensor,
    slots: Tensor,
    positions: Tensor,
    records: Tensor,
    chances: Tensor,
    decode_rows: int,
    width: int,
    vocab_size: int,
) -> None:
    """Change samples of decode rows so that drafts are accepted by chance.

    Args:
        sampled: int64 `[sample rows]`, changed: of each row all but its last.
        token_ids: int64 `[tokens]`: a row's last token, then its drafts.
        slots: int64 `[sample rows]`.
        positions: int32 `[sample rows]`.
        records: int32 `[slots, RECORD_WORDS]`.
        chances: float32 `[width - 1]` or more.
        decode_rows: so many.
        width: query tokens of each.
        vocab_size: tokens.
    """
    samples = decode_rows * width
    if samples:
        _force_kernel[(triton.cdiv(samples, TILE),)](
            sampled, token_ids, slots, positions, records, chances, samples, vocab_size, width,
            TILE, **launch_options(sampled),
        )  # fmt: skip


def force_samples_reference(
    sampled: Tensor,
    token_ids: Tensor,
    slots: Tensor,
    positions: Tensor,
    records: Tensor,
    chances: Tensor,
    decode_rows: int,
    width: int,
    vocab_size: int,
) -> None:
    """`force_samples` in plain torch."""
    samples = decode_rows * width
    if not samples:
        return
    seeds = records[:, Header.SEED_LOW].index_select(0, slots[:samples]).long() & 0xFFFFFFFF
    zero = torch.zeros_like(seeds)
    counter = [positions[:samples].long(), zero + STREAM, zero, zero]
    uniform = (philox4x32(counter, [seeds, zero])[0] >> 8).float() * 2.0**-24
    table, drafts = (values[:samples].view(decode_rows, width) for values in (sampled, token_ids))
    wrong = torch.where(
        table[:, :-1] == drafts[:, 1:], (table[:, :-1] + 1) % vocab_size, table[:, :-1]
    )
    is_right = uniform.view(decode_rows, width)[:, :-1] < chances[: width - 1]
    table[:, :-1] = torch.where(is_right, drafts[:, 1:], wrong)


@triton.jit(do_not_specialize=["samples", "vocab_size"])
def _force_kernel(
    sampled: tl.tensor,
    token_ids: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    records: tl.tensor,
    chances: tl.tensor,
    samples: tl.tensor,
    vocab_size: tl.tensor,
    width: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    wait_for_previous(overlap)
    sample = tl.program_id(0) * tile + tl.arange(0, tile)
    query = sample % width
    forced = (sample < samples) & (query < width - 1)
    slot = tl.load(slots + sample, forced, other=0)
    seed = tl.load(records + slot * WORDS + SEED_LOW, forced, other=0)
    position = tl.load(positions + sample, forced, other=0).to(tl.uint32)
    zero = position * 0
    first, _, _, _ = tl.philox_impl(
        position, zero + STREAM_WORD, zero, zero, seed.to(tl.uint32), zero
    )
    uniform = (first >> 8).to(tl.float32) * (2.0**-24)
    token = tl.load(sampled + sample, forced, other=0)
    draft = tl.load(token_ids + sample + 1, forced, other=0)
    is_right = uniform < tl.load(chances + query, forced, other=0.0)
    wrong = tl.where(token == draft, (token + 1) % vocab_size, token)
    tl.store(sampled + sample, tl.where(is_right, draft, wrong), forced)
