"""Where each gradient is stored at the rows' owner, and which gradients travel together; every rank knows it all."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from dlrm_overlap.comm.arena import Region
from dlrm_overlap.embedding.protocol.layout import FeatureShard, Layout
from dlrm_overlap.embedding.protocol.windows import WindowSpec

_PART_BYTES = 32 << 20  # of a window: so much takes the links longer than the launches that a part costs
_MOST_PARTS = 6  # from here on the host's launches cost more than they hide


class GradientLayout:
    """The gradient windows [D_local * B], shard after shard, and the parts in which gradients travel.

    A shard whose columns begin at `start` of D_local has its gradient [B, D] from element start * B on, so that a
    table's gradients are together while its rows are updated. Parts are ranges of a rank's tables: the rows of one
    part are updated while the next part travels. A part has a flag of its own.

    Example: B is 2, a rank has shards of dims 4 and 8. The first one's gradient is [2, 4] at elements 0 .. 7, the
    second one's [2, 8] at 8 .. 23.
    """

    def __init__(self, layout: Layout, samples_per_rank: int, wire_dtype: torch.dtype) -> None:
        """Lay out the gradients of up to `samples_per_rank` samples a rank."""
        self._layout, self._wire_dtype = layout, wire_dtype
        self._elements = max(layout.owner_dims) * samples_per_rank * layout.world_size
        self.parts = max(1, min(_MOST_PARTS, self._elements * wire_dtype.itemsize // _PART_BYTES))

    @property
    def windows(self) -> WindowSpec:
        """What the gradients need in every rank's arena: a flag a part."""
        return WindowSpec("gradients", Region((self._elements,), self._wire_dtype), self.parts)

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
        """The part of each shard, by the columns before its table, whose rows are all updated at once.

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
