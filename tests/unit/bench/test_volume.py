"""The bytes on the links over time are those that the step sends, where its tasks and kernels ran."""

import numpy as np
import pytest
import torch

from dlrm_overlap.bench.figures.volume import Sending, bin_bytes, describe_bins, sending_of_kernels, sending_of_tasks
from dlrm_overlap.bench.harness.traces import last_step
from dlrm_overlap.config import InputError
from dlrm_overlap.observe.trace_summary import Span, Work

# Two ranks, four tasks; program 9 takes the first and the last. Columns: program, sm, start, end, put, wait.
TRACE = torch.tensor(
    [
        [9, 1, 5_000, 6_000, 100, 0],
        [4, 0, 5_200, 6_400, 50, 700],
        [7, 2, 5_100, 6_300, 0, 800],
        [9, 1, 6_000, 6_900, 200, 300],
    ]
)


def _sending(spans: list[tuple[float, float]], sent: list[float], stage_us: float) -> Sending:
    return Sending(np.array(spans), np.array(sent), stage_us)


def test_tasks_for_peers_send_while_they_pool() -> None:
    """Rank 0 of 2, linear: the last two of the four tasks are for rank 1."""
    sending = sending_of_tasks(TRACE, "linear", rank=0, world_size=2, peer_bytes=800)
    assert sending.bytes.tolist() == [400, 400]
    assert sending.spans_us.tolist() == [[0.1, 1.3], [1.0, 1.7]]
    assert sending.stage_us == 2.2, "the wait of program 9 ends last"


def test_kernels_of_the_last_step_send_evenly() -> None:
    work = [
        Work("nccl old", 7, Span(0, 50)),
        Work("spin_kernel(long)", 3, Span(50, 90)),
        Work("nccl gate", 7, Span(90, 98)),
        Work("spin_kernel(long)", 3, Span(98, 100)),
        Work("lookup", 3, Span(102, 110)),
        Work("nccl b", 7, Span(114, 118)),
        Work("nccl a", 7, Span(110, 114)),
        Work("unpack", 3, Span(118, 122)),
    ]
    sending = sending_of_kernels(last_step(work), "nccl_chunked_2", [80, 40])
    assert (sending.spans_us.tolist(), sending.stage_us) == ([[8, 12], [12, 16]], 20)
    assert bin_bytes(sending, 4, 5.0) == pytest.approx([0, 40, 70, 10])
    with pytest.raises(InputError, match="2 kernels of NCCL in a step with 1 All-to-Alls"):
        sending_of_kernels(last_step(work), "baseline", [80])


def test_rows_end_with_their_stage_and_hold_all_bytes() -> None:
    found = {"baseline": _sending([(10, 20)], [1000], 25.0), "fused": _sending([(0, 7), (3, 3)], [600, 400], 9.0)}
    rows = describe_bins(found, bins=10)
    assert [row["contender"] for row in rows] == ["baseline"] * 10 + ["fused"] * 4
    for name in found:
        assert sum(row["bytes"] for row in rows if row["contender"] == name) == pytest.approx(1000)
