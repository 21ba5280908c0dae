"""Ready flags: raising one's own at every rank, and the bounded wait for the peers'."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels import primitives
from dlrm_overlap.kernels.arguments import power_of_2
from dlrm_overlap.kernels.compiled import INTERPRETED, CompiledKernel

_GENERAL = {"do_not_specialize": ["rank", "world_size", "slots", "first_slot", "epoch", "timeout"]}


@dataclass(frozen=True)
class Flags:
    """Ready flags and their waits."""

    addresses: torch.Tensor
    """[W] int64: of each rank's flags, [W, slots] int64, row w raised by rank w"""
    local: torch.Tensor
    """[W, slots] int64: this rank's own"""
    counts: torch.Tensor
    """[W] int32: slots that rank w raises"""
    timeout: int
    """a wait's bound in ns; turns under the interpreter"""
    status: torch.Tensor
    """[3] int64: address of the records that the host polls, and a lock for each kind of them"""


@triton.jit(**_GENERAL)
def _raise_flags(peers_ready, rank, world_size, slots, first_slot, epoch: tl.int64, PEERS: tl.constexpr):
    """Raise this rank's flag `first_slot` to `epoch` at every rank; the grid is one program.

    Each peer's flag is one store, by a lane of its own: a release at system scope, of all that the kernels before this
    one on the stream have stored, into any rank's memory, since their end precedes this one's beginning.

    Example: rank 2 of 3, which have 4 slots a rank, raises slot 1 to epoch 7: element 2 * 4 + 1 = 9 of the flags of
    ranks 0, 1 and 2 becomes 7.
    """
    primitives.raise_flags(peers_ready, rank * slots + first_slot, world_size, epoch, PEERS)


@triton.jit(**_GENERAL)
def _await_flags(
    ready,
    counts,
    status,
    rank,
    world_size,
    slots,
    epoch: tl.int64,
    timeout: tl.int64,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Await the flags [p * BLOCK, (p + 1) * BLOCK) of `ready` [W, slots], as program p, see `primitives.await_flags`.

    Flags are read at system scope until all that `counts` says are in use have reached `epoch`, and acquired then, so
    that what their ranks stored before them is seen by the kernels that follow on the stream. When `timeout` has
    passed, a record of the missing flag is written by way of `status`, and the kernel stops the GPU's work.

    Example: rank 0 of 2, 3 slots a rank, counts 0 and 2: one program awaits elements 3 and 4, slots 0 and 1 of rank 1.
    """
    first = tl.program_id(0) * BLOCK
    primitives.await_flags(ready, counts, slots, first, rank, world_size, epoch, timeout, status, BLOCK, INTERPRETED)


@lru_cache
def _raising(world_size: int) -> CompiledKernel:
    return CompiledKernel(_raise_flags, {"num_warps": 1}, {"PEERS": power_of_2(world_size)})


@lru_cache
def _awaiting(block: int) -> CompiledKernel:
    return CompiledKernel(
        _await_flags, {"num_warps": max(1, block // 128)}, {"BLOCK": block, "INTERPRETED": INTERPRETED}
    )


def raise_flags(flags: Flags, rank: int, slot: int, epoch: int) -> None:
    """Raise slot `slot` of `rank` to `epoch` at every rank, after everything before it on the stream."""
    world_size, slots = flags.local.shape
    _raising(world_size)(1, (), flags.addresses, rank, world_size, slots, slot, epoch)


def wait_flags(flags: Flags, rank: int, epoch: int) -> None:
    """Let the stream wait until all slots of `flags.counts` have reached `epoch`, `flags.timeout` at most."""
    world_size, slots = flags.local.shape
    block = min(1024, power_of_2(world_size * slots))
    _awaiting(block)(
        -(-world_size * slots // block),
        (),
        flags.local,
        flags.counts,
        flags.status,
        rank,
        world_size,
        slots,
        epoch,
        flags.timeout,
    )
