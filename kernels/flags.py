"""Ready flags: a rank raises its own flags at every rank, and waits, for a bounded time, for the peers' flags."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels import primitives
from dlrm_overlap.kernels.compiled import INTERPRETED, CompiledKernel, specialised
from dlrm_overlap.kernels.launches import Launch
from dlrm_overlap.kernels.tuning import power_of_2

_GENERAL = {"do_not_specialize": ["rank", "world_size", "slots", "first_slot", "epoch", "timeout"]}


@dataclass(frozen=True, eq=False)
class Flags:
    """The ready flags of all ranks, and how this rank waits for those that its peers raise here.

    A flag holds the epoch of the last step for which it was raised; nothing is reset.
    """

    addresses: torch.Tensor
    """[W] int64: of each rank's flags, [W, slots] int64, whose row w rank w raises; only those of the ranks reached by
    stores, where there are others"""
    clock: torch.Tensor
    """[1] int64 on the device: kernels add it to the epoch that they are given, see `comm/counters.py`"""
    local: torch.Tensor
    """[W, slots] int64: this rank's flags"""
    counts: torch.Tensor
    """[W] int32: of row w, the first counts[w] slots are in use"""
    timeout: int
    """bound of a wait in ns; in turns under the interpreter"""
    status: torch.Tensor
    """[3] int64: address of the records that the host polls, and a lock for each kind of them"""


@triton.jit(**_GENERAL)
def _signal_flags(peers_ready, clock, rank, world_size, slots, first_slot, epoch: tl.int64, PEERS: tl.constexpr):
    """Raise this rank's flag `first_slot` to `epoch` + `clock` at every rank; the grid is one program.

    Memory: `peers_ready` [W] int64 holds the addresses of the ranks' flags [W, slots]; one element of each is stored.
    `clock` [1] int64 is read.

    Order: each flag is stored by a lane of its own, as a release at system scope. It covers all stores of earlier
    kernels of the stream into any rank's memory, since they end before this one begins.

    Example: rank 2 of 3 raises slot 1 of 4 to epoch 7: element 2 * 4 + 1 = 9 of each rank's flags becomes 7.
    """
    primitives.signal_flags(peers_ready, rank * slots + first_slot, world_size, epoch + tl.load(clock), PEERS)


@triton.jit(**_GENERAL)
def _wait_for_flags(
    ready, counts, clock, status, rank, world_size, slots, epoch: tl.int64, timeout: tl.int64,
    BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Wait, as program p, for the flags [p * BLOCK, (p + 1) * BLOCK) of `ready` [W, slots].

    Memory: the program reads this rank's flags, and of row w awaits the first counts[w], until they have reached
    `epoch` + `clock` [1] int64. When `timeout` has passed, it writes a record of the missing flag by way of `status`,
    and the kernel stops the GPU's work.

    Order: the flags are read at system scope until all in use have reached the epoch, and are then acquired. The
    kernels that follow on the stream see the peers' stores before they raised them.

    Example: rank 0 of 2, 3 slots, counts [0, 2], BLOCK 8: one program awaits elements 3 and 4, slots 0 and 1 of rank 1.
    """
    first = tl.program_id(0) * BLOCK
    epoch = epoch + tl.load(clock)
    primitives.wait_for_flags(ready, counts, slots, first, rank, world_size, epoch, timeout, status, BLOCK, INTERPRETED)


def _awaiting(block: int) -> CompiledKernel:
    return specialised(_wait_for_flags, num_warps=max(1, block // 128), BLOCK=block, INTERPRETED=INTERPRETED)


def signal_flags(flags: Flags, rank: int, slot: int, epoch: int) -> None:
    """Raise slot `slot` of `rank` to `epoch` + `flags.clock` at every rank that has an address, after all before it."""
    kernel, arguments = _raising(flags, rank, slot, epoch)
    kernel(1, (), *arguments)


def prepare_signals(flags: Flags, rank: int, slot: int) -> Launch:
    """Return the launch of `signal_flags` that is called with the epoch alone."""
    kernel, arguments = _raising(flags, rank, slot, epoch=0)
    return Launch(kernel, 1, (), arguments, changing=("epoch",))


def _raising(flags: Flags, rank: int, slot: int, epoch: int) -> tuple[CompiledKernel, tuple[Any, ...]]:
    ranks = flags.addresses.numel()
    kernel = specialised(_signal_flags, num_warps=1, PEERS=power_of_2(ranks))
    return kernel, (flags.addresses, flags.clock, rank, ranks, flags.local.shape[1], slot, epoch)


def wait_flags(flags: Flags, rank: int, epoch: int) -> None:
    """Make the current stream wait until all flags in use at `rank` have reached `epoch` + `flags.clock`.

    A wait that lasts longer than `flags.timeout` is recorded and stops the GPU's work.
    """
    kernel, programs, arguments = _awaited(flags, rank, epoch)
    kernel(programs, (), *arguments)


def prepare_wait(flags: Flags, rank: int) -> Launch:
    """Return the launch of `wait_flags` that is called with the epoch alone."""
    kernel, programs, arguments = _awaited(flags, rank, epoch=0)
    return Launch(kernel, programs, (), arguments, changing=("epoch",))


def _awaited(flags: Flags, rank: int, epoch: int) -> tuple[CompiledKernel, int, tuple[Any, ...]]:
    (world_size, slots), block = flags.local.shape, min(1024, power_of_2(flags.local.numel()))
    arguments = flags.local, flags.counts, flags.clock, flags.status, rank, world_size, slots, epoch, flags.timeout
    return _awaiting(block), -(-flags.local.numel() // block), arguments
