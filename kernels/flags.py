"""Ready flags: raising one's own at every rank, and the bounded wait for the peers'."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels import primitives
from dlrm_overlap.kernels.arguments import power_of_2
from dlrm_overlap.kernels.launch import INTERPRETED, Form

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
    first = tl.program_id(0) * BLOCK
    primitives.await_flags(ready, counts, slots, first, rank, world_size, epoch, timeout, status, BLOCK, INTERPRETED)


@lru_cache
def _raising(world_size: int) -> Form:
    return Form(_raise_flags, {"num_warps": 1}, {"PEERS": power_of_2(world_size)})


@lru_cache
def _awaiting(block: int) -> Form:
    return Form(_await_flags, {"num_warps": max(1, block // 128)}, {"BLOCK": block, "INTERPRETED": INTERPRETED})


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
