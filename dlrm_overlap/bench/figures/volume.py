"""`bench volume`: how many bytes are on the links at each moment of the embedding stage?

The figure of Chen et al. 2024 of communication volume over time. Contenders: the baseline, the baseline in chunks, and
`fused`, whose tasks store rows straight into the peers' windows (`put: in_place`) with the configuration's schedule. A
row is a stretch of time of one contender on rank 0: the bytes that leave for the peers in it. Of `fused` the clock that
each task reads gives them. Of the baselines they are spread evenly over the time of NCCL's kernels, since links have no
counters that could be read every microsecond; a kernel's time holds its wait for the slowest peer. Outputs are compared
first, and if they differ no row is reported. A CPU has neither clock, so the figure needs GPUs.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from dlrm_overlap.bench.harness.agreement import check_outputs, disagreements
from dlrm_overlap.bench.harness.chunked import Chunked, make_chunked
from dlrm_overlap.bench.harness.contenders import Baseline, Contender, Overlap
from dlrm_overlap.bench.harness.limits import describe, measure_ceilings
from dlrm_overlap.bench.harness.timing import begin_together, counted
from dlrm_overlap.bench.harness.traces import LEAD_MS, record_step
from dlrm_overlap.bench.harness.workload import Workload, make_workload, read_ids
from dlrm_overlap.bench.report.rows import report
from dlrm_overlap.bench.request import CHUNKS, VolumeRequest
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.embedding.steps import BatchSizes, Step
from dlrm_overlap.kernels.schedule import TaskGrid
from dlrm_overlap.observe.trace_summary import Work
from dlrm_overlap.train.ranks import Ranks

_BACKEND = "fused"


class Sending(NamedTuple):
    """The bytes that leave this rank for its peers in one step, each row of them evenly over a stretch of time."""

    spans_us: np.ndarray
    """[N, 2] float64, begin and end since the step's first kernel or task began"""
    bytes: np.ndarray
    """[N] float64, that leave in each"""
    stage_us: float
    """from the begin of the first kernel or task to the end of the last"""


@torch.no_grad()
def trace_tasks(workload: Workload, options: ExchangeOptions, steps: int) -> torch.Tensor:
    """Run `steps` steps and one more of a backend with slices; return the trace of that one, see `TRACE_COLUMNS`.

    All ranks call this, on GPUs; `steps` is one at least, since the first compiles the kernel.

    Raises:
        InputError: if one kernel does not pool all tables.
    """
    from dlrm_overlap.embedding.backends.fused import SlicedForward

    halves = workload.open_halves(replace(options, trace=True))
    forward = halves.forward
    assert isinstance(forward, SlicedForward)
    for ids in itertools.islice(itertools.cycle(workload.batches), steps + 1):
        step = Step(list(ids.inputs), BatchSizes.of(workload.batch_sizes))
        begin_together(workload.group, workload.device, LEAD_MS)
        forward.start(step)
        forward.finish(step)
    torch.cuda.synchronize(workload.device)
    traces = [trace.cpu() for trace in forward.traces.values()]
    dist.barrier(workload.group)
    halves.close()
    if len(traces) != 1:
        raise InputError(f"{len(traces)} kernels pool these tables; give all tables one dim and type")
    return traces[0]


