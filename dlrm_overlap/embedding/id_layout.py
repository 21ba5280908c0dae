"""The sizes of a batch's ids, and the windows in which they are published; the same on every rank."""

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

_ALIGNMENT = 4  # int32 words


@dataclass(frozen=True)
class BatchCapacity:
    """The largest batch of a rank; memory and launches are sized by it.

    Example: BatchCapacity(512, {"user": (1, 1), "clicks": (0, 50)}, {"clicks": 4000}) is for up to 512 samples, each
    with one user and up to 50 clicks, and up to 4000 clicks in all.
    """

    samples: int
    """largest number of samples of a rank, b"""
    bag_sizes: Mapping[str, tuple[int, int]]
    """feature -> (least, most) ids of a bag; if these are equal for every feature, lengths are never read"""
    ids: Mapping[str, int] = field(default_factory=dict)
    """feature -> largest number of ids of a batch; by default `samples` times the largest bag"""
    distinct: Mapping[str, int] = field(default_factory=dict)
    """unpooled table -> largest number of distinct ids of a batch; by default all ids"""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise InputError(
                f"BatchCapacity: {self.samples} samples, but a batch has at least 1; give the samples of a rank's batch"
            )
        for name, sizes in self.bag_sizes.items():
            if not isinstance(sizes, tuple | list) or len(sizes) != 2 or not 0 <= sizes[0] <= sizes[1]:
                raise InputError(f"BatchCapacity: {sizes} ids a bag of {name} is not a range; give (least, most)")
        for name, most in (*self.ids.items(), *self.distinct.items()):
            if most < 0:
                raise InputError(
                    f"BatchCapacity: {most} ids of {name} in a batch, but it must be 0 or more; leave it out"
                )

    @property
    def known_lengths(self) -> bool:
        return all(least == most for least, most in self.bag_sizes.values())

    @property
    def mean_bag_sizes(self) -> dict[str, float]:
        """Estimated mean ids of a bag, by feature: from `ids`, or else the middle of the range in `bag_sizes`."""
        means = {name: (least + most) / 2 for name, (least, most) in self.bag_sizes.items()}
        return means | {name: most / self.samples for name, most in self.ids.items()}

    def capacity(self, keys: Sequence[str]) -> list[int]:
        """Return the largest number of ids of each feature of `keys`; an InputError if one has no bag size."""
        for key in keys:
            if key not in self.bag_sizes:
                raise InputError(f"BatchCapacity: feature {key} has no bag size; add it to bag_sizes")
        most = {key: self.samples * self.bag_sizes[key][1] for key in keys}
        return [min(most[key], self.ids.get(key, most[key])) for key in keys]


_EVERY_ID = 1 << 32  # above every id; kernels read negative ids as unsigned numbers


class Share(NamedTuple):
    """The ids of feature `key` that name rows of one row shard of its table, or any ids that belong to its buckets."""

    key: int
    first: int
    """first id, or bucket"""
    end: int
    """end of the shard's ids, or buckets. For the last shard with rows it is above every id, since the shard's owner
    reports ids out of range"""
    buckets: int = 0
    """number of buckets of the whole table; 0 unless it is a table of any id"""


