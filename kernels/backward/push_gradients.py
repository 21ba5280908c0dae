"""Gradients to the owners of the rows: each rank reads the gradient of its samples' pooled embeddings where autograd
left it, and stores it straight into the gradient windows of the ranks that hold the rows, with nothing packed.

A rank's gradient window is [D_local * B] of the wire's type, shard after shard. The shard whose columns begin at
`start` of D_local has its [B, D] from element start * B on, row `sample` from element start * B + sample * D on. So the
gradients of a table are together, which keeps them in the cache while its rows are updated.

Shards travel in parts. Each part has a flag of its own, so that the rows of one part are updated while the next part
travels. One launch can send all parts of a dim with few programs, which keep their multiprocessors to the end; a launch
a part would queue behind the dense kernels that run beside it. The program that finishes a part's last task raises the
part's flags.

Example: two ranks of two samples; rank 1 owns a table of dim 4. Rank 0 stores its gradient [2, 4] of that table to
elements 0 .. 7 of rank 1's window, rank 1 stores its own to elements 8 .. 15.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.bags import Windows
from dlrm_overlap.kernels.compiled import TYPES, specialised
from dlrm_overlap.kernels.launches import Launch
from dlrm_overlap.kernels.primitives import signal_flags, task_at
from dlrm_overlap.kernels.tuning import power_of_2

# Columns of the shard table [parts, W, most, 3] int64.
SOURCE = tl.constexpr(0)  # column of the output's gradient where the shard begins
START = tl.constexpr(1)  # column of D_local where the shard begins at its owner
# 0: no shard, since this rank has fewer in this part than the fullest; 1: a shard; from 2 on: one of a table that is
# cut by rows, whose ids are those of the share 0, 1, ..
PRESENT = tl.constexpr(2)
SHARD_COLUMNS = tl.constexpr(3)

_NUM_WARPS = 32
_TASK_BYTES = 4096  # of a warp's gradients: so much in flight keeps the links busy beside dense kernels, too
_SIZES = [
    "rank", "world_size", "parts", "first_part", "end_part", "most", "blocks", "samples", "batch", "first_sample",
    "programs",
]  # fmt: skip


@dataclass(frozen=True)
class ShardTable:
    """The shards of one dim, by part and owner: where each is in the gradient, and where at its owner."""

    entries: torch.Tensor
    """[parts, W, most, 3] int64: column of the gradient, column of D_local at the owner, and `PRESENT`"""
    counts: torch.Tensor
    """[parts] int32: shards in this part of the rank that has most"""
    dim: int
    """D, a multiple of 4, at most 1024"""
    source_alignment: int
    """elements, a power of two up to 16, that divide every column of the gradient"""
    start_alignment: int
    """elements, a power of two up to 16, that divide every column of D_local"""


@dataclass(frozen=True)
class PartFlags:
    """The flags of the parts at every rank, and the counts by which programs find out who raises them."""

    addresses: torch.Tensor
    """[W] int64: of each rank's flags, [W, parts] int64, whose row w rank w raises"""
    done: torch.Tensor
    """[parts] int32: programs that have done their share of the part; 0 before and after each exchange"""
    clock: torch.Tensor
    """[1] int64: added to the epoch, as in `Flags`"""


