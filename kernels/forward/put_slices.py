"""Fused forward: one persistent kernel pools all bags and puts slices as they are done (arXiv 2305.06942, section 3).

A slice is some consecutive bags of one feature for one destination. Programs take task after task in the order of the
schedule; each pools into staging memory and counts its task done; the program that completes a slice, and only it, puts
the slice into the destination's window and raises its ready flag there, while the others go on. What stays on this rank
is stored in place. Nobody waits before the end, where each program awaits its share of the flags of the peers' slices.

No program needs another to be resident: one that waits has drawn a ticket behind the last task, so every task has been
drawn, by a program that runs and will not wait before the task is done. A program that starts only when others end
finds no task left and has its share of the flags to await, nothing else. So a grid of any size makes progress, beside
any kernel that leaves room for one program.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.arguments import Bags, FeatureTable, PoolingOptions, Windows, power_of_2
from dlrm_overlap.kernels.compiled import INTERPRETED, CompiledKernel
from dlrm_overlap.kernels.flags import Flags
from dlrm_overlap.kernels.forward.store_pooled import GENERAL, constants_of, shape_of, store_rows
from dlrm_overlap.kernels.primitives import (
    COLUMN,
    FEATURE_COLUMNS,
    await_flags,
    clock,
    multiprocessor,
    pool,
    raise_flag,
    task_at,
)

TRACE_COLUMNS = ("program", "sm", "start_ns", "end_ns", "put_ns", "wait_ns")


@triton.jit
def put_by_stores(
    staged,
    window,
    first,
    end,
    column,
    ROWS: tl.constexpr,
    STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Put `staged` [end - first, DIM] to the rows [first, end) of a peer's window, by this program's own stores.

    A put may return before its data is there; the flag that follows is released at system scope.
    """
    at = tl.arange(0, BLOCK_DIM)
    for chunk in range(first, end, ROWS):
        sample = chunk + tl.arange(0, ROWS)
        live = sample < end
        source = staged + (sample - first).to(tl.int64)[:, None] * DIM + at[None, :]
        rows = tl.load(source, mask=live[:, None] & (at < DIM)[None, :])
        store_rows(rows, window, sample, column, live, STRIDE, DIM, BLOCK_DIM)


