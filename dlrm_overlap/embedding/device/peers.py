"""A pair of windows as the kernels take it: the peers' windows to store into, and the flags to raise and await."""

import torch

from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.embedding.protocol.windows import WindowPair
from dlrm_overlap.kernels.arguments import Windows
from dlrm_overlap.kernels.flags import Flags


def peer_windows(pair: WindowPair, stride: int, options: ExchangeOptions) -> list[Windows]:
    """Return the windows of all ranks of even epochs, and of odd ones; `stride` is a window's row, in elements."""
    return [Windows(pair.arena.addresses(name), stride, options.wire_dtype) for name in pair.names]


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
