"""The messages that a step sends between nodes; sender and receiver compute the same layout.

A rank sends one message to each other node in the forward, and one in the backward, to a fixed rank there
(`Reach.relay`), which passes it on to the ranks of its node by stores. A message has a row for each sample; rows begin
at multiples of 16 bytes.

    forward     from rank w to node H:  a row for each sample of H's ranks, with the columns of w's shards, in order
    sums        from rank w to node H:  a row for each sample of the ranks of H that w serves, with the columns of the
                                        sums that w's node makes
    backward    from rank r to node H:  a row for each sample of r, with the columns of the shards of all ranks of H

If several ranks of a node own rows of a table, the node sends only their sums (on GPUs): the rank that receives the
messages of a rank r of another node *serves* r, which means that it gathers and adds up the partial sums for r's
samples. The gradient of the sum is sent once. If the exchange sends ids, one more message has the window in which a
rank has published them; the ranks of the node read it where it arrives.

Example: nodes of ranks 0, 1 and 2, 3, with 5 samples each. Rank 1 owns shards of 12 columns, rank 2 of 4, rank 3 of 8.
In the forward rank 1 sends 10 rows of 12 to rank 3: samples of rank 2, then of rank 3. In the backward it sends 5 rows
of 12: the gradients of rank 2's 4 columns, then of rank 3's 8. If ranks 2 and 3 each own rows of a table of 4 columns,
rank 3 gathers two partial sums for each sample of rank 1, and sends it a row of 4.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from dlrm_overlap.comm.arena import Arena, Region
from dlrm_overlap.comm.reach import Reach
from dlrm_overlap.embedding.layout import FeatureShard, Layout, column_numbers
from dlrm_overlap.embedding.steps import BatchSizes
from dlrm_overlap.embedding.windows import WindowSpec

_ROW_BYTES = 16  # rows are multiples of it, so that kernels read and write 16 bytes at a time


class Message(NamedTuple):
    """A message to or from rank `peer` of `node`: `rows` rows of `pitch` elements.

    It begins at element `start` of a flat buffer, which has all messages that the rank sends, or all that it receives.
    """

    peer: int
    node: range
    start: int
    rows: int
    pitch: int

    @property
    def elements(self) -> int:
        return self.rows * self.pitch

    def within(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return a view [rows, pitch] of the buffer."""
        return buffer[self.start : self.start + self.elements].view(self.rows, self.pitch)


class Messages(NamedTuple):
    """One rank's messages in one direction of a step, in the order of their peers."""

    sent: Sequence[Message]
    received: Sequence[Message]


