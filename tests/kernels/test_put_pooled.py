from collections.abc import Sequence

import pytest
import torch

from dlrm_overlap.comm.device_errors import DeviceErrorRecord
from dlrm_overlap.kernels.bags import Windows
from dlrm_overlap.kernels.forward.put_columns import PutColumns, put_columns
from dlrm_overlap.kernels.forward.put_pooled import put_pooled
from dlrm_overlap.kernels.messages import Groups, Outgoing, Waiting, send_signal, wait_message
from dlrm_overlap.kernels.network import Network
from tests.agreement import assert_same
from tests.kernels.emulation import CLOCK, CPU, GUARD, Case, World, interpreted

_STAGED, _ARRIVED, _SIGNALS = 0, 4096, 8192  # offsets in each heap, in bytes


def _heaps(ranks: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    heaps = [torch.zeros(1040, dtype=torch.int64) for _ in range(ranks)]
    return heaps, torch.tensor([heap.data_ptr() for heap in heaps])


def _rows(heap: torch.Tensor, offset: int, rows: int, pitch: int) -> torch.Tensor:
    return heap.view(torch.float32)[offset // 4 : offset // 4 + rows * pitch].view(rows, pitch)


def _signals(heap: torch.Tensor) -> list[int]:
    return heap[_SIGNALS // 8 : _SIGNALS // 8 + 4].tolist()


@interpreted
@pytest.mark.parametrize(
    ("groups", "puts", "weighted"), [(Groups(16, 1), (1, 1, 0, 0), False), (Groups(8, 2), (1, 1, 1, 0), True)]
)
def test_groups_of_a_message_are_pooled_sent_and_received(groups: Groups, puts: Sequence[int], weighted: bool) -> None:
    """Rank 0 pools for ranks 1 and 2 of another node; rank 2 takes the message for both."""
    world = World(Case(batch_sizes=(1, 9, 3), features=(2, 0, 0), dim=4, gap=0, weighted=weighted))
    heaps, addresses = _heaps(3)
    sent, arrived = (_rows(heaps[rank], at, 12, 8) for rank, at in ((0, _STAGED), (2, _ARRIVED)))
    node = world.first_sample[1:].clone()  # aligned, as kernels need it
    begins = torch.tensor([sent.data_ptr(), sent.data_ptr() + 9 * 8 * 4])
    out = Outgoing(_ARRIVED - _STAGED, heaps[0].data_ptr() + _SIGNALS, peer=2)
    counts = torch.zeros(4, dtype=torch.int32)
    bags = world.bags(0)._replace(first_sample=node)
    for epoch in (1, 2):
        heaps[2][_ARRIVED // 8 : _ARRIVED // 8 + 48] = -1
        put_pooled(
            bags, world.feature_table(0), Windows(begins, 8, torch.float32), world.records[0].status, world.options(0),
            Network("stores", addresses, 0), out, groups, counts, 2, CLOCK, epoch,
        )  # fmt: skip
        assert not counts.any()
        assert _signals(heaps[2]) == [epoch * put for put in puts]
        pooled = [[world.pooled(0, feature, rank) for rank in (1, 2)] for feature in range(2)]
        expected = torch.cat([torch.cat(features) for features in pooled], dim=1)
        assert_same(arrived, expected, "message")
    windows = [torch.full((10, 20), GUARD) for _ in range(2)]
    record = DeviceErrorRecord(CPU)

    def take() -> None:
        network, signals = Network("stores", addresses, 2), heaps[2].data_ptr() + _SIGNALS
        wait_message(network, 0, signals, groups, Waiting(9, record.status), CLOCK, 2, node)
        columns = PutColumns.of([(4, 4), (4, 12)], 20, 4, CPU)
        addressed = torch.tensor([window.data_ptr() for window in windows])
        put_columns(arrived, columns, addressed, node, 20, 9, here=1)

    take()
    assert record.empty
    for window, first, samples in zip(windows, (0, 9), (9, 3), strict=True):
        known = torch.full((10, 20), GUARD)
        known[:samples, 4:8], known[:samples, 12:16] = expected[first : first + samples].split(4, dim=1)
        assert_same(window, known, f"window of the samples from {first} on")
    heaps[2][_SIGNALS // 8 + groups.each] = 1
    take()
    assert record.expired() == [2, 0, groups.each, 2, 1], "the first group of rank 2's samples was seen at epoch 1"


@interpreted
def test_a_message_without_rows_is_only_a_signal() -> None:
    heaps, addresses = _heaps(2)
    begin = heaps[0].data_ptr()
    out = Outgoing(_ARRIVED - _STAGED, begin + _SIGNALS, peer=1)
    send_signal(Network("stores", addresses, 0), out, CLOCK, 5)
    assert _signals(heaps[1]) == [5, 0, 0, 0]
    assert heaps[1].count_nonzero() == 1


@pytest.mark.parametrize(
    ("longest", "row_bytes", "expected"),
    [(3000, 1000, (264, 12)), (0, 0, (262144, 1)), (10, 1 << 20, (8, 2)), (9, 512, (512, 1))],
)
def test_groups_have_about_as_many_bytes_as_they_must(longest: int, row_bytes: int, expected: Sequence[int]) -> None:
    assert Groups.of(longest, row_bytes, 256 * 1024) == tuple(expected)
