"""Copies pooled embeddings from another node to their columns in the windows of this node's ranks.

A message of one rank has a row for each sample of this node's ranks, with the columns that the sender pools.
"""

from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import specialised
from dlrm_overlap.kernels.tuning import power_of_2

_WORDS = {8: (torch.int64, tl.int64), 4: (torch.int32, tl.int32), 2: (torch.int16, tl.int16)}
_TASK_WORDS = 2048  # in flight per program of 8 warps
_NUM_WARPS = 8


class PutColumns(NamedTuple):
    """Where the columns of a message's rows go, in every window."""

    columns: torch.Tensor
    """[n] int32: offset in a window's row of each word of a message's row; words of 8, 4 or 2 bytes, the largest that
    fit"""
    word_bytes: int

    @staticmethod
    def of(shards: list[tuple[int, int]], stride: int, itemsize: int, device: torch.device) -> "PutColumns":
        """Return the columns of `shards`, each a dim and a first column in a window's row, in a message's order."""
        word = gcd(8, *((column * itemsize) for shard in shards for column in shard), stride * itemsize)
        starts = [(dim * itemsize // word, column * itemsize // word) for dim, column in shards]
        columns = [column + at for words, column in starts for at in range(words)]
        return PutColumns(torch.tensor(columns, dtype=torch.int32, device=device), word)


@triton.jit(do_not_specialize=["ranks", "words", "pitch", "stride", "blocks", "here"])
def _put_columns(
    message,  # [rows, pitch] words
    columns,  # [words] int32
    windows,  # [ranks] int64, addresses
    first_sample,  # [ranks + 1] int32
    ranks,  # of this node
    words,  # of a message's row that are copied
    pitch,
    stride: tl.int64,  # words from one row of a window to the next
    blocks,  # programs of each rank
    here,  # index of this rank in the node
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WORD: tl.constexpr,
):
    """Copy up to ROWS rows of a message into the window of the rank that has the samples.

    Program p serves the node's rank (here + 1 + p / blocks) modulo `ranks`, so that ranks begin with different windows.

    Order: the kernel that signals for the sender comes next on the stream.
    """
    rank = (here + 1 + tl.program_id(0) // blocks) % ranks
    begin = tl.load(first_sample + rank)
    sample = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    live = sample < tl.load(first_sample + rank + 1) - begin
    window = tl.multiple_of(tl.load(windows + rank).to(tl.pointer_type(WORD)), 16)
    row = (begin - tl.load(first_sample) + sample).to(tl.int64)
    for first in range(0, words, BLOCK):
        at = first + tl.arange(0, BLOCK)
        into = tl.load(columns + at, mask=at < words, other=0)
        mask = live[:, None] & (at < words)[None, :]
        # [ROWS, BLOCK]
        values = tl.load(message + row[:, None] * pitch + at[None, :], mask=mask, other=0)
        tl.store(window + sample.to(tl.int64)[:, None] * stride + into[None, :], values, mask=mask)


def put_columns(
    message: torch.Tensor,
    put: PutColumns,
    windows: torch.Tensor,
    first_sample: torch.Tensor,
    stride: int,
    most_samples: int,
    here: int,
) -> None:
    """Store a message's rows into the windows of the node's ranks, without a signal.

    Args:
        message: [rows, pitch] of the wire type, contiguous, at a multiple of 16 bytes.
        windows: [ranks] int64, addresses, multiples of 16.
        first_sample: [ranks + 1] int32, first samples in the global batch, and the end.
        stride: elements of a window's row.
        most_samples: at least the samples of any of these ranks.
    """
    words, ranks = put.columns.numel(), windows.numel()
    if not words:
        return
    (dtype, word), block = _WORDS[put.word_bytes], min(256, power_of_2(words))
    rows = max(1, _TASK_WORDS // block)
    kernel = specialised(_put_columns, num_warps=_NUM_WARPS, ROWS=rows, BLOCK=block, WORD=word)
    blocks, each = -(-most_samples // rows), message.element_size()
    kernel(
        ranks * blocks,
        (),
        message.view(dtype),
        put.columns,
        windows,
        first_sample,
        ranks,
        words,
        message.shape[1] * each // put.word_bytes,
        stride * each // put.word_bytes,
        blocks,
        here,
    )
