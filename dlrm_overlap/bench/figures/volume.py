"""`bench volume`: how many bytes are on the links at each moment of the embedding stage?

The figure of Chen et al. 2024 of communication volume over time. Contenders: the baseline, the baseline in chunks, and
`fused`, whose tasks store rows straight into the peers' windows (`put: in_place`) with the configuration's schedule. A
row is a stretch of time of one contender on rank 0: the bytes that leave for the peers in it. Of `fused` they are known
from the clock that each task reads; of the baselines from when NCCL's kernels ran, over which their bytes are spread
evenly, since links have no counters that could be read that often. Outputs are compared first, and if they differ
nothing is told. A CPU has neither clock, so the figure needs GPUs.
"""

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from dlrm_overlap.bench.harness.agreement import check_outputs
from dlrm_overlap.bench.harness.chunked import Chunked, make_chunked
from dlrm_overlap.bench.harness.contenders import Baseline, Contender, Overlap
from dlrm_overlap.bench.harness.limits import measure_ceilings
from dlrm_overlap.bench.harness.programs import trace_programs
from dlrm_overlap.bench.harness.progress import counted
from dlrm_overlap.bench.harness.volume import Sending, bin_bytes, sending_of_collectives, sending_of_tasks
from dlrm_overlap.bench.harness.workload import make_workload, read_ids
from dlrm_overlap.bench.report.columns import describe
from dlrm_overlap.bench.report.rows import append_rows, print_faults, print_table
from dlrm_overlap.bench.stage_request import CHUNKS, VolumeRequest
from dlrm_overlap.train.ranks import Ranks

_BACKEND = "fused"
_SHOWN = ("contender", "stage_us", "first_us", "last_us", "sent_bytes", "link_gb_per_s")


def run(request: VolumeRequest, ranks: Ranks) -> int:
    """Measure the figure; on rank 0 print a line a contender and append the rows. All ranks call this.

    Returns:
        The exit code: 1 if outputs differ from the baseline's, and no row is told.
    """
    group = ranks.connect()
    config = request.shape(ranks.config, ranks.world.world_size)
    sparse = read_ids(config, group, ranks.device)
    workload = make_workload(
        config, sparse, group, ranks.device, ranks.world.local_world_size, precision=config.train.precision
    )
    options = replace(workload.exchange_options(config.embedding, _BACKEND), backward="collective", put="in_place")
    contenders: list[Contender] = [Baseline(workload), *make_chunked(workload, CHUNKS), Overlap(workload, options)]
    agreements = check_outputs(contenders, workload)
    dist.barrier(group)
    faults = [
        f"{each.name}: outputs differ from the baseline's; nothing is told"
        for each, agreement in zip(contenders, agreements, strict=True)
        if not agreement.agrees
    ]
    link_gb_per_s = measure_ceilings(group, ranks.device)[1]
    found: dict[str, Sending] = {}
    for each in [] if faults else counted("contenders", contenders):
        if isinstance(each, Baseline | Chunked):
            found[each.name] = sending_of_collectives(each, workload, request.iterations)
    for each in contenders:
        each.close()
    if not faults:
        trace = trace_programs(workload, options, request.iterations)
        sent_bytes = Baseline(workload).sent_bytes()[0]
        found[_BACKEND] = sending_of_tasks(trace, options.resolved_schedule, workload.rank, group.size(), sent_bytes)
    if ranks.world.rank == 0:
        print_faults(faults)
        if found:
            head = {"kind": request.kind, "rank": 0} | describe(config, workload) | {"link_gb_per_s": link_gb_per_s}
            append_rows(request.output, [head | row for row in describe_bins(found, request.bins)])
            print_table([head | summarise(name, sending) for name, sending in found.items()], _SHOWN)
            print(f"rows in {request.output}")
    return 1 if faults else 0


def describe_bins(found: dict[str, Sending], bins: int) -> list[dict[str, Any]]:
    """Return a row for each contender and each of `bins` stretches of the longest stage, as far as its own lasts."""
    width_us = max(sending.stage_us for sending in found.values()) / bins
    return [
        {"contender": name, "stage_us": sending.stage_us, "begin_us": i * width_us, "end_us": (i + 1) * width_us}
        | {"bytes": count, "gb_per_s": count / width_us / 1e3}
        for name, sending in found.items()
        for i, count in enumerate(bin_bytes(sending, bins, width_us))
        if i * width_us < sending.stage_us
    ]


def summarise(name: str, sending: Sending) -> dict[str, Any]:
    """Return a contender's line of the printed table."""
    spans = [each.span for each in sending.sent]
    return {
        "contender": name,
        "stage_us": sending.stage_us,
        "first_us": min(span.begin for span in spans),
        "last_us": max(span.end for span in spans),
        "sent_bytes": int(sum(each.bytes for each in sending.sent)),
    }