@dataclass(frozen=True)
class IdLayout:
    """Positions of ids in a rank's window, and where they arrive.

    The window has the ids of all T features. If tables are cut by rows, the same ids follow once more, sorted into
    shares when they are published. Published features are numbered: 0 .. T - 1 are `keys`, T is a separator, and the
    shares follow from T + 1 on.

    The rows of a table of any id are divided into B buckets of equal size, and each row shard has whole buckets. An id
    is any int64, and belongs to bucket `unsigned id % B`. If there is such a table, the layout is `wide`: a window also
    has the high words of all ids.

    Example: features f of 1 id a bag and g of 0 .. 2, 3 samples a rank, W = 2. A window has room for 3 + 6 ids, then
    the offsets of 2 * 3 bags. An owner of g alone has room for 2 * 6 ids.
    """

    layout: Layout
    """with one input for each rank, see `joined`"""
    keys: Sequence[str]
    """the T features in the order of every batch"""
    batch_capacity: BatchCapacity
    weighted: bool = False
    mixes: bool = False
    """whether ids are replaced by a bijective hash when they are published, so that they spread over all buckets"""

    @cached_property
    def capacity(self) -> list[int]:
        """Largest number of ids of a rank's batch, by feature."""
        return self.batch_capacity.capacity(self.keys)

    @cached_property
    def values(self) -> int:
        return sum(self.capacity)

    @cached_property
    def shares(self) -> list[Share]:
        return sorted(set(self._share_of.values()))

    @cached_property
    def _share_of(self) -> dict[FeatureShard, Share]:
        rows: dict[str, int] = {}
        cut = [s for shards in self.layout.by_owner for s in shards if s.is_cut_by_rows]
        for shard in cut:
            rows[shard.name] = max(rows.get(shard.name, 0), shard.rows[1])
        index = self.keys.index
        return {shard: Share(index(shard.feature_name), *_ids_of(shard, rows[shard.name])) for shard in cut}

    @cached_property
    def wide(self) -> bool:
        """True if some tables are of any id; the same on every rank."""
        return any(shard.buckets for shards in self.layout.by_owner for shard in shards)

    def published(self, shard: FeatureShard) -> int:
        """Return the number of the published feature, or share, that has a shard's ids."""
        if shard.is_cut_by_rows:
            return len(self.keys) + 1 + self.shares.index(self._share_of[shard])
        return self.keys.index(shard.feature_name)

    def knows_empty_bags(self, shard: FeatureShard) -> bool:
        """Return whether ranks know which bags of a shard are empty, and send no gradients for them; see
        `Step.own_offsets`.
        """
        return shard.is_cut_by_rows or shard.slots

    @property
    def known_lengths(self) -> bool:
        return self.batch_capacity.known_lengths and not self.shares

    @cached_property
    def shared_values(self) -> int:
        """Largest number of ids in all shares; each cut of a table counts its feature's ids once."""
        cuts: dict[tuple[str, int], set[Share]] = {}
        for shard, share in self._share_of.items():
            cuts.setdefault((shard.name, shard.first_column), set()).add(share)
        different = {tuple(sorted(cut)) for cut in cuts.values()}
        return sum(self.capacity[shares[0].key] for shares in different)

    @cached_property
    def published_capacity(self) -> list[int]:
        """Largest number of ids of each feature, then of the separator and each share."""
        if not self.shares:
            return self.capacity
        return [*self.capacity, self.shares_at, *(self.capacity[share.key] for share in self.shares)]

    @cached_property
    def shares_at(self) -> int:
        """Index of the first word of the shares' ids in a window; a word is an int32."""
        return _aligned(self.values)

    def known_total(self, samples: int) -> int:
        return samples * sum(self.batch_capacity.bag_sizes[key][1] for key in self.keys)

    @cached_property
    def weights_at(self) -> int:
        """Number of words from an id to its weight."""
        return _aligned(self.shares_at + self.shared_values)

    @cached_property
    def high_at(self) -> int:
        """Number of words from an id to its high word, if the layout is `wide`."""
        return self.weights_at * (1 + self.weighted)

    @cached_property
    def offsets_at(self) -> int:
        """Index of the first word of the offsets in a window."""
        return self.weights_at * (1 + self.weighted + self.wide)

    @property
    def windows(self) -> WindowSpec:
        """int32 ids, float32 weights if any, int32 high words if `wide`, then int32 offsets of bags or, with known
        lengths, the number of ids.
        """
        offsets = 0 if self.known_lengths else len(self.published_capacity) * self.batch_capacity.samples
        return WindowSpec("ids", Region((self.offsets_at + offsets + 1,), torch.int32), 1)

    def features(self, rank: int) -> list[int]:
        return [self.published(shard) for shard in self.layout.by_owner[rank]]

    def arriving(self, features: Sequence[int], sources: int) -> int:
        """Return the largest number of ids that arrive from `sources` ranks; `features` are numbers of `published`."""
        return sources * sum(self.published_capacity[feature] for feature in features)

    def known_offsets(self, features: Sequence[int], bags: int) -> torch.Tensor:
        """Return the offsets of bags whose lengths the capacity fixes, feature by feature, on the CPU.

        Args:
            features: indices of F features, all bags of which have the same length.
            bags: bags of each feature.

        Returns:
            [F * bags + 1] int32, in ids.
        """
        sizes = torch.tensor(
            [self.batch_capacity.bag_sizes[self.keys[feature]][1] for feature in features],
            dtype=torch.int32,
            device="cpu",
        )
        ends = sizes.repeat_interleave(bags).cumsum(0, dtype=torch.int32)
        return torch.cat([ends.new_zeros(1), ends])

    def known_arrivals(
        self, features: Sequence[int], sources: int, samples: int
    ) -> tuple[list[int], list[int], list[int], list[int]]:
        """Return the positions of ids with known lengths, for `samples` samples from each of S = `sources` ranks.

        Returns:
            Three lists [F * S], for each of the F `features` and each source: the first id in the source's window, the
            number of ids, and where they arrive. Then [F + 1]: where each feature's bags begin, and the end.
        """
        sizes = [self.batch_capacity.bag_sizes[key][1] * samples for key in self.keys]
        starts = [0, *accumulate(sizes)]
        counts = [sizes[feature] for feature in features for _ in range(sources)]
        firsts = [starts[feature] for feature in features for _ in range(sources)]
        arrivals = [0, *accumulate(counts)]
        return firsts, counts, arrivals[:-1], arrivals[::sources]


def _aligned(words: int) -> int:
    return -(-words // _ALIGNMENT) * _ALIGNMENT


def _ids_of(shard: FeatureShard, table_rows: int) -> tuple[int, int, int]:
    """Return the first id, or bucket, of a row shard, the end, and the number of its table's buckets."""
    first, end = shard.rows
    if shard.buckets:
        size = shard.bucket_rows or table_rows // shard.buckets
        table_rows = size * shard.buckets if shard.bucket_rows else table_rows  # `name` may be a range of the table
        assert table_rows == size * shard.buckets, f"{shard.name}: {table_rows} rows, but {shard.buckets} buckets"
        assert first % size == end % size == 0, f"{shard.name}: rows {first} to {end}, but buckets have {size} rows"
        return first // size, end // size, shard.buckets
    if first == end:
        return _EVERY_ID, _EVERY_ID, 0
    return first, _EVERY_ID if end == table_rows else end, 0


def joined(layout: Layout) -> Layout:
    """Return the layout with all ids of an owner in one input."""
    shards: list[FeatureShard] = []
    for owned in (*layout.by_owner, layout.replicated):
        shards += [replace(shard, input=0, feature=index) for index, shard in enumerate(owned)]
    return Layout(shards, layout.names, layout.world_size)