def sending_of_tasks(trace: torch.Tensor, schedule: str, rank: int, world_size: int, peer_bytes: int) -> Sending:
    """Return the bytes that the persistent kernel sends, by its own clock.

    A task stores its rows as it pools them, one after the other: its bytes leave evenly while it pools. All tasks for
    peers count as many bytes, also a shorter last one of a feature.

    Example: of two tasks for peers, which send 8 bytes in all, one pools from 0 to 2 us: 4 bytes leave in these.

    Args:
        trace: [tasks, 6] int64 in the order of the tasks, columns as `slices.TRACE_COLUMNS` has them.
        schedule: linear | remote_first | balanced.
        rank: whose tasks they are.
        world_size: number of ranks.
        peer_bytes: that leave this rank in the step.
    """
    _, _, start, end, put, wait = trace.double().numpy().T
    grid = TaskGrid(rank, world_size, 1, len(trace) // world_size, 1, 1)
    away = np.array([grid.task_at(position, schedule).destination != rank for position in range(len(trace))])
    spans = np.stack([start, end - put], axis=1)[away] - start.min()
    return Sending(spans / 1e3, np.full(len(spans), peer_bytes / len(spans)), ((end + wait).max() - start.min()) / 1e3)


def sending_of_kernels(work: Sequence[Work], name: str, sent_bytes: Sequence[int]) -> Sending:
    """Return the bytes that NCCL's kernels send: each its All-to-All's, evenly from its begin to its end.

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
    stage_us = max(each.span.end for each in work) - origin
    return Sending(np.array(sends) - origin, np.array(sent_bytes, dtype=np.float64), stage_us)


def bin_bytes(sending: Sending, bins: int, width_us: float) -> np.ndarray:
    """Return [bins]: the bytes that leave in each stretch of `width_us` from the step's begin on.

    Example: 6 bytes from 1 to 4 us, and stretches of 2 us: 2, 4 bytes.
    """
    (begin, end), edges = sending.spans_us.T[:, :, None], width_us * np.arange(bins + 1)
    end = np.maximum(end, begin + 1e-9)  # all at once, but in some stretch
    inside = np.minimum(end, edges[1:]) - np.maximum(begin, edges[:-1])
    return sending.bytes @ (np.maximum(inside, 0.0) / (end - begin))


def run(request: VolumeRequest, ranks: Ranks) -> int:
    """Measure the figure; on rank 0 print a line a contender and append the rows. All ranks call this.

    Returns:
        The exit code: 1 if outputs differ from the baseline's, and there is no row.
    """
    group = ranks.connect()
    config = request.shape(ranks.config, ranks.world.world_size)
    sparse = read_ids(config, group, ranks.device)
    workload = make_workload(config, sparse, group, ranks.device, ranks.world.local_world_size)
    options = replace(workload.exchange_options(config.embedding, _BACKEND), backward="collective", put="in_place")
    baselines = [Baseline(workload), *make_chunked(workload, CHUNKS)]
    contenders: list[Contender] = [*baselines, Overlap(workload, options)]
    faults = disagreements(contenders, check_outputs(contenders, workload))
    dist.barrier(group)
    link_gb_per_s = measure_ceilings(group, ranks.device)[1]
    found: dict[str, Sending] = {}
    for each in [] if faults else counted("contenders", baselines):
        assert isinstance(each, Baseline | Chunked)
        work = record_step(each, workload, request.iterations)
        found[each.name] = sending_of_kernels(work, each.name, each.sent_bytes())
    for each in contenders:
        each.close()
    if not faults:
        trace = trace_tasks(workload, options, request.iterations)
        sent_bytes = Baseline(workload).sent_bytes()[0]
        found[_BACKEND] = sending_of_tasks(trace, options.resolved_schedule, workload.rank, group.size(), sent_bytes)
    if ranks.world.rank == 0:
        head = {"kind": request.kind, "rank": 0} | describe(config, workload) | {"link_gb_per_s": link_gb_per_s}
        report([head | row for row in describe_bins(found, request.bins)], faults, request.output, ())
        for name, sending in found.items():
            first, last = sending.spans_us.min(), sending.spans_us.max()
            print(f"{name}: sends from {first:.1f} to {last:.1f} us of {sending.stage_us:.1f}")
    return 1 if faults else 0


def describe_bins(found: dict[str, Sending], bins: int) -> list[dict[str, Any]]:
    """Return a row for each contender and each of `bins` stretches of the longest stage, as far as its own lasts."""
    width_us = max((sending.stage_us for sending in found.values()), default=0.0) / bins
    return [
        {"contender": name, "stage_us": sending.stage_us, "begin_us": i * width_us, "end_us": (i + 1) * width_us}
        | {"bytes": count, "gb_per_s": count / width_us / 1e3}
        for name, sending in found.items()
        for i, count in enumerate(bin_bytes(sending, bins, width_us))
        if i * width_us < sending.stage_us
    ]
