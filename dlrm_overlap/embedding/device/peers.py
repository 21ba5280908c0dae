"""A pair of windows as the kernels take it: the peers' windows to store into, and the flags to raise and await."""

import torch

from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.embedding.protocol.windows import WindowPair
from dlrm_overlap.kernels.arguments import Windows
from dlrm_overlap.kernels.flags import Flags, raise_flags, wait_flags


def peer_windows(pair: WindowPair, stride: int, options: ExchangeOptions) -> list[Windows]:
    """Return the windows of all ranks of even epochs, and of odd ones; `stride` is a window's row, in elements."""
    return [Windows(pair.arena.addresses(name), stride, options.wire_dtype) for name in pair.names]


def skip_epoch(pair: WindowPair, status: torch.Tensor, options: ExchangeOptions) -> None:
    """Take an epoch of a pair in which nothing is stored: raise a flag at each rank, and await one of each."""
    flags = ready_flags(pair, torch.ones(pair.arena.world_size, dtype=torch.int32), status, options)
    pair.begin()
    raise_flags(flags, pair.arena.rank, 0, pair.counter.argument)
    wait_flags(flags, pair.arena.rank, pair.counter.argument)


def ready_flags(pair: WindowPair, counts: torch.Tensor, status: torch.Tensor, options: ExchangeOptions) -> Flags:
    """Return the flags of a pair.

    Args:
        counts: [W] int32, how many flags this rank awaits of each rank.
        status: [1 + kinds] int64 on the device, where a wait that expires is recorded: `Record.status`.
    """
    return Flags(
        addresses=pair.arena.addresses(pair.flags),
        clock=pair.counter.word,
        local=pair.arena.local(pair.flags),
        counts=counts.to(pair.arena.device),
        timeout=int(options.wait_timeout_s * 1e9),
        status=status,
    )
