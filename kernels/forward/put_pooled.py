"""The forward to another node: programs pool bags into a message, and put each group of rows when it is finished."""

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
_JIT_OPTIONS = JIT_OPTIONS | {"do_not_specialize": JIT_OPTIONS["do_not_specialize"] + _INTEGERS}


@triton.jit
def completes(count, rows, whole):
    """Add `rows` finished rows to a group's `count` [1] int32; return whether it is now `whole`, and reset it then.

    Order: a barrier, then the count (release, GPU scope). The program that completes the group acquires and releases at
    system scope, since a network card may read the group next. Others do not acquire, which would empty L1.
    """
    tl.debug_barrier()  # all threads have stored before one of them counts
    last = tl.atomic_add(count, rows, sem="release", scope="gpu") + rows == whole
    if last:
        tl.atomic_xchg(count, 0, sem="acq_rel", scope="sys")
        tl.debug_barrier()  # no thread puts the group before one has acquired it
    return last


@triton.jit(**_JIT_OPTIONS)
def _put_pooled(
    values,  # [ids] int32 or int64
    offsets,  # [features * batch + 1], of the bags
    id_weights,  # [ids] float32, or `values` again
    first_sample,  # [ranks + 1] int32
    features,  # [features_here, 6] int64
    windows,  # [ranks] int64: where each rank's rows begin in the message
    status,  # see `record`
    heaps,  # [W] int64, addresses
    counts,  # [ranks * groups] int32: finished rows
    clock_word,  # [1] int64
    rank,
    peer,
    features_here,
    every_feature,  # features of all launches that fill the message
    blocks,  # tasks of a feature for each destination
    batch,  # samples of all ranks
    group_blocks,  # tasks of a feature in a group
    groups,  # of each rank
    shift: tl.int64,  # bytes from the message here to where it arrives
    signals: tl.int64,  # address of the first group's signal
    epoch: tl.int64,
    FORM: tl.constexpr,
    POOLING: tl.constexpr,
):
    """Do one task: pool bags of one feature into the message, and put the group if this task completes it.

    A group is the samples of `group_blocks` tasks for one rank of the other node, with all features. Tasks take all
    features of some samples first, so that the first groups are sent early.

    Memory: stores [bags, dim] to the message in this rank's heap. `counts` are 0 before and after all launches of an
    epoch.

    Order: the program that completes a group acquires all of it, see `completes`, before it puts the group.

    Source: arXiv 2305.06942, section 3.2; Chen et al. 2024.
    """
    # Find the task's samples and their rows of the message.
    which = tl.program_id(0) % features_here
    destination = tl.program_id(0) // features_here // blocks
    block = tl.program_id(0) // features_here % blocks
    feature = features + which * FEATURE_COLUMNS
    first = tl.load(first_sample + destination)
    samples = tl.load(first_sample + destination + 1) - first
    sample = block * POOLING.bags + tl.arange(0, POOLING.bags)
    live = sample < samples
    address = tl.load(windows + destination)
    window = tl.multiple_of(address.to(tl.pointer_type(POOLING.wire_type)), POOLING.window_alignment)
    # Pool and store: rows [bags, block_dim].
    rows, filled = pool(values, offsets, id_weights, feature, first + sample, live, batch, status, POOLING)
    column = tl.multiple_of(tl.load(feature + COLUMN), POOLING.column_alignment)
    store_rows(rows, window, sample, column, filled, POOLING.stride, POOLING)
    # Count the rows, and put the group if it is complete.
    mine = tl.minimum(POOLING.bags, samples - block * POOLING.bags)
    if mine > 0:
        group = block // group_blocks  # of the rank's `groups`; the last ones may be empty
        begin = group * group_blocks * POOLING.bags
        rows_here = tl.minimum(group_blocks * POOLING.bags, samples - begin)
        number = destination * groups + group
        if completes(counts + number, mine, rows_here * every_feature):
            row_bytes: tl.constexpr = POOLING.stride * (window.dtype.element_ty.primitive_bitwidth // 8)
            source = address + begin.to(tl.int64) * row_bytes
            size_bytes = rows_here.to(tl.int64) * row_bytes
            signal = signals + number.to(tl.int64) * 8
            epoch = epoch + tl.load(clock_word)
            put_signal(heaps, rank, peer, source, source + shift, size_bytes, signal, epoch, FORM)


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
    """Pool every bag of one node's samples into a message, and put its groups; the signals are set to `epoch` +
    `clock`.

    Args:
        bags: `first_sample` has the ranks of the other node.
        windows: where these ranks' rows begin in the message; the stride is the message's pitch.
        every_feature: features of all launches that fill the message.
    """
    bags_a_task = options.tuning.task_bags
    assert options.tuning.groups == 1, "a program does one task, which it pools as one group"
    assert groups.rows % bags_a_task == 0, "a task is in one group"
    ranks, features_here = windows.addresses.numel(), features.entries.shape[0]
    blocks = -(-bags.samples_per_rank // bags_a_task)
    kernel = specialised(
        _put_pooled,
        num_warps=options.tuning.num_warps,
        **heap.options(),
        FORM=heap.form,
        POOLING=pooling_constants(features, windows, options),
    )
    kernel(
        ranks * features_here * blocks,
        tuple(each.dtype for each in bags.tensors),
        *bags.tensors,
        bags.first_sample,
        features.entries,
        windows.addresses,
        status,
        heap.heaps,
        counts,
        clock,
        heap.rank,
        message.peer,
        features_here,
        every_feature,
        blocks,
        bags.samples,
        groups.rows // bags_a_task,
        groups.each,
        message.shift_bytes,
        message.signals,
        epoch,
    )
