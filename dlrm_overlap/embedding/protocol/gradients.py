"""Where each gradient is stored at the rows' owner, and which gradients travel together; every rank knows it all."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from dlrm_overlap.comm.arena import Region
from dlrm_overlap.embedding.protocol.layout import FeatureShard, Layout
from dlrm_overlap.embedding.protocol.windows import WindowSpec

_PART_BYTES = 32 << 20  # of a window: so much takes the links longer than the launches that a part costs
_HEAVY = 0.25  # share of a rank's ids from which a table travels first
_MOST_PARTS = 6  # from here on the host's launches cost more than they hide


class GradientLayout:
    """The gradient windows [D_local * B], shard after shard, and the parts in which gradients travel.

    A shard whose columns begin at `start` of D_local has its gradient [B, D] from element start * B on, so that a
    table's gradients are together while its rows are updated. Parts are some of a rank's tables: the rows of one part
    are updated while the next part travels. A part has a flag of its own. Where the ids of a bag are known, tables of
    more than a quarter of a rank's ids travel first, since their update takes longest.

    Example: B is 2, a rank has shards of dims 4 and 8. The first one's gradient is [2, 4] at elements 0 .. 7, the
    second one's [2, 8] at 8 .. 23.
    """

    def __init__(
        self,
        layout: Layout,
        samples_per_rank: int,
        wire_dtype: torch.dtype,
        bag_ids: Mapping[str, float] | None = None,
        most_parts: int | None = None,
    ) -> None:
        """Lay out the gradients of up to `samples_per_rank` samples a rank.

        Args:
            bag_ids: feature -> ids of a bag, alike on all ranks; None where nobody knows.
            most_parts: None takes up to six.
        """
        self._layout, self._wire_dtype, self._bag_ids = layout, wire_dtype, bag_ids or {}
        self._elements = max(layout.owner_dims) * samples_per_rank * layout.world_size
        self.parts = max(1, min(most_parts or _MOST_PARTS, self._elements * wire_dtype.itemsize // _PART_BYTES))

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
        """The part of each shard, by the columns that travel before its table, whose rows are updated at once.

        The first part is half as long as the others: nothing is updated while it travels.
        """
        parts: dict[FeatureShard, int] = {}
        for rank, columns in enumerate(self._layout.owner_dims):
            before = 0
            for shards in self._in_order(rank):
                parts |= dict.fromkeys(shards, (before * (2 * self.parts - 1) // columns + 1) // 2)
                before += sum(shard.dim for shard in shards)
        return parts

    def _in_order(self, rank: int) -> Sequence[Sequence[FeatureShard]]:
        """Return the rank's shards by table, in the order in which they travel."""
        tables = self._layout.tables(rank)
        ids = [sum(self._bag_ids.get(shard.feature_name, 0.0) for shard in shards) for shards in tables]
        heavy = [each / max(sum(ids), 1e-9) > _HEAVY for each in ids]
        first = [table for table, travels_first in zip(tables, heavy, strict=True) if travels_first]
        return first + [table for table, travels_first in zip(tables, heavy, strict=True) if not travels_first]

    @cached_property
    def shards(self) -> Sequence[Sequence[Sequence[FeatureShard]]]:
        """The shards by part, then by owner, in order."""
        return [
            [[shard for shard in shards if self.part_of[shard] == part] for shards in self._layout.by_owner]
            for part in range(self.parts)
        ]
