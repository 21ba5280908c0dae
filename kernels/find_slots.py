"""The slots of a step's rows in a cache of rows: found, or taken from rows that neither this step nor the last names.

Five kernels and a sum take each id, each slot, and a bit for each row of the tables in turn:

    _look_up   ids of rows that have a slot -> the slot; of all others, the rows' bits are set
    _count     how many bits are set in each block of them; how many slots may be taken in each block
    (a sum)    the blocks' counts -> where their entries begin
    _list      the rows that enter, ascending, and the slots that they take, in the order of the hand
    _take      each of these slots leaves its row for the one that enters
    _replace   ids of rows that had no slot -> the one that they have now

However many ids name a row, it has one bit. So no sort finds the distinct rows, they come in their order, in which the
host's memory moves faster, and nothing depends on which program comes first.

Example: 4 slots have rows 7 3 9 5, none of which was used again, and 9 and 5 came in the last step; the hand is at slot
0. A step names rows 8 8 2. The bits of 2 and 8 are set, slots 0 and 1 may be taken. Row 2 enters slot 0, which row 7
leaves, row 8 slot 1, which row 3 leaves; the ids become 1 1 0, and the hand is at slot 2.
"""

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.compiled import INTERPRETED, specialised
from dlrm_overlap.kernels.row_cache import MOST_USES, CacheState, Swaps

_PROGRAMS = 2 if INTERPRETED else 128  # of _take
_NUM_WARPS = 4


@triton.jit
def _first_row(offsets, first_rows, position, mask, samples, features, HALVINGS: tl.constexpr):
    """Return, for each id's `position` [N], the element of `first_rows` of the feature that has it in its bags."""
    low = tl.zeros_like(position)
    high = low + features
    for _ in range(HALVINGS):
        searching = mask & (low < high)
        middle = (low + high) // 2
        ended = tl.load(offsets + (middle + 1) * samples, mask=searching, other=0) <= position
        low = tl.where(searching & ended, middle + 1, low)
        high = tl.where(searching & (ended == 0), middle, high)
    return tl.load(first_rows + low, mask=mask, other=-1)


