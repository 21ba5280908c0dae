"""Finds the slots of a step's rows in a cache, and gives slots to those that have none, by CLOCK replacement.

    _look_up   ids of cached rows become their slots; a bit is set for every other row
    _count     the bits of each block, and the slots of each block that may be taken
    (cumsum)   where the entries of each block begin
    _list      the rows that enter, ascending, and the slots that they take, in the hand's order
    _take      these slots change rows
    _replace   the other ids become their rows' new slots

Bits need no sort, give rows in ascending order, in which host memory is faster, and the same result every time.

Example: 4 slots hold rows 7 3 9 5. None was used again; 9 and 5 came in the last step; the hand is at slot 0. A step
names rows 8 8 2. Row 2 takes slot 0, row 8 slot 1, the ids become 1 1 0, and the hand moves to slot 2.
"""

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.compiled import INTERPRETED, specialised
from dlrm_overlap.kernels.primitives import feature_of
from dlrm_overlap.kernels.row_cache import MOST_USES, CacheState, Swaps

_TAKE_PROGRAMS = 2 if INTERPRETED else 128
_NUM_WARPS = 4


@triton.jit
def _first_row(offsets, first_rows, position, mask, samples, features, HALVINGS: tl.constexpr):
    """Return [N]: the element of `first_rows` of the feature whose bags hold the id at `position` [N]."""
    feature = feature_of(offsets, position, mask, samples, features, HALVINGS)
    return tl.load(first_rows + feature, mask=mask, other=-1)


