"""Messages between nodes: both ends lay them out alike."""

from collections.abc import Sequence

import pytest
import torch

from dlrm_overlap.comm.reach import Reach
from dlrm_overlap.embedding.internode import InternodeLayout, Message
from dlrm_overlap.embedding.layout import FeatureShard, Layout
from dlrm_overlap.embedding.steps import BatchSizes
from tests.unit.embedding.shards import make_shard

DIMS = [[], [12], [4], [8, 4], [20]]  # of each rank's shards
HOSTS = (range(2), range(2, 4), range(4, 5))
BATCH = BatchSizes.of((3, 2, 4, 0, 5))


def _layouts(wire: torch.dtype = torch.float32, cut: Sequence[int] = ()) -> list[InternodeLayout]:
    """Return those of all ranks; `cut` are the owners of a table of 4 columns that is cut by rows."""
    shards = [
        FeatureShard(f"r{owner}_{i}", owner, 0, i, 0, i, 0, dim, False, torch.float32, f"r{owner}_{i}")
        for owner, dims in enumerate(DIMS)
        for i, dim in enumerate(dims)
    ]
    shards += [make_shard("cut", owner, 4, feature=9, rows=(i, i + 1), row_shard=i) for i, owner in enumerate(cut)]
    layout = Layout(shards, sorted({shard.name for shard in shards}, reverse=True), len(DIMS))
    return [InternodeLayout(layout, Reach(rank, HOSTS), wire) for rank in range(len(DIMS))]


@pytest.mark.parametrize("way", ["pooled", "gradients", "sums"])
def test_what_is_sent_is_what_is_received(way: str) -> None:
    every = [getattr(layout, way)(BATCH) for layout in _layouts(cut=[1, 2, 3])]
    sent = {(rank, m.peer): (m.rows, m.pitch) for rank, messages in enumerate(every) for m in messages.sent}
    received = {(m.peer, rank): (m.rows, m.pitch) for rank, messages in enumerate(every) for m in messages.received}
    assert sent == received
    assert len(sent) == len(DIMS) * (len(HOSTS) - 1), "one message a rank and other node"
    for messages in every:
        for each in messages:
            assert [m.peer for m in each] == sorted(m.peer for m in each), "in the order of a collective"
            assert [m.start for m in each] == [sum(m.elements for m in each[:i]) for i in range(len(each))]


def test_a_message_has_a_row_for_each_sample_of_the_node() -> None:
    """The nodes have 3 + 2, 4 + 0 and 5 samples."""
    for rank, to, here in ((0, [4, 5], 5), (1, [4, 5], 5), (2, [5, 5], 4), (3, [5, 5], 4), (4, [5, 4], 5)):
        messages = _layouts()[rank].pooled(BATCH)
        assert [message.rows for message in messages.sent] == to
        assert {message.rows for message in messages.received} <= {here}


def test_a_table_that_is_cut_by_rows_over_a_node_leaves_it_as_one_sum() -> None:
    layouts = _layouts(cut=[1, 2, 3])
    first, second, third = layouts[1], layouts[2], layouts[3]
    # Rank 1's partial sums are alone on their node, and travel as they are.
    assert first.pitch(first.pooled_columns[1]) == 12 + 4
    assert second.pitch(second.pooled_columns[2]) == 4
    assert list(second.sum_columns[HOSTS[1]].values()) == [0, 4], "rank 2's, where the sum is made, and rank 3's"
    # Ranks 0 and 4 are served by rank 2, rank 1 by rank 3, whose message to the last node is empty.
    assert second.gathered_at(4) == (2, 1)
    assert second.gathered_at(1) == (3, 0)
    assert second.sums(BATCH).sent == [Message(0, HOSTS[0], 0, 3, 4), Message(4, HOSTS[2], 12, 5, 4)]
    assert third.sums(BATCH).sent == [Message(1, HOSTS[0], 0, 2, 4), Message(4, HOSTS[2], 8, 0, 4)]
    # Its gradient is sent once: 4 columns of rank 2, 12 of rank 3, and these 4.
    assert first.gradients(BATCH).sent[0] == Message(3, HOSTS[1], 0, 2, 20)
    assert len(first.output_columns(HOSTS[1])) == len(set(first.output_columns(HOSTS[1]).tolist())) == 20
