"""An All-to-All by plain stores and nothing else, which measures how fast the links carry what our kernels send."""

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK_ELEMENTS = 4096
_PROGRAMS = 128  # half of them fill the links of an H200
_NUM_WARPS = 8  # 16 bytes a lane, four times a block


@triton.jit(do_not_specialize=["rank", "world_size"])
def _store_to_peers(source, landings, rank, world_size, elements, BLOCK: tl.constexpr):
    """Copy the blocks p, p + P, .. of `source` to the peers' landings, as program p of P.

    Memory: `source` [W, elements] float32 is on this rank; its row w, cut into blocks of BLOCK elements, goes to row
    `rank` of rank w's landing [W, elements], whose address is landings[w]. Blocks take turns among the peers, from the
    next rank on, so that no two ranks send to one peer alone.

    Order: no two programs store to one place; the stores are complete when the kernel ends.

    Example: rank 1 of 3, two blocks a row: 2a 0a 2b 0b, where 2a is the first block of row 2, which goes to rank 2.
    """
    peers = world_size - 1
    for turn in range(tl.program_id(0), peers * (elements // BLOCK), tl.num_programs(0)):
        peer = (rank + 1 + turn % peers) % world_size
        at = (turn // peers).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        landing = tl.multiple_of(tl.load(landings + peer).to(tl.pointer_type(tl.float32)), 16)
        rows = tl.load(source + peer.to(tl.int64) * elements + at)
        tl.store(landing + rank.to(tl.int64) * elements + at, rows)


def store_to_peers(source: torch.Tensor, landings: torch.Tensor, rank: int) -> None:
    """Store row w of `source` to row `rank` of rank w's landing, for every peer w.

    The stores are complete when the kernel ends; no flag is raised.

    Args:
        source: [W, n] float32, contiguous, n a multiple of BLOCK_ELEMENTS.
        landings: [W] int64, the address of each rank's landing, [W, n] float32.
        rank: of the caller.

    Example:
        rank 1 of 3 stores its row 2 to row 1 of rank 2's landing, and its row 0 to row 1 of rank 0's.
    """
    world_size, elements = source.shape
    assert elements % BLOCK_ELEMENTS == 0
    options: dict[str, Any] = {"BLOCK": BLOCK_ELEMENTS, "num_warps": _NUM_WARPS}
    _store_to_peers[(_PROGRAMS,)](source, landings, rank, world_size, elements, **options)
