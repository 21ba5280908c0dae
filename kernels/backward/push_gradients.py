"""Gradients to their owners: each rank's part of the pooled embeddings' gradient, stored from where autograd left it
straight into the gradient windows of the ranks that hold the rows. No packing, no unpacking.

A window is [D_local * B] of the wire's type at the rows' owner, shard after shard: the shard whose columns begin at
`start` of D_local holds row sample of its [B, D] from element (start * B + sample * D) on. A table's gradients lie
together, which keeps them in the cache while its rows are updated.

Shards travel in parts, each with a flag of its own, so that the rows of one are updated while the next travels. One
launch sends all parts of a dim: few programs, which keep their multiprocessors to the end, where a launch a part would
queue behind the dense kernels that run beside it. The program that finishes a part's last task raises its flags.

Example: two ranks of two samples; rank 1 owns a table of dim 4. Rank 0 stores its gradient [2, 4] of that table to
elements 0 .. 7 of rank 1's window, rank 1 its own to 8 .. 15.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.arguments import Windows, power_of_2
from dlrm_overlap.kernels.compiled import TYPES, CompiledKernel
from dlrm_overlap.kernels.primitives import raise_flags, task_at

# Columns of the shard table [parts, W, most, 3] int64.
SOURCE = tl.constexpr(0)  # column of the output's gradient where the shard begins
START = tl.constexpr(1)  # column of D_local, at its owner
PRESENT = tl.constexpr(2)  # 0: this rank has fewer shards than the fullest
SHARD_COLUMNS = tl.constexpr(3)

_NUM_WARPS = 32
_TASK_ELEMENTS = 1024  # of a warp: so much in flight keeps the links busy beside dense kernels, too
_SIZES = ["rank", "world_size", "parts", "most", "blocks", "samples", "batch", "first_sample", "programs"]


@dataclass(frozen=True)
class ShardTable:
    """What of the gradient goes where: shards of one dim, by part and owner."""

    entries: torch.Tensor
    """[parts, W, most, 3] int64: column of the gradient, of D_local at the owner, 1 (0 where the rank has no more)"""
    counts: torch.Tensor
    """[parts] int32: shards of the rank that has most in this part"""
    dim: int
    """D, a multiple of 4, at most 1024"""
    source_alignment: int
    """elements, a power of two up to 16, that divide every column of the gradient"""
    start_alignment: int
    """the same of every column of D_local"""


@dataclass(frozen=True)
class PartFlags:
    """The flags of the parts, at every rank, and what the programs that raise them share."""

    addresses: torch.Tensor
    """[W] int64: of each rank's flags, [W, parts] int64, row w raised by rank w"""
    done: torch.Tensor
    """[parts] int32: programs that have done their share of the part; zero before and after each exchange"""


