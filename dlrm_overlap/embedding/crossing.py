"""The messages of a step that crosses from host to host, and the offsets of all values in them; both ends agree on it.

A rank sends one message to each other host in the forward, and one in the backward: to the rank there that takes its
messages, which passes them on to the ranks of that host by stores (`Reach.relay`). A message is made of rows, one a
sample, that begin at multiples of 16 bytes.

    forward     of rank w, to host H:  a row for each sample of H's ranks, with the columns of w's shards, in order
    backward    of rank r, to host H:  a row for each sample of r, with the columns of the shards of all ranks of H

So as many bytes are sent as in an All-to-All, but there are as many messages as hosts, not as ranks. Where ids go to
their owners by the exchange, a third message brings the window in which a rank has published its ids, whole, since its
size is known beforehand; the ranks of the host read it where it has arrived, at the rank that takes it.

Example: hosts of ranks 0, 1 and 2, 3, of 5 samples each. Rank 1 owns shards of 12 columns, rank 2 of 4, rank 3 of 8.
Forward, rank 1 sends rank 3 a message of 10 rows of 12: samples of rank 2, then of rank 3. Backward, it sends rank 3
one of 5 rows of 12: the gradients of rank 2's 4 columns, then of rank 3's 8.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from dlrm_overlap.comm.arena import Arena, Region
from dlrm_overlap.comm.reach import Reach
from dlrm_overlap.embedding.layout import FeatureShard, Layout
from dlrm_overlap.embedding.steps import BatchSizes, StepCache
from dlrm_overlap.embedding.windows import WindowSpec

_ROW_BYTES = 16  # divide every row, so that kernels read and write 16 bytes at a time


class Message(NamedTuple):
    """One message, and where it is in the buffer that holds all that are sent, or all that are received."""

    peer: int
    """the rank to which it goes, or from which it comes"""
    host: range
    """the ranks of the peer's host"""
    start: int
    """its first element"""
    rows: int
    pitch: int
    """elements from row to row"""

    @property
    def elements(self) -> int:
        """Elements of the message."""
        return self.rows * self.pitch

    def within(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the message [rows, pitch] in its buffer, which is flat."""
        return buffer[self.start : self.start + self.elements].view(self.rows, self.pitch)


class Messages(NamedTuple):
    """The messages of a forward or of a backward on one rank, in the order of their peers."""

    sent: Sequence[Message]
    received: Sequence[Message]


class Crossing:
    """The messages between hosts on one rank, for any batch."""

    def __init__(self, layout: Layout, reach: Reach, wire_dtype: torch.dtype) -> None:
        self.reach, self._layout = reach, layout
        self._unit = _ROW_BYTES // wire_dtype.itemsize
        self._pooled, self._gradients = (StepCache[BatchSizes, Messages]() for _ in range(2))

    def columns_of(self, ranks: Sequence[int]) -> Mapping[FeatureShard, int]:
        """Return the first column of each shard of `ranks` in a row that has those of all of them, in order."""
        shards = [shard for rank in ranks for shard in self._layout.by_owner[rank]]
        starts = [0, *accumulate(shard.dim for shard in shards)]
        return dict(zip(shards, starts[:-1], strict=True))

    def pitch(self, ranks: Sequence[int]) -> int:
        """Return the elements from row to row of a message with the columns of the shards of `ranks`."""
        return -(-sum(self._layout.owner_dims[rank] for rank in ranks) // self._unit) * self._unit

    def output_columns(self, ranks: Sequence[int]) -> torch.Tensor:
        """Return [pitch] int64: of each column of such a row the output's column; those after the last repeat it."""
        columns = torch.cat([self._layout.owner_columns(rank) for rank in ranks])
        padding = self.pitch(ranks) - columns.numel()
        return torch.cat([columns, columns[-1:].repeat(padding)]) if padding else columns

    def pooled(self, batch: BatchSizes) -> Messages:
        """Return the messages of pooled embeddings."""
        return self._pooled.get(batch, self._pooled_of, batch)

    def _pooled_of(self, batch: BatchSizes) -> Messages:
        reach, here = self.reach, self._samples(self.reach.here, batch)
        mine = self.pitch([reach.rank])
        sent = [(self._samples(host, batch), mine) for host in self._other_hosts]
        return self._messages(sent, [(here, self.pitch([source])) for source in reach.sources])

    def gradients(self, batch: BatchSizes) -> Messages:
        """Return the messages of their gradients."""
        return self._gradients.get(batch, self._gradients_of, batch)

    def _gradients_of(self, batch: BatchSizes) -> Messages:
        reach, each = self.reach, batch.per_rank
        sent = [(each[reach.rank], self.pitch(host)) for host in self._other_hosts]
        return self._messages(sent, [(each[source], self.pitch(reach.here)) for source in reach.sources])

    @property
    def _other_hosts(self) -> Sequence[range]:
        return [host for host in self.reach.hosts if host != self.reach.here]

    @staticmethod
    def _samples(host: range, batch: BatchSizes) -> int:
        return batch.first_sample[host.stop] - batch.first_sample[host.start]

    def _messages(self, sent: Sequence[tuple[int, int]], received: Sequence[tuple[int, int]]) -> Messages:
        """Return the messages whose rows and pitches these are."""
        reach = self.reach
        to = [reach.relay(reach.rank, host) for host in self._other_hosts]
        return Messages(self._laid_out(to, sent), self._laid_out(reach.sources, received))

    def _laid_out(self, peers: Sequence[int], shapes: Sequence[tuple[int, int]]) -> list[Message]:
        starts = [0, *accumulate(rows * pitch for rows, pitch in shapes)]
        return [
            Message(peer, self.reach.host_of(peer), start, *shape)
            for peer, start, shape in zip(peers, starts[:-1], shapes, strict=True)
        ]


def arrival_regions(spec: WindowSpec, reach: Reach) -> Mapping[str, Region]:
    """Return the regions in which windows of other hosts' ranks arrive, alike on all ranks: one for either window."""
    if reach.whole:
        return {}
    window = Region((max(1, reach.most_taken), *spec.window.shape), spec.window.dtype)
    return {_arrivals(name): window for name in (f"{spec.name}0", f"{spec.name}1")}


def published_window(arena: Arena, name: str, rank: int) -> torch.Tensor:
    """Return window `name` of `rank` as it is seen here: its own or, of another host's, the copy that has arrived."""
    reach = arena.reach
    if rank in reach.here:
        return arena.view(name, rank)
    relay = reach.relay(rank, reach.here)
    return arena.view(_arrivals(name), relay)[reach.taken_by(relay).index(rank)]


def arriving_windows(arena: Arena, name: str) -> torch.Tensor:
    """Return the windows `name` that arrive at this rank, flat, in the order of their ranks."""
    return arena.local(_arrivals(name))[: len(arena.reach.sources)].flatten()


def _arrivals(name: str) -> str:
    return f"{name}_arrived"
