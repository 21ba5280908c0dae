"""Messages between hosts: both ends lay them out alike."""

import pytest
import torch

from dlrm_overlap.comm.reach import Reach
from dlrm_overlap.embedding.crossing import Crossing, Message
from dlrm_overlap.embedding.layout import FeatureShard, Layout
from dlrm_overlap.embedding.steps import BatchSizes

DIMS = [[], [12], [4], [8, 4], [20]]  # of each rank's shards
HOSTS = (range(2), range(2, 4), range(4, 5))
BATCH = BatchSizes.of((3, 2, 4, 0, 5))


def _crossings(wire: torch.dtype = torch.float32) -> list[Crossing]:
    shards = [
        FeatureShard(f"r{owner}_{i}", owner, 0, i, 0, i, 0, dim, False, torch.float32, f"r{owner}_{i}")
        for owner, dims in enumerate(DIMS)
        for i, dim in enumerate(dims)
    ]
    layout = Layout(shards, sorted((shard.name for shard in shards), reverse=True), len(DIMS))
    return [Crossing(layout, Reach(rank, HOSTS), wire) for rank in range(len(DIMS))]


@pytest.mark.parametrize("way", ["pooled", "gradients"])
def test_what_is_sent_is_what_is_received(way: str) -> None:
    every = [getattr(crossing, way)(BATCH) for crossing in _crossings()]
    sent = {(rank, m.peer): (m.rows, m.pitch) for rank, messages in enumerate(every) for m in messages.sent}
    received = {(m.peer, rank): (m.rows, m.pitch) for rank, messages in enumerate(every) for m in messages.received}
    assert sent == received
    assert len(sent) == len(DIMS) * (len(HOSTS) - 1), "one message a rank and other host"
    for messages in every:
        for each in messages:
            assert [m.peer for m in each] == sorted(m.peer for m in each), "in the order of a collective"
            assert [m.start for m in each] == [sum(m.elements for m in each[:i]) for i in range(len(each))]


def test_the_messages_of_an_example() -> None:
    # Rank 1 owns 12 columns. Rank 3 takes its message for ranks 2 and 3, who own 4 and 12; rank 4 that for itself.
    one = _crossings()[1]
    assert one.pooled(BATCH).sent == [Message(3, HOSTS[1], 0, 4 + 0, 12), Message(4, HOSTS[2], 48, 5, 12)]
    assert one.gradients(BATCH).sent == [Message(3, HOSTS[1], 0, 2, 16), Message(4, HOSTS[2], 32, 2, 20)]
    assert [m.peer for m in one.pooled(BATCH).received] == [3]


def test_rows_are_filled_up_to_16_bytes() -> None:
    crossing = _crossings(torch.bfloat16)[0]
    assert [crossing.pitch([rank]) for rank in range(5)] == [0, 16, 8, 16, 24]
    columns = crossing.output_columns([2])
    assert columns.tolist() == [*range(32, 36), 35, 35, 35, 35], "padding repeats the last column"
