"""A simulation as it is shown: a row of a CSV file, a trace."""

from dataclasses import asdict
from typing import Any

from dlrm_overlap.simulate.step import Simulated

_TRACED_RANKS = 8


def describe(simulated: Simulated) -> dict[str, Any]:
    """Return a simulation's row: the keys of its exchange and network, its work, its time."""
    config, timeline, work = simulated.config, simulated.timeline, simulated.work
    links = 3 * work.world_size
    busy = float((timeline.carried[links:] / timeline.capacities[links:]).max(initial=0.0)) / timeline.seconds
    fullest = {name: f"{float(getattr(work.shares, name).max()):.4g}" for name in ("memory", "links", "ids")}
    return {
        "kind": "simulated",
        "what": config.what,
        **asdict(config.exchange),
        **asdict(config.network),
        "world_size": work.world_size,
        "arch": config.model.arch,
        "dim": config.model.dim,
        "tables": round(work.features * work.world_size),
        "samples": work.samples,
        "id_bytes": config.work.id_bytes,
        "plan": config.work.plan,
        **{f"fullest_{name}": share for name, share in fullest.items()},
        "idle_ranks": work.shares.idle_ranks,
        "hbm_bytes": round(work.hbm_bytes),
        "link_bytes": round(work.link_bytes),
        "ms": f"{simulated.ms:.4g}",
        "samples_per_s": f"{work.samples * work.world_size / simulated.ms * 1e3:.4g}",
        "busiest_link": f"{busy:.3f}",
        "activities": len(timeline.activities),
        "events": timeline.events,
    }


def chrome_trace(simulated: Simulated) -> dict[str, Any]:
    """Return a trace of the first ranks, a process a rank and a thread a lane, times in us."""
    timeline = simulated.timeline
    times = zip(timeline.activities, 1e6 * timeline.start_s, 1e6 * timeline.end_s, strict=True)
    events = [
        {"name": each.name, "cat": "simulated", "ph": "X", "pid": each.rank, "tid": each.lane}
        | {"ts": round(float(begin), 3), "dur": round(float(end - begin), 3)}
        for each, begin, end in times
        if each.rank < _TRACED_RANKS and len(each.resources)
    ]
    names = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}, simulated"}}
        for rank in sorted({event["pid"] for event in events})
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *events]}
