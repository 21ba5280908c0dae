"""Makes synthetic samples from a counter-based random stream: dense features, bag sizes, ids and labels.

The stream is numpy's Philox 4x64-10 (Salmon et al., SC 2011): a counter value gives a block of four 64-bit draws. A
sample has a fixed number of blocks: draw 0 is for the label, then come dense features, bag sizes, and, table after
table, ids, as many as the largest bag holds. `data/synthetic.py` makes bit-identical samples on a CPU.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import INTERPRETED, specialised
from dlrm_overlap.kernels.ids.probing import mix
from dlrm_overlap.kernels.wide_ids import remainder

# Columns of the table of tables, [T, 12] int64.
CELLS = tl.constexpr(0)  # first word of the table's cells
BITS = tl.constexpr(1)  # number of high bits of a draw that choose the cell
ROWS = tl.constexpr(2)
MULTIPLIER = tl.constexpr(3)  # the row of popularity rank r is (r * multiplier + offset) mod rows
OFFSET = tl.constexpr(4)
KEY = tl.constexpr(5)  # of the hash that scores the table's rows
COLUMN = tl.constexpr(6)  # first of a sample's draws that is for an id of the table
MAX_IDS = tl.constexpr(7)  # ids of the table's largest bag
START = tl.constexpr(8)  # upper limit of a sample's ids in all tables before
WEIGHTS = tl.constexpr(9)  # first word of the weights of the table's scores, by position in a bag; -1: all are 1
PERIOD = tl.constexpr(10)  # samples after which a row's id is replaced; 0: never; -1: ids are the rows themselves
HASHED = tl.constexpr(11)  # rows that the ids are reduced to by a hash; 0: the ids stay
TABLE_COLUMNS = tl.constexpr(12)

# Words of a cell, int64: word 0 is the threshold, the first item begins at word 1, the second at word 5.
CELL_WORDS = tl.constexpr(8)

BLOCK = 32 if INTERPRETED else 128  # samples of a program, one a thread


class Source(NamedTuple):
    """What the samples of a split are made from."""

    key: torch.Tensor
    """[2] int64: bits of Philox's key"""
    bag_sizes: torch.Tensor
    """[T, 2] int64: smallest bag and number of sizes of each table"""
    columns: torch.Tensor
    """[4 * blocks] int32: table of each of a sample's draws; -1 if it is not for an id"""
    tables: torch.Tensor
    """[T, 12] int64: see the columns above"""
    cells: torch.Tensor
    """[words] int64: the cells of each popularity (`data/zipf.py`), each a threshold and, for two items, the first rank
    and the bits of the float64 slope and curve; then the weights of tables whose ids count by position"""
    signals: torch.Tensor
    """[S, 2] int64, for each table with a signal: table, and index in `factors` of an empty bag, even if no bag is that
    small"""
    weights: torch.Tensor
    """[S, 3] float64: weights of a signal, of signal * dense feature, and of signal * previous signal"""
    dense_weights: torch.Tensor
    """[F] float64"""
    factors: torch.Tensor
    """[sizes, 2] float64, table after table: mean score of a bag of this size, and factor that standardises it"""
    curve: torch.Tensor
    """[pieces + 1] float64: probability of a click at evenly spaced logits from -end to end"""
    end: float
    bias: float
    """added to the logit"""
    scale: float
    """a dense feature is the sum of four 16-bit fields, minus its mean, times this"""
    ids: int | None
    """ids of a sample; None if the bags of a table differ in size"""
    id_type: torch.dtype
    """int64 if a table has ids of any value, else int32"""
    has_wide_ids: bool
    """whether some table has ids of any value, or rows that these are reduced to"""


@triton.jit
def draw_block(key, sample, block, blocks):
    """Return the four draws, uint64, of `block` of each `sample` (int64)."""
    # numpy advances the counter before it draws, hence the 1.
    counter = (sample * blocks + block + 1).to(tl.uint64)
    rest = tl.zeros_like(counter)
    first_word = tl.load(key).to(tl.uint64, bitcast=True)
    second_word = tl.load(key + 1).to(tl.uint64, bitcast=True)
    return tl.philox_impl(counter, rest, rest, rest, first_word, second_word)


