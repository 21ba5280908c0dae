"""Device functions for ids of 64 bits in int32 windows: low words, and `high_at` words after each its high word.

The rows of a table of any id are divided into buckets; an id belongs to bucket `unsigned id % buckets`. Ids of other
tables are row numbers.
"""

import triton
import triton.language as tl


@triton.jit
def joined(low, high):
    """Return [N] int64: the ids with the words `low` and `high`, [N] int32 each."""
    return (high.to(tl.int64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def remainder(value, divisor):
    """Return uint64 modulo int64, as int64; modulo 1 if `divisor` is 0."""
    return (value % tl.maximum(divisor, 1).to(tl.uint64)).to(tl.int64)


@triton.jit
def bucket_of(low, high, buckets):
    """Return [N] int64: the buckets of ids, given by their words [N] int32; `buckets` is int64, and 0 counts as 1."""
    return remainder(joined(low, high).to(tl.uint64, bitcast=True), buckets)


@triton.jit
def row_of(low, high):
    """Return [N] int32: ids as row numbers; -1 or 2^31 - 1, which no table has, for ids beyond int32."""
    return tl.where(high == (low >> 31), low, tl.where(high < 0, -1, 2147483647))