class InternodeLayout:
    """The messages of one rank, for any batch; unless `with_sums`, partial sums are sent without being added up."""

    def __init__(self, layout: Layout, reach: Reach, wire_dtype: torch.dtype, with_sums: bool = True) -> None:
        self.reach, self._layout, self._wire_dtype = reach, layout, wire_dtype
        self._unit = _ROW_BYTES // wire_dtype.itemsize
        cache = lru_cache(maxsize=64)
        self.pooled, self.sums, self.gradients = cache(self._pooled), cache(self._sums), cache(self._gradients)
        """functions that return the `Messages` of a batch, given its `BatchSizes`"""
        sums = layout.partial_sums if with_sums else ()
        on_nodes = {node: [each.on(node) for each in sums] for node in reach.nodes}
        self.sums_on = {node: [shards for shards in found if len(shards) > 1] for node, found in on_nodes.items()}
        """by node, the row shards of each sum that it makes for samples of other nodes"""
        added = {shard for found in self.sums_on.values() for shards in found for shard in shards}
        self.has_sums = bool(added and reach.max_sources)
        self.pooled_columns = [_side_by_side([s for s in shards if s not in added]) for shards in layout.by_owner]
        """by rank, the first column of each of its shards in a row of a forward message"""
        self.sum_columns = {node: _sum_columns(found) for node, found in self.sums_on.items()}
        """by node, the first column of each shard in a row of partial sums gathered there. Columns of each sum's first
        shard come first: the sum replaces them, and a message has only these"""
        self.gradient_columns = {node: self._gradient_columns(node) for node in reach.nodes}
        """by node, the first column of each of its shards in a row of gradients; shards of one sum have the same"""

    def _gradient_columns(self, node: range) -> Mapping[FeatureShard, int]:
        shards = [shard for rank in node for shard in self._layout.by_owner[rank]]
        first = {shard: shards[0] for shards in self.sums_on[node] for shard in shards}
        columns = _side_by_side([shard for shard in shards if first.get(shard, shard) is shard])
        return {shard: columns[first.get(shard, shard)] for shard in shards}

    def pitch(self, columns: Mapping[FeatureShard, int]) -> int:
        """Return the number of elements of a row with these columns, rounded up to a multiple of 16 bytes."""
        return -(-max((column + shard.dim for shard, column in columns.items()), default=0) // self._unit) * self._unit

    def _sum_pitch(self, node: range) -> int:
        return self.pitch(_side_by_side([shards[0] for shards in self.sums_on[node]]))

    def output_columns(self, node: range) -> torch.Tensor:
        """Return [pitch] int64: the output's column for each column of a row of gradients; padding repeats the last."""
        columns = self.gradient_columns[node]
        ranges = {column: (self._layout.output_column(shard), shard.dim) for shard, column in columns.items()}
        found = column_numbers(list(ranges.values()))
        padding = self.pitch(columns) - found.numel()
        return torch.cat([found, found[-1:].repeat(padding)]) if padding else found

    def served(self, rank: int, node: range) -> Sequence[int]:
        """Return the ranks of `node` that `rank`, of another node, serves, in order."""
        return [each for each in self.reach.sources_of(rank) if each in node]

    def gathered_at(self, rank: int) -> tuple[int, int]:
        """Return which rank of this node serves `rank`, and the position of `rank` among those it serves."""
        gatherer = self.reach.relay(rank, self.reach.here)
        return gatherer, self.reach.sources_of(gatherer).index(rank)

    def sum_windows(self, samples: int) -> WindowSpec | None:
        """Return the windows that gather partial sums, `samples` rows for each rank served; None without sums."""
        if not self.has_sums:
            return None
        widest = max(self.pitch(self.sum_columns[node]) for node in self.reach.nodes)
        return WindowSpec("sums", Region((self.reach.max_sources * samples * widest,), self._wire_dtype), 1)

    def _pooled(self, batch: BatchSizes) -> Messages:
        reach, here = self.reach, self._samples(self.reach.here, batch)
        mine = self.pitch(self.pooled_columns[reach.rank])
        sent = [(self._samples(node, batch), mine) for node in self._other_nodes]
        received = [(here, self.pitch(self.pooled_columns[source])) for source in reach.sources]
        return self._messages(sent, received)

    def _sums(self, batch: BatchSizes) -> Messages:
        reach, mine = self.reach, self._sum_pitch(self.reach.here)

        def rows(rank: int, node: range) -> int:
            return sum(batch.per_rank[each] for each in self.served(rank, node))

        sent = [(rows(reach.rank, node), mine) for node in self._other_nodes]
        received = [(rows(source, reach.here), self._sum_pitch(reach.node_of(source))) for source in reach.sources]
        return self._messages(sent, received)

    def _gradients(self, batch: BatchSizes) -> Messages:
        reach, each = self.reach, batch.per_rank
        sent = [(each[reach.rank], self.pitch(self.gradient_columns[node])) for node in self._other_nodes]
        mine = self.pitch(self.gradient_columns[reach.here])
        return self._messages(sent, [(each[source], mine) for source in reach.sources])

    @property
    def _other_nodes(self) -> Sequence[range]:
        return [node for node in self.reach.nodes if node != self.reach.here]

    @staticmethod
    def _samples(node: range, batch: BatchSizes) -> int:
        return batch.first_sample[node.stop] - batch.first_sample[node.start]

    def _messages(self, sent: Sequence[tuple[int, int]], received: Sequence[tuple[int, int]]) -> Messages:
        reach = self.reach
        to = [reach.relay(reach.rank, node) for node in self._other_nodes]
        return Messages(self._laid_out(to, sent), self._laid_out(reach.sources, received))

    def _laid_out(self, peers: Sequence[int], shapes: Sequence[tuple[int, int]]) -> list[Message]:
        starts = [0, *accumulate(rows * pitch for rows, pitch in shapes)]
        return [
            Message(peer, self.reach.node_of(peer), start, *shape)
            for peer, start, shape in zip(peers, starts[:-1], shapes, strict=True)
        ]


def _side_by_side(shards: Sequence[FeatureShard]) -> Mapping[FeatureShard, int]:
    """Return the first column of each shard in a row that has all shards' columns, in order."""
    starts = [0, *accumulate(shard.dim for shard in shards)]
    return dict(zip(shards, starts[:-1], strict=True))


def _sum_columns(sums: Sequence[Sequence[FeatureShard]]) -> Mapping[FeatureShard, int]:
    return _side_by_side([*(shards[0] for shards in sums), *(shard for shards in sums for shard in shards[1:])])


def arrival_regions(spec: WindowSpec, reach: Reach) -> Mapping[str, Region]:
    """Return the regions in which the two windows of other nodes' ranks arrive; same on every rank."""
    if reach.is_one_node:
        return {}
    window = Region((max(1, reach.max_sources), *spec.window.shape), spec.window.dtype)
    return {_arrivals(name): window for name in (f"{spec.name}0", f"{spec.name}1")}


def published_window(arena: Arena, name: str, rank: int) -> torch.Tensor:
    """Return window `name` of `rank`; if it is of another node, the copy that has arrived on this node."""
    reach = arena.reach
    if rank in reach.here:
        return arena.view(name, rank)
    relay = reach.relay(rank, reach.here)
    return arena.view(_arrivals(name), relay)[reach.sources_of(relay).index(rank)]


def arriving_windows(arena: Arena, name: str) -> torch.Tensor:
    """Return the windows `name` that arrive at this rank, flat, in rank order."""
    return arena.local(_arrivals(name))[: len(arena.reach.sources)].flatten()


def _arrivals(name: str) -> str:
    return f"{name}_arrived"
