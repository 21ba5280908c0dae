"""The forward to another host: programs pool bags into a message, and who completes a part of it puts that part.

It pools as `store_pooled` does, but sample after sample, all features of some samples first, so that the first parts
are on their way while the last ones are pooled. No host and no collective is in the way of a part.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels import network
from dlrm_overlap.kernels.arguments import Bags, FeatureTable, PoolingOptions, Windows
from dlrm_overlap.kernels.compiled import CompiledKernel
from dlrm_overlap.kernels.forward.pooling import COLUMN, FEATURE_COLUMNS, GENERAL, PoolingShape, pool, store_rows
from dlrm_overlap.kernels.messages import Outgoing, Parts
from dlrm_overlap.kernels.network import Network

_INTEGERS = ["peer", "part_blocks", "parts", "every_feature", "shift", "signals"]
_GENERAL = GENERAL | {"do_not_specialize": GENERAL["do_not_specialize"] + _INTEGERS}


@triton.jit(**_GENERAL)
def _put_pooled(
    values, offsets, first_sample, features, windows, status, heaps, pieces, clock_word,
    rank, peer, features_here, every_feature, blocks, batch, part_blocks, parts,
    shift: tl.int64, signals: tl.int64, epoch: tl.int64,
    FORM: tl.constexpr, SCHEDULE: tl.constexpr, BAGS: tl.constexpr, UNROLL: tl.constexpr, STRIDE: tl.constexpr,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, WEIGHT: tl.constexpr, WIRE: tl.constexpr, ALIGNMENT: tl.constexpr,
    WINDOW_ALIGNMENT: tl.constexpr, COLUMN_ALIGNMENT: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Do one task: pool BAGS bags of one feature into the message, and put the part that this completes.

    A part is `part_blocks` tasks' samples of one rank of the other host, with all features; several launches fill it
    where features are not pooled together.

    Memory: the program reads the offsets, ids and rows of its bags. It stores [BAGS, DIM] of the wire's type to as many
    rows of the message, which is in this rank's heap: those of rank i of the host begin at `windows`[i]. `pieces`
    [ranks * parts] int32 counts the finished rows of each part, once for each of `every_feature` features; it is 0
    before and after. A part and its signal are stored in the heap of `peer`. `clock_word` [1] int64 is read.

    Order: a task is stored, then counted, and who completes the part puts it, see `network.count_piece`.

    Example: a host of ranks 2 and 3 with 4 samples each, two features, BAGS 2, parts of 2 blocks. Programs 0 and 1 pool
    features 0 and 1 of samples 0 and 1 of rank 2, programs 2 and 3 those of samples 2 and 3: who of these four counts
    last puts part 0. Programs 4 .. 7 do the same for rank 3, and part 1.

    Source: arXiv 2305.06942, section 3.2; Chen et al. 2024.
    """
    which = tl.program_id(0) % features_here
    place = tl.program_id(0) // features_here // blocks
    block = tl.program_id(0) // features_here % blocks
    feature = features + which * FEATURE_COLUMNS
    first = tl.load(first_sample + place)
    samples = tl.load(first_sample + place + 1) - first
    sample = block * BAGS + tl.arange(0, BAGS)
    live = sample < samples
    address = tl.load(windows + place)
    window = tl.multiple_of(address.to(tl.pointer_type(WIRE)), WINDOW_ALIGNMENT)
    rows = pool(
        values, offsets, feature, first + sample, live, batch, status,
        BAGS, DIM, BLOCK_DIM, UNROLL, WEIGHT, ALIGNMENT, CHECK,
    )  # fmt: skip
    column = tl.multiple_of(tl.load(feature + COLUMN), COLUMN_ALIGNMENT)
    store_rows(rows, window, sample, column, live, STRIDE, DIM, BLOCK_DIM)
    mine = tl.minimum(BAGS, samples - block * BAGS)
    if mine > 0:
        index = block // part_blocks
        begin = index * part_blocks * BAGS
        part_rows = tl.minimum(part_blocks * BAGS, samples - begin)
        part = place * parts + index
        if network.count_piece(pieces + part, mine, part_rows * every_feature):
            row_bytes: tl.constexpr = STRIDE * (WIRE.primitive_bitwidth // 8)
            source = address + begin.to(tl.int64) * row_bytes
            size_bytes = part_rows.to(tl.int64) * row_bytes
            signal = signals + part.to(tl.int64) * 8
            value = epoch + tl.load(clock_word)
            network.put_signal(heaps, rank, peer, source, source + shift, size_bytes, signal, value, FORM)


_ARGUMENTS = (
    "values", "offsets", "first_sample", "features", "windows", "status", "heaps", "pieces", "clock_word",
    "rank", "peer", "features_here", "every_feature", "blocks", "batch", "part_blocks", "parts",
    "shift", "signals", "epoch",
)  # fmt: skip


@lru_cache
def _compiled(form: str, options: tuple, fields: tuple[Any, ...]) -> CompiledKernel:
    shape = PoolingShape(*fields)
    constants = {"FORM": form} | shape.constants()
    return CompiledKernel(_put_pooled, _ARGUMENTS, constants, num_warps=shape.options.tuning.num_warps, **dict(options))


def put_pooled(
    bags: Bags,
    features: FeatureTable,
    windows: Windows,
    status: torch.Tensor,
    options: PoolingOptions,
    heap: Network,
    message: Outgoing,
    parts: Parts,
    pieces: torch.Tensor,
    every_feature: int,
    clock: torch.Tensor,
    epoch: int,
) -> None:
    """Pool every bag of one host's samples into a message, and put each part of it as soon as it is complete.

    Args:
        bags: whose `first_sample` are those of the host's ranks.
        windows: where the rows of each of these ranks begin in the message; the stride is the message's pitch.
        status: [1 + kinds] int64, see `Flags`; the kernel records an id outside its table there.
        message: where the rows go.
        parts: how the message is cut; its runs are the samples of the host's ranks.
        pieces: [ranks * parts.each] int32: finished rows of each part, 0 before and after the last launch.
        every_feature: features of all launches that fill the message.
        clock: [1] int64; the signals are raised to `epoch` + `clock`.
    """
    bags_a_task = options.tuning.task_bags
    assert options.tuning.groups == 1, "a program does one task, which it pools as one group"
    assert parts.rows % bags_a_task == 0, "a task lies in one part"
    ranks, features_here = windows.addresses.numel(), features.entries.shape[0]
    blocks = -(-bags.samples_per_rank // bags_a_task)
    kernel = _compiled(heap.form, heap.options(), PoolingShape.fields_of(features, windows, options))
    kernel(
        ranks * features_here * blocks,
        (bags.values.dtype, bags.offsets.dtype),
        bags.values, bags.offsets, bags.first_sample, features.entries, windows.addresses, status,
        heap.heaps, pieces, clock,
        heap.rank, message.peer, features_here, every_feature, blocks, bags.samples,
        parts.rows // bags_a_task, parts.each,
        message.shift_bytes, message.signals, epoch,
    )  # fmt: skip
