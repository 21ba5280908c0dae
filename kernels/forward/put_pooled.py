"""The forward to another node: programs pool bags into a message, and put its groups as they are finished.

It pools as `store_pooled` does, but sample after sample, all features of some samples first, so that the first groups
are on their way while the last ones are pooled. No host and no collective is in the way of a group.
"""

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.bags import Bags, FeatureTable, Windows
from dlrm_overlap.kernels.compiled import specialised
from dlrm_overlap.kernels.forward.pooling import (
    COLUMN,
    FEATURE_COLUMNS,
    JIT_OPTIONS,
    pool,
    pooling_constants,
    store_rows,
)
from dlrm_overlap.kernels.messages import Groups, Outgoing
from dlrm_overlap.kernels.network import Network, put_signal
from dlrm_overlap.kernels.tuning import PoolingOptions

_INTEGERS = ["peer", "group_blocks", "groups", "every_feature", "shift", "signals"]
_GENERAL = JIT_OPTIONS | {"do_not_specialize": JIT_OPTIONS["do_not_specialize"] + _INTEGERS}


@triton.jit
def completes(count, rows, whole):
    """Count `rows` finished rows of a group; return whether that makes it `whole`.

    Memory: `count` [1] int32 has the finished rows, 0 before and after.

    Order: a barrier, so that all threads have stored; the count (release, GPU scope); by who makes the group whole, an
    acquire and release at system scope, since a network card may read the group next, and a barrier. The others do not
    acquire, since that empties the multiprocessor's L1.

    Example: a group of 8 rows of 3 features, counted 2 at a time. Of 12 programs, the one that finds 22 sets the count
    to 0 and returns true.
    """
    tl.debug_barrier()
    last = tl.atomic_add(count, rows, sem="release", scope="gpu") + rows == whole
    if last:
        tl.atomic_xchg(count, 0, sem="acq_rel", scope="sys")
        tl.debug_barrier()
    return last


@triton.jit(**_GENERAL)
def _put_pooled(
    values, offsets, id_weights, first_sample, features, windows, status, heaps, counts, clock_word,
    rank, peer, features_here, every_feature, blocks, batch, group_blocks, groups,
    shift: tl.int64, signals: tl.int64, epoch: tl.int64,
    FORM: tl.constexpr,
    SCHEDULE: tl.constexpr, BAGS: tl.constexpr, UNROLL: tl.constexpr, STRIDE: tl.constexpr, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, WEIGHT: tl.constexpr, WIRE: tl.constexpr, ALIGNMENT: tl.constexpr,
    WINDOW_ALIGNMENT: tl.constexpr, COLUMN_ALIGNMENT: tl.constexpr, CHECK: tl.constexpr, LEAVES_OUT: tl.constexpr,
):  # fmt: skip
    """Do one task: pool BAGS bags of one feature into the message, and put the group that is finished with it.

    A group is `group_blocks` tasks' samples of one rank of the other node, with all features; several launches fill it
    where features are not pooled together. The program that completes a group puts it.

    Memory: the program reads the offsets, ids and rows of its bags. It stores [BAGS, DIM] of the wire's type to as many
    rows of the message, which is in this rank's heap: those of rank i of the node begin at `windows`[i]. `counts`
    [ranks * groups] int32 counts the finished rows of each group, once for each of `every_feature` features; it is 0
    before and after all launches of an epoch. Groups and their signals are stored in the heap of `peer`. `clock_word`
    [1] int64 is read.

    Order: the program stores a task, then counts its rows; the one that completes a group acquires all of it, see
    `completes`, before it puts the group.

    Example: a node of ranks 2 and 3 with 4 samples each, two features, BAGS 2, groups of 2 blocks. Programs 0 and 1
    pool features 0 and 1 of samples 0 and 1 of rank 2, programs 2 and 3 those of samples 2 and 3: who of all four
    counts last puts the group. Programs 4 .. 7 do the same for rank 3.

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
        group = block // group_blocks  # among the `groups` of the rank's samples, of which the last ones may have none
        begin = group * group_blocks * BAGS
        rows_here = tl.minimum(group_blocks * BAGS, samples - begin)
        number = destination * groups + group
        if completes(counts + number, mine, rows_here * every_feature):
            row_bytes: tl.constexpr = STRIDE * (WIRE.primitive_bitwidth // 8)
            source = address + begin.to(tl.int64) * row_bytes
            size_bytes = rows_here.to(tl.int64) * row_bytes
            signal = signals + number.to(tl.int64) * 8
            put_signal(
                heaps, rank, peer, source, source + shift, size_bytes, signal, epoch + tl.load(clock_word), FORM
            )  # fmt: skip


def put_pooled(
    bags: Bags,
    features: FeatureTable,
    windows: Windows,
    status: torch.Tensor,
    options: PoolingOptions,
    heap: Network,
    message: Outgoing,
    groups: Groups,
    counts: torch.Tensor,
    every_feature: int,
    clock: torch.Tensor,
    epoch: int,
) -> None:
    """Pool every bag of one node's samples into a message, and put its groups.

    Args:
        bags: whose `first_sample` are those of the node's ranks.
        windows: where the rows of each of these ranks begin in the message; the stride is the message's pitch.
        status: [1 + kinds] int64, see `Flags`; the kernel records an id outside its table there.
        message: where the rows go.
        groups: how the message is cut; its runs are the samples of the node's ranks.
        counts: [at least ranks * groups.each] int32, of finished rows; 0 before and after all launches of an epoch.
        every_feature: features of all launches that fill the message.
        clock: [1] int64; the signals are set to `epoch` + `clock`.
    """
    bags_a_task = options.tuning.task_bags
    assert options.tuning.groups == 1, "a program does one task, which it pools as one group"
    assert groups.rows % bags_a_task == 0, "a task lies in one group"
    ranks, features_here = windows.addresses.numel(), features.entries.shape[0]
    blocks = -(-bags.samples_per_rank // bags_a_task)
    constants = {"FORM": heap.form} | pooling_constants(features, windows, options)
    kernel = specialised(_put_pooled, num_warps=options.tuning.num_warps, **heap.options(), **constants)
    kernel(
        ranks * features_here * blocks,
        tuple(each.dtype for each in bags.tensors),
        *bags.tensors, bags.first_sample, features.entries, windows.addresses, status,
        heap.heaps, counts, clock,
        heap.rank, message.peer, features_here, every_feature, blocks, bags.samples,
        groups.rows // bags_a_task, groups.each, message.shift_bytes, message.signals, epoch,
    )  # fmt: skip
