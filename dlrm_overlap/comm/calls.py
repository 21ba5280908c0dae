"""The arguments of a collective, on all ranks and on one of them alone, and the faults that they may have."""

from typing import Literal, NamedTuple, get_args

import torch

Way = Literal["auto", "dma", "stores"]
Beside = Literal["nothing", "compute"]
COPIED_FROM_BYTES = {
    ("nothing", False): 32 << 20,
    ("nothing", True): 32 << 20,
    ("compute", False): 32 << 20,
    ("compute", True): 1 << 20,
}
"""(beside, whether captured) -> bytes to a peer from which on copies are faster than stores, or leave the computation
beside more of its speed; on 4 x H200. Not captured, a copy takes the host 9 us. (docs/results/collectives.md)"""


class Place(NamedTuple):
    """How the tensors of a call lie on this rank, which may be otherwise on another."""

    alignment: int
    """bytes, a power of two up to 16, that divide the addresses and the sizes of all rows"""
    placed: str
    """how the input lies to the output: apart | in place (it is the row that this rank sends to itself) | across"""
    contiguous: bool
    """whether both tensors are"""
    here: bool
    """whether both are on this rank's device"""


class Call(NamedTuple):
    """A call of `PeerCollectives`, as far as it has to be alike on all ranks; by it the next one of its kind is known.

    The first of its kind is compared between the ranks.
    """

    name: str
    """all_to_all | all_gather"""
    offset: int
    """bytes: where the output begins in the memory of outputs"""
    output: tuple[int, ...]
    """its shape"""
    input: tuple[int, ...]
    """its shape"""
    output_dtype: torch.dtype
    input_dtype: torch.dtype
    way: str
    """a `Way`"""
    beside: str
    """a `Beside`"""

    def __str__(self) -> str:
        """Return the call as one of its ranks would write it."""
        return (
            f"{self.name}(output {self.output} {self.output_dtype} at byte {self.offset}, input {self.input} "
            f"{self.input_dtype}, {self.way}, {self.beside})"
        )

    def fault(self, place: Place, world_size: int, used_bytes: int) -> str:
        """Return the fault of the call, or an empty text.

        Args:
            place: of its tensors.
            world_size: ranks.
            used_bytes: of the memory of outputs, from its begin on.
        """
        if self.way not in get_args(Way):
            return f"way {self.way}: not a way; take one of {', '.join(get_args(Way))}"
        if self.beside not in get_args(Beside):
            return f"beside {self.beside}: not known; take one of {', '.join(get_args(Beside))}"
        if not place.here:
            return "a tensor is not on the device of the collectives; move it there"
        if not place.contiguous:
            return "a tensor is not contiguous; pass input.contiguous(), and an output that is"
        if self.output_dtype != self.input_dtype:
            return f"output {self.output_dtype}, input {self.input_dtype}: must be alike; cast the input"
        rows = (world_size, *self.input) if self.name == "all_gather" else self.input
        if self.output != rows or self.output[:1] != (world_size,):
            needed = "[W, n..] and [n..]" if self.name == "all_gather" else "both [W, n..]"
            return f"output {self.output}, input {self.input}: must be {needed}, W = {world_size}; reshape them"
        size = torch.Size(self.output).numel() * self.output_dtype.itemsize
        if not 0 <= self.offset <= self.offset + size <= used_bytes:
            return "the output is not in memory that the peers write to; take it from `empty`"
        if place.placed == "across" or (place.placed == "in place" and self.name != "all_gather"):
            return "input and output overlap; give the input memory of its own"
        return ""


def fastest_way(row_bytes: int, beside: str, captured: bool) -> str:
    """Return the way that `auto` takes.

    Args:
        row_bytes: that go to each peer.
        beside: nothing | compute: whether kernels that fill the GPU run at the same time.
        captured: whether the call becomes a part of a CUDA graph.
    """
    return "dma" if row_bytes >= COPIED_FROM_BYTES[beside, captured] else "stores"