@triton.jit(**GENERAL)
def _put_slices(
    values,
    offsets,
    first_sample,
    features,
    windows,
    status,
    peers_ready,
    ready,
    counts,
    staging,
    done,
    ticket,
    trace,
    rank,
    world_size,
    features_here,
    blocks,
    batch,
    slots,
    first_slot,
    epoch: tl.int64,
    timeout: tl.int64,
    PUT: tl.constexpr,
    PUT_ROWS: tl.constexpr,
    SLICE_TASKS: tl.constexpr,
    GROUPS: tl.constexpr,
    END_WAIT: tl.constexpr,
    FLAGS: tl.constexpr,
    TRACE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    SCHEDULE: tl.constexpr,
    BAGS: tl.constexpr,
    UNROLL: tl.constexpr,
    STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WEIGHT: tl.constexpr,
    WIRE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WINDOW_ALIGNMENT: tl.constexpr,
    COLUMN_ALIGNMENT: tl.constexpr,
    CHECK: tl.constexpr,
):
    """Pool task after task as the ticket gives them out, put the slices that this program completes, await flags.

    A task is GROUPS * BAGS bags of one feature for one destination, SLICE_TASKS of them a slice. The program reads the
    bags' offsets, ids and rows, which lie on this rank; it stores the pooled embeddings into this rank's window where
    they stay here, else into `staging` [W, F, b, DIM], or straight into the peer's window where PUT is None. `done`
    [W, F, slices] counts the finished tasks of each slice; `ticket` holds the next task and how many programs are
    through, the last of which sets both back to 0.

    Order: a task's stores, a barrier, its count (release, GPU scope). Who counts a slice's last task acquires, passes a
    barrier, and so sees what all of them staged; it sets the count back to 0, puts the slice and raises its flag at the
    destination (release, system scope), behind a barrier too. What stays here is ordered by the kernel's end. With
    END_WAIT the program at last awaits FLAGS flags of this rank's `ready`, and as many again a grid further.

    Example: rank 0 of 2 with 4 samples each, one feature, tasks of 2 bags, slices of 4, balanced. Program A draws task
    0, pools samples 4 and 5, which are rank 1's, stages them and counts 1 of 2. Program B draws task 1 and stores
    samples 0 and 1 into this rank's window; then task 2, samples 6 and 7: it counts 2 of 2, puts the four rows to rows
    0 .. 3 of rank 1's window and raises the flag there, while A is at task 3, samples 2 and 3. Tickets 4 and 5 tell
    both that they are through.

    Source: arXiv 2305.06942, section 3.
    """
    tasks = world_size * features_here * blocks
    slices = tl.cdiv(blocks, SLICE_TASKS)
    position = tl.atomic_add(ticket, 1, sem="relaxed", scope="gpu")
    group = 0
    last = position
    start_ns = clock(0, INTERPRETED)
    while position < tasks:
        # One loop over the groups of all tasks: nested, it compiles to a slower one.
        destination, which, block = task_at(position, rank, world_size, features_here, blocks, SCHEDULE)
        feature = features + which * FEATURE_COLUMNS
        first = tl.load(first_sample + destination)
        samples = tl.load(first_sample + destination + 1) - first
        window = tl.multiple_of(tl.load(windows + destination).to(tl.pointer_type(WIRE)), WINDOW_ALIGNMENT)
        column = tl.multiple_of(tl.load(feature + COLUMN), COLUMN_ALIGNMENT)
        pair = destination * features_here + which
        staged = staging + pair.to(tl.int64) * (blocks * GROUPS * BAGS) * DIM
        sample = (block * GROUPS + group) * BAGS + tl.arange(0, BAGS)
        live = sample < samples
        rows = pool(
            values, offsets, feature, first + sample, live, batch, status,
            BAGS, DIM, BLOCK_DIM, UNROLL, WEIGHT, ALIGNMENT, CHECK,
        )  # fmt: skip
        if PUT is None or destination == rank:
            store_rows(rows, window, sample, column, live, STRIDE, DIM, BLOCK_DIM)
        else:
            store_rows(rows, staged, sample, 0, live, DIM, DIM, BLOCK_DIM)
        group += 1
        if group == GROUPS:
            if TRACE:
                put_ns = clock(0, INTERPRETED)
            if destination != rank:
                piece = block // SLICE_TASKS
                pieces = tl.minimum(SLICE_TASKS, blocks - piece * SLICE_TASKS)
                counter = done + pair * slices + piece
                tl.debug_barrier()  # all threads have stored before one of them counts the task
                # At GPU scope also where PUT is None and the stores lie at the peer: the last finisher, which acquires
                # at this scope, answers for them by the flag's release at system scope, see `primitives`.
                # Only the last finisher acquires: that empties the multiprocessor's L1, where all keep their ids.
                if tl.atomic_add(counter, 1, sem="release", scope="gpu") == pieces - 1:
                    tl.atomic_xchg(counter, 0, sem="acquire", scope="gpu")  # and leaves it ready for the next launch
                    if PUT is not None:
                        tl.debug_barrier()  # no thread reads what others staged before the one that acquired
                        begin = piece * (SLICE_TASKS * GROUPS * BAGS)
                        end = tl.minimum(begin + SLICE_TASKS * GROUPS * BAGS, samples)
                        PUT(
                            staged + begin.to(tl.int64) * DIM, window, begin, end, column,
                            PUT_ROWS, STRIDE, DIM, BLOCK_DIM,
                        )  # fmt: skip
                    flags = tl.load(peers_ready + destination).to(tl.pointer_type(tl.int64))
                    raise_flag(flags + rank * slots + first_slot + which * slices + piece, epoch)
            if TRACE:
                end_ns = clock(0, INTERPRETED)
                row = trace + position.to(tl.int64) * 6
                tl.store(row, tl.program_id(0).to(tl.int64))
                tl.store(row + 1, multiprocessor(INTERPRETED).to(tl.int64))
                tl.store(row + 2, start_ns)
                tl.store(row + 3, end_ns)
                tl.store(row + 4, end_ns - put_ns)
                tl.store(row + 5, end_ns - end_ns)
                start_ns = end_ns
            last = position
            position = tl.atomic_add(ticket, 1, sem="relaxed", scope="gpu")
            group = 0
    if tl.atomic_add(ticket + 1, 1, sem="relaxed", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(ticket, 0)
        tl.store(ticket + 1, 0)
    if END_WAIT:
        start_ns = clock(0, INTERPRETED)
        for share in range(tl.program_id(0) * FLAGS, world_size * slots, tl.num_programs(0) * FLAGS):
            await_flags(ready, counts, slots, share, rank, world_size, epoch, timeout, status, FLAGS, INTERPRETED)
        if TRACE and last < tasks:
            tl.store(trace + last.to(tl.int64) * 6 + 5, clock(0, INTERPRETED) - start_ns)


@dataclass(frozen=True)
class SliceState:
    """What the persistent kernel's programs share; `done` and `ticket` are zero before and after each launch."""

    staging: torch.Tensor
    """[at least W * F * b * D, b rounded up to whole tasks] of the wire's type: pooled embeddings on their way"""
    done: torch.Tensor
    """[at least W * F * slices] int32: finished tasks of each slice"""
    ticket: torch.Tensor
    """[2] int32: the next task; programs that are through"""
    trace: torch.Tensor | None = None
    """[tasks, 6] int64, see TRACE_COLUMNS; None leaves tracing out of the kernel"""


@dataclass(frozen=True)
class Slices:
    """How the persistent kernel's results are sent."""

    bags: int
    """bags of a feature in a slice, a multiple of the tuning's task_bags"""
    first_slot: int
    """slice i of the launch's f-th feature is slot first_slot + f * ceil(b / bags) + i at its destination"""
    end_wait: bool = True
    """return only when all slots of `Flags.counts` have reached the epoch"""
    put: Any = put_by_stores
    """a @triton.jit function with `put_by_stores`' arguments; None lets each task store in place at the peer, unstaged,
    which leaves the last finisher the flag alone"""


@lru_cache
def _putting(put: Any, slice_bags: int, end_wait: bool, traced: bool, *shape: Any) -> CompiledKernel:
    tuning = shape[0].tuning
    constants = {
        "PUT": put,
        "PUT_ROWS": min(slice_bags, max(1, 1024 * tuning.num_warps // power_of_2(shape[1]))),
        "SLICE_TASKS": slice_bags // tuning.task_bags,
        "GROUPS": tuning.groups,
        "END_WAIT": end_wait,
        "FLAGS": 32 * tuning.num_warps,
        "TRACE": traced,
        "INTERPRETED": INTERPRETED,
    }
    # Not a cooperative launch, which no wait needs: all its programs would have to start together, hence after a NCCL
    # kernel that waits for a peer's, which in turn may be behind that peer's grid, whose programs wait for ours.
    return CompiledKernel(_put_slices, {"num_warps": tuning.num_warps}, constants | constants_of(*shape))


class SlicedPut(NamedTuple):
    """A launch of the persistent kernel, but for its epoch and its grid."""

    bags: Bags
    features: FeatureTable
    windows: Windows
    flags: Flags
    state: SliceState
    launch: PoolingOptions
    slices: Slices

    def launch_kernel(self, epoch: int, programs: int) -> None:
        """Pool every bag in one persistent grid; the last finisher of a slice puts it and raises its flag to `epoch`.

        What stays on this rank is stored in place and has no flag: the stream orders it.

        Args:
            programs: of the grid; best what the GPU holds at once, see `resident_programs`: more find no task left.
        """
        self._form()(programs, (self.bags.values.dtype, self.bags.offsets.dtype), *self._arguments(epoch))

    def resident_programs(self) -> int:
        """Return how many programs of this launch one multiprocessor holds at once, for the size of the grid."""
        from cuda.bindings import driver

        compiled = self._form().compile(*self._arguments(epoch=1))
        threads = 32 * self.launch.tuning.num_warps
        error, programs = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            driver.CUfunction(compiled.function), threads, compiled.metadata.shared
        )
        assert error == driver.CUresult.CUDA_SUCCESS, error
        return programs

    def _form(self) -> CompiledKernel:
        shape = shape_of(self.features, self.windows, self.launch)
        slices = self.slices
        return _putting(slices.put, slices.bags, slices.end_wait, self.state.trace is not None, *shape)

    def _arguments(self, epoch: int) -> list[Any]:
        bags, flags, state = self.bags, self.flags, self.state
        return [
            bags.values,
            bags.offsets,
            bags.first_sample,
            self.features.entries,
            self.windows.addresses,
            flags.status,
            flags.addresses,
            flags.local,
            flags.counts,
            state.staging,
            state.done,
            state.ticket,
            state.done if state.trace is None else state.trace,
            self.launch.rank,
            self.windows.addresses.numel(),
            self.features.entries.shape[0],
            -(-bags.samples_per_rank // self.launch.tuning.task_bags),
            bags.samples,
            flags.local.shape[1],
            self.slices.first_slot,
            epoch,
            flags.timeout,
        ]
