"""The sliced forward: one persistent kernel pools all bags, and puts each slice as soon as it is complete
(arXiv 2305.06942, section 3).

A slice is some consecutive bags of one feature for one destination, and is pooled in one or more tasks. Programs take
tasks in the order of the schedule. A program pools its task, stores the rows for a peer into staging memory, and counts
the task. The one whose count completes a slice puts it into the destination's window (`put_by_stores`) and raises the
slice's flag there, while the others go on with their next tasks. No program waits before the end, where each awaits its
share of the flags that the peers raise here.

Or rows are stored straight into the destination's window, the paper's zero-copy variant. It has no slices: a program
that finds no task left adds its number of tasks to a count, and whoever completes the count raises one flag at every
rank.

A grid of any size makes progress, beside any kernel that leaves room for one program, since no program needs another to
be resident. A program waits only after it has found no task left in the ticket. By then every task has been drawn by a
program that is running, and that does not wait before its tasks are done and counted. A program that starts only when
others have ended finds no task left, counts none, and awaits its share of the flags.
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

# Of a thread, so that a multiprocessor holds 32 programs of a warp and has as many loads in flight as with
# `store_pooled`. Left to itself the compiler takes 72 for 128 columns, which is 28 programs.
_REGISTERS = 64


@dataclass(frozen=True)
class SliceState:
    """Memory that the programs of the persistent kernel share; `done` and `ticket` are 0 before and after a launch."""

    staging: torch.Tensor
    """[at least W * F * b * D, b rounded up to whole tasks] of the wire's type: pooled embeddings to be put; may be
    empty in place"""
    done: torch.Tensor
    """[at least W * F * slices] int32: finished tasks of each slice"""
    ticket: torch.Tensor
    """[3] int32: the next task, the number of programs that have found none left, and the number of tasks that are
    stored, in place"""


@dataclass(frozen=True)
class Slices:
    """How the results of the persistent kernel are sent."""

    bags: int
    """bags of a feature in a slice, a multiple of the tuning's task_bags"""
    first_slot: int
    """slice i of the launch's f-th feature is slot first_slot + f * ceil(b / bags) + i at its destination"""
    in_place: bool
    """each task, of which there is at least one, stores straight into the peer's window, and no slice has a flag of its
    own; otherwise a slice is staged, and put once it is complete"""
    raises: bool = True
    """in place: this launch raises the rank's flag, slot 0, at every rank, as the last of the stream's"""
    end_wait: bool = True
    """the kernel ends only when all slots of `Flags.counts` have reached the epoch"""


