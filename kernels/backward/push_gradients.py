"""Stores gradients into the windows of the ranks that hold the rows, straight from where autograd left them.

A rank's gradient window is [D_local * B] of the wire type: the shard whose columns begin at `start` of D_local has its
[B, D] from element start * B on. Shards are sent in parts, each with its own flag, so that its rows are updated while
the next part is sent. One launch sends all parts of a dim: one for each part would queue after the dense kernels.
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
# 0: no shard, since the rank has fewer in this part than `most`; 1: a shard; 2 + i: a shard of a table that is cut by
# rows, which has the bags of share i.
PRESENT = tl.constexpr(2)
SHARD_COLUMNS = tl.constexpr(3)

_NUM_WARPS = 32
_TASK_BYTES = 4096  # gradients in flight per warp, which keeps links busy also while dense kernels run
_SIZES = [
    "rank",
    "world_size",
    "parts",
    "first_part",
    "end_part",
    "most",
    "blocks",
    "samples",
    "batch",
    "first_sample",
    "programs",
]


@dataclass(frozen=True)
class ShardTable:
    """The shards of one dim, by part and owner."""

    entries: torch.Tensor
    """[parts, W, most, 3] int64: see the columns above"""
    counts: torch.Tensor
    """[parts] int32: largest number of shards of a rank"""
    dim: int
    """a multiple of 4, at most 1024"""
    source_alignment: int
    """elements, a power of two up to 16, that divide every column of the gradient"""
    start_alignment: int
    """elements, a power of two up to 16, that divide every column of D_local"""


@dataclass(frozen=True)
class PartFlags:
    addresses: torch.Tensor
    """[W] int64: address of each rank's flags [W, parts] int64; rank w signals row w"""
    done: torch.Tensor
    """[parts] int32: programs that have finished the part; 0 between exchanges"""
    clock: torch.Tensor
    """[1] int64: see `Flags`"""


@triton.jit(do_not_specialize=[*_SIZES, "scale", "epoch"], do_not_specialize_on_alignment=["offsets"])
def _push_gradients(
    gradient,  # [samples, D_total], rows STRIDE elements apart
    offsets,  # [shares * samples + 1] int32, of the bags
    shards,  # [parts, W, most, 3] int64
    counts,  # [parts] int32, largest number of shards of a rank
    windows,  # [W] int64, addresses
    peers_ready,  # [W] int64, addresses of flags [W, parts]
    done,  # [parts] int32, finished programs of all launches
    clock,  # [1] int64, added to `epoch`
    rank,
    world_size,
    parts,
    first_part,
    end_part,
    most,
    blocks,  # tasks of a shard
    samples,
    batch: tl.int64,  # samples of all ranks
    first_sample: tl.int64,  # of this rank
    scale,
    programs,  # of all launches
    epoch: tl.int64,
    SCHEDULE: tl.constexpr,
    PEERS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WIRE: tl.constexpr,
    STRIDE: tl.constexpr,
    WINDOW_ALIGNMENT: tl.constexpr,
    SOURCE_ALIGNMENT: tl.constexpr,
    START_ALIGNMENT: tl.constexpr,
    SCALED: tl.constexpr,
    SHARES: tl.constexpr,
):
    """Store this program's share of parts [first_part, end_part) of one dim into the windows of the shards' owners.

    A task is up to ROWS samples of one shard; program p of P does the tasks p, p + P, .. of each part.

    Memory: `gradient` is stored in the wire type, times `scale` if SCALED, to the rows from `first_sample` on of the
    shard's [B, DIM]. With SHARES, bags without ids of a shard's rows are skipped.

    Order: the program counts itself after its share of a part (acquire and release, GPU scope). The last of `programs`
    has acquired what all others have released, and signals the part at every rank (release, system scope), while others
    go on with the next part.

    Example: two ranks of two samples; rank 1 holds a table of dim 4. Rank 0 stores its gradient [2, 4] to elements 0 ..
    7 of rank 1's window, rank 1 its own to elements 8 .. 15.
    """
    at = tl.arange(0, BLOCK_DIM)
    for part in range(first_part, end_part):
        # Store this program's tasks of the part.
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
                # [ROWS, BLOCK_DIM]
                rows = tl.load(gradient + sample[:, None] * STRIDE + (source + at)[None, :], mask=mask, other=0.0)
                if SCALED:
                    rows = rows.to(tl.float32) * scale
                into = start * batch + (first_sample + sample)[:, None] * DIM + at[None, :]
                tl.store(window + into, rows.to(WIRE), mask=mask)

        # Count the program. The last one signals.
        tl.debug_barrier()  # all threads have stored before one of them counts the program
        # GPU scope suffices although the stores are in peers' memory: the release of the flags, at system scope, covers
        # what was acquired here, see `primitives`.
        if tl.atomic_add(done + part, 1, sem="acq_rel", scope="gpu") == programs - 1:
            tl.store(done + part, 0)  # for the next exchange
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

    Each exchange calls all of them with a gradient like this one (shape, type, strides), offsets if given here, and the
    epoch. The last program of a part signals it at every rank, with the epoch plus `flags.clock`.

    Args:
        gradient: [b, D_total] float32, bfloat16 or float16; it may be some columns of a wider tensor. Each row is
            contiguous and begins at a multiple of 16 bytes.
        tables: one for each dim, each with all parts.
        windows: [D_local * B] each; their stride is not used.
        first_sample: the rank's first sample in the global batch.
        most_samples: largest number of samples of a rank.
        programs: programs of each launch, of 32 warps; links need few.
        end_part: the part after the last to send.
        offsets: [shares * b + 1] int32, the rank's bags of each share; empty ones get no gradient. None: all get one.
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
            _push_gradients,
            num_warps=_NUM_WARPS,
            SCHEDULE=schedule,
            PEERS=power_of_2(world_size),
            ROWS=rows,
            DIM=table.dim,
            BLOCK_DIM=block,
            WIRE=TYPES[windows.dtype],
            STRIDE=gradient.stride(0),
            WINDOW_ALIGNMENT=windows.alignment,
            SOURCE_ALIGNMENT=table.source_alignment,
            START_ALIGNMENT=table.start_alignment,
            SCALED=scale != 1.0,
            SHARES=offsets is not None,
        )
        arguments = (
            gradient,
            table.counts if offsets is None else offsets,
            table.entries,
            table.counts,
            windows.addresses,
            flags.addresses,
            flags.done,
            flags.clock,
            rank,
            world_size,
            parts,
            first_part,
            end_part,
            most,
            -(-most_samples // rows),
            gradient.shape[0],
            batch,
            first_sample,
            scale,
            programs * len(tables),
            0,
        )
        launches.append(Launch(kernel, programs, (gradient.dtype,), arguments, changing=changing))
    return launches
