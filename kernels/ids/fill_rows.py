"""Gives the rows of new ids their initial values: see `map_ids`, which claims the slots."""

from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import INTERPRETED, specialised
from dlrm_overlap.kernels.ids import reference
from dlrm_overlap.kernels.ids.id_map import Claims
from dlrm_overlap.kernels.tuning import power_of_2

_NUM_WARPS = 1
_PROGRAMS = 2 if INTERPRETED else 4224
_BLOCK_WORDS, _MOST_ROWS = 512, 64  # upper limits of what a program stores at a time
MOST_STATES = 3


class FilledTable(NamedTuple):
    """One table's rows on this rank, as a row of a table [tables, 12] int64. A word is an int32."""

    first_slot: int
    weights: int
    """address of the rows"""
    words: int
    """of a row"""
    source: int
    """address of the initial rows; equal to `weights` if reserved slots have them"""
    slots: int
    """address of [rows] int32, each row's slot, if `weights` is a cache's memory; else 0"""
    source_slots: int
    """the same for `source`"""
    states: tuple[int, ...]
    """address and words of a row of each state, which becomes 0; address 0 for none"""

    def entry(self) -> list[int]:
        states = [*self.states, *[0] * (2 * MOST_STATES - len(self.states))]
        return [*self[:-1], *states]


# Columns.
FIRST_SLOT = tl.constexpr(0)
WEIGHTS = tl.constexpr(1)
WORDS = tl.constexpr(2)
SOURCE = tl.constexpr(3)
SLOTS = tl.constexpr(4)
SOURCE_SLOTS = tl.constexpr(5)
STATES = tl.constexpr(6)
COLUMNS = tl.constexpr(6 + 2 * MOST_STATES)


@triton.jit
def _in_cache(row, slots, mask):
    """Return [N]: the slots of rows in a cache; the rows themselves where `slots` is 0."""
    cached = mask & (slots != 0)
    slot = tl.load(slots.to(tl.pointer_type(tl.int32)) + row, mask=cached, other=0)
    return tl.where(cached, slot.to(tl.int64), row)


@triton.jit(do_not_specialize_on_alignment=["count"])
def _fill_rows(
    tables,  # [tables, 12] int64
    slots,  # these four as in `Claims`
    numbers,
    origins,
    count,
    STATE_COUNT: tl.constexpr,
    CACHED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill the rows of claims, as program p of P the blocks p, p + P, .. of ROWS.

    Memory: stores rows that no step reads or updates yet, and zeros to their states.
    """
    total = tl.load(count)
    column = tl.arange(0, BLOCK)[None, :]
    for first in range(tl.program_id(0) * ROWS, total, tl.num_programs(0) * ROWS):
        i = first + tl.arange(0, ROWS)
        slot = tl.load(slots + i, mask=i < total, other=-1)  # [ROWS]
        mask = slot >= 0
        # Find each claim's row, and the row that has its initial values.
        table = tables + tl.load(numbers + i, mask=mask, other=0).to(tl.int64) * COLUMNS
        row = slot - tl.load(table + FIRST_SLOT, mask=mask, other=0)
        origin = tl.load(origins + i, mask=mask, other=0)
        if CACHED:
            row = _in_cache(row, tl.load(table + SLOTS, mask=mask, other=0), mask)
            origin = _in_cache(origin, tl.load(table + SOURCE_SLOTS, mask=mask, other=0), mask)
        # Copy the values, and zero the states.
        words = tl.multiple_of(tl.load(table + WORDS, mask=mask, other=0), [ALIGNMENT // 4])
        weights = tl.load(table + WEIGHTS, mask=mask, other=0)
        read = tl.load(table + SOURCE, mask=mask, other=0) + origin * words * 4
        inside = mask[:, None] & (column < words[:, None])
        read = tl.multiple_of(read.to(tl.pointer_type(tl.int32)), [ALIGNMENT])
        values = tl.load(read[:, None] + column, mask=inside, other=0)  # [ROWS, BLOCK]
        write = tl.multiple_of((weights + row * words * 4).to(tl.pointer_type(tl.int32)), [ALIGNMENT])
        tl.store(write[:, None] + column, values, mask=inside)
        for state in tl.static_range(STATE_COUNT):
            words = tl.load(table + STATES + 2 * state + 1)
            at = (tl.load(table + STATES + 2 * state) + row * words * 4).to(tl.pointer_type(tl.int32))
            tl.store(at[:, None] + column, tl.zeros_like(values), mask=mask[:, None] & (column < words[:, None]))


class RowTables(NamedTuple):
    """The rows of a map's tables."""

    entries: torch.Tensor
    """[tables, 12] int64, see `FilledTable.entry`"""
    words: int
    """largest number of words of a row, or of a state of a row"""
    states: int
    """largest number of states of a table"""
    cached: bool
    """whether some rows are in a cache"""
    alignment: int
    """of all weights and sources, in bytes: a power of two up to 16"""


def row_tables(tables: list[FilledTable], device: torch.device) -> RowTables:
    entries = torch.tensor([table.entry() for table in tables], dtype=torch.int64, device=device)
    alignment = gcd(16, *(part for t in tables for part in (t.weights, t.source, 4 * t.words)))
    most = max(words for t in tables for words in (t.words, *t.states[1::2])), max(len(t.states) // 2 for t in tables)
    return RowTables(entries, *most, any(t.slots for t in tables), alignment)


def fill_rows(tables: RowTables, claims: Claims) -> None:
    """Give the rows of `claims` their initial values, which depend on the ids alone, and zero their states."""
    if not (claims.ids.is_cuda or INTERPRETED):
        reference.fill_rows(tables.entries, claims)
        return
    block = power_of_2(tables.words)
    rows = max(1, min(_BLOCK_WORDS // block, _MOST_ROWS))
    kernel = specialised(
        _fill_rows, num_warps=_NUM_WARPS,
        STATE_COUNT=tables.states, CACHED=tables.cached, ALIGNMENT=tables.alignment, ROWS=rows, BLOCK=block,
    )  # fmt: skip
    kernel(_PROGRAMS, (), tables.entries, claims.slots, claims.tables, claims.origins, claims.count)
