"""`RequestSlots`: all per-request state of the CPU, as structure-of-arrays indexed by slot.

A request holds one slot from admission to its end; the slot never moves. Scheduling and bookkeeping
work on whole arrays; Python code runs for a single request only at events of its life.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_async.device_state.cache_layout import BlockNeeds
from megatron_async.ops.sampling.slot_records import Header
from megatron_async.planning.step_plan import IntArray
from megatron_async.planning.window_tables import WindowTables
from megatron_async.requests.inference_request import DynamicInferenceRequest
from megatron_async.requests.sampling_params import SamplingParams

ALL = slice(None)
"""Index of all slots."""
MANY = 2**30
NO_TOKEN = -1
"""Fills unused entries of `stop_ids`: no token has this id."""


class SlotState(IntEnum):
    """State of a slot. The order matters: from DECODING on, a slot has its prompt in the cache."""

    FREE = 0
    PREFILLING = 1
    DECODING = 2
    PAUSED = 3
    """Needs a block and none is free; the scheduler tries again in every step."""


class DecodeRows(NamedTuple):
    """The rows of a step that decode."""

    slots: IntArray
    """int64 `[rows]`: NumPy indexes several times faster by int64 than by int32."""
    width: int
    """Most tokens that a row yields."""
    kv_at_most: IntArray
    """int32 `[rows]`: `RequestSlots.places` of the rows."""
    short_of_blocks: bool = False
    """Whether rows have fewer drafts because no blocks are free."""


NO_SLOTS: IntArray = np.empty(0, dtype=np.int64)
NO_DECODE = DecodeRows(NO_SLOTS, 1, NO_SLOTS)


class RequestSlots:
    """State of up to `capacity` requests.

    The device knows the length of a request's sequence. The CPU knows the first `num_known` tokens
    (prompt and booked samples), and two bounds, always computed from `num_known`: each step in
    flight yields at least one token (`at_least`), and all of them at most `in_flight_tokens`
    (`at_most`). If all rows have width 1, the bounds are equal. `max_length` is the length limit.

    Args:
        capacity: number of slots.
        max_sequence_length: longest sequence, tokens.
        max_blocks: blocks that the longest sequence takes in each block table.
        num_micro_batches: groups that the slots form, `slot % num_micro_batches`.
        max_width: most tokens that a row yields.
        draft_places: further cache positions that a step fills for a row's drafts.
        needs: of blocks, with the windows of the block tables; None: one, of full layers.

    Attributes:
        needs: as given, or made here.
        windows: blocks that layers with a window hold; None without such layers.
    """

    def __init__(
        self,
        capacity: int,
        max_sequence_length: int,
        max_blocks: int,
        num_micro_batches: int = 1,
        max_width: int = 1,
        draft_places: int = 0,
        needs: BlockNeeds | None = None,
    ) -> None:
        self.capacity = capacity
        self.max_width = max_width
        self.draft_places = draft_places
        self.num_micro_batches = num_micro_batches
        self.state = np.full(capacity, SlotState.FREE, dtype=np.int8)
        self.generation = np.zeros(capacity, dtype=np.int64)
        self.request_id = np.full(capacity, -1, dtype=np.int64)
        self.rank = np.zeros(capacity, dtype=np.int64)

        self.prompt_length = np.zeros(capacity, dtype=np.int32)
        self.num_known = np.zeros(capacity, dtype=np.int32)
        self.in_flight_steps = np.zeros(capacity, dtype=np.int32)
        """Steps in flight that yield tokens of the request."""
        # Where all rows have width 1, one array is both.
        one = self.in_flight_steps
        self.in_flight_tokens = one if max_width == 1 else np.zeros(capacity, dtype=np.int32)
        """Sum of the widths of the request's rows in these steps."""
        self.max_length = np.zeros(capacity, dtype=np.int32)
        self.num_prefilled = np.zeros(capacity, dtype=np.int32)
        """Tokens whose prefill is launched; only of a PREFILLING slot."""
        self.num_cached = np.zeros(capacity, dtype=np.int32)
        """Tokens that were in the cache when the request got its slot: its first chunk begins
        behind them."""
        self.num_shared = np.zeros(capacity, dtype=np.int32)
        """Tokens of the shared blocks that the request got: `num_cached`, or one more, its last
        one, which is computed again and not written."""

        self.needs = needs = needs or BlockNeeds((0,), -(-max_sequence_length // max_blocks))
        self.num_tables, self.columns = len(needs.windows), max_blocks
        self.num_blocks = np.zeros(capacity, dtype=np.int32)
        """Blocks in each table of full layers; from DECODING on, the end of others' too."""
        self.block_table = np.zeros((capacity, self.num_tables * max_blocks), dtype=np.int32)
        """All tables of a slot, side by side."""
        self.windows = WindowTables(needs, capacity, max_blocks) if needs.kinds else None
        # Lazily paged in by the system: a short sequence touches little of its row.
        self.tokens = np.empty((capacity, max_sequence_length), dtype=np.int32)

        self.stop_ids = np.full((capacity, 1), NO_TOKEN, dtype=np.int32)
        self.most_in_flight = np.full(capacity, MANY, dtype=np.int32)
        """Samples that may be unknown to the host when another step of the request is planned."""
        self.watch_row = np.zeros(capacity, dtype=np.int32)
        """Row of `TokenWatch`'s table: tokens to check for stop words when they are booked."""
        self.features = np.zeros(capacity, dtype=np.int32)
        """Bits of `RowFeature`, as in the requests' records."""
        self.drafts = np.zeros(capacity, dtype=np.int32)
        """Most drafts of the requests that a step verifies, as in their records."""
        self.prompt_log_probs = np.zeros(capacity, dtype=np.int32)
        """End of the positions of the prompt at which log probs are made of the next token; 0:
        none are wanted, or all are delivered."""
        self.prompt_log_probs_from = np.zeros(capacity, dtype=np.int32)
        """Beginning of these positions."""
        self.forces_routing = np.zeros(capacity, dtype=np.bool_)
        """Whether the requests' prompts go to given experts."""
        self.sampling_mode = np.zeros(capacity, dtype=np.int8)
        """`SamplingMode` of the requests' records."""

        self.requests: list[DynamicInferenceRequest | None] = [None] * capacity
        self.slot_of: dict[int, int] = {}
        """Request id -> slot; `requests` by slot, the other way round."""
        self._members = [
            range(group, capacity, num_micro_batches) for group in range(num_micro_batches)
        ]
        self._free = [list(reversed(members)) for members in self._members]

    def clear(self) -> None:
        """Take all slots from their requests, however far the books of these are written. Rows in
        flight become zombies."""
        self.generation += 1
        self.slot_of = {}
        self.requests[:] = [None] * self.capacity
        self.state[:] = SlotState.FREE
        self.request_id[:] = -1
        self.num_blocks[:] = 0
        if self.windows is not None:
            self.windows.clear()
        self._free = [list(reversed(members)) for members in self._members]

    @property
    def num_free(self) -> int:
        """Slots that no request holds."""
        return sum(map(len, self._free))

    def num_free_in(self, micro_batch: int) -> int:
        """Slots of a micro-batch that no request holds."""
        return len(self._free[micro_batch])

    def num_held_in(self, micro_batch: int) -> int:
        """Slots of a micro-batch that requests hold."""
        return len(self._members[micro_batch]) - len(self._free[micro_batch])

    def acquire(
        self,
        request: DynamicInferenceRequest,
        rank: int,
        max_length: int,
        micro_batch: int = 0,
        num_shared: int = 0,
    ) -> int:
        """Give a free slot to a request that starts, or starts again after an eviction.

        Args:
            request: its prompt and generated tokens are copied in; its record is made.
            rank: place in the order of service; kept over evictions.
            max_length: sequence length at which it ends.
            micro_batch: which the slot belongs to; it has a free one.
            num_shared: its first tokens, whose keys and values are in the cache already; perhaps
                all.

        Returns:
            the slot, in state PREFILLING, without blocks. If anything raises, it is still free.
        """
        record = request.record
        assert record is not None, f"request {request.request_id} has no record"
        slot = self._free[micro_batch][-1]
        self.rank[slot] = rank
        prompt, generated = request.prompt_tokens, request.generated_tokens
        known = len(prompt) + len(generated)
        self.tokens[slot, : len(prompt)] = prompt
        self.tokens[slot, len(prompt) : known] = generated
        self.prompt_length[slot] = len(prompt)
        self.num_known[slot] = known
        self.in_flight_steps[slot] = self.in_flight_tokens[slot] = 0
        self.max_length[slot] = max_length
        self.num_shared[slot] = num_shared
        # One token at least is computed: the next one is made of its logits.
        self.num_prefilled[slot] = self.num_cached[slot] = min(num_shared, known - 1)
        self.num_blocks[slot] = 0
        self._set_stop_ids(slot, request.sampling_params)
        self.features[slot] = record.features
        self.drafts[slot] = record.words[Header.DRAFTS]
        self.sampling_mode[slot] = record.mode
        is_constrained = request.sampling_params.structured_output is not None
        self.most_in_flight[slot] = 2 if is_constrained else MANY
        self.watch_row[slot] = request.watch_row
        missing = request.prompt_log_probs_missing
        self.prompt_log_probs[slot] = len(prompt) - 1 if missing else 0
        self.prompt_log_probs_from[slot] = len(prompt) - 1 - missing
        self.forces_routing[slot] = request.forced_routing is not None
        # Behind all that may raise: from here on the slot is the request's.
        self.slot_of[request.request_id] = slot
        self._free[micro_batch].pop()
        self.state[slot] = SlotState.PREFILLING
        self.requests[slot] = request
        self.request_id[slot] = request.request_id
        return slot

    def _set_stop_ids(self, slot: int, params: SamplingParams) -> None:
        stop_ids = [NO_TOKEN if params.termination_id is None else params.termination_id]
        stop_ids += params.stop_token_ids or []
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self.stop_ids[slot] = NO_TOKEN
        self.stop_ids[slot, : len(stop_ids)] = stop_ids

    def release(self, slot: int) -> IntArray:
        """Take the slot from its request and raise its generation, which makes every row in flight
        a zombie.

        Returns:
            the blocks that it held, int32.
        """
        blocks = self.blocks_of(slot).copy()
        self.state[slot] = SlotState.FREE
        self.generation[slot] += 1
        del self.slot_of[int(self.request_id[slot])]
        self.request_id[slot] = -1
        self.num_blocks[slot] = 0
        if self.windows is not None:
            self.windows.clear(slot)
        self.requests[slot] = None
        self._free[slot % self.num_micro_batches].append(slot)
        return blocks

    def request_at(self, slot: int) -> DynamicInferenceRequest:
        """The request that holds `slot`."""
        request = self.requests[slot]
        assert request is not None, f"slot {slot} is free"
        return request

    def num_computed(self, slot: int) -> int:
        """Known tokens of `slot` that are in the cache, or will be after the steps in flight."""
        if self.state[slot] == SlotState.PREFILLING:
            return int(self.num_prefilled[slot])
        # The sample of the step launched last has not been fed back.
        return int(min(self.at_least(slot) - 1, self.num_known[slot]))

    def is_score(self, slot: int) -> bool:
        """Whether the request in `slot` generates nothing."""
        return bool(self.max_length[slot] == self.prompt_length[slot])

    def num_to_prefill(self, slot: int) -> int:
        """Tokens of `slot` that are prefilled: the known ones, but for the last of a sequence that
        ends with it."""
        return int(min(self.num_known[slot], self.max_length[slot] - 1))

    def may_decode(self) -> NDArray[np.bool_]:
        """Slots with their prompts in the cache that the steps in flight do not bring to their
        length limits, bool `[slots]`."""
        found: NDArray[np.bool_] = self.state >= SlotState.DECODING
        found &= self.at_least(ALL) < self.max_length
        return found

    def at_least(self, slots: IntArray | slice | int) -> IntArray:
        """Lower bound of the sequences' lengths after the steps in flight, int32 `[slots]`."""
        return self.num_known[slots] + self.in_flight_steps[slots]

    def at_most(self, slots: IntArray | slice | int) -> IntArray:
        """Upper bound of these lengths, int32 `[slots]`, without regard to length limits."""
        return self.num_known[slots] + self.in_flight_tokens[slots]

    def widths_of(self, slots: IntArray | slice, width: int) -> IntArray:
        """Most tokens that rows of these slots yield in a step of this width, int32 `[slots]`: no
        more than their requests allow drafts."""
        return np.minimum(self.drafts[slots] + 1, width)

    def places(self, slots: IntArray | slice, width: int) -> IntArray:
        """Cache positions that the sequences may take once rows of this width have run, int32
        `[slots]`. The last token is at length - 1, drafts follow it, and a sequence's very last
        token is never fed."""
        at_most = self.at_most(slots)
        if self.max_width == 1:
            return at_most
        return np.minimum(at_most + self.widths_of(slots, width) - 1, self.max_length[slots] - 1)

    def with_drafts(self, places: IntArray) -> IntArray:
        """`places`, int32 `[slots]`, plus the positions in which drafts are made."""
        if not self.draft_places:
            return places
        return np.minimum(places + self.draft_places, self.max_length - 1)

    def blocks_of(self, slot: int | np.integer[Any]) -> IntArray:
        """The blocks of a slot, table by table, int32: a view where there is one table."""
        row, count = self.block_table[slot], self.num_blocks[slot]
        if self.num_tables == 1 and self.windows is None:
            return row[:count]
        return np.concatenate([row[span] for span in self.spans_of(int(slot))])

    def spans_of(self, slot: int) -> list[slice]:
        """Columns of `block_table` that hold blocks of a slot, table by table."""
        starts = range(0, self.needs.full * self.columns, self.columns)
        full = [slice(start, start + int(self.num_blocks[slot])) for start in starts]
        return full if self.windows is None else full + self.windows.spans(slot)

    def count_launched(self, slots: IntArray, widths: IntArray | int) -> None:
        """A step was planned that yields up to `widths` tokens of each of `slots`."""
        self.in_flight_steps[slots] += 1
        if self.max_width > 1:
            self.in_flight_tokens[slots] += widths

    def count_back(self, slots: IntArray, widths: IntArray | int) -> None:
        """Undo `count_launched`: the step is booked, or was taken back."""
        self.in_flight_steps[slots] -= 1
        if self.max_width > 1:
            self.in_flight_tokens[slots] -= widths

    def generated(self, slot: int) -> IntArray:
        """Booked generated tokens of `slot`, int32 `[n]`: a view."""
        return self.tokens[slot, self.prompt_length[slot] : self.num_known[slot]]

    def tokens_since(self, request_id: int, first: int) -> list[int] | None:
        """Booked generated tokens of a request from its `first` on; None if it holds no slot."""
        slot = self.slot_of.get(request_id)
        if slot is None:
            return None
        start = self.prompt_length[slot] + first
        return self.tokens[slot, start : self.num_known[slot]].tolist()  # sync-ok: NumPy

    def keep_tokens(self) -> None:
        """Give requests that hold a slot the tokens that are booked for them."""
        for slot in self.slot_of.values():
            self.request_at(slot).generated_tokens = self.generated_tokens(slot)

    def generated_tokens(self, slot: int) -> list[int]:
        """Booked generated tokens of `slot`, as Python integers."""
        return self.generated(slot).tolist()  # sync-ok: NumPy, at the end of a request
