"""`PrefixCache`: which blocks hold the keys and values of which tokens, for requests that begin
alike.

An index on top of `KVBlockAllocator`, which keeps cached blocks without an owner. Its content
follows only from the plans, never from a clock or the order of a dictionary. So ranks that replay
one log, and replays of a recording, find the same blocks.

A block of a prompt is entered when the step that writes it is planned: steps run in the order of
their launch, so any later step may read it. A block with generated tokens may be entered once its
tokens are known and a step that feeds the last of them is planned. It is entered at the next
look-up, or when its request leaves. So steps without new or ending requests do no such work.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron_async.device_state.state_table import StatePlan
from megatron_async.ops.sampling.slot_records import RowFeature
from megatron_async.planning.kv_block_allocator import KVBlockAllocator
from megatron_async.planning.prefix_hashes import DIGEST_BYTES, block_hashes
from megatron_async.planning.request_slots import (
    ALL,
    NO_SLOTS,
    DecodeRows,
    RequestSlots,
    SlotState,
)
from megatron_async.planning.state_rows import NO_ROW, StateRows
from megatron_async.planning.step_plan import IntArray, StepPlan

if TYPE_CHECKING:
    from megatron_async.requests.inference_request import DynamicInferenceRequest

REMEMBERED = 4
"""Number of evicted blocks whose hashes are kept, as a multiple of the pool's blocks."""


COUNTING = RowFeature.PENALTIES | RowFeature.BAD_WORDS
"""Features for which cached tokens are counted."""


class Found(NamedTuple):
    """The cached blocks and state of a sequence's beginning."""

    blocks: IntArray
    """Integers `[n]`: blocks with the keys and values of the first tokens, perhaps of all, table by
    table; in tables of windows those that the next query sees."""
    length: int = 0
    """Blocks in a table of full layers: where the request begins."""
    is_being_written: bool = False
    """Whether the plan that is being made writes the next block: then the request should wait for
    the next plan."""
    matched: int = 0
    """Tokens whose blocks are cached in full layers: those of `length`, and later ones without a
    state or a window's blocks."""
    state_row: int = NO_ROW
    """Row of the state after `blocks`; -1: none, the request begins at 0."""
    was_lost: bool = False
    """Whether the block after the matched ones was cached once, and has been evicted since."""


NOTHING = Found(NO_SLOTS)


