"""The ways of a collective into the peers' memory, and the rule that chooses one."""

from typing import Literal

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


def fastest_way(row_bytes: int, beside: str, captured: bool) -> str:
    """Return the way that `auto` takes.

    Args:
        row_bytes: that go to each peer.
        beside: nothing | compute: whether kernels that fill the GPU run at the same time.
        captured: whether the call becomes a part of a CUDA graph.
    """
    return "dma" if row_bytes >= COPIED_FROM_BYTES[beside, captured] else "stores"
