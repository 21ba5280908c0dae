"""Ids on their way to the owners of their rows: how many there may be, and where each is stored; all ranks agree.

Every rank publishes the ids of its samples in a window of its own, and raises a flag. The owners of the rows read the
ids of their tables there. The ids arrive as one input: those of an owner's shards, feature after feature, each with the
bags of rank 0's samples first. The CPU knows nothing that depends on the batch, so all offsets are found on the device
or, where every bag of a feature has the same number of ids, beforehand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from dlrm_overlap.comm.arena import Region
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.layout import FeatureShard, Layout
from dlrm_overlap.embedding.windows import WindowSpec

_ALIGNMENT = 4  # int32 words, to which the offsets of a window are aligned


@dataclass(frozen=True)
class BatchCapacity:
    """The most that a rank brings to a step; memory and launches are sized by it.

    Example: BatchCapacity(512, {"user": (1, 1), "clicks": (0, 50)}, {"clicks": 4000}) is for batches of up to 512
    samples, each with one user and up to 50 clicks, and with up to 4000 clicks in all.
    """

    samples: int
    """the most samples of a rank, b"""
    bag_sizes: Mapping[str, tuple[int, int]]
    """the least and the most ids of a bag, by feature. Where the two agree for every feature, lengths are never read"""
    ids: Mapping[str, int] = field(default_factory=dict)
    """the most ids of a batch, by feature; of a feature that is left out, those of `samples` bags of the most ids"""
    distinct: Mapping[str, int] = field(default_factory=dict)
    """the most distinct ids of a batch, by table of an unpooled collection; of a table that is left out, all ids"""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise InputError(
                f"BatchCapacity: {self.samples} samples, but a batch has at least 1; give those of a rank's batch"
            )
        for name, sizes in self.bag_sizes.items():
            if not isinstance(sizes, tuple | list) or len(sizes) != 2 or not 0 <= sizes[0] <= sizes[1]:
                raise InputError(f"BatchCapacity: {sizes} ids a bag of {name} is no range; give (least, most)")
        for name, most in (*self.ids.items(), *self.distinct.items()):
            if most < 0:
                raise InputError(
                    f"BatchCapacity: {most} ids of {name} in a batch, but they are 0 or more; leave it out"
                )

    @property
    def known_lengths(self) -> bool:
        """Whether every bag of a feature has the same number of ids."""
        return all(least == most for least, most in self.bag_sizes.values())

    @property
    def mean_bag_sizes(self) -> dict[str, float]:
        """The ids of a bag, by feature: half way between the least and the most, or of the most ids of a batch."""
        middles = {name: (least + most) / 2 for name, (least, most) in self.bag_sizes.items()}
        return middles | {name: most / self.samples for name, most in self.ids.items()}

    def capacity(self, keys: Sequence[str]) -> list[int]:
        """Return the most ids of a rank's batch, by feature.

        Raises:
            InputError: if a feature has no bound.
        """
        for key in keys:
            if key not in self.bag_sizes:
                raise InputError(f"BatchCapacity: no bound for the ids of feature {key}; name it in bag_sizes")
        most = {key: self.samples * self.bag_sizes[key][1] for key in keys}
        return [min(most[key], self.ids.get(key, most[key])) for key in keys]


_EVERY_ID = 1 << 32  # more than any id, also than those below 0, which kernels read as numbers without a sign


class Share(NamedTuple):
    """The ids of one feature that are of one row shard of its table; the shard's rows count from 0."""

    key: int
    """index of the feature in the keys"""
    first: int
    """first id of the shard"""
    end: int
    """the id after its last; beyond all ids for the last shard that has rows, whose owner finds those outside"""