@triton.jit(do_not_specialize=["ids_count", "samples", "features"], do_not_specialize_on_alignment=["offsets"])
def _look_up(
    ids,  # [ids_count] int32
    offsets,  # [features * samples + 1], of the bags
    first_rows,  # [features + 1 or more] int64
    slot_of,  # [rows] int32
    used_at,  # [slots + resident rows] int32
    named,  # [words] int32, a bit for each row
    clock,  # [3] int64: step, hand, next hand
    ids_count,
    samples,
    features,
    HALVINGS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Replace BLOCK ids by their rows' slots and mark the slots as used; set the bits of rows that have no slot.

    Memory: the id of a row without a slot becomes -1 - id. Programs that mark the same slot store the same step.

    Order: bits are set by relaxed atomics, since 32 rows share a word.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < ids_count
    first = _first_row(offsets, first_rows, i, live, samples, features, HALVINGS)  # [BLOCK]
    live = live & (first >= 0)
    step = tl.load(clock).to(tl.int32)
    value = tl.load(ids + i, mask=live, other=0)  # [BLOCK]
    row = first + value
    slot = tl.load(slot_of + row, mask=live, other=-1)  # [BLOCK]
    found = live & (slot >= 0)
    # Thousands of ids may name one row: store only where the step is not noted yet.
    stale = tl.load(used_at + slot, mask=found, other=0) != step
    tl.store(used_at + slot, tl.zeros_like(slot) + step, mask=found & stale)
    bit = tl.full((BLOCK,), 1, tl.int32) << (row % 32).to(tl.int32)
    tl.atomic_or(named + row // 32, bit, mask=live & (slot < 0), sem="relaxed")
    tl.store(ids + i, tl.where(slot < 0, -1 - value, slot), mask=live)


@triton.jit
def _count_ones(word):
    pairs = word - ((word >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    return (((((fours >> 4) + fours) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _load_words(named, words, block, WORDS: tl.constexpr):
    """Return the numbers [WORDS] int64 and the values [WORDS] uint32 of a block's words of bits."""
    number = block.to(tl.int64) * WORDS + tl.arange(0, WORDS)
    return number, tl.load(named + number, mask=number < words, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _load_slots(used_at, uses, clock, slots, block, SLOTS: tl.constexpr):
    """Return a block of slots in the hand's order, [SLOTS] each: mask, slot, last step, uses, whether it is free."""
    # A slot is free if neither this step nor the last one used it.
    at = block * SLOTS + tl.arange(0, SLOTS)
    mask = at < slots
    slot = at + tl.load(clock + 1).to(tl.int32)
    slot = tl.where(slot < slots, slot, slot - slots)
    used = tl.load(used_at + slot, mask=mask, other=0)
    free = mask & (used < tl.load(clock) - 1)
    return mask, slot, used, tl.load(uses + slot, mask=mask, other=0), free


@triton.jit(do_not_specialize=["words", "slots", "word_blocks", "slot_blocks"])
def _count(
    named,  # [words] int32
    used_at,  # [slots] int32
    uses,  # [slots] int32
    clock,  # [3] int64
    counts,  # [word_blocks + 2 * slot_blocks] int32: bits, free slots without uses, free slots with uses
    words: tl.int64,
    slots,
    word_blocks,
    slot_blocks,
    MAX_USES: tl.constexpr,
    WORDS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Count the bits of one block, or the slots of one block that may be taken.

    Memory: a slot that this step names gains a use, up to MAX_USES.
    """
    program = tl.program_id(0)
    if program < word_blocks:
        _, word = _load_words(named, words, program, WORDS)
        tl.store(counts + program, tl.sum(_count_ones(word), 0))
    else:
        mask, slot, used, left, free = _load_slots(used_at, uses, clock, slots, program - word_blocks, SLOTS)
        tl.store(uses + slot, tl.minimum(left + 1, MAX_USES), mask=mask & (used == tl.load(clock)))
        tl.store(counts + program, tl.sum((free & (left == 0)).to(tl.int32), 0))
        tl.store(counts + program + slot_blocks, tl.sum((free & (left > 0)).to(tl.int32), 0))


@triton.jit
def _list_rows(named, entering, words, block, begin, WORDS: tl.constexpr):
    number, word = _load_words(named, words, block, WORDS)
    inside = _count_ones(word)
    into = entering + begin + tl.cumsum(inside, 0) - inside
    # Each turn lists and clears the lowest bit of every word.
    for _ in range(0, tl.max(inside, 0)):
        others = word & (word - 1)
        row = number * 32 + _count_ones((word ^ others) - 1)
        tl.store(into, row, mask=word != 0)
        into += 1
        word = others
    tl.store(named + number, tl.zeros((WORDS,), tl.int32), mask=number < words)


@triton.jit
def _list_slots(
    used_at,
    uses,
    clock,
    taken,
    slots,
    block,
    first_idle,
    first_other,
    idles,
    entries,
    SLOTS: tl.constexpr,
):
    """Store the slots of one block that are taken to `taken`, and move the hand past them.

    Free slots are numbered, first the `idles` ones without uses. This block's free slots without uses begin at number
    `first_idle`, those with uses at `first_other`.
    """
    mask, slot, _, left, free = _load_slots(used_at, uses, clock, slots, block, SLOTS)
    # Number the block's slots: those without uses come first.
    idle = (free & (left == 0)).to(tl.int32)
    other = (free & (left > 0)).to(tl.int32)
    before = first_idle + tl.cumsum(idle, 0) - idle
    number = tl.where(idle > 0, before, first_other + tl.cumsum(other, 0) - other)
    tl.store(taken + number, slot.to(tl.int64), mask=free & (number < entries))
    # The hand passes all slots up to the last one without uses that is taken: they lose a use.
    idles_taken = tl.minimum(entries, idles)
    tl.store(uses + slot, left - 1, mask=mask & (before < idles_taken) & (left > 0))
    following = tl.where(slot + 1 < slots, slot + 1, 0).to(tl.int64)
    tl.store(clock + 2 + tl.zeros_like(slot), following, mask=(idle > 0) & (before == idles_taken - 1))


@triton.jit(do_not_specialize=["words", "slots", "word_blocks", "slot_blocks"])
def _list(
    named,
    used_at,
    uses,
    clock,
    counts,  # of `_count`
    ends,  # inclusive sum of `counts`
    taken,  # [entries] int64
    entering,  # [entries] int64
    words: tl.int64,
    slots,
    word_blocks,
    slot_blocks,
    WORDS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """List the rows of one block that enter, or the slots of one block: row entering[i] takes slot taken[i].

    Memory: the hand's next slot is stored to `clock[2]`, since other programs still read `clock[1]`.
    """
    program = tl.program_id(0)
    entries = tl.load(ends + word_blocks - 1)
    begin = tl.load(ends + program) - tl.load(counts + program)
    if program < word_blocks:
        _list_rows(named, entering, words, program, begin, WORDS)
    else:
        other = program + slot_blocks
        first_other = tl.load(ends + other) - tl.load(counts + other) - entries
        idles = tl.load(ends + word_blocks + slot_blocks - 1) - entries
        _list_slots(
            used_at,
            uses,
            clock,
            taken,
            slots,
            program - word_blocks,
            begin - entries,
            first_other,
            idles,
            entries,
            SLOTS,
        )


@triton.jit(do_not_specialize=["word_blocks"])
def _take(
    slot_of,  # [rows] int32
    row_in,  # [slots] int64
    used_at,
    uses,
    clock,
    ends,
    taken,
    leaving,  # [entries] int64
    entering,
    count,  # [1] int64
    word_blocks,
    BLOCK: tl.constexpr,
):
    """Assign slots to the rows that enter, as program p of P the blocks p, p + P, .. of BLOCK."""
    entries = tl.load(ends + word_blocks - 1)
    step = tl.load(clock).to(tl.int32)
    for first in range(tl.program_id(0) * BLOCK, entries, tl.num_programs(0) * BLOCK):
        i = first + tl.arange(0, BLOCK)
        mask = i < entries
        slot = tl.load(taken + i, mask=mask, other=0)  # [BLOCK]
        row = tl.load(entering + i, mask=mask, other=0)  # [BLOCK]
        old = tl.load(row_in + slot, mask=mask, other=-1)  # [BLOCK]
        tl.store(leaving + i, old, mask=mask)
        tl.store(slot_of + old, tl.full((BLOCK,), -1, tl.int32), mask=mask & (old >= 0))
        tl.store(slot_of + row, slot.to(tl.int32), mask=mask)
        tl.store(row_in + slot, row, mask=mask)
        tl.store(used_at + slot, tl.zeros_like(i) + step, mask=mask)
        tl.store(uses + slot, tl.zeros_like(i), mask=mask)
    # No program reads the hand here, so it may move now.
    if tl.program_id(0) == 0:
        tl.store(clock + 1, tl.load(clock + 2))
        tl.store(count, entries.to(tl.int64))


@triton.jit(do_not_specialize=["ids_count", "samples", "features"], do_not_specialize_on_alignment=["offsets"])
def _replace(
    ids,  # [ids_count] int32
    offsets,  # [features * samples + 1], of the bags
    first_rows,  # [features + 1 or more] int64
    slot_of,  # [rows] int32
    clock,
    ids_count,
    samples,
    features,
    HALVINGS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Replace the ids for which `_look_up` found no slot, of BLOCK ids; program 0 counts the step."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(ids + i, mask=i < ids_count, other=0)  # [BLOCK], -1 - id where there was no slot
    live = (i < ids_count) & (value < 0)
    if tl.max(live.to(tl.int32), 0) > 0:
        first = _first_row(offsets, first_rows, i, live, samples, features, HALVINGS)
        live = live & (first >= 0)
        slot = tl.load(slot_of + (first - 1 - value), mask=live, other=0)
        tl.store(ids + i, slot, mask=live)
    if tl.program_id(0) == 0:
        tl.store(clock, tl.load(clock) + 1)


class Blocks(NamedTuple):
    ids: int = 1024
    words: int = 1024
    slots: int = 1024
    entries: int = 1024


_BLOCKS = Blocks()


def find_slots(
    state: CacheState,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    samples: int,
    first_rows: torch.Tensor,
    blocks: Blocks = _BLOCKS,
) -> Swaps:
    """Find slots for the rows that a step names, and replace its ids by the slots; `state` and `ids` are updated in
    place.

    There must be enough slots for the rows of this step and the last one together; they enter in ascending order.

    Args:
        ids: [n] int32, ids within their tables, feature after feature.
        offsets: [F * B + 1] int32 or int64, of the bags of F features; later ids belong to feature F.
        first_rows: [F + 1 or more] int64: first row of each feature's table in the cache; ids stay if it is negative.
    """
    if not (ids.is_cuda or INTERPRETED):
        return reference.find_slots(state, ids, offsets, samples, first_rows)
    # Allocate the lists. At most one row enters for each id, and for each slot.
    slot_of, row_in, used_at, uses, named, clock = state
    max_entries, features = min(ids.numel(), row_in.numel()), (offsets.numel() - 1) // samples
    words, slots = named.numel(), row_in.numel()
    word_blocks, slot_blocks = -(-words // blocks.words), -(-slots // blocks.slots)
    counts = torch.empty(word_blocks + 2 * slot_blocks, dtype=torch.int32, device=ids.device)
    taken, leaving, entering = (torch.empty(max_entries, dtype=torch.int64, device=ids.device) for _ in range(3))
    count = torch.empty(1, dtype=torch.int64, device=ids.device)
    make, bags = partial(specialised, num_warps=_NUM_WARPS), (ids, offsets, first_rows)
    block_sizes, id_blocks = (words, slots, word_blocks, slot_blocks), -(-ids.numel() // blocks.ids)
    types, bag_sizes = (offsets.dtype,), (ids.numel(), samples, features)
    # Launch the kernels in the order of the module's docstring.
    look_up = make(_look_up, HALVINGS=features.bit_length(), BLOCK=blocks.ids)
    look_up(id_blocks, types, *bags, slot_of, used_at, named, clock, *bag_sizes)
    counting = make(_count, MAX_USES=MOST_USES, WORDS=blocks.words, SLOTS=blocks.slots)
    counting(word_blocks + slot_blocks, (), named, used_at, uses, clock, counts, *block_sizes)
    ends = counts.cumsum(0, dtype=torch.int32)
    listing = make(_list, WORDS=blocks.words, SLOTS=blocks.slots)
    listing(
        word_blocks + slot_blocks, (), named, used_at, uses, clock, counts, ends, taken, entering, *block_sizes
    )  # fmt: skip
    take = make(_take, BLOCK=blocks.entries)
    take(_TAKE_PROGRAMS, (), slot_of, row_in, used_at, uses, clock, ends, taken, leaving, entering, count, word_blocks)
    replace = make(_replace, HALVINGS=features.bit_length(), BLOCK=blocks.ids)
    replace(id_blocks, types, *bags, slot_of, clock, *bag_sizes)
    return Swaps(taken, leaving, entering, count)
