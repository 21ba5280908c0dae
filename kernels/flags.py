"""Ready flags: each rank signals its own flags at every rank, and waits for the peers' flags up to a timeout."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels import primitives
from dlrm_overlap.kernels.compiled import INTERPRETED, CompiledKernel, specialised
from dlrm_overlap.kernels.launches import Launch
from dlrm_overlap.kernels.tuning import power_of_2

_JIT_OPTIONS = {"do_not_specialize": ["rank", "world_size", "slots", "first_slot", "epoch", "timeout"]}


@dataclass(frozen=True, eq=False)
class Flags:
    """The ready flags of all ranks, and how this rank waits for those of its peers.

    A flag holds the epoch of the last step that signalled it; nothing is reset.
    """

    addresses: torch.Tensor
    """[W] int64, address of each rank's flags [W, slots] int64, of which rank w signals row w; only ranks of this node,
    if there are others"""
    clock: torch.Tensor
    """[1] int64 on the device: kernels add it to the epoch that they are given, see `comm/counters.py`"""
    local: torch.Tensor
    """[W, slots] int64: this rank's flags"""
    counts: torch.Tensor
    """[W] int32: the first counts[w] slots of row w are in use"""
    timeout: int
    """limit of a wait in ns; in turns under the interpreter"""
    status: torch.Tensor
    """[1 + kinds] int64: address of the records that the host polls, and a lock for each kind of record"""


@triton.jit(**_JIT_OPTIONS)
def _signal_flags(
    peers_ready,
    clock,
    rank,
    world_size,
    slots,
    first_slot,
    epoch: tl.int64,
    PEERS: tl.constexpr,
):
    """Set this rank's flag `first_slot` to `epoch` + `clock` at every rank; the grid is one program.

    Memory: `peers_ready` [W] int64 holds the addresses of the ranks' flags [W, slots]; one element of each is stored.
    `clock` [1] int64 is read.

    Order: one lane stores each flag, by a release at system scope. It covers all stores of earlier kernels of the
    stream into any rank's memory, since they end before this one begins.

    Example: rank 2 of 3 signals slot 1 of 4 with epoch 7: element 2 * 4 + 1 = 9 of each rank's flags becomes 7.
    """
    primitives.signal_flags(peers_ready, rank * slots + first_slot, world_size, epoch + tl.load(clock), PEERS)


@triton.jit(**_JIT_OPTIONS)
def _wait_for_flags(
    ready,
    counts,
    clock,
    status,
    rank,
    world_size,
    slots,
    epoch: tl.int64,
    timeout: tl.int64,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Wait, as program p, for the flags [p * BLOCK, (p + 1) * BLOCK) of `ready` [W, slots].

    Memory: the program reads this rank's flags until the first counts[w] of each row w have reached `epoch` + `clock`
    [1] int64. After `timeout` it writes a record of the missing flag by way of `status`, and stops the GPU's work.

    Order: the flags are read at system scope until all in use have reached the epoch, and are then acquired. The next
    kernels on the stream see the peers' stores before these signals.

    Example: rank 0 of 2, 3 slots, counts [0, 2], BLOCK 8: one program waits for elements 3 and 4, slots 0 and 1 of rank
    1.
    """
    first = tl.program_id(0) * BLOCK
    epoch = epoch + tl.load(clock)
    primitives.wait_for_flags(ready, counts, slots, first, rank, world_size, epoch, timeout, status, BLOCK, INTERPRETED)


def _wait_kernel(block: int) -> CompiledKernel:
    return specialised(_wait_for_flags, num_warps=max(1, block // 128), BLOCK=block, INTERPRETED=INTERPRETED)


def signal_flags(flags: Flags, rank: int, slot: int, epoch: int) -> None:
    """Set `slot` of `rank` to `epoch` + `flags.clock` at every rank that has an address, after all earlier work."""
    kernel, arguments = _signalling(flags, rank, slot, epoch)
    kernel(1, (), *arguments)


def prepare_signals(flags: Flags, rank: int, slot: int) -> Launch:
    """Return the launch of `signal_flags` that is called with the epoch alone."""
    kernel, arguments = _signalling(flags, rank, slot, epoch=0)
    return Launch(kernel, 1, (), arguments, changing=("epoch",))


def _signalling(flags: Flags, rank: int, slot: int, epoch: int) -> tuple[CompiledKernel, tuple[Any, ...]]:
    ranks = flags.addresses.numel()
    kernel = specialised(_signal_flags, num_warps=1, PEERS=power_of_2(ranks))
    return kernel, (flags.addresses, flags.clock, rank, ranks, flags.local.shape[1], slot, epoch)


def wait_flags(flags: Flags, rank: int, epoch: int) -> None:
    """Make the current stream wait until all flags in use at `rank` have reached `epoch` + `flags.clock`.

    A wait that lasts longer than `flags.timeout` is recorded and stops the GPU's work.
    """
    kernel, programs, arguments = _waiting(flags, rank, epoch)
    kernel(programs, (), *arguments)


def prepare_wait(flags: Flags, rank: int) -> Launch:
    """Return the launch of `wait_flags` that is called with the epoch alone."""
    kernel, programs, arguments = _waiting(flags, rank, epoch=0)
    return Launch(kernel, programs, (), arguments, changing=("epoch",))


def _waiting(flags: Flags, rank: int, epoch: int) -> tuple[CompiledKernel, int, tuple[Any, ...]]:
    (world_size, slots), block = flags.local.shape, min(1024, power_of_2(flags.local.numel()))
    arguments = flags.local, flags.counts, flags.clock, flags.status, rank, world_size, slots, epoch, flags.timeout
    return _wait_kernel(block), -(-flags.local.numel() // block), arguments
