"""A pair of windows as the kernels take it: the peers' windows to store into, and the flags to raise and await."""

from dataclasses import replace

import torch

from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.embedding.protocol.windows import WindowPair, one_flag_each
from dlrm_overlap.kernels.arguments import Windows
from dlrm_overlap.kernels.flags import Flags, raise_flags, wait_flags


def peer_windows(pair: WindowPair, stride: int, options: ExchangeOptions) -> list[Windows]:
    """Return the windows of the ranks reached, of even epochs and of odd ones; `stride` is a row's, in elements."""
    return [Windows(pair.arena.addresses(name), stride, options.wire_dtype) for name in pair.names]


def skip_epoch(pair: WindowPair, status: torch.Tensor, options: ExchangeOptions) -> None:
    """Take an epoch of a pair in which nothing is stored: raise a flag at each rank reached, and await one of each.

    Only ranks of this host store into its windows, so those of other hosts need not be awaited.
    """
    flags = ready_flags(pair, one_flag_each(pair.arena.reached, pair.arena.world_size), status, options)
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


def flags_among(flags: Flags, reached: range) -> Flags:
    """Return the flags that the ranks reached raise at each other, as if they were all ranks, for who raises them.

    Rank i of these has row i, as `Flags` says, since each address is that of the first one's row. They are not awaited:
    `local` and `counts` are of the shape alone.
    """
    if len(reached) == len(flags.local):
        return flags
    row_bytes = flags.local.shape[1] * flags.local.element_size()
    ranks, addresses = len(reached), flags.addresses + reached.start * row_bytes
    return replace(flags, addresses=addresses, local=flags.local[:ranks], counts=flags.counts[:ranks])
