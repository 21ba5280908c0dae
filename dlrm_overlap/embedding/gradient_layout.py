"""Where gradients of pooled embeddings arrive, and in which parts they are sent."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate

import torch

from dlrm_overlap.comm.arena import Region
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.layout import FeatureShard, Layout
from dlrm_overlap.embedding.windows import WindowSpec

_PART_BYTES = 32 << 20  # sending less takes less time than a part's kernel launches
_HEAVY = 0.25  # tables with a larger share of a rank's ids are sent first
_MAX_ELEMENTS = 1 << 33  # of a window: `RowUpdate` counts 4 elements as one, in 32 bits
_MAX_PARTS = 6  # with more, the CPU's launches cost more than the overlap saves


class GradientLayout:
    """The gradient windows [D_local * B], shard by shard, and the parts in which gradients are sent.

    The gradient [B, D] of the shard at column `start` of D_local begins at element start * B, so a table's gradients
    are contiguous. A part is a group of tables with its own flag: rows of one part are updated while the gradients
    of the next part are sent.

    Example: B is 2, a rank has shards of dims 4 and 8. The first gradient is [2, 4] at elements 0 .. 7, the second [2,
    8] at 8 .. 23.

    Args:
        samples_per_rank: largest number of samples of a rank.
        bag_ids: feature -> ids of a bag, identical on every rank; None if unknown.

    Raises:
        InputError: if a window would have more than 2^33 elements.
    """

    def __init__(
        self,
        layout: Layout,
        samples_per_rank: int,
        wire_dtype: torch.dtype,
        bag_ids: Mapping[str, float] | None = None,
    ) -> None:
        self._layout, self._wire_dtype, self._bag_ids = layout, wire_dtype, bag_ids or {}
        columns, samples = max(layout.owner_dims), samples_per_rank * layout.world_size
        self._elements = columns * samples
        if self._elements > _MAX_ELEMENTS:
            raise InputError(
                f"gradients: {columns} columns of a rank for {samples} samples of all ranks are more than "
                f"{_MAX_ELEMENTS} elements; take a smaller train.batch_size, or a plan whose ranks have fewer columns"
            )
        parts = min(_MAX_PARTS, self._elements * wire_dtype.itemsize // _PART_BYTES)
        self.parts = max(1, parts) if self._elements else 0
        """number of parts; 0 if nothing is exchanged, since no kernel would signal a part's flag"""

    @property
    def windows(self) -> WindowSpec:
        return WindowSpec("gradients", Region((self._elements,), self._wire_dtype), max(1, self.parts))

    @cached_property
    def starts(self) -> Mapping[FeatureShard, int]:
        """Each shard's first column in its owner's D_local."""
        starts: dict[FeatureShard, int] = {}
        for shards in self._layout.by_owner:
            starts |= zip(shards, accumulate((shard.dim for shard in shards), initial=0), strict=False)
        return starts

    @cached_property
    def part_of(self) -> Mapping[FeatureShard, int]:
        """The part of each shard, by the columns sent before its table; a table is in one part.

        The first part is half as large as the others, since no rows are updated while it is sent.
        """
        parts: dict[FeatureShard, int] = {}
        for rank, columns in enumerate(self._layout.owner_dims):
            before = 0
            for shards in self._in_order(rank):
                parts |= dict.fromkeys(shards, (before * (2 * self.parts - 1) // columns + 1) // 2)
                before += sum(shard.dim for shard in shards)
        return parts

    def _in_order(self, rank: int) -> Sequence[Sequence[FeatureShard]]:
        tables = self._layout.tables(rank)
        ids = [sum(self._bag_ids.get(shard.feature_name, 0.0) for shard in shards) for shards in tables]
        total = max(sum(ids), 1e-9)
        heavy_first = sorted(zip(ids, tables, strict=True), key=lambda pair: pair[0] / total <= _HEAVY)
        return [table for _, table in heavy_first]

    @cached_property
    def shards(self) -> Sequence[Sequence[Sequence[FeatureShard]]]:
        """The shards of each part, by part and then by owner."""
        return [
            [[shard for shard in shards if self.part_of[shard] == part] for shards in self._layout.by_owner]
            for part in range(self.parts)
        ]

    def views(
        self, shards: Iterable[FeatureShard], window: torch.Tensor, samples: int
    ) -> Mapping[FeatureShard, torch.Tensor]:
        """Return the gradient [B, D] of each shard as a view of their owner's `window`; `samples` is B."""
        found: dict[FeatureShard, torch.Tensor] = {}
        for shard in shards:
            start = self.starts[shard] * samples
            found[shard] = window[start : start + samples * shard.dim].view(samples, shard.dim)
        return found
