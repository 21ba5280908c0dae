"""Where gradients lie at the owners of their rows: every rank's gradient window, alike known to all."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from dlrm_overlap.comm.arena import Region
from dlrm_overlap.embedding.protocol.layout import FeatureShard, Layout

GRADIENT_WINDOWS = ("gradients0", "gradients1")
GRADIENT_FLAGS = "gradients_ready"

_PART_BYTES = 32 << 20  # of a window: so much takes the links longer than the launches that a part costs
_MOST_PARTS = 6  # from here on the host's launches cost more than they hide


class GradientLayout:
    """The gradient windows [D_local * B], shard after shard, and their parts.

    A shard whose columns begin at `start` of D_local holds [B, D] from element start * B on. Parts are ranges of a
    rank's shards: the rows of one are updated while the next travels. Two windows take turns: a rank that has seen all
    flags of exchange e - 1 may write e, since its peers raise those after their updates of e - 2.
    """

    def __init__(self, layout: Layout, samples_per_rank: int, wire_dtype: torch.dtype) -> None:
        """Lay out the gradients of up to `samples_per_rank` samples a rank."""
        self._layout, self._wire_dtype = layout, wire_dtype
        self._elements = max(layout.owner_dims) * samples_per_rank * layout.world_size
        self.parts = max(1, min(_MOST_PARTS, self._elements * wire_dtype.itemsize // _PART_BYTES))

    def regions(self) -> Mapping[str, Region]:
        """Return what an arena must have."""
        flags = Region((self._layout.world_size, self.parts), torch.int64)
        return dict.fromkeys(GRADIENT_WINDOWS, Region((self._elements,), self._wire_dtype)) | {GRADIENT_FLAGS: flags}

    @cached_property
    def starts(self) -> Mapping[FeatureShard, int]:
        """The first column of each shard in its owner's D_local."""
        starts: dict[FeatureShard, int] = {}
        for shards in self._layout.by_owner:
            column = 0
            for shard in shards:
                starts[shard] = column
                column += shard.dim
        return starts

    @cached_property
    def part_of(self) -> Mapping[FeatureShard, int]:
        """The part of each shard: by the columns before its table, whose rows are all updated at once.

        The first part is half as long as the others: nothing is updated while it travels.
        """
        parts: dict[FeatureShard, int] = {}
        for rank, columns in enumerate(self._layout.owner_dims):
            for shards in self._layout.tables(rank):
                parts |= dict.fromkeys(shards, (self.starts[shards[0]] * (2 * self.parts - 1) // columns + 1) // 2)
        return parts

    @cached_property
    def shards(self) -> Sequence[Sequence[Sequence[FeatureShard]]]:
        """The shards by part, then by owner, in order."""
        return [
            [[shard for shard in shards if self.part_of[shard] == part] for shards in self._layout.by_owner]
            for part in range(self.parts)
        ]
