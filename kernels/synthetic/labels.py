"""Draws the labels of synthetic samples, of which the teacher in `data/teacher.py` says how likely a click is."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import CompiledKernel, specialised
from dlrm_overlap.kernels.synthetic.draws import BLOCK, Stream, draw_block


class ClickModel(NamedTuple):
    """The teacher's numbers."""

    signals: torch.Tensor
    """[S, 2] int64, a row a table that has a signal: the table, and the element of `factors` for a bag of no ids, which
    may lie before the first one of the table"""
    weights: torch.Tensor
    """[S, 3] float64: the weights of a table's signal alone, with a dense feature, and with the signal before"""
    dense_weights: torch.Tensor
    """[F] float64"""
    factors: torch.Tensor
    """[sizes, 2] float64, table after table: the mean score of a bag of this size, and the factor that standardises the
    score"""
    curve: torch.Tensor
    """[pieces + 1] float64: the probability of a click at evenly spaced logits from -end to end"""
    bias: float
    end: float


@triton.jit(do_not_specialize=["first", "blocks", "count", "features", "signals"])
def _draw_labels(
    labels, dense, lengths, sums, key, signal_tables, weights, dense_weights, factors, curve,
    first: tl.int64, blocks: tl.int64, count: tl.int64, features, signals,
    BIAS: tl.constexpr, END: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw the labels of BLOCK samples a program.

    Memory: of its samples, the program reads all of `dense` [count, features] float32 and, as [tables, count] int32,
    `lengths` and the bags' `sums` of scores, which are unsigned. It writes `labels` [count] float32.

    Order: no two programs share an element; the sums come from kernels before it on the stream. The terms of a logit
    are added in a fixed order, each product and each sum rounded by itself, as on a CPU.

    Example: bias -1, no dense weights, one signal of weight 2; a bag of 3 ids has the mean 300 and the factor 0.01. One
    with the sum 350 has the signal (350 - 300) * 0.01 = 0.5 and the logit -1 + 2 * 0.5 = 0. With END 16 and 2048
    pieces, that is the beginning of piece (0 + 16) * 64 = 1024, where the curve is 0.5; the label is 1 if the uniform
    draw is below.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    logit = tl.full((BLOCK,), BIAS, tl.float64)
    for f in range(features):
        x = tl.load(dense + i * features + f, mask=mask, other=0.0).to(tl.float64)
        logit += tl.load(dense_weights + f) * x
    before = tl.zeros((BLOCK,), tl.float64)
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
        logit += tl.load(weights + 3 * n + 2) * before * signal
        before = signal
    position = (tl.minimum(tl.maximum(logit, -END), END) + END) * (PIECES / (2 * END))
    piece = tl.minimum(position.to(tl.int64), PIECES - 1)
    begin = tl.load(curve + piece)
    probability = begin + (tl.load(curve + piece + 1) - begin) * (position - piece.to(tl.float64))
    draw, _, _, _ = draw_block(key, first + i, 0, blocks)
    uniform = (draw >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2**-53
    tl.store(labels + i, (uniform < probability).to(tl.float32), mask=mask)


def _drawing(bias: float, end: float, pieces: int) -> CompiledKernel:
    return specialised(_draw_labels, num_warps=4, fuse_sums=False, BIAS=bias, END=end, PIECES=pieces, BLOCK=BLOCK)


def draw_labels(
    stream: Stream,
    first: int,
    labels: torch.Tensor,
    dense: torch.Tensor,
    lengths: torch.Tensor,
    sums: torch.Tensor,
    model: ClickModel,
) -> None:
    """Write the labels of the samples from `first` on.

    Args:
        stream: of the samples.
        first: position of the first sample.
        labels: [b] float32.
        dense: [b, F] float32.
        lengths: [T * b] int32.
        sums: [T * b] int32, of the scores of each bag's ids.
        model: how likely a click is.
    """
    count, features = dense.shape
    _drawing(model.bias, model.end, len(model.curve) - 1)(
        -(-count // BLOCK), (),
        labels, dense, lengths, sums, stream.key, *model[:5],
        first, stream.blocks, count, features, len(model.signals),
    )  # fmt: skip