@triton.jit(do_not_specialize=[*_SIZES, "scale", "epoch"])
def _push_gradients(
    gradient,
    shards,
    counts,
    windows,
    peers_ready,
    done,
    rank,
    world_size,
    parts,
    most,
    blocks,
    samples,
    batch: tl.int64,
    first_sample: tl.int64,
    scale,
    programs,
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
):
    """Store this program's share of the gradient's shards of one dim, part by part, into the windows of their owners.

    A task is up to ROWS samples of one shard; program p of P takes the tasks p, p + P, .. of each part. It reads the
    gradient [b, STRIDE] of this rank, and stores `scale` times it, in the wire's type, into an owner's window, this
    rank's or a peer's, at rows `first_sample` .. of the shard's [B, DIM]. No two programs store to one place.

    Order: a part's stores, a barrier, the count in `done` [parts] (GPU scope). Who counts last of `programs`, which are
    those of all dims' launches, has acquired what the others released; it sets the count back to 0 for the next
    exchange and raises the part's flag at every rank (release, system scope). The others are at the next part by then.

    Example: 4 owners with up to 5 shards each of the part, 2 tasks a shard: 40 tasks, of which program 3 of 11 takes 3,
    14, 25 and 36; in balanced order those of rank 0 go to ranks 0, 3, 2 and 1.
    """
    at = tl.arange(0, BLOCK_DIM)
    for part in range(0, parts):
        here = tl.load(counts + part)
        for position in range(tl.program_id(0), world_size * here * blocks, tl.num_programs(0)):
            destination, which, block = task_at(position, rank, world_size, here, blocks, SCHEDULE)
            shard = shards + ((part * world_size + destination) * most + which) * SHARD_COLUMNS
            if tl.load(shard + PRESENT) != 0:
                source = tl.multiple_of(tl.load(shard + SOURCE), SOURCE_ALIGNMENT)
                start = tl.multiple_of(tl.load(shard + START), START_ALIGNMENT)
                window = tl.multiple_of(tl.load(windows + destination).to(tl.pointer_type(WIRE)), WINDOW_ALIGNMENT)
                sample = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
                mask = (sample < samples)[:, None] & (at < DIM)[None, :]
                rows = tl.load(gradient + sample[:, None] * STRIDE + (source + at)[None, :], mask=mask, other=0.0)
                rows = rows.to(tl.float32) * scale
                into = start * batch + (first_sample + sample)[:, None] * DIM + at[None, :]
                tl.store(window + into, rows.to(WIRE), mask=mask)
        tl.debug_barrier()  # all threads have stored before one of them counts the program
        # At GPU scope though the stores lie at the peers: the last finisher, which acquires at this scope, answers for
        # them by the flags' release at system scope, see `primitives`.
        if tl.atomic_add(done + part, 1, sem="acq_rel", scope="gpu") == programs - 1:
            tl.store(done + part, 0)  # ready for the next exchange
            raise_flags(peers_ready, rank * parts + part, world_size, epoch, PEERS)


@lru_cache
def _pushing(
    schedule: str, world_size: int, dim: int, wire: torch.dtype, stride: int, *alignments: int
) -> CompiledKernel:
    block = power_of_2(dim)
    constants: dict[str, Any] = {
        "SCHEDULE": schedule,
        "PEERS": power_of_2(world_size),
        "ROWS": max(1, _TASK_ELEMENTS * _NUM_WARPS // block),
        "DIM": dim,
        "BLOCK_DIM": block,
        "WIRE": TYPES[wire],
        "STRIDE": stride,
    }
    names = ("WINDOW_ALIGNMENT", "SOURCE_ALIGNMENT", "START_ALIGNMENT")
    return CompiledKernel(
        _push_gradients, {"num_warps": _NUM_WARPS}, constants | dict(zip(names, alignments, strict=True))
    )


def push_gradients(
    gradient: torch.Tensor,
    tables: Sequence[ShardTable],
    windows: Windows,
    flags: PartFlags,
    rank: int,
    epoch: int,
    schedule: str,
    first_sample: int,
    batch: int,
    most_samples: int,
    scale: float,
    programs: int,
) -> None:
    """Store this rank's part of the gradient into the windows of its owners, and raise each part's flag to `epoch`.

    Args:
        gradient: [b, at least D_total] float32, rows `stride(0)` apart, at a multiple of 16 bytes.
        tables: one a dim, each with all parts.
        windows: each rank's, [D_local * B]; their stride is not used.
        first_sample: of this rank in the global batch.
        batch: samples of all ranks, B.
        most_samples: of a rank: all ranks walk the same tasks.
        scale: factor of every element.
        programs: of each launch, of 32 warps: links need few, and the rest of the GPU stays free.
    """
    assert gradient.stride(1) == 1
    assert gradient.data_ptr() % 16 == 0
    for table in tables:
        parts, world_size, most, _ = table.entries.shape
        form = _pushing(
            schedule, world_size, table.dim, windows.dtype, gradient.stride(0),
            windows.alignment, table.source_alignment, table.start_alignment,
        )  # fmt: skip
        form(
            programs,
            (gradient.dtype,),
            gradient,
            table.entries,
            table.counts,
            windows.addresses,
            flags.addresses,
            flags.done,
            rank,
            world_size,
            parts,
            most,
            -(-most_samples // form.constants["ROWS"]),
            gradient.shape[0],
            batch,
            first_sample,
            scale,
            programs * len(tables),
            epoch,
        )
