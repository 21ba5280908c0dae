"""Counts the ids of each feature of a batch, and those of its largest and its smallest bag, into the CPU's memory."""

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import INTERPRETED, specialised

BLOCK = 64 if INTERPRETED else 2048  # bags at a time


@triton.jit(
    do_not_specialize=["numbers", "features", "samples"],
    do_not_specialize_on_alignment=["lengths"],
)
def _count_bags(lengths, numbers: tl.int64, features: tl.int64, samples: tl.int64, BLOCK: tl.constexpr):
    """Count the ids of feature t, as program t of the features of some ids.

    Memory: `lengths` [T * b] are feature after feature. At the address `numbers` begin three rows of `features` int64,
    in page-locked memory of the CPU, which the kernel writes to itself: the ids of each feature, the most ids of a bag,
    and the least with a minus. The program writes element t of each row: 0, -2^31, -2^31 without samples.

    Order: no two programs share an element. The CPU may read them once an event after the kernel is done.

    Example: bags f: [5] [], g: [7, 7] [1] are lengths 1 0 2 1, and give rows 1 3, 1 2, 0 -1.
    """
    feature = tl.program_id(0).to(tl.int64)
    ids = tl.zeros([BLOCK], tl.int64)
    most = tl.full([BLOCK], -(2**31), tl.int64)
    least = tl.full([BLOCK], -(2**31), tl.int64)
    for first in range(0, samples, BLOCK):
        bag = first + tl.arange(0, BLOCK)
        mask = bag < samples
        length = tl.load(lengths + feature * samples + bag, mask=mask, other=0).to(tl.int64)
        ids += length
        most = tl.where(mask, tl.maximum(most, length), most)
        least = tl.where(mask, tl.maximum(least, -length), least)
    row = numbers.to(tl.pointer_type(tl.int64)) + feature
    tl.store(row, tl.sum(ids))
    tl.store(row + features, tl.max(most))
    tl.store(row + 2 * features, tl.max(least))


def count_bags(lengths: torch.Tensor, numbers: torch.Tensor) -> None:
    """Count the ids of features, on the current stream, see `reference.count_bags`; the CPU does not wait.

    Args:
        lengths: [T, b] int32 or int64, contiguous: the ids of each bag.
        numbers: [3, T] int64 in page-locked memory, whose rows are apart: a row's elements follow each other.
    """
    features, samples = lengths.shape
    kernel = specialised(_count_bags, num_warps=8, BLOCK=BLOCK)
    kernel(features, (lengths.dtype,), lengths, numbers.data_ptr(), numbers.stride(0), samples)
