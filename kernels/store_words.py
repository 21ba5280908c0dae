"""Stores ids of 64 bits as their words, as windows have them; see `wide_ids`."""

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.compiled import INTERPRETED, in_aligned_memory, specialised
from dlrm_overlap.kernels.ids import id_map
from dlrm_overlap.kernels.ids.probing import mix

_BLOCK, _NUM_WARPS = 1024, 4


@triton.jit(do_not_specialize=["count"])
def _store_words(ids, low, high, count, MIX: tl.constexpr, BLOCK: tl.constexpr):
    """Store the low words of `count` ids, int32 or int64, to `low` and the high words to `high`, int32 each.

    With MIX, these are the words of the hashes `mix` of the ids.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = position < count
    id = tl.load(ids + position, mask=live, other=0).to(tl.int64)
    if MIX:
        id = mix(id).to(tl.int64, bitcast=True)
    tl.store(low + position, id.to(tl.int32), mask=live)
    tl.store(high + position, (id >> 32).to(tl.int32), mask=live)


def store_words(ids: torch.Tensor, low: torch.Tensor, high: torch.Tensor, mixes: bool = False) -> None:
    """Store the words of `ids` [n], int32 or int64, to `low` and `high`, [n] int32 each.

    If `mixes`, ids are first replaced by the bijective hash `mix`.
    """
    if not (ids.is_cuda or INTERPRETED):
        wide = id_map.mix(ids.long()) if mixes else ids.long()
        for window, words in zip((low, high), reference.split_words(wide), strict=True):
            window.copy_(words)
        return
    ids = in_aligned_memory(ids)
    kernel = specialised(_store_words, num_warps=_NUM_WARPS, MIX=mixes, BLOCK=_BLOCK)
    kernel(-(-ids.numel() // _BLOCK), (ids.dtype,), ids, low, high, ids.numel())
