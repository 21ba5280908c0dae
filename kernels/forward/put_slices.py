"""The sliced forward (`fused`): one persistent kernel pools all bags, and puts each slice as soon as it is complete.

A slice is some consecutive bags of one feature for one destination, pooled in one or more tasks. With `in_place`, rows
are stored straight into the windows instead, and one signal follows all tasks.

A grid of any size makes progress: a program waits only once no task is left. Running programs have then drawn all
tasks, and each counts its own before it waits.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.bags import Bags, FeatureTable, Windows
from dlrm_overlap.kernels.compiled import INTERPRETED, CompiledKernel, specialised
from dlrm_overlap.kernels.flags import Flags
from dlrm_overlap.kernels.forward.pooling import (
    COLUMN,
    FEATURE_COLUMNS,
    JIT_OPTIONS,
    pool,
    pooling_constants,
    store_rows,
)
from dlrm_overlap.kernels.launches import Launch
from dlrm_overlap.kernels.primitives import signal_flag, signal_flags, task_at, wait_for_flags
from dlrm_overlap.kernels.tuning import PoolingOptions, power_of_2

# Registers of a thread: a multiprocessor then holds 32 programs of one warp, with as many loads in flight as with
# `store_pooled`. Without a limit the compiler takes 72 for 128 columns, and 28 programs fit.
_REGISTERS = 64


@dataclass(frozen=True)
class SliceState:
    """Memory that the programs of a launch share; `done` and `ticket` are 0 before and after it."""

    staging: torch.Tensor
    """[at least W * F * b * D] of the wire type, b rounded up to whole tasks; may be empty in place"""
    done: torch.Tensor
    """[at least W * F * slices] int32: finished tasks of each slice"""
    ticket: torch.Tensor
    """[3] int32: the next task, the programs that found none left, and stored tasks (in place)"""


@dataclass(frozen=True)
class Slices:
    bags: int
    """bags of a slice, a multiple of the tuning's task_bags"""
    first_slot: int
    """slot of the first slice; slice i of feature f has slot first_slot + f * ceil(b / bags) + i"""
    in_place: bool
    """store straight into the peers' windows, without slices; needs at least one task"""
    signals: bool = True
    """in place: signal slot 0 at every rank, as the last launch of the step"""
    end_wait: bool = True
    """end when all slots of `Flags.counts` have reached the epoch"""


@triton.jit
def put_by_stores(
    staged,
    window,
    first,
    end,
    column,
    ROWS: tl.constexpr,
    POOLING: tl.constexpr,
):
    """Put `staged` [end - first, dim] to rows [first, end) of a peer's window, ROWS at a time; the caller signals."""
    at = tl.arange(0, POOLING.block_dim)
    for begin in range(first, end, ROWS):
        sample = begin + tl.arange(0, ROWS)
        live = sample < end
        source = staged + (sample - first).to(tl.int64)[:, None] * POOLING.dim + at[None, :]
        # [ROWS, block_dim]
        rows = tl.load(source, mask=live[:, None] & (at < POOLING.dim)[None, :])
        store_rows(rows, window, sample, column, live, POOLING.stride, POOLING)


