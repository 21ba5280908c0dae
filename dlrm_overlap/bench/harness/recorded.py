"""One step of the embedding stage as the profiler saw it: kernels and copies, with their times."""

import itertools
import tempfile
from pathlib import Path

import torch

from dlrm_overlap.bench.harness.contenders import Contender
from dlrm_overlap.bench.harness.step_trace import MARK, mark_time
from dlrm_overlap.bench.harness.workload import Workload
from dlrm_overlap.comm.turns import begin_together
from dlrm_overlap.observe.trace_summary import Work, gpu_work, read_events

LEAD_MS = 10.0  # in which the host issues a step, the chunked ones too
_STEPS = 3  # under the profiler; the last one counts


@torch.no_grad()
def record_step(contender: Contender, workload: Workload, warmup: int) -> list[Work]:
    """Return what a step of `contender` runs on this rank's GPU, by its begin. All ranks call this.

    Args:
        contender: whose steps are taken.
        workload: gives the batches, the group and the device.
        warmup: steps before the profiler is there.
    """
    following = itertools.cycle(workload.batches)
    for _ in range(warmup):
        contender.step(next(following))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(_STEPS):
            begin_together(workload.group, workload.device, LEAD_MS)
            mark_time()
            contender.step(next(following))
        torch.cuda.synchronize(workload.device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return last_step(gpu_work(read_events(path)))


def last_step(work: list[Work]) -> list[Work]:
    """Return, by its begin, what comes behind the last mark in `work`, or all of it where there is none.

    The gate's collective, which runs in front of the mark, is not part of it.
    """
    begin = max((each.span.end for each in work if MARK.search(each.name)), default=float("-inf"))
    return sorted((each for each in work if each.span.begin >= begin), key=lambda each: each.span)
