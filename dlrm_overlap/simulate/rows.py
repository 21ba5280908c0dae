"""A simulation as it is shown: a row of a CSV file, a trace."""

from dataclasses import asdict
from typing import Any

from dlrm_overlap.simulate.product import SimulatedProduct
from dlrm_overlap.simulate.step import Simulated

_TRACED_RANKS = 8


def describe(simulated: Simulated) -> dict[str, Any]:
    """Return a simulation's row."""
    config, timeline, work = simulated.config, simulated.timeline, simulated.work
    network, exchange = config.network, config.exchange
    links = 3 * work.world_size
    busy = float((timeline.carried[links:] / timeline.capacities[links:]).max(initial=0.0)) / timeline.seconds
    return {
        "kind": "simulated",
        "what": config.what,
        "backend": exchange.backend,
        "schedule": exchange.schedule,
        "slice_bags": exchange.slice_bags,
        "aggregate_bytes": exchange.aggregate_bytes,
        "aggregate_us": exchange.aggregate_us,
        "hosts": network.hosts,
        "gpus_per_host": network.gpus_per_host,
        "world_size": work.world_size,
        "nic_gbit_per_s": network.nic_gbit_per_s,
        "latency_ns": network.latency_ns,
        "message_ns": network.message_ns,
        "arch": config.model.arch,
        "dim": config.model.dim,
        "tables": round(work.features * work.world_size),
        "samples": work.samples,
        "id_bytes": config.work.id_bytes,
        "plan": config.work.plan,
        **{f"fullest_{name}": f"{float(getattr(work.shares, name).max()):.4g}" for name in ("memory", "links", "ids")},
        "idle_ranks": work.shares.idle_ranks,
        "hbm_bytes": round(work.hbm_bytes),
        "link_bytes": round(work.link_bytes),
        "ms": f"{simulated.ms:.4g}",
        "samples_per_s": f"{work.samples * work.world_size / simulated.ms * 1e3:.4g}",
        "busiest_link": f"{busy:.3f}",
        "activities": len(timeline.activities),
        "events": timeline.events,
    }


def describe_product(simulated: SimulatedProduct) -> dict[str, Any]:
    """Return the row of a simulated product."""
    config, product, memory = simulated.config, simulated.config.product, simulated.memory
    return {
        "kind": "simulated",
        "what": config.what,
        "name": product.name,
        "layer": product.layer if product.k is None else "",
        "ranks": config.network.world_size,
        "m": product.m,
        "n": product.n,
        "k": product.terms,
        "way": product.way,
        "gather": product.gather,
        "link_gb_per_s": config.gpu.link_gb_per_s,
        "tflop_per_s": f"{config.gpu.tflop_per_s * config.gpu.dense_efficiency:.4g}",
        "update_factor": product.update_factor,
        "ms": f"{simulated.ms:.4g}",
        "product_ms": f"{simulated.product_ms:.4g}",
        "scatter_ms": f"{simulated.scatter_ms:.4g}",
        "memory_mb": f"{memory.total / 1e6:.4g}",
        **{f"{name}_mb": f"{nbytes / 1e6:.4g}" for name, nbytes in asdict(memory).items()},
    }


def chrome_trace(simulated: Simulated | SimulatedProduct) -> dict[str, Any]:
    """Return a trace of the first ranks, a process a rank and a thread a lane, times in us."""
    timeline = simulated.timeline
    events = [
        {
            "name": activity.name,
            "cat": "simulated",
            "ph": "X",
            "pid": activity.rank,
            "tid": activity.lane,
            "ts": round(1e6 * float(start), 3),
            "dur": round(1e6 * float(end - start), 3),
        }
        for activity, start, end in zip(timeline.activities, timeline.start_s, timeline.end_s, strict=True)
        if activity.rank < _TRACED_RANKS and len(activity.resources)
    ]
    names = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}, simulated"}}
        for rank in sorted({event["pid"] for event in events})
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *events]}
