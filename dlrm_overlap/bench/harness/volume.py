"""What leaves a rank when, in one step of the embedding stage: bytes to the peers by stretches of time."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dlrm_overlap.bench.harness.chunked import Chunked
from dlrm_overlap.bench.harness.contenders import Baseline
from dlrm_overlap.bench.harness.recorded import record_step
from dlrm_overlap.bench.harness.workload import Workload
from dlrm_overlap.config import InputError
from dlrm_overlap.kernels.schedule import TaskGrid
from dlrm_overlap.observe.trace_summary import Span, Work


class Sent(NamedTuple):
    """Bytes that leave this rank for its peers, evenly over a stretch of time."""

    span: Span
    """in us since the step's first kernel or task began"""
    bytes: float


class Sending(NamedTuple):
    """All that leaves this rank in one step."""

    sent: Sequence[Sent]
    stage_us: float
    """from the begin of the first kernel or task to the end of the last"""


def sending_of_tasks(trace: torch.Tensor, schedule: str, rank: int, world_size: int, peer_bytes: int) -> Sending:
    """Return what the persistent kernel sends, by its own clock, where each task stores rows straight into the windows.

    A task stores its rows as it pools them, one after the other: its bytes leave evenly while it pools. All tasks for
    peers have as many bytes, but for a shorter last one of each feature, which is not told apart.

    Example: of two tasks for peers, which send 8 bytes in all, one pools from 0 to 2 us: 4 bytes leave in these.

    Args:
        trace: [tasks, 6] int64 in the order of the tasks, columns as `slices.TRACE_COLUMNS` has them.
        schedule: linear | remote_first | balanced.
        rank: whose tasks they are.
        world_size: number of ranks.
        peer_bytes: that leave this rank in the step.
    """
    tasks: list[list[int]] = trace.tolist()
    grid = TaskGrid(rank, world_size, 1, len(tasks) // world_size, 1, 1)
    origin = min(start for _, _, start, *_ in tasks)
    end_us = max(end + wait for *_, end, _, wait in tasks) - origin
    spans = [
        Span((start - origin) / 1e3, (end - put - origin) / 1e3)
        for position, (_, _, start, end, put, _) in enumerate(tasks)
        if grid.task_at(position, schedule).destination != rank
    ]
    return Sending([Sent(span, peer_bytes / len(spans)) for span in spans], end_us / 1e3)


def sending_of_collectives(contender: Baseline | Chunked, workload: Workload, steps: int) -> Sending:
    """Return what NCCL's kernels send in a step: each its All-to-All's bytes, evenly from its begin to its end.

    Links have no counters that could be read every microsecond, so evenly is an assumption. A kernel's time holds its
    wait for the slowest peer, though all ranks begin together. All ranks call this, on GPUs.

    Args:
        contender: whose steps are taken.
        workload: its tables and ids.
        steps: before the profiler is there.

    Raises:
        InputError: if the profiler has not seen a kernel of NCCL for each All-to-All.
    """
    return sending_of_kernels(record_step(contender, workload, steps), contender.name, contender.sent_bytes())


def sending_of_kernels(work: Sequence[Work], name: str, sent_bytes: Sequence[int]) -> Sending:
    """Return what NCCL's kernels in `work` send; see `sending_of_collectives`.

    Args:
        work: kernels and copies of a step, by their begin.
        name: of the contender.
        sent_bytes: of each All-to-All of a step, in their order.

    Raises:
        InputError: if there is not a kernel of NCCL for each All-to-All.
    """
    sends = [each.span for each in work if each.name.startswith("nccl")]
    if len(sends) != len(sent_bytes):
        raise InputError(
            f"bench volume: {name}: {len(sends)} kernels of NCCL in a step with {len(sent_bytes)} All-to-Alls; leave "
            f"NCCL's own settings as they are, so that a kernel carries each"
        )
    origin = work[0].span.begin
    moved = [Span(span.begin - origin, span.end - origin) for span in sends]
    sent = [Sent(span, float(count)) for span, count in zip(moved, sent_bytes, strict=True)]
    return Sending(sent, max(each.span.end for each in work) - origin)


def bin_bytes(sending: Sending, bins: int, width_us: float) -> list[float]:
    """Return the bytes that leave in each of `bins` stretches of `width_us` from the step's begin on.

    Example: 6 bytes from 1 to 4 us, and stretches of 2 us: 2, 4 bytes.
    """
    found = [0.0] * bins
    for (begin, end), count in sending.sent:
        first, last = int(begin // width_us), min(int(end // width_us), bins - 1)
        for i in range(first, last + 1):
            inside = min(end, (i + 1) * width_us) - max(begin, i * width_us)
            found[i] += count * inside / (end - begin) if end > begin else count / (last + 1 - first)
    return found
