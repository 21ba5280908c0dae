"""The section `product` of a simulation's configuration."""

from dataclasses import dataclass
from typing import Literal

from dlrm_overlap.config import InputError, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class ProductConfig:
    """A matrix product [m, k] x [k, n] with k divided among the ranks, so that its results are summed over them.

    The defaults but m and n describe the GPU of the simulations of T3 (Pati et al. 2024); its rates are in `gpu`.
    """

    name: str = "T-NLG"
    """of the model, for the rows"""
    m: PositiveInt = 8192
    """rows of the result: the tokens of a batch"""
    n: PositiveInt = 4256
    """columns of the result: the hidden size"""
    layer: Literal["out", "fc2", "fc1_backward", "qkv_backward"] = "fc2"
    """of a transformer, which gives k: the attention's output, n; the second layer behind it, 4 n; the gradient of the
    first layer's input, 4 n; that of the input of queries, keys and values, 3 n"""
    k: PositiveInt | None = None
    """instead of what `layer` gives: terms of each sum, on all ranks together"""
    way: Literal["serial", "software", "near_memory", "arbitrated", "ideal"] = "serial"
    """serial: product, then reduce-scatter; software: finished parts are copied by copy engines and summed by kernels
    beside the product; near_memory: finished parts are sent by triggered copies and summed by the memory; arbitrated:
    the same, with the product's memory accesses first; ideal: product and reduce-scatter side by side, as if alone"""
    pattern: Literal["ring", "direct"] = "ring"
    """ring: a part goes from rank to rank, growing; direct, software only: a part goes to its owner, who sums all"""
    parts: NonNegativeInt = 0
    """direct: ranges in which the rows of the first and of the last owner are multiplied and sent, those of the first
    from small to large, those of the last the other way, as the way copies of our products has them; 0: whole"""
    gather: bool = True
    """whether an all-gather follows, so that the whole is an all-reduce"""
    element_bytes: PositiveInt = 2
    """of inputs and results"""
    programs: PositiveInt = 80
    """tiles that are computed at a time"""
    tile_m: PositiveInt = 128
    """rows of a tile of the result"""
    tile_n: PositiveInt = 128
    """columns of a tile of the result"""
    k_step: PositiveInt = 64
    """terms of the sums that a tile's program has loaded before it computes"""
    group_rows: PositiveInt = 8
    """rows of tiles that are computed column by column before the next ones"""
    cache_mb: PositiveFloat = 16.0
    """of the GPU's last cache"""
    update_factor: PositiveFloat = 2.0
    """time that the memory takes to add a byte to what it holds, over that of a plain write"""
    trigger_us: NonNegativeFloat = 5.0
    """software: from the end of a part's last tile to the begin of its copy"""
    sum_share: PositiveFloat = 0.25
    """software: part of the multiprocessors that the kernel that sums holds while it runs"""
    sum_gb_per_s: PositiveFloat = 750.0
    """software: of that kernel, bytes read and written"""

    def __post_init__(self) -> None:
        if self.pattern == "direct" and self.way in ("near_memory", "arbitrated"):
            raise InputError(
                f"product.pattern: direct, but product.way {self.way} sums along a ring; set product.pattern ring"
            )
        if self.sum_share >= 1:
            raise InputError(f"product.sum_share: {self.sum_share} must be below 1; the rest is left to the product")

    @property
    def terms(self) -> int:
        """Number of terms of each sum, on all ranks together."""
        return self.k or self.n * {"out": 1, "fc2": 4, "fc1_backward": 4, "qkv_backward": 3}[self.layer]