@dataclass(frozen=True)
class IdLayout:
    """Where ids are in a rank's window, and where they arrive.

    Where tables are cut by rows, a window has the ids of all features, then those of every share, which are sorted out
    where they are published. The offsets are those of the features, of a feature of no interest between, and of the
    shares: T features, then, from T + 1 on, the shares.

    Example: features f of 1 id a bag and g of 0 .. 2, 3 samples a rank, W = 2. A window has room for 3 + 6 ids, then
    the offsets of 2 * 3 bags. An owner of g alone has room for 2 * 6 ids.
    """

    layout: Layout
    """the shards of all ranks, with one input a rank: see `joined`"""
    keys: Sequence[str]
    """the features in the order in which every batch has them"""
    bound: BatchCapacity
    weighted: bool = False
    """whether ids have weights, which then travel with them"""

    @cached_property
    def capacity(self) -> list[int]:
        """The most ids of a rank's batch, by feature in order of `keys`."""
        return self.bound.capacity(self.keys)

    @cached_property
    def values(self) -> int:
        """The most ids of a rank's batch."""
        return sum(self.capacity)

    @cached_property
    def shares(self) -> list[Share]:
        """The shares of the tables that are cut by rows, alike on all ranks."""
        return sorted(set(self._share_of.values()))

    @cached_property
    def _share_of(self) -> dict[FeatureShard, Share]:
        rows: dict[str, int] = {}
        cut = [s for shards in self.layout.by_owner for s in shards if s.is_cut_by_rows]
        for shard in cut:
            rows[shard.name] = max(rows.get(shard.name, 0), shard.rows[1])
        index = self.keys.index
        return {shard: Share(index(shard.feature_name), *_ids_of(shard.rows, rows[shard.name])) for shard in cut}

    def published(self, shard: FeatureShard) -> int:
        """Return which of the published features has the ids of a shard; of a table that is cut by rows, its share."""
        if shard.is_cut_by_rows:
            return len(self.keys) + 1 + self.shares.index(self._share_of[shard])
        return self.keys.index(shard.feature_name)

    def knows_empty_bags(self, shard: FeatureShard) -> bool:
        """Return whether the samples' rank sends no gradient of a shard's empty bags, see `Step.own_offsets`."""
        return shard.is_cut_by_rows or shard.slots

    @property
    def known_lengths(self) -> bool:
        """Whether every bag that is published has a number of ids that is known beforehand."""
        return self.bound.known_lengths and not self.shares

    @cached_property
    def shared_values(self) -> int:
        """The most ids of a rank's batch in shares; every id of a feature is in one share of each of its cuts."""
        cuts: dict[tuple[str, int], set[Share]] = {}
        for shard, share in self._share_of.items():
            cuts.setdefault((shard.name, shard.first_column), set()).add(share)
        different = {tuple(sorted(cut)) for cut in cuts.values()}
        return sum(self.capacity[shares[0].key] for shares in different)

    @cached_property
    def published_capacity(self) -> list[int]:
        """The most ids of each feature and, where there are shares, of the feature between and of each share."""
        if not self.shares:
            return self.capacity
        return [*self.capacity, self.shares_at, *(self.capacity[share.key] for share in self.shares)]

    @cached_property
    def shares_at(self) -> int:
        """First word of the ids in shares."""
        return -(-self.values // _ALIGNMENT) * _ALIGNMENT

    def known_total(self, samples: int) -> int:
        """Return the ids of a rank's batch of `samples`, where lengths are known beforehand."""
        return samples * sum(self.bound.bag_sizes[key][1] for key in self.keys)

    @cached_property
    def weights_at(self) -> int:
        """Words from an id to its weight, where ids have weights: those of all ids follow the last id."""
        return -(-(self.shares_at + self.shared_values) // _ALIGNMENT) * _ALIGNMENT

    @cached_property
    def offsets_at(self) -> int:
        """First word of a window's offsets."""
        return self.weights_at * (1 + self.weighted)

    @property
    def windows(self) -> WindowSpec:
        """The windows of the ids in every rank's arena: int32 ids, then the int32 offsets of all bags; one flag a rank.

        Where ids have weights, these are between, float32. Where lengths are known, the number of ids is there in place
        of the offsets.
        """
        offsets = 0 if self.known_lengths else len(self.published_capacity) * self.bound.samples
        return WindowSpec("ids", Region((self.offsets_at + offsets + 1,), torch.int32), 1)

    def features(self, rank: int) -> list[int]:
        """Return of each feature shard of `rank` which of the published features it looks up, see `published`."""
        return [self.published(shard) for shard in self.layout.by_owner[rank]]

    def arriving(self, features: Sequence[int], sources: int) -> int:
        """Return the most ids of `features`, as `features()` returns them, that arrive from `sources` ranks."""
        return sources * sum(self.published_capacity[feature] for feature in features)

    def known_offsets(self, features: Sequence[int], bags: int) -> torch.Tensor:
        """Return [F * bags + 1] int32: the offsets of the bags of F features that have known lengths.

        Args:
            features: indices in `keys`.
            bags: of each feature.
        """
        sizes = torch.tensor(
            [self.bound.bag_sizes[self.keys[feature]][1] for feature in features], dtype=torch.int32, device="cpu"
        )
        ends = sizes.repeat_interleave(bags).cumsum(0, dtype=torch.int32)
        return torch.cat([ends.new_zeros(1), ends])

    def known_arrivals(
        self, features: Sequence[int], sources: int, samples: int
    ) -> tuple[list[int], list[int], list[int], list[int]]:
        """Return where ids are that have known lengths, for batches of `samples`.

        Args:
            features: indices in `keys` of F features.
            sources: ranks whose ids of these features arrive, S.
            samples: of a rank.

        Returns:
            For each feature and each source, [F * S]: the first id in the source's window, the number of ids, and where
            they arrive; then the offsets at which the F features' bags begin, and the end, [F + 1].
        """
        sizes = [self.bound.bag_sizes[key][1] * samples for key in self.keys]
        starts = [0, *accumulate(sizes)]
        counts = [sizes[feature] for feature in features for _ in range(sources)]
        firsts = [starts[feature] for feature in features for _ in range(sources)]
        arrivals = [0, *accumulate(counts)]
        return firsts, counts, arrivals[:-1], arrivals[::sources]


def _ids_of(rows: tuple[int, int], table_rows: int) -> tuple[int, int]:
    """Return the first id and the end of a row shard's share, in a table of `table_rows` rows."""
    first, end = rows
    if first == end:
        return _EVERY_ID, _EVERY_ID
    return first, _EVERY_ID if end == table_rows else end


def joined(layout: Layout) -> Layout:
    """Return the layout of the same shards whose ids are all in one input of their owner, in the same order."""
    shards: list[FeatureShard] = []
    for owned in (*layout.by_owner, layout.replicated):
        shards += [replace(shard, input=0, feature=index) for index, shard in enumerate(owned)]
    return Layout(shards, layout.names, layout.world_size)