@triton.jit(**JIT_OPTIONS)
def _put_slices(
    values,  # [ids] int32 or int64
    offsets,  # [features * batch + 1], of the bags
    id_weights,  # [ids] float32, or `values` again
    first_sample,  # [W + 1] int32
    features,  # [features_here, 6] int64
    windows,  # [W] int64, addresses
    status,  # see `record`
    peers_ready,  # [W] int64, addresses of flags
    ready,  # [W, slots] int64, this rank's flags
    counts,  # [W] int32, flags in use
    clock_word,  # [1] int64, added to `epoch`
    staging,  # [W * features_here, bags of all tasks, dim]
    done,  # [W * features_here * slices] int32
    ticket,  # [3] int32, see `SliceState`
    rank,
    world_size,
    features_here,
    blocks,  # tasks of a feature for each destination
    batch,  # samples of all ranks
    slots,
    first_slot,  # of the first slice
    epoch: tl.int64,
    timeout: tl.int64,  # ns; turns under the interpreter
    IN_PLACE: tl.constexpr,
    SIGNAL: tl.constexpr,
    PEERS: tl.constexpr,
    PUT_ROWS: tl.constexpr,
    SLICE_TASKS: tl.constexpr,
    GROUPS: tl.constexpr,
    END_WAIT: tl.constexpr,
    FLAGS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    POOLING: tl.constexpr,
):
    """Take tasks until none is left, each GROUPS groups of bags; put the slices that this program completes.

    Memory: stores rows to this rank's window, to `staging` or, IN_PLACE, to a peer's window; slices and flags to the
    peers.

    Order: a program that has stored a task counts it (release, GPU scope). The one that completes a slice acquires it,
    puts it, and signals (release, system scope). The kernel's end orders stores into this rank's own window. IN_PLACE
    with SIGNAL, programs count all their tasks at the end, and the one that completes the sum signals, which covers all
    stores of this launch and earlier ones on the stream. With END_WAIT, programs then wait for the flags in `ready`.

    Example: rank 0 of 2, 4 samples a rank, tasks of 2 bags, slices of 2 tasks. Program A stages samples 4 and 5.
    Program B stages samples 6 and 7, which completes the slice: it puts four rows to rank 1's window, and signals
    there.

    Source: arXiv 2305.06942, section 3.
    """
    epoch = epoch + tl.load(clock_word)
    tasks = world_size * features_here * blocks
    slices = tl.cdiv(blocks, SLICE_TASKS)
    position = tl.atomic_add(ticket, 1, sem="relaxed", scope="gpu")
    group = 0
    stored = 0
    # One loop over the groups of all tasks: a nested loop compiles to slower code.
    while position < tasks:
        # Find the group's samples, their window and their staging memory.
        destination, which, block = task_at(position, rank, world_size, features_here, blocks, POOLING.schedule)
        feature = features + which * FEATURE_COLUMNS
        first = tl.load(first_sample + destination)
        samples = tl.load(first_sample + destination + 1) - first
        window = tl.load(windows + destination).to(tl.pointer_type(POOLING.wire_type))
        window = tl.multiple_of(window, POOLING.window_alignment)
        column = tl.multiple_of(tl.load(feature + COLUMN), POOLING.column_alignment)
        pair = destination * features_here + which
        staged = staging + pair.to(tl.int64) * (blocks * GROUPS * POOLING.bags) * POOLING.dim
        sample = (block * GROUPS + group) * POOLING.bags + tl.arange(0, POOLING.bags)
        live = sample < samples

        # Pool and store: rows [bags, block_dim].
        rows, filled = pool(values, offsets, id_weights, feature, first + sample, live, batch, status, POOLING)
        if IN_PLACE or destination == rank:
            store_rows(rows, window, sample, column, filled, POOLING.stride, POOLING)
        else:
            store_rows(rows, staged, sample, 0, filled, POOLING.dim, POOLING)
        group += 1

        # The last group ends the task. Count it, put the slice if that completes it, and draw the next task.
        if group == GROUPS:
            if not IN_PLACE and destination != rank:
                index = block // SLICE_TASKS  # of the slice, among those of this feature for this destination
                slice_tasks = tl.minimum(SLICE_TASKS, blocks - index * SLICE_TASKS)
                counter = done + pair * slices + index
                tl.debug_barrier()  # all threads have stored before one of them counts the task
                # GPU scope suffices: the release of the flag, at system scope, covers what was acquired here, see
                # `primitives`. Only the last program acquires: an acquire empties L1, where all programs keep ids.
                if tl.atomic_add(counter, 1, sem="release", scope="gpu") == slice_tasks - 1:
                    tl.atomic_xchg(counter, 0, sem="acquire", scope="gpu")  # 0 for the next launch
                    tl.debug_barrier()  # no thread reads others' staging before one has acquired
                    begin = index * (SLICE_TASKS * GROUPS * POOLING.bags)
                    end = tl.minimum(begin + SLICE_TASKS * GROUPS * POOLING.bags, samples)
                    source = staged + begin.to(tl.int64) * POOLING.dim
                    put_by_stores(source, window, begin, end, column, PUT_ROWS, POOLING)
                    flags = tl.load(peers_ready + destination).to(tl.pointer_type(tl.int64))
                    signal_flag(flags + rank * slots + first_slot + which * slices + index, epoch)
            stored += 1
            position = tl.atomic_add(ticket, 1, sem="relaxed", scope="gpu")
            group = 0

    # In place, the program that completes the count of all tasks signals. A program that finds no task counts
    # nothing, and may start after the signal.
    if IN_PLACE and SIGNAL and stored > 0:
        tl.debug_barrier()  # all threads have stored before one of them counts the tasks
        if tl.atomic_add(ticket + 2, stored, sem="release", scope="gpu") == tasks - stored:
            tl.atomic_xchg(ticket + 2, 0, sem="acquire", scope="gpu")  # 0 for the next launch
            signal_flags(peers_ready, rank * slots, world_size, epoch, PEERS)

    # The last program resets the ticket. Then wait for the peers.
    if tl.atomic_add(ticket + 1, 1, sem="relaxed", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(ticket, 0)
        tl.store(ticket + 1, 0)
    if END_WAIT:
        for share in range(tl.program_id(0) * FLAGS, world_size * slots, tl.num_programs(0) * FLAGS):
            wait_for_flags(ready, counts, slots, share, rank, world_size, epoch, timeout, status, FLAGS, INTERPRETED)


class SlicedPut(NamedTuple):
    bags: Bags
    features: FeatureTable
    windows: Windows
    flags: Flags
    state: SliceState
    options: PoolingOptions
    slices: Slices

    def launch(self, programs: int) -> Launch:
        """Return the launch, called with `Bags.tensors` of the types and samples of `bags`, and the epoch.

        It holds all tensors but the rows, and is valid while they are at the addresses in `features`.
        """
        dtypes, changing = tuple(each.dtype for each in self.bags.tensors), ("values", "offsets", "id_weights", "epoch")
        return Launch(self._kernel(), programs, dtypes, self._arguments(epoch=0), changing)

    def resident_programs(self) -> int:
        """Return how many programs one multiprocessor holds at once."""
        from cuda.bindings import driver

        compiled = self._kernel().compile(*self._arguments(epoch=1))
        threads = 32 * self.options.tuning.num_warps
        error, programs = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            driver.CUfunction(compiled.function), threads, compiled.metadata.shared
        )
        assert error == driver.CUresult.CUDA_SUCCESS, error
        return programs

    def _kernel(self) -> CompiledKernel:
        # Not a cooperative launch, whose programs must all start together: it would queue after an NCCL kernel that
        # waits for a peer, while that peer's NCCL kernel may queue after a grid that waits for ours.
        slices, tuning = self.slices, self.options.tuning
        return specialised(
            _put_slices,
            num_warps=tuning.num_warps,
            registers=_REGISTERS,
            IN_PLACE=slices.in_place,
            SIGNAL=slices.signals,
            PEERS=power_of_2(self.windows.addresses.numel()),
            PUT_ROWS=min(slices.bags, max(1, 1024 * tuning.num_warps // power_of_2(self.features.dim))),
            SLICE_TASKS=slices.bags // tuning.task_bags,
            GROUPS=tuning.groups,
            END_WAIT=slices.end_wait,
            FLAGS=32 * tuning.num_warps,
            INTERPRETED=INTERPRETED,
            POOLING=pooling_constants(self.features, self.windows, self.options),
        )

    def _arguments(self, epoch: int) -> tuple[Any, ...]:
        bags, features, windows, flags, state, options, slices = self
        return (
            *bags.tensors,
            bags.first_sample,
            features.entries,
            windows.addresses,
            flags.status,
            flags.addresses,
            flags.local,
            flags.counts,
            flags.clock,
            state.staging,
            state.done,
            state.ticket,
            options.rank,
            windows.addresses.numel(),
            features.entries.shape[0],
            -(-bags.samples_per_rank // options.tuning.task_bags),
            bags.samples,
            flags.local.shape[1],
            slices.first_slot,
            epoch,
            flags.timeout,
        )
