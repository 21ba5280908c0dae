"""The forward to another host: programs pool bags into a message, and put the parts of it that are to leave.

It pools as `store_pooled` does, but sample after sample, all features of some samples first, so that the first parts
are on their way while the last ones are pooled. No host and no collective is in the way of a part.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.aggregate import Gathered, finish_rows, next_put, put_signal_value
from dlrm_overlap.kernels.arguments import Bags, FeatureTable, PoolingOptions, Windows
from dlrm_overlap.kernels.compiled import INTERPRETED, CompiledKernel
from dlrm_overlap.kernels.forward.pooling import COLUMN, FEATURE_COLUMNS, GENERAL, PoolingShape, pool, store_rows
from dlrm_overlap.kernels.messages import Outgoing, Parts
from dlrm_overlap.kernels.network import Network, put_signal

_INTEGERS = ["peer", "part_blocks", "parts", "every_feature", "shift", "signals", "longest_wait", "group_parts"]
_GENERAL = GENERAL | {"do_not_specialize": GENERAL["do_not_specialize"] + _INTEGERS}


@triton.jit(**_GENERAL)
def _put_pooled(
    values, offsets, id_weights, first_sample, features, windows, status, heaps, counts, done, sent, stamps, clock_word,
    rank, peer, features_here, every_feature, blocks, batch, part_blocks, parts, group_parts,
    shift: tl.int64, signals: tl.int64, epoch: tl.int64, longest_wait: tl.int64,
    FORM: tl.constexpr, INTERPRETED: tl.constexpr,
    SCHEDULE: tl.constexpr, BAGS: tl.constexpr, UNROLL: tl.constexpr, STRIDE: tl.constexpr, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, WEIGHT: tl.constexpr, WIRE: tl.constexpr, ALIGNMENT: tl.constexpr,
    WINDOW_ALIGNMENT: tl.constexpr, COLUMN_ALIGNMENT: tl.constexpr, CHECK: tl.constexpr, LEAVES_OUT: tl.constexpr,
):  # fmt: skip
    """Do one task: pool BAGS bags of one feature into the message, and put the parts that leave with it.

    A part is `part_blocks` tasks' samples of one rank of the other host, with all features; several launches fill it
    where features are not pooled together. `group_parts` parts of a rank's samples are a group, see `grouping`: the
    program that completes a part puts the parts of its group that are to leave.

    Memory: the program reads the offsets, ids and rows of its bags. It stores [BAGS, DIM] of the wire's type to as many
    rows of the message, which is in this rank's heap: those of rank i of the host begin at `windows`[i]. `counts`
    [ranks * parts] int32 counts the finished rows of each part, once for each of `every_feature` features; `done`,
    `sent` [ranks * groups] and `stamps` [ranks * parts] int64 are those of `aggregate.finish_part`. Parts that leave
    and their signals are stored in the heap of `peer`. `clock_word` [1] int64 is read.

    Order: a task is stored, then counted; who completes a part acquires the data that it puts, see `aggregate`.

    Example: a host of ranks 2 and 3 with 4 samples each, two features, BAGS 2, parts of 1 block, groups of 2. Programs
    0 and 1 pool features 0 and 1 of samples 0 and 1 of rank 2, programs 2 and 3 those of samples 2 and 3: who of the
    first two counts last completes part 0, and who of all four counts last puts both parts, unless the first has waited
    for too long. Programs 4 .. 7 do the same for rank 3.

    Source: arXiv 2305.06942, section 3.2; Chen et al. 2024.
    """
    which = tl.program_id(0) % features_here
    destination = tl.program_id(0) // features_here // blocks
    block = tl.program_id(0) // features_here % blocks
    feature = features + which * FEATURE_COLUMNS
    first = tl.load(first_sample + destination)
    samples = tl.load(first_sample + destination + 1) - first
    sample = block * BAGS + tl.arange(0, BAGS)
    live = sample < samples
    address = tl.load(windows + destination)
    window = tl.multiple_of(address.to(tl.pointer_type(WIRE)), WINDOW_ALIGNMENT)
    rows, filled = pool(
        values, offsets, id_weights, feature, first + sample, live, batch, status,
        BAGS, DIM, BLOCK_DIM, UNROLL, WEIGHT, ALIGNMENT, CHECK, LEAVES_OUT,
    )  # fmt: skip
    column = tl.multiple_of(tl.load(feature + COLUMN), COLUMN_ALIGNMENT)
    store_rows(rows, window, sample, column, filled, STRIDE, DIM, BLOCK_DIM)
    mine = tl.minimum(BAGS, samples - block * BAGS)
    if mine > 0:
        epoch = epoch + tl.load(clock_word)
        part_rows = part_blocks * BAGS
        part = block // part_blocks  # among the `parts` of the rank's samples, of which the last ones may have none
        whole = tl.minimum(part_rows, samples - part * part_rows) * every_feature
        words = destination * tl.cdiv(parts, group_parts)
        leaving = finish_rows(
            counts + destination * parts, mine, whole, done + words, sent + words, stamps + destination * parts,
            part, tl.cdiv(samples, part_rows), group_parts, epoch, longest_wait, tl.program_id(0), INTERPRETED,
        )  # fmt: skip
        while leaving != 0:
            first_part, count, leaving = next_put(leaving)
            first_part += part // group_parts * group_parts
            begin = first_part * part_rows
            row_bytes: tl.constexpr = STRIDE * (WIRE.primitive_bitwidth // 8)
            source = address + begin.to(tl.int64) * row_bytes
            size_bytes = tl.minimum(count * part_rows, samples - begin).to(tl.int64) * row_bytes
            signal = signals + (destination * parts + first_part).to(tl.int64) * 8
            value = put_signal_value(epoch, count)
            put_signal(heaps, rank, peer, source, source + shift, size_bytes, signal, value, FORM)


_ARGUMENTS = (
    "values", "offsets", "id_weights", "first_sample", "features", "windows", "status",
    "heaps", "counts", "done", "sent", "stamps", "clock_word",
    "rank", "peer", "features_here", "every_feature", "blocks", "batch", "part_blocks", "parts",
    "group_parts", "shift", "signals", "epoch", "longest_wait",
)  # fmt: skip


@lru_cache
def _compiled(form: str, options: tuple, fields: tuple[Any, ...]) -> CompiledKernel:
    shape = PoolingShape(*fields)
    constants = {"FORM": form, "INTERPRETED": INTERPRETED} | shape.constants()
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
    gathered: Gathered,
    every_feature: int,
    clock: torch.Tensor,
    epoch: int,
) -> None:
    """Pool every bag of one host's samples into a message, and put its parts, gathered in groups.

    Args:
        bags: whose `first_sample` are those of the host's ranks.
        windows: where the rows of each of these ranks begin in the message; the stride is the message's pitch.
        status: [1 + kinds] int64, see `Flags`; the kernel records an id outside its table there.
        message: where the rows go.
        parts: how the message is cut; its runs are the samples of the host's ranks.
        gathered: the parts that are finished, at least ranks * parts.each.
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
        tuple(each.dtype for each in bags.tensors),
        *bags.tensors, bags.first_sample, features.entries, windows.addresses, status,
        heap.heaps, gathered.counts, gathered.done, gathered.sent, gathered.stamps, clock,
        heap.rank, message.peer, features_here, every_feature, blocks, bags.samples,
        parts.rows // bags_a_task, parts.each,
        parts.group, message.shift_bytes, message.signals, epoch, gathered.longest_wait,
    )  # fmt: skip