@triton.jit(do_not_specialize=["ids_count", "samples", "features"], do_not_specialize_on_alignment=["offsets"])
def _look_up(
    ids, offsets, first_rows, slot_of, used_at, named, clock, ids_count, samples, features,
    HALVINGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace BLOCK ids by their rows' slots, and note that this step uses these; set the bits of rows without a slot.

    Memory: an id of such a row becomes -1 less the id, by which `_replace` finds it. Programs store the same value, the
    step's number, to `used_at` of a slot; bits are set by atomics, since 32 rows share a word.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < ids_count
    first = _first_row(offsets, first_rows, i, live, samples, features, HALVINGS)
    live = live & (first >= 0)
    step = tl.load(clock).to(tl.int32)
    value = tl.load(ids + i, mask=live, other=0)
    row = first + value
    slot = tl.load(slot_of + row, mask=live, other=-1)
    found = live & (slot >= 0)
    # Thousands of ids name the same few rows: not all of them store.
    stale = tl.load(used_at + slot, mask=found, other=0) != step
    tl.store(used_at + slot, tl.zeros_like(slot) + step, mask=found & stale)
    bit = tl.full((BLOCK,), 1, tl.int32) << (row % 32).to(tl.int32)
    tl.atomic_or(named + row // 32, bit, mask=live & (slot < 0), sem="relaxed")
    tl.store(ids + i, tl.where(slot < 0, -1 - value, slot), mask=live)


@triton.jit
def _ones(word):
    """Return the number of bits that are set in each uint32."""
    pairs = word - ((word >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    return (((((fours >> 4) + fours) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _words_of(named, words, block, WORDS: tl.constexpr):
    """Return [WORDS] int64, the numbers of a block's words of bits, and these as uint32."""
    number = block.to(tl.int64) * WORDS + tl.arange(0, WORDS)
    return number, tl.load(named + number, mask=number < words, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _slots_in_order(used_at, uses, clock, slots, block, SLOTS: tl.constexpr):
    """Return, of a block of slots in the hand's order: a mask of those there are, the slots, the last step that used
    each, its uses, and whether it may be taken.
    """
    at = block * SLOTS + tl.arange(0, SLOTS)
    mask = at < slots
    slot = at + tl.load(clock + 1).to(tl.int32)
    slot = tl.where(slot < slots, slot, slot - slots)
    used = tl.load(used_at + slot, mask=mask, other=0)
    free = mask & (used < tl.load(clock) - 1)
    return mask, slot, used, tl.load(uses + slot, mask=mask, other=0), free


@triton.jit(do_not_specialize=["words", "slots", "word_blocks", "slot_blocks"])
def _count(
    named, used_at, uses, clock, counts,
    words: tl.int64, slots, word_blocks, slot_blocks,
    MOST: tl.constexpr, WORDS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Count the bits that are set in one block, or the slots of one block that may be taken.

    Memory: `counts` int32 has the numbers of the blocks of bits; then, block by block, how many slots may be taken that
    have no use left; then how many that have some. A slot that this step names has one use more from now on.
    """
    program = tl.program_id(0)
    if program < word_blocks:
        _, word = _words_of(named, words, program, WORDS)
        tl.store(counts + program, tl.sum(_ones(word), 0))
    else:
        mask, slot, used, left, free = _slots_in_order(used_at, uses, clock, slots, program - word_blocks, SLOTS)
        tl.store(uses + slot, tl.minimum(left + 1, MOST), mask=mask & (used == tl.load(clock)))
        tl.store(counts + program, tl.sum((free & (left == 0)).to(tl.int32), 0))
        tl.store(counts + program + slot_blocks, tl.sum((free & (left > 0)).to(tl.int32), 0))


@triton.jit
def _list_rows(named, entering, words, block, begin, WORDS: tl.constexpr):
    """Store the rows of one block's bits to `entering`, from element `begin` on, and clear the bits."""
    number, word = _words_of(named, words, block, WORDS)
    inside = _ones(word)
    into = entering + begin + tl.cumsum(inside, 0) - inside
    for _ in range(0, tl.max(inside, 0)):  # the lowest bit of each word
        others = word & (word - 1)
        row = number * 32 + _ones((word ^ others) - 1)
        tl.store(into, row, mask=word != 0)
        into += 1
        word = others
    tl.store(named + number, tl.zeros((WORDS,), tl.int32), mask=number < words)


@triton.jit
def _list_slots(
    used_at, uses, clock, taken, slots, block, first_idle, first_other, idles, entries, SLOTS: tl.constexpr
):
    """Store the slots of one block that are taken to `taken`, and let the hand pass.

    Slots without a use go first: there are `idles`, of which this block's begin with number `first_idle`. The others'
    begin with `first_other`.
    """
    mask, slot, _, left, free = _slots_in_order(used_at, uses, clock, slots, block, SLOTS)
    idle = (free & (left == 0)).to(tl.int32)
    other = (free & (left > 0)).to(tl.int32)
    before = first_idle + tl.cumsum(idle, 0) - idle
    number = tl.where(idle > 0, before, first_other + tl.cumsum(other, 0) - other)
    tl.store(taken + number, slot.to(tl.int64), mask=free & (number < entries))
    idles_taken = tl.minimum(entries, idles)
    tl.store(uses + slot, left - 1, mask=mask & (before < idles_taken) & (left > 0))
    following = tl.where(slot + 1 < slots, slot + 1, 0).to(tl.int64)
    tl.store(clock + 2 + tl.zeros_like(slot), following, mask=(idle > 0) & (before == idles_taken - 1))


@triton.jit(do_not_specialize=["words", "slots", "word_blocks", "slot_blocks"])
def _list(
    named, used_at, uses, clock, counts, ends, taken, entering,
    words: tl.int64, slots, word_blocks, slot_blocks,
    WORDS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """List one block's rows that enter, or its slots that they take.

    Memory: `ends` is the sum of `counts` up to each. Row `entering[i]` is to have slot `taken[i]`. Slots up to the last
    one without a use that is taken are passed by the hand: they lose a use. The hand, in `clock[1]`, is then to point
    to the next slot; `clock[2]` says so, since other programs may still read the former.
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
            used_at, uses, clock, taken, slots, program - word_blocks, begin - entries, first_other, idles, entries,
            SLOTS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["word_blocks"])
def _take(
    slot_of, row_in, used_at, uses, clock, ends, taken, leaving, entering, count, word_blocks, BLOCK: tl.constexpr
):
    """Give the slots of BLOCK entries at a time to the rows that enter, as program p of P.

    Memory: the rows that leave are stored to `leaving`, and the number of entries to `count` [1].
    """
    entries = tl.load(ends + word_blocks - 1)
    step = tl.load(clock).to(tl.int32)
    for first in range(tl.program_id(0) * BLOCK, entries, tl.num_programs(0) * BLOCK):
        i = first + tl.arange(0, BLOCK)
        mask = i < entries
        slot = tl.load(taken + i, mask=mask, other=0)
        row = tl.load(entering + i, mask=mask, other=0)
        old = tl.load(row_in + slot, mask=mask, other=-1)
        tl.store(leaving + i, old, mask=mask)
        tl.store(slot_of + old, tl.full((BLOCK,), -1, tl.int32), mask=mask & (old >= 0))
        tl.store(slot_of + row, slot.to(tl.int32), mask=mask)
        tl.store(row_in + slot, row, mask=mask)
        tl.store(used_at + slot, tl.zeros_like(i) + step, mask=mask)
        tl.store(uses + slot, tl.zeros_like(i), mask=mask)
    if tl.program_id(0) == 0:
        tl.store(clock + 1, tl.load(clock + 2))
        tl.store(count, entries.to(tl.int64))


@triton.jit(do_not_specialize=["ids_count", "samples", "features"], do_not_specialize_on_alignment=["offsets"])
def _replace(
    ids, offsets, first_rows, slot_of, clock, ids_count, samples, features,
    HALVINGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace those of BLOCK ids that `_look_up` has found no slot for; program 0 counts the step."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(ids + i, mask=i < ids_count, other=0)
    live = (i < ids_count) & (value < 0)
    if tl.max(live.to(tl.int32), 0) > 0:
        first = _first_row(offsets, first_rows, i, live, samples, features, HALVINGS)
        live = live & (first >= 0)
        slot = tl.load(slot_of + (first - 1 - value), mask=live, other=0)
        tl.store(ids + i, slot, mask=live)
    if tl.program_id(0) == 0:
        tl.store(clock, tl.load(clock) + 1)


class Blocks(NamedTuple):
    """Sizes of what one program takes, powers of two."""

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
    """Find slots for the rows that a step names, and replace its ids by them; on the current stream.

    There are slots enough for the rows of this step and of the last.

    Args:
        state: rewritten.
        ids: [n] int32, feature after feature, within their tables; rewritten.
        offsets: [F * B + 1] int, of the bags of F features; ids after the last bag are of feature F.
        samples: B.
        first_rows: [F + 1 or more] int64: the number of the first row of each feature's table, as the cache counts
            rows; below 0 leaves the feature's ids as they are.
        blocks: what one program takes.

    Returns:
        Where rows that leave and enter are to be swapped, the latter ascending.
    """
    if not (ids.is_cuda or INTERPRETED):
        return reference.find_slots(state, ids, offsets, samples, first_rows)
    slot_of, row_in, used_at, uses, named, clock = state
    most, features = min(ids.numel(), row_in.numel()), (offsets.numel() - 1) // samples
    words, slots = named.numel(), row_in.numel()
    word_blocks, slot_blocks = -(-words // blocks.words), -(-slots // blocks.slots)
    counts = torch.empty(word_blocks + 2 * slot_blocks, dtype=torch.int32, device=ids.device)
    taken, leaving, entering = (torch.empty(most, dtype=torch.int64, device=ids.device) for _ in range(3))
    count = torch.empty(1, dtype=torch.int64, device=ids.device)
    make, bags = partial(specialised, num_warps=_NUM_WARPS), (ids, offsets, first_rows)
    sizes, by_id = (words, slots, word_blocks, slot_blocks), -(-ids.numel() // blocks.ids)
    types, bounds = (offsets.dtype,), (ids.numel(), samples, features)
    look_up = make(_look_up, HALVINGS=features.bit_length(), BLOCK=blocks.ids)
    look_up(by_id, types, *bags, slot_of, used_at, named, clock, *bounds)
    counting = make(_count, MOST=MOST_USES, WORDS=blocks.words, SLOTS=blocks.slots)
    counting(word_blocks + slot_blocks, (), named, used_at, uses, clock, counts, *sizes)
    ends = counts.cumsum(0, dtype=torch.int32)
    changed = (named, used_at, uses, clock)
    listing = make(_list, WORDS=blocks.words, SLOTS=blocks.slots)
    listing(word_blocks + slot_blocks, (), *changed, counts, ends, taken, entering, *sizes)
    by_row = (slot_of, row_in, used_at, uses, clock)
    take = make(_take, BLOCK=blocks.entries)
    take(_PROGRAMS, (), *by_row, ends, taken, leaving, entering, count, word_blocks)
    replace = make(_replace, HALVINGS=features.bit_length(), BLOCK=blocks.ids)
    replace(by_id, types, *bags, slot_of, clock, *bounds)
    return Swaps(taken, leaving, entering, count)