@triton.jit
def id_of(table, rows, generations):
    """Return the ids, int64, of `rows` of a table, as `data/synthetic.py` does; all arguments are int64."""
    keys = (rows + (table << 40)) ^ mix(generations).to(tl.int64, bitcast=True)
    return (mix(keys) & 0x7FFFFFFFFFFFFFFF).to(tl.int64)


@triton.jit
def hashed_row(ids, rows):
    """Return the rows, int64, of int64 ids in a table of `rows` rows, int64, as `data/hashed.py` does."""
    mixed = ids.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    mixed = mixed ^ (mixed >> 32)
    return remainder(mixed, rows - 1) + (rows > 1).to(tl.int64)


@triton.jit(do_not_specialize=["first", "blocks", "count", "features", "tables"])
def _draw_features(
    dense,  # [count, features] float32
    lengths,  # [tables, count] int32
    sums,  # [tables, count] int32, set to 0
    key,  # [2] int64
    bag_sizes,  # [tables, 2] int64: smallest size, number of sizes
    first: tl.int64,  # number of the first sample
    blocks: tl.int64,  # blocks of draws of a sample
    count: tl.int64,
    features,
    tables,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draw dense features and bag sizes: a program makes one block of four draws for each of BLOCK samples.

    Memory: stores up to four columns of `dense` and rows of `lengths` and `sums`.

    Example: 2 features, 3 tables. Block 0 has the draws of the label, both features, and the bag size of table 0.
    """
    groups = tl.cdiv(count, BLOCK)
    block = tl.program_id(0) // groups
    i = tl.program_id(0) % groups * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    draws = draw_block(key, first + i, block, blocks)  # 4 of [BLOCK]
    for n in tl.static_range(4):
        draw, column = draws[n], block * 4 + n
        # A dense feature: the sum of the draw's four 16-bit fields.
        if (column > 0) & (column <= features):
            fields = (draw & 0xFFFF) + ((draw >> 16) & 0xFFFF) + ((draw >> 32) & 0xFFFF) + (draw >> 48)
            value = (fields.to(tl.int32) - 2 * 65535).to(tl.float32) * SCALE
            tl.store(dense + i * features + (column - 1), value, mask=mask)
        # A bag size: smallest + floor(upper half of the draw * sizes / 2**32).
        t = column - 1 - features
        if (t >= 0) & (t < tables):
            smallest = tl.load(bag_sizes + 2 * t)
            sizes = tl.load(bag_sizes + 2 * t + 1).to(tl.uint64)
            length = smallest + (((draw >> 32) * sizes) >> 32).to(tl.int64)
            tl.store(lengths + t * count + i, length.to(tl.int32), mask=mask)
            tl.store(sums + t * count + i, tl.zeros_like(i).to(tl.int32), mask=mask)


@triton.jit(do_not_specialize=["first", "blocks", "count", "first_block"])
def _draw_ids(
    values,  # int32 or int64: all bags of table 0, then of table 1, ..
    lengths,  # [tables, count] int32
    offsets,  # [tables * count + 1] int64, with RANGES
    sums,  # [tables, count] int32: of scores, modulo 2**32
    key,  # [2] int64
    columns,  # [4 * blocks] int32
    tables,  # [tables, 12] int64
    cells,  # int64
    first: tl.int64,
    blocks: tl.int64,
    count: tl.int64,
    first_block,
    RANGES: tl.constexpr,
    ANY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draw ids and sum the scores of each bag: a program makes one block of four draws for each of BLOCK samples.

    Memory: with RANGES, bags have `lengths`, otherwise all bags of a table have MAX_IDS ids. With ANY, some tables have
    ids of any value, or rows that such ids are reduced to.

    Order: sums are relaxed atomics of integers, whose order does not matter.
    """
    groups = tl.cdiv(count, BLOCK)
    block = first_block + tl.program_id(0) // groups
    i = tl.program_id(0) % groups * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    draws = draw_block(key, first + i, block, blocks)  # 4 of [BLOCK]
    for n in tl.static_range(4):
        draw, column = draws[n], block * 4 + n
        t = tl.load(columns + column)
        if t >= 0:
            # Where the id is in its bag, and in `values`.
            entry = tables + t * TABLE_COLUMNS
            position = column - tl.load(entry + COLUMN)
            kept = mask
            if RANGES:
                kept = mask & (position < tl.load(lengths + t * count + i, mask=mask, other=0))
                at = tl.load(offsets + t * count + i, mask=kept, other=0) + position
            else:
                at = tl.load(entry + START) * count + i * tl.load(entry + MAX_IDS) + position

            # The draw chooses a cell, then one of its two items, then a popularity rank in the item.
            bits = tl.load(entry + BITS).to(tl.uint64)
            cell = cells + tl.load(entry + CELLS) + (draw >> (64 - bits)).to(tl.int64) * CELL_WORDS
            within = ((draw << bits) >> 1).to(tl.int64)
            threshold = tl.load(cell)
            second = within >= threshold
            item = cell + tl.where(second, 5, 1)
            y = tl.where(second, within - threshold, within).to(tl.float64)
            slope = tl.load(item + 1).to(tl.float64, bitcast=True)
            curve = tl.load(item + 2).to(tl.float64, bitcast=True)
            rank = tl.load(item) + ((curve * y + slope) * y).to(tl.int64)
            row = (rank * tl.load(entry + MULTIPLIER) + tl.load(entry + OFFSET)) % tl.load(entry + ROWS)
            score_key = tl.load(entry + KEY).to(tl.uint32)
            if ANY:
                # The row's id, and the part of its generation in the score.
                period = tl.load(entry + PERIOD)
                turn = row * tl.maximum(period, 1) // tl.load(entry + ROWS)
                generation = tl.where(period > 0, (first + i + turn) // tl.maximum(period, 1), 0)
                score_key = score_key + generation.to(tl.uint32) * 0x9E3779B1
                id = id_of(t.to(tl.int64), row, generation)
                hashed = tl.load(entry + HASHED)
                id = tl.where(hashed > 0, hashed_row(id, hashed), id)
                tl.store(values + at, tl.where(period < 0, row, id).to(values.dtype.element_ty), mask=kept)
            else:
                tl.store(values + at, row.to(tl.int32), mask=kept)

            # The row's score is a hash, weighted by the position.
            score = row.to(tl.uint32) ^ score_key
            score = score * 0x9E3779B1
            score = score ^ (score >> 15)
            score = score * 0x85EBCA77
            score = score ^ (score >> 15)
            score = (score * 0xC2B2AE3D) >> 16
            weights = tl.load(entry + WEIGHTS)
            if weights >= 0:
                score = score * tl.load(cells + weights + position).to(tl.uint32)
            tl.atomic_add(sums + t * count + i, score.to(tl.int32), mask=kept, sem="relaxed", scope="gpu")


@triton.jit(do_not_specialize=["first", "blocks", "count", "features", "signals"])
def _draw_labels(
    labels,  # [count] float32
    dense,  # [count, features] float32
    lengths,  # [tables, count] int32
    sums,  # [tables, count] int32: of scores, modulo 2**32
    key,  # [2] int64
    signal_tables,  # [signals, 2] int64
    weights,  # [signals, 3] float64
    dense_weights,  # [features] float64
    factors,  # [sizes, 2] float64
    curve,  # [PIECES + 1] float64
    first: tl.int64,
    blocks: tl.int64,
    count: tl.int64,
    features,
    signals,
    BIAS: tl.constexpr,
    END: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draw the labels of BLOCK samples.

    The terms of a logit are added in a fixed order, and every product and sum is rounded, as on a CPU.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    # The logit: bias, dense features, and the signals of tables.
    logit = tl.full((BLOCK,), BIAS, tl.float64)
    for f in range(features):
        x = tl.load(dense + i * features + f, mask=mask, other=0.0).to(tl.float64)
        logit += tl.load(dense_weights + f) * x
    previous = tl.zeros((BLOCK,), tl.float64)
    for n in range(signals):
        t = tl.load(signal_tables + 2 * n)
        length = tl.load(lengths + t * count + i, mask=mask, other=0)
        total = tl.load(sums + t * count + i, mask=mask, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
        size = factors + 2 * (tl.load(signal_tables + 2 * n + 1) + length)
        mean = tl.load(size, mask=mask, other=0.0)
        signal = (total.to(tl.float64) - mean) * tl.load(size + 1, mask=mask, other=0.0)
        x = tl.load(dense + i * features + n, mask=mask & (n < features), other=0.0).to(tl.float64)
        logit += tl.load(weights + 3 * n) * signal
        logit += tl.load(weights + 3 * n + 1) * x * signal
        logit += tl.load(weights + 3 * n + 2) * previous * signal
        previous = signal
    # The probability, interpolated on the curve, and the label.
    position = (tl.minimum(tl.maximum(logit, -END), END) + END) * (PIECES / (2 * END))
    piece = tl.minimum(position.to(tl.int64), PIECES - 1)
    begin = tl.load(curve + piece)
    probability = begin + (tl.load(curve + piece + 1) - begin) * (position - piece.to(tl.float64))
    draw, _, _, _ = draw_block(key, first + i, 0, blocks)
    uniform = (draw >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2**-53
    tl.store(labels + i, (uniform < probability).to(tl.float32), mask=mask)


def draw_samples(
    source: Source, first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the samples [first, first + count): dense features [b, F], lengths [T * b] int32, ids, labels [b].

    Ids are of the source's `id_type`. Lengths and ids are table after table. The host waits only for the number of ids,
    if bags of a table differ in size.
    """
    key, device, features, tables = source.key, source.key.device, len(source.dense_weights), len(source.bag_sizes)
    blocks, groups, first_draw = len(source.columns) // 4, -(-count // BLOCK), 1 + features + tables
    dense = torch.empty(count, features, device=device)
    labels = torch.empty(count, device=device)
    lengths, sums = (torch.empty(tables * count, dtype=torch.int32, device=device) for _ in range(2))
    specialised(_draw_features, num_warps=4, SCALE=source.scale, BLOCK=BLOCK)(
        -(-first_draw // 4) * groups, (),
        dense, lengths, sums, key, source.bag_sizes, first, blocks, count, features, tables,
    )  # fmt: skip
    ids, offsets = count * (source.ids or 0), lengths
    if source.ids is None:
        offsets = torch.zeros(tables * count + 1, dtype=torch.int64, device=device)
        torch.cumsum(lengths, 0, out=offsets[1:])
        ids = int(offsets[-1])
    values = torch.empty(ids, dtype=source.id_type, device=device)
    constants = {"RANGES": source.ids is None, "ANY": source.has_wide_ids, "BLOCK": BLOCK}
    specialised(_draw_ids, num_warps=4, fuse_sums=False, **constants)(
        (blocks - first_draw // 4) * groups, (values.dtype,),
        values, lengths, offsets, sums, key, source.columns, source.tables, source.cells,
        first, blocks, count, first_draw // 4,
    )  # fmt: skip
    constants = {"BIAS": source.bias, "END": source.end, "PIECES": len(source.curve) - 1, "BLOCK": BLOCK}
    specialised(_draw_labels, num_warps=4, fuse_sums=False, **constants)(
        groups, (),
        labels, dense, lengths, sums, key, source.signals, source.weights, source.dense_weights, source.factors,
        source.curve, first, blocks, count, features, len(source.signals),
    )  # fmt: skip
    return dense, lengths, values, labels