class PrefixCache:
    """Finds blocks for requests, and enters those that steps fill.

    Attributes:
        states: rows of the recurrent layers' states; None without such layers.
        queries: tokens of admitted requests.
        hits: queries that were found.
        lost_states: queries whose keys and values were found in full layers, but no state after
            them, or not the blocks of a window.
        lost_blocks: queries in whole blocks that were evicted.
        evictions: cached blocks that were handed out to another owner.
        losses: blocks that cannot be found any more, for any reason.
    """

    def __init__(
        self,
        slots: RequestSlots,
        blocks: KVBlockAllocator,
        block_size: int,
        states: StateRows | None = None,
    ) -> None:
        self._slots, self._blocks, self._size = slots, blocks, block_size
        self.states = states
        self._block_of: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * blocks.total
        self._tokens = np.empty((blocks.total, block_size), dtype=np.int32)
        """Tokens of the blocks; `_salt_of` has their salts. Both are compared beside the hash."""
        self._salt_of: list[bytes] = [b""] * blocks.total
        self._handed_out: OrderedDict[bytes, None] = OrderedDict()
        """Hashes of the blocks evicted last: a larger pool would have found these."""
        self._lost: deque[bytes] = deque(maxlen=blocks.total)
        """Hashes of blocks that were lost since the last `take_lost`, the latest ones."""
        self._written_by = np.zeros(blocks.total, dtype=np.int64)
        """The plan that a block was entered with."""
        self._entered = np.zeros(slots.capacity, dtype=np.int32)
        """Blocks of a slot's request, from its beginning, that were entered or need not be."""
        self._is_stale = np.zeros(slots.capacity, dtype=np.bool_)
        """Whether the slot's request began before `reset`."""
        self._last: tuple[tuple[int, int, int], Found] | None = None
        """The last result: its plan, its request, and the number of losses at that time."""
        self.queries = 0
        self.hits = 0
        self.lost_states = 0
        self.lost_blocks = 0
        self.evictions = 0
        self.losses = 0

    def prepare(self, request: DynamicInferenceRequest) -> None:
        """Hash a new request's prompt, outside of any step."""
        request.block_hashes = block_hashes(request.prompt_tokens, self._size, _salt(request))

    def take_lost(self) -> list[bytes]:
        """Hashes of blocks that cannot be found any more; each hash is returned once."""
        self._take_notice()
        known = (each for each in self._lost if len(each) == DIGEST_BYTES)  # of the first table
        lost = [each for each in known if each not in self._block_of]
        self._lost.clear()
        return lost

    # ---- Requests begin ----------------------------------------------------------------------

    def look_up(self, request: DynamicInferenceRequest, num_known: int, step: int) -> Found:
        """The cached blocks and state of a request's beginning."""
        # Asked several times for one admission; between two of them blocks may be handed out.
        now = step, request.request_id, self._all_losses + len(self._blocks.forgotten)
        if self._last is None or self._last[0] != now:
            found = self._find(request, num_known, step)
            self._last = (step, request.request_id, self._all_losses), found
        return self._last[1]

    def _find(self, request: DynamicInferenceRequest, num_known: int, step: int) -> Found:
        self._take_notice()
        self._catch_up(step)
        count, row = self._most(request, num_known), NO_ROW
        is_being_written = was_lost = False
        chains: list[list[int]] = []
        for table in range(self._slots.needs.full):
            found, writes, lost = self._chain(request, table, count, step)
            count, chains = len(found), [*chains, found]
            is_being_written, was_lost = is_being_written or writes, was_lost or lost
        matched, before = count * self._size, -1
        # A state and each window must be there at the same place.
        while count != before:
            before = count
            for window, first, tables in self._slots.needs.kinds:
                for table in range(first, first + tables):
                    count, writes = self._in_window(request, window, table, count, num_known, step)
                    is_being_written |= writes
            if self.states is not None:
                state = self.states.find(request.block_hashes[:count], step)
                count, row = state.tokens // self._size, state.row
                is_being_written |= state.is_being_written
        blocks = [block for found in chains for block in found[:count]]
        for window, first, tables in self._slots.needs.kinds:
            places = range(self._first(window, count, num_known), count)
            for table in range(first, first + tables):
                keys = self._keys(request, places.start, count, table)
                blocks += [self._block_of[each] for each in keys]
        if not chains:
            matched = count * self._size
        held = np.array(blocks, dtype=np.int32)
        return Found(held, count, is_being_written, matched, row, was_lost)

    def _chain(
        self, request: DynamicInferenceRequest, table: int, most: int, step: int
    ) -> tuple[list[int], bool, bool]:
        """Blocks of a sequence's beginning in a table of full layers, `most` or fewer; whether plan
        `step` writes the next one, or it was lost."""
        found: list[int] = []
        is_being_written = was_lost = False
        salt = _salt(request)
        for each in self._keys(request, 0, most, table):
            block = self._block_of.get(each)
            if block is None or self._salt_of[block] != salt:
                was_lost = each in self._handed_out
                break
            if self._written_by[block] >= step:
                is_being_written = True
                break
            found.append(block)
        if found and (equal := self._hold_tokens_of(request, found)) < len(found):
            del found[equal:]
            is_being_written = was_lost = False
        return found, is_being_written, was_lost

    def _in_window(
        self,
        request: DynamicInferenceRequest,
        window: int,
        table: int,
        count: int,
        num_known: int,
        step: int,
    ) -> tuple[int, bool]:
        """Number of blocks, at most `count`, after which a sequence can begin in a table of
        windows: those that the next query sees are there. And whether plan `step` writes one."""
        is_being_written, salt = False, _salt(request)
        number = count - 1
        while number >= self._first(window, count, num_known) and number >= 0:
            (each,) = self._keys(request, number, number + 1, table)
            block = self._block_of.get(each)
            if block is None or self._salt_of[block] != salt:
                count = number
            elif self._written_by[block] >= step:
                count, is_being_written = number, True
            elif not self._hold_tokens_of(request, [block], number):
                count = number
            number -= 1
        return count, is_being_written

    def _first(self, window: int, count: int, num_known: int) -> int:
        """The first block in a window that a sequence needs which begins after `count` blocks."""
        query = min(count * self._size, num_known - 1)
        return max(query - window + 1, 0) // self._size

    def _keys(
        self, request: DynamicInferenceRequest, first: int, end: int, table: int
    ) -> list[bytes]:
        """What blocks of a sequence are found by, in a table."""
        hashes = request.block_hashes[first:end]
        return [each + bytes([table]) for each in hashes] if table else hashes

    def _most(self, request: DynamicInferenceRequest, num_known: int) -> int:
        """Blocks that a request's sequence of so many tokens may share. The last token is always
        computed. If it ends a block, this is shared all the same, but not without the state before
        the token; nor is a block of this token alone, which saves nothing. All tokens are computed
        from the one before the first whose log prob is wanted."""
        features = 0 if request.record is None else request.record.features
        if not self._slots.needs.full and features & COUNTING:
            return 0  # tokens of the blocks before a window are not there
        ends_alone = self.states is not None or self._size == 1
        most = num_known - ends_alone
        if missing := request.prompt_log_probs_missing:
            most = min(most, len(request.prompt_tokens) - missing - 1)
        return most // self._size

    def _hold_tokens_of(
        self, request: DynamicInferenceRequest, found: list[int], first: int = 0
    ) -> int:
        """How many of the blocks in `found`, from the first on, hold this request's tokens, from
        those of its block `first` on: all, unless two blocks have the same hash."""
        size, known = self._size, request.prompt_tokens
        end = (first + len(found)) * size
        if end > len(known):
            known = np.concatenate((known, request.generated_tokens))
        own = known[first * size : end].reshape(len(found), size)
        same = self._tokens[found] == own
        if same.all():
            return len(found)
        return int(np.argmin(same.all(axis=1)))

    def has_row(self, found: Found, step: int) -> bool:
        """Whether a request that was found this much can have a state's row in plan `step`."""
        return self.states is None or self.states.can_begin(found.state_row, step)

    def begin(self, slot: int, found: Found, step: int) -> None:
        """A request was given `slot` in plan `step`, with what was found."""
        self._entered[slot] = found.length
        self._is_stale[slot] = False
        if self.states is not None:
            self.states.begin(slot, found.state_row, found.matched, step)

    def count(self, request: DynamicInferenceRequest, found: Found) -> None:
        """Count a request that has begun with what was found."""
        num_known, cached = request.num_known, found.length * self._size
        self.queries += num_known
        self.hits += min(cached, num_known - 1)
        self.lost_states += found.matched - cached
        if found.was_lost:
            self.lost_blocks += self._most(request, num_known) * self._size - found.matched

    # ---- What steps write --------------------------------------------------------------------

    def written(self, slot: int, start: int, end: int, step: int) -> None:
        """A chunk of tokens `start` to `end` - 1 of `slot` is in plan `step`."""
        if not self._is_stale[slot]:
            self._enter(slot, end // self._size, step)
            if self.states is not None:
                hashes = self._slots.request_at(slot).block_hashes
                self.states.written(slot, start, end, hashes, step)

    def plan_states(
        self, decode: DecodeRows, chunks: Sequence[tuple[int, int, int]], step: int
    ) -> StatePlan | None:
        """State rows that a plan's rows read and write; None: the rows of their slots. Its rows are
        not yet counted as launched; a chunk is slot, start and end."""
        if self.states is None:
            return None
        saves = []
        at_border = (decode.kv_at_most - 1) % self.states.unit == 0
        if np.count_nonzero(at_border):
            saves = self._saves(decode, np.flatnonzero(at_border), step)
        return self.states.plan(saves, chunks) if chunks or saves else None

    def _saves(self, decode: DecodeRows, rows: IntArray, step: int) -> list[tuple[int, int]]:
        """Slots, and rows for snapshots, of decode rows whose token follows a multiple of the
        unit."""
        assert self.states is not None
        books, slots = self._slots, decode.slots[rows]
        # Of rows with drafts the host does not know in which step they pass the border.
        is_exact = books.in_flight_tokens[slots] == books.in_flight_steps[slots]
        keeps = is_exact & ~self._is_stale[slots]
        saves = []
        for row in rows[keeps].tolist() if decode.width == 1 else ():  # sync-ok: NumPy
            slot, end = int(decode.slots[row]), int(decode.kv_at_most[row]) - 1
            hashes, count = self._slots.request_at(slot).block_hashes, end // self._size
            if count <= len(hashes) and self.states.holds(hashes[count - 1]):
                continue  # the scan of the prompt has left it
            place = self.states.decoded(slot, end, step)
            if place != NO_ROW:
                saves.append((slot, place))
        return saves

    def leaves(self, slot: int, step: int) -> None:
        """The request in `slot` is about to give its blocks back; `step` is planned next."""
        if self._slots.state[slot] >= SlotState.DECODING and not self._is_stale[slot]:
            self._enter(slot, int(self._held(slot)), step - 1)
            self._settle([slot], step)
        if self.states is not None:
            self.states.leave(slot)

    # ---- What is lost ------------------------------------------------------------------------

    def failed(self, plan: StepPlan) -> None:
        """A step has failed: forget the blocks that it and later steps were to write; its requests
        enter no more blocks."""
        held = self._slots.generation[plan.slots] == plan.generations
        self._is_stale[plan.slots[held]] = True
        self._forget_written_by(plan.step)

    def reset(self) -> None:
        """Forget everything; requests that hold a slot enter no more blocks."""
        self._forget(self._findable())
        self._handed_out.clear()
        self._is_stale[:] = True
        if self.states is not None:
            self.states.reset()

    def clear(self) -> None:
        """Forget everything, however far the books are written; no request holds a slot."""
        self.losses += len(self._block_of)
        self._lost.extend(self._block_of)
        self._block_of, self._hash_of = {}, [None] * len(self._hash_of)
        self._handed_out.clear()
        if self.states is not None:
            self.states.clear()

    def _forget_written_by(self, step: int) -> None:
        known = self._findable()
        self._forget(known[self._written_by[known] >= step])
        if self.states is not None:
            self.states.failed(step)

    def _catch_up(self, step: int) -> None:
        """Enter blocks that decoding requests have filled; `step` is planned next."""
        held = self._held(ALL)
        due = (held > self._entered) & (self._slots.state >= SlotState.DECODING) & ~self._is_stale
        if np.count_nonzero(due):
            slots = np.flatnonzero(due)
            for slot, count in zip(slots.tolist(), held[slots].tolist()):  # sync-ok: NumPy
                self._enter(slot, count, step - 1)
        if self.states is not None:
            self._settle(self.states.pending.tolist(), step)  # sync-ok: NumPy

    def _settle(self, slots: list[int], step: int) -> None:
        """Enter the states that decoding has left, where the blocks before them are entered."""
        if self.states is None:
            return
        for slot in slots:
            hashes = self._slots.request_at(slot).block_hashes[: int(self._entered[slot])]
            self.states.settle(slot, hashes, step)

    def _held(self, slots: IntArray | slice | int) -> IntArray:
        """Blocks of decoding `slots` whose tokens are known, and fed by the steps in flight at the
        latest: the token that the last of these yields is not, nor a sequence's last token."""
        books = self._slots
        fed = np.minimum(books.at_least(slots), books.max_length[slots]) - 1
        known = np.minimum(books.num_known[slots], fed)
        if books.draft_places:
            # A token under a grammar is chosen behind the step, too late for its draft entry.
            is_constrained = (books.features[slots] & RowFeature.CONSTRAINED) != 0
            prefilled = np.minimum(known, books.num_prefilled[slots])
            known = np.where(is_constrained, prefilled, known)
        return known // self._size

    def _enter(self, slot: int, count: int, step: int) -> None:
        """Enter blocks of `slot` up to `count` of them."""
        self._take_notice()
        request, size = self._slots.request_at(slot), self._size
        hashes, begin = request.block_hashes, int(self._entered[slot])
        if count > len(hashes):
            tokens = self._slots.tokens[slot, len(hashes) * size : count * size]
            parent = hashes[-1] if hashes else b""
            hashes += block_hashes(tokens, size, _salt(request), parent)
        columns, row = self._slots.columns, self._slots.block_table[slot]
        for span in self._slots.spans_of(slot):
            table = span.start // columns
            first, end = max(begin, span.start % columns), min(count, span.stop - table * columns)
            if first >= end:
                continue
            blocks, new = row[table * columns + first : table * columns + end], []
            keys = self._keys(request, first, end, table)
            for block, each in zip(blocks.tolist(), keys):  # sync-ok: NumPy
                # Of two blocks with the same tokens the first is kept.
                if each not in self._block_of:
                    self._block_of[each] = block
                    self._hash_of[block] = each
                    new.append(block)
            if new:
                known = self._slots.tokens[slot, first * size : end * size]
                self._tokens[blocks] = known.reshape(len(blocks), size)
                salt = _salt(request)
                for block in new:
                    self._salt_of[block] = salt
                self._blocks.remember(np.array(new, dtype=np.int32))
                self._written_by[new] = step
        self._entered[slot] = max(count, begin)

    def _findable(self) -> IntArray:
        """Blocks that can be found, int32."""
        self._take_notice()
        return np.fromiter(self._block_of.values(), dtype=np.int32, count=len(self._block_of))

    @property
    def _all_losses(self) -> int:
        return self.losses + (0 if self.states is None else self.states.losses)

    def _take_notice(self) -> None:
        """Forget blocks that were given to other requests since the last call."""
        lost, self._blocks.forgotten = self._blocks.forgotten, []
        if lost:
            self.evictions += len(lost)
            hashes = [self._hash_of[block] for block in lost]
            self._handed_out.update((each, None) for each in hashes if each is not None)
            while len(self._handed_out) > REMEMBERED * self._blocks.total:
                self._handed_out.popitem(last=False)
            self._drop(lost)

    def _forget(self, blocks: IntArray) -> None:
        self._drop(blocks.tolist())  # sync-ok: NumPy
        self._blocks.forget(blocks)

    def _drop(self, blocks: list[int]) -> None:
        self.losses += len(blocks)
        for block in blocks:
            each = self._hash_of[block]
            if each is not None:
                del self._block_of[each]
                self._hash_of[block] = None
                self._lost.append(each)
                if self.states is not None:
                    self.states.drop(each)


def _salt(request: DynamicInferenceRequest) -> bytes:
    return (request.sampling_params.cache_salt or "").encode()