@triton.jit
def put_by_stores(
    staged, window, first, end, column,
    ROWS: tl.constexpr, STRIDE: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Put `staged` [end - first, DIM] to the rows [first, end) of a peer's window, by this program's own stores.

    The program copies ROWS rows at a time. The caller raises the slice's flag next, by a release at system scope, and
    so after a barrier of the program.

    Example: first 4, end 7, ROWS 2: rows 0 and 1 of `staged` go to rows 4 and 5 of the window, then row 2 to row 6.
    """
    at = tl.arange(0, BLOCK_DIM)
    for begin in range(first, end, ROWS):
        sample = begin + tl.arange(0, ROWS)
        live = sample < end
        source = staged + (sample - first).to(tl.int64)[:, None] * DIM + at[None, :]
        rows = tl.load(source, mask=live[:, None] & (at < DIM)[None, :])
        store_rows(rows, window, sample, column, live, STRIDE, DIM, BLOCK_DIM)


@triton.jit(**JIT_OPTIONS)
def _put_slices(
    values, offsets, id_weights, first_sample, features, windows,
    status, peers_ready, ready, counts, clock_word,
    staging, done, ticket,
    rank, world_size, features_here, blocks, batch,
    slots, first_slot, epoch: tl.int64, timeout: tl.int64,
    IN_PLACE: tl.constexpr, RAISE: tl.constexpr, PEERS: tl.constexpr,
    PUT_ROWS: tl.constexpr, SLICE_TASKS: tl.constexpr, GROUPS: tl.constexpr, END_WAIT: tl.constexpr,
    FLAGS: tl.constexpr, INTERPRETED: tl.constexpr,
    SCHEDULE: tl.constexpr, BAGS: tl.constexpr, UNROLL: tl.constexpr, STRIDE: tl.constexpr, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, WEIGHT: tl.constexpr, WIRE: tl.constexpr, ALIGNMENT: tl.constexpr,
    WINDOW_ALIGNMENT: tl.constexpr, COLUMN_ALIGNMENT: tl.constexpr, CHECK: tl.constexpr, LEAVES_OUT: tl.constexpr,
):  # fmt: skip
    """Do task after task as the ticket gives them out, put the slices that this program completes, await flags.

    A task is GROUPS * BAGS bags of one feature for one destination; a slice is SLICE_TASKS tasks.

    Memory: the program reads the offsets, ids, weights and rows of its bags, which are in this rank's memory. Pooled
    embeddings of this rank's samples it stores into this rank's window, others straight into the peer's window where
    IN_PLACE, or else into `staging` [W, F, b, DIM]. `done` [W, F, slices] counts the finished tasks of
    each slice. `ticket` [3] holds the next task, the number of programs that are through, the last of which sets both
    back to 0, and, IN_PLACE, the number of tasks that are stored, which whoever completes it sets back to 0. Flags are
    raised to `epoch` + `clock_word` [1].

    Order: the program stores a task, passes a barrier, and counts the task (release, GPU scope). The program whose
    count completes the slice sets the count back to 0 (acquire, GPU scope). It passes a barrier, so that all its
    threads see all that programs have staged for the slice, and puts the slice. It passes a barrier and raises the flag
    at the destination (release, system scope). Stores into this rank's own window need no flag: the kernel's end orders
    them. IN_PLACE with RAISE, a program that has stored tasks and finds none left passes a barrier and adds their
    number to those stored (release, GPU scope). The one whose sum is that of all tasks sets it back to 0 (acquire, GPU
    scope), and passes a barrier and raises this rank's slot 0 at every rank (release, system scope): that covers all
    stores of this launch and of earlier ones on the stream. Every task is in exactly one sum, so exactly one program
    raises, and it waits for none; a program without a task adds nothing, and may begin after the flags are raised. With
    END_WAIT, program p of P finally waits for its share of this rank's `ready` [W, slots], see `wait_for_flags`: FLAGS
    flags from p * FLAGS on, then from (p + P) * FLAGS on, and so forth.

    Example: rank 0 of 2, 4 samples a rank, one feature, tasks of 2 bags, slices of 2 tasks, balanced order, staged.
    Program A draws task 0: it pools samples 4 and 5, which are rank 1's, stages them, and counts 1 of 2. Program B
    draws task 1 and stores samples 0 and 1 into this rank's window. It draws task 2 while A is at task 3, samples 2 and
    3: it pools and stages samples 6 and 7, counts 2 of 2, puts the four rows to rows 0 .. 3 of rank 1's window, and
    raises the flag there. Then A draws 4 and B draws 5: no such tasks, so both are through. IN_PLACE, each task is
    stored where the put would bring it; A adds 2 to the tasks stored, B adds 2 more, which makes all 4, and raises the
    flags.

    Source: arXiv 2305.06942, section 3.
    """
    epoch = epoch + tl.load(clock_word)
    tasks = world_size * features_here * blocks
    slices = tl.cdiv(blocks, SLICE_TASKS)
    position = tl.atomic_add(ticket, 1, sem="relaxed", scope="gpu")
    group = 0
    stored = 0
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
        rows, filled = pool(
            values, offsets, id_weights, feature, first + sample, live, batch, status,
            BAGS, DIM, BLOCK_DIM, UNROLL, WEIGHT, ALIGNMENT, CHECK, LEAVES_OUT,
        )  # fmt: skip
        if IN_PLACE or destination == rank:
            store_rows(rows, window, sample, column, filled, STRIDE, DIM, BLOCK_DIM)
        else:
            store_rows(rows, staged, sample, 0, filled, DIM, DIM, BLOCK_DIM)
        group += 1
        if group == GROUPS:
            if not IN_PLACE and destination != rank:
                index = block // SLICE_TASKS  # of the slice, among those of this feature for this destination
                slice_tasks = tl.minimum(SLICE_TASKS, blocks - index * SLICE_TASKS)
                counter = done + pair * slices + index
                tl.debug_barrier()  # all threads have stored before one of them counts the task
                # Whoever counts the slice's last task acquires at GPU scope; its release of the flag at system scope
                # then covers the stores of all, see `primitives`. Nobody else acquires, since an acquire empties the
                # multiprocessor's L1, where all programs keep their ids.
                if tl.atomic_add(counter, 1, sem="release", scope="gpu") == slice_tasks - 1:
                    tl.atomic_xchg(counter, 0, sem="acquire", scope="gpu")  # 0, as the next launch must find it
                    tl.debug_barrier()  # no thread reads others' staging before one has acquired
                    begin = index * (SLICE_TASKS * GROUPS * BAGS)
                    end = tl.minimum(begin + SLICE_TASKS * GROUPS * BAGS, samples)
                    put_by_stores(
                        staged + begin.to(tl.int64) * DIM, window, begin, end, column,
                        PUT_ROWS, STRIDE, DIM, BLOCK_DIM,
                    )  # fmt: skip
                    flags = tl.load(peers_ready + destination).to(tl.pointer_type(tl.int64))
                    signal_flag(flags + rank * slots + first_slot + which * slices + index, epoch)
            stored += 1
            position = tl.atomic_add(ticket, 1, sem="relaxed", scope="gpu")
            group = 0
    if IN_PLACE and RAISE and stored > 0:
        tl.debug_barrier()  # all threads have stored before one of them counts the tasks
        if tl.atomic_add(ticket + 2, stored, sem="release", scope="gpu") == tasks - stored:
            tl.atomic_xchg(ticket + 2, 0, sem="acquire", scope="gpu")  # 0, as the next launch must find it
            signal_flags(peers_ready, rank * slots, world_size, epoch, PEERS)
    if tl.atomic_add(ticket + 1, 1, sem="relaxed", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(ticket, 0)
        tl.store(ticket + 1, 0)
    if END_WAIT:
        for share in range(tl.program_id(0) * FLAGS, world_size * slots, tl.num_programs(0) * FLAGS):
            wait_for_flags(ready, counts, slots, share, rank, world_size, epoch, timeout, status, FLAGS, INTERPRETED)


class SlicedPut(NamedTuple):
    """All that a launch of the persistent kernel takes, but its epoch and its number of programs."""

    bags: Bags
    features: FeatureTable
    windows: Windows
    flags: Flags
    state: SliceState
    options: PoolingOptions
    slices: Slices

    def launch(self, programs: int) -> Launch:
        """Return the launch, which is called with `Bags.tensors` of the types and samples of `bags`, and the epoch.

        It pools every bag, puts each slice as soon as it is complete, and raises its flag to the epoch at the
        destination. In place there are no slices, and one flag is raised at every rank when all is stored. Bags of this
        rank's samples are stored into its own window and have no flag: the end of the kernel orders them.

        It holds all but the rows, and may be called as long as they are where `features` says.

        Args:
            programs: of the grid, best as many as the GPU holds at once, see `resident_programs`; more find no task.
        """
        dtypes, changing = tuple(each.dtype for each in self.bags.tensors), ("values", "offsets", "id_weights", "epoch")
        return Launch(self._kernel(), programs, dtypes, self._arguments(epoch=0), changing)

    def resident_programs(self) -> int:
        """Return how many programs of this launch one multiprocessor holds at once; the grid's size follows from it."""
        from cuda.bindings import driver

        compiled = self._kernel().compile(*self._arguments(epoch=1))
        threads = 32 * self.options.tuning.num_warps
        error, programs = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            driver.CUfunction(compiled.function), threads, compiled.metadata.shared
        )
        assert error == driver.CUresult.CUDA_SUCCESS, error
        return programs

    def _kernel(self) -> CompiledKernel:
        slices, tuning = self.slices, self.options.tuning
        constants = {
            "IN_PLACE": slices.in_place,
            "RAISE": slices.raises,
            "PEERS": power_of_2(self.windows.addresses.numel()),
            "PUT_ROWS": min(slices.bags, max(1, 1024 * tuning.num_warps // power_of_2(self.features.dim))),
            "SLICE_TASKS": slices.bags // tuning.task_bags,
            "GROUPS": tuning.groups,
            "END_WAIT": slices.end_wait,
            "FLAGS": 32 * tuning.num_warps,
            "INTERPRETED": INTERPRETED,
        }
        # The launch is not cooperative. No wait needs that, and all programs of such a launch have to start together,
        # hence after an NCCL kernel that waits for a peer's, which may come after that peer's grid, whose programs wait
        # for ours.
        constants |= pooling_constants(self.features, self.windows, self.options)
        return specialised(_put_slices, num_warps=tuning.num_warps, registers=_REGISTERS, **constants)

    def _arguments(self, epoch: int) -> tuple[Any, ...]:
        """Return the arguments of `_put_slices`, line by line."""
        bags, features, windows, flags, state, options, slices = self
        world_size, features_here = windows.addresses.numel(), features.entries.shape[0]
        blocks, slots = -(-bags.samples_per_rank // options.tuning.task_bags), flags.local.shape[1]
        return (
            *bags.tensors, bags.first_sample, features.entries, windows.addresses,
            flags.status, flags.addresses, flags.local, flags.counts, flags.clock,
            state.staging, state.done, state.ticket,
            options.rank, world_size, features_here, blocks, bags.samples,
            slots, slices.first_slot, epoch, flags.timeout,
        )  # fmt: skip
