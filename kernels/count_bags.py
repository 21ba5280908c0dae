"""Counts the ids of each feature of a batch, of its largest bag and of its smallest bag, into host memory."""

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import INTERPRETED, specialised

BLOCK = 64 if INTERPRETED else 2048  # bags that a program reads at a time


@triton.jit(
    do_not_specialize=["numbers", "features", "samples"],
    do_not_specialize_on_alignment=["lengths"],
)
def _count_bags(lengths, numbers: tl.int64, features: tl.int64, samples: tl.int64, BLOCK: tl.constexpr):
    """Count the ids of feature t, as program t.

    Memory: `lengths` is [T, b]. `numbers` is the address of the three rows of `reference.count_bags`, int64, `features`
    apart, in page-locked host memory.

    Order: the host may read them after an event that follows the kernel.

    Example: bags f: [5] [], g: [7, 7] [1] have the lengths 1 0 2 1, which give the rows 1 3, 1 2, 0 -1.
    """
    feature = tl.program_id(0).to(tl.int64)
    ids = tl.zeros([BLOCK], tl.int64)
    largest = tl.full([BLOCK], -(2**31), tl.int64)
    smallest = tl.full([BLOCK], -(2**31), tl.int64)  # negated, so that the smallest bag is a maximum
    for first in range(0, samples, BLOCK):
        bag = first + tl.arange(0, BLOCK)
        mask = bag < samples
        length = tl.load(lengths + feature * samples + bag, mask=mask, other=0).to(tl.int64)  # [BLOCK]
        ids += length
        largest = tl.where(mask, tl.maximum(largest, length), largest)
        smallest = tl.where(mask, tl.maximum(smallest, -length), smallest)
    row = numbers.to(tl.pointer_type(tl.int64)) + feature
    tl.store(row, tl.sum(ids))
    tl.store(row + features, tl.max(largest))
    tl.store(row + 2 * features, tl.max(smallest))


def count_bags(lengths: torch.Tensor, numbers: torch.Tensor) -> None:
    """Store `reference.count_bags` of `lengths` [T, b] to `numbers` [3, T] int64 in page-locked host memory.

    `lengths` is int32 or int64, contiguous; so are the rows of `numbers`.
    """
    features, samples = lengths.shape
    kernel = specialised(_count_bags, num_warps=8, BLOCK=BLOCK)
    kernel(features, (lengths.dtype,), lengths, numbers.data_ptr(), numbers.stride(0), samples)