@triton.jit(do_not_specialize=[*_SIZES, "scale", "epoch"], do_not_specialize_on_alignment=["offsets"])
def _push_gradients(
    gradient, offsets, shards, counts, windows, peers_ready, done, clock,
    rank, world_size, parts, first_part, end_part,
    most, blocks, samples, batch: tl.int64, first_sample: tl.int64, scale, programs, epoch: tl.int64,
    SCHEDULE: tl.constexpr, PEERS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    WIRE: tl.constexpr, STRIDE: tl.constexpr, WINDOW_ALIGNMENT: tl.constexpr, SOURCE_ALIGNMENT: tl.constexpr,
    START_ALIGNMENT: tl.constexpr, SCALED: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Store this program's share of the shards of one dim, part after part, into the windows of their owners.

    A task is up to ROWS samples of one shard; program p of P does the tasks p, p + P, .. of each part.

    The parts are first_part .. end_part - 1 of all `parts`.

    Memory: the program reads this rank's `gradient`, b rows STRIDE elements apart. It stores the gradient in the wire's
    type, SCALED times `scale`, to the rows from `first_sample` on of the shard's [B, DIM] in one window, this rank's or
    a peer's; where it is not SCALED and has the wire's type, rows are copied as they are. With SHARES a bag that has no
    ids of a shard's rows, by `offsets` [shares * samples + 1], gets nothing there, since no row is updated by it. No
    two programs store to one place. `done` [parts] counts the programs of all dims' launches that are through with a
    part.

    Order: the program stores its share of a part, passes a barrier, and counts itself in `done` (acquire and release,
    GPU scope). The one of `programs` that counts last has so acquired all that the others have released. It sets the
    count back to 0 for the next exchange, and raises the part's flag at every rank to `epoch` + `clock` (release,
    system scope). The other programs go on with the next part meanwhile.

    Example: 4 owners with up to 5 shards each in the part, 2 tasks a shard: 40 tasks, of which program 3 of 11 does 3,
    14, 25 and 36. On rank 0, in balanced order, these are for ranks 0, 3, 2 and 1.

    Source: ours; the zero-copy stores of `store_pooled`, from where the embeddings are read to where they are pooled.
    """
    at = tl.arange(0, BLOCK_DIM)
    for part in range(first_part, end_part):
        here = tl.load(counts + part)
        for position in range(tl.program_id(0), world_size * here * blocks, tl.num_programs(0)):
            destination, which, block = task_at(position, rank, world_size, here, blocks, SCHEDULE)
            shard = shards + ((part * world_size + destination) * most + which) * SHARD_COLUMNS
            present = tl.load(shard + PRESENT)
            if present != 0:
                source = tl.multiple_of(tl.load(shard + SOURCE), SOURCE_ALIGNMENT)
                start = tl.multiple_of(tl.load(shard + START), START_ALIGNMENT)
                window = tl.multiple_of(tl.load(windows + destination).to(tl.pointer_type(WIRE)), WINDOW_ALIGNMENT)
                sample = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
                live = sample < samples
                if SHARES and present >= 2:
                    bag = offsets + (present - 2) * samples + sample
                    first = tl.load(bag, mask=live, other=0)
                    live = live & (tl.load(bag + 1, mask=live, other=0) > first)
                mask = live[:, None] & (at < DIM)[None, :]
                rows = tl.load(gradient + sample[:, None] * STRIDE + (source + at)[None, :], mask=mask, other=0.0)
                if SCALED:
                    rows = rows.to(tl.float32) * scale
                into = start * batch + (first_sample + sample)[:, None] * DIM + at[None, :]
                tl.store(window + into, rows.to(WIRE), mask=mask)
        tl.debug_barrier()  # all threads have stored before one of them counts the program
        # GPU scope suffices though the stores are in the peers' memory. The program that counts last acquires at this
        # scope; its release of the flags at system scope then covers the stores of all, see `primitives`.
        if tl.atomic_add(done + part, 1, sem="acq_rel", scope="gpu") == programs - 1:
            tl.store(done + part, 0)  # ready for the next exchange
            signal_flags(peers_ready, rank * parts + part, world_size, epoch + tl.load(clock), PEERS)


def prepare_push_gradients(
    gradient: torch.Tensor,
    tables: Sequence[ShardTable],
    windows: Windows,
    flags: PartFlags,
    rank: int,
    schedule: str,
    first_sample: int,
    batch: int,
    most_samples: int,
    scale: float,
    programs: int,
    first_part: int,
    end_part: int,
    offsets: torch.Tensor | None = None,
) -> list[Launch]:
    """Return launches, one for each dim, that store parts of a rank's gradient into the windows of the rows' owners.

    In each exchange all of them are called, each with a gradient of the shape, type and strides of this one, with such
    offsets if there are any, and with the epoch. The last to finish a part raises its flag at every rank, to the sum of
    the epoch and `flags.clock`.

    Args:
        gradient: [b, D_total] float32, bfloat16 or float16, of the rank's samples: rows `stride(0)` elements apart,
            each at a multiple of 16 bytes, their elements side by side. It may be some columns of a wider tensor.
        tables: one for each dim, each with all parts.
        windows: each rank's gradient window, [D_local * B]; their stride is not used.
        rank: whose gradient it is.
        schedule: order of the tasks, see `schedule`.
        first_sample: index of the rank's first sample in the global batch.
        batch: samples of all ranks, B.
        most_samples: of the rank that has most, since all ranks walk the same tasks.
        scale: factor of every element.
        programs: of each launch, of 32 warps each: links need few, and the rest of the GPU stays free.
        first_part: the first part to send.
        end_part: the part after the last one to send.
        offsets: [shares * b + 1] int32, of the rank's bags of each share; an empty one gets no gradient. None: all do.
    """
    assert gradient.stride(1) == 1
    assert gradient.data_ptr() % 16 == 0
    changing = ("gradient", "epoch") if offsets is None else ("gradient", "offsets", "epoch")
    launches: list[Launch] = []
    for table in tables:
        parts, world_size, most, _ = table.entries.shape
        block = power_of_2(table.dim)
        rows = max(1, _TASK_BYTES * _NUM_WARPS // (block * gradient.element_size()))
        kernel = specialised(
            _push_gradients, num_warps=_NUM_WARPS,
            SCHEDULE=schedule, PEERS=power_of_2(world_size), ROWS=rows, DIM=table.dim, BLOCK_DIM=block,
            WIRE=TYPES[windows.dtype], STRIDE=gradient.stride(0), WINDOW_ALIGNMENT=windows.alignment,
            SOURCE_ALIGNMENT=table.source_alignment, START_ALIGNMENT=table.start_alignment, SCALED=scale != 1.0,
            SHARES=offsets is not None,
        )  # fmt: skip
        blocks, counted = -(-most_samples // rows), programs * len(tables)
        arguments = (
            gradient, table.counts if offsets is None else offsets, table.entries, table.counts,
            windows.addresses, flags.addresses, flags.done, flags.clock,
            rank, world_size, parts, first_part, end_part,
            most, blocks, gradient.shape[0], batch, first_sample, scale, counted, 0,
        )  # fmt: skip
        launches.append(Launch(kernel, programs, (gradient.dtype,), arguments, changing=changing))
    return launches
