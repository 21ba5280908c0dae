"""Ready flags: each rank signals its flags at every rank, and waits for the peers' flags up to a timeout."""

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
    """The ready flags of all ranks. A flag holds the epoch of its last signal, and is never reset."""

    addresses: torch.Tensor
    """[W] int64: address of each rank's flags [W, slots] int64, row w signalled by rank w; ranks of this node only"""
    clock: torch.Tensor
    """[1] int64: added to epochs on the device, see `comm/counters.py`"""
    local: torch.Tensor
    """[W, slots] int64: this rank's flags"""
    counts: torch.Tensor
    """[W] int32: the first counts[w] slots of row w are in use"""
    timeout: int
    """ns; turns under the interpreter"""
    status: torch.Tensor
    """[1 + kinds] int64, see `primitives.record`"""


@triton.jit(**_JIT_OPTIONS)
def _signal_flags(
    peers_ready,  # [W] int64, addresses of flags [W, slots]
    clock,  # [1] int64, added to `epoch`
    rank,
    world_size,
    slots,
    first_slot,
    epoch: tl.int64,
    PEERS: tl.constexpr,
):
    """Set this rank's flag `first_slot` to `epoch` + `clock` at every rank; the grid is one program.

    Order: releases at system scope, which cover all stores of earlier kernels on the stream.
    """
    primitives.signal_flags(peers_ready, rank * slots + first_slot, world_size, epoch + tl.load(clock), PEERS)


@triton.jit(**_JIT_OPTIONS)
def _wait_for_flags(
    ready,  # [W, slots] int64
    counts,  # [W] int32, flags in use
    clock,  # [1] int64, added to `epoch`
    status,
    rank,
    world_size,
    slots,
    epoch: tl.int64,
    timeout: tl.int64,  # ns; turns under the interpreter
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Wait, as program p, for the flags [p * BLOCK, (p + 1) * BLOCK); see `primitives.wait_for_flags`.

    Order: acquires at system scope: the next kernels on the stream see the peers' stores before these signals.
    """
    first = tl.program_id(0) * BLOCK
    epoch = epoch + tl.load(clock)
    primitives.wait_for_flags(ready, counts, slots, first, rank, world_size, epoch, timeout, status, BLOCK, INTERPRETED)


def _wait_kernel(block: int) -> CompiledKernel:
    return specialised(_wait_for_flags, num_warps=max(1, block // 128), BLOCK=block, INTERPRETED=INTERPRETED)


def signal_flags(flags: Flags, rank: int, slot: int, epoch: int) -> None:
    """Set `slot` of `rank` to `epoch` + `flags.clock` at every rank of the node, after all earlier work."""
    kernel, arguments = _signalling(flags, rank, slot, epoch)
    kernel(1, (), *arguments)


def prepare_signals(flags: Flags, rank: int, slot: int) -> Launch:
    """Return the launch of `signal_flags`, called with the epoch."""
    kernel, arguments = _signalling(flags, rank, slot, epoch=0)
    return Launch(kernel, 1, (), arguments, changing=("epoch",))


def _signalling(flags: Flags, rank: int, slot: int, epoch: int) -> tuple[CompiledKernel, tuple[Any, ...]]:
    ranks = flags.addresses.numel()
    kernel = specialised(_signal_flags, num_warps=1, PEERS=power_of_2(ranks))
    return kernel, (flags.addresses, flags.clock, rank, ranks, flags.local.shape[1], slot, epoch)


def wait_flags(flags: Flags, rank: int, epoch: int) -> None:
    """Make the current stream wait until all flags in use at `rank` have reached `epoch` + `flags.clock`.

    After `flags.timeout` the wait is recorded and stops the GPU's work.
    """
    kernel, programs, arguments = _waiting(flags, rank, epoch)
    kernel(programs, (), *arguments)


def prepare_wait(flags: Flags, rank: int) -> Launch:
    """Return the launch of `wait_flags`, called with the epoch."""
    kernel, programs, arguments = _waiting(flags, rank, epoch=0)
    return Launch(kernel, programs, (), arguments, changing=("epoch",))


def _waiting(flags: Flags, rank: int, epoch: int) -> tuple[CompiledKernel, int, tuple[Any, ...]]:
    (world_size, slots), block = flags.local.shape, min(1024, power_of_2(flags.local.numel()))
    arguments = flags.local, flags.counts, flags.clock, flags.status, rank, world_size, slots, epoch, flags.timeout
    return _wait_kernel(block), -(-flags.local.numel() // block), arguments
