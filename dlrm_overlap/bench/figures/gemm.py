"""`bench gemm`: how much does a product save with its communication inside, and how much is left to save?

A shape M x K x N is that of two layers whose N hidden units are cut over the ranks, see `harness.gemm_contenders`:
`all_gather` is the product of [M, K], whose rows are gathered, and [N / W, K]; `reduce_scatter` that of [M, N / W] and
[K, N / W], whose sums are scattered. Contenders: `serial`, the collective and the product one after the other; the
other ways of `dense.gemm`, and `auto`, which picks one; and `torch`, the fused operators of torch's symmetric memory.
The output of each contender is held against a product in float32 before it is timed, and again afterwards. All
contenders and their parts are timed in turns, the ranks beginning together, without the CPU's time.

Columns, times being medians of the slowest rank:
    gemm_ms, triton_gemm_ms   the product alone, of all rows: by cuBLAS, and by our kernel, which the way `tiles` uses
    triton_of_cublas          gemm_ms / triton_gemm_ms
    collective_ms, own_ms     the communication alone: the process group's, and our own all-gather
    communication_ms          the less of the two
    ect_ms                    effective communication time: median_ms less the shorter of the products alone
    overlap_efficiency        1 - ect_ms / that of `serial`: 1 if the product hides all communication
    link_bytes, link_gb_per_s bytes that leave each GPU, and the rate of its links, measured in the same run
    floor_ms, of_floor        the longer of the product alone and link_bytes at that rate; floor_ms / median_ms
    speedup                   median_ms of `serial` / median_ms

Source: Flux (Chang et al., arXiv 2406.06858) for the effective communication time and overlap efficiency.
"""

from collections.abc import Mapping
from typing import Any

import torch

from dlrm_overlap.bench.harness.gemm_contenders import Call, Case, Shape
from dlrm_overlap.bench.harness.limits import measure_ceilings
from dlrm_overlap.bench.harness.timing import counted, gather
from dlrm_overlap.bench.harness.turns import Timed, Turns, greatest
from dlrm_overlap.bench.report.rows import report
from dlrm_overlap.bench.request import GemmRequest
from dlrm_overlap.comm.collectives import PeerCollectives
from dlrm_overlap.dense.gemm.products import parallel_products
from dlrm_overlap.train.ranks import Ranks

_DTYPE = torch.bfloat16
_PARTS = ("cublas", "triton", "collective", "own")
_TOLERANCE = 0.05  # of an element's size and the mean's: partial products are rounded to bfloat16, by NCCL sums, too
_SHOWN = (
    "operator", "m", "k", "n", "contender", "median_ms", "p10_ms", "p90_ms", "gemm_ms", "triton_gemm_ms",
    "communication_ms", "ect_ms", "overlap_efficiency", "floor_ms", "of_floor", "speedup",
)  # fmt: skip


def run(request: GemmRequest, ranks: Ranks) -> int:
    """Measure the figure, print its table, and append its rows on rank 0. All ranks call this.

    Returns:
        The exit code: 1 if an output was wrong; that contender has no row.
    """
    group, device = ranks.connect(), ranks.device
    shapes = [Shape.read(text) for text in request.shapes_on(device.type)]
    link_gb_per_s = min(rates[1] for rates in gather([*measure_ceilings(group, device)], device, group))
    capacity_bytes = max(shape.m * shape.k for shape in shapes) * _DTYPE.itemsize
    own = PeerCollectives(group, device, capacity_bytes)
    landing = own.empty((capacity_bytes,), torch.uint8)
    products, turns = parallel_products(group, device), Turns(group, device)
    products.wait_timeout_s = 60.0
    rows, faults = list[dict[str, Any]](), list[str]()
    with torch.no_grad():
        for operator in request.operators:
            for shape in counted(f"shapes of {operator}", shapes):
                case = Case(operator, shape, _DTYPE, group, device)
                calls = {name: case.contender(name, products) for name in request.contenders}
                found = {name: call for name, call in calls.items() if call is not None}
                faults += _wrong(case, found)
                parts = case.products_alone() | case.communication_alone(own, landing)
                pieces = [*found.values(), *parts.values()]
                timed = dict(zip([*found, *parts], turns.time(pieces, request.repetitions), strict=True))
                faults += _wrong(case, found)
                timed = {name: times for name, times in timed.items() if name in found or name in parts}
                columns = {"kind": request.kind, "operator": operator, **shape._asdict(), "dtype": str(_DTYPE)[6:]}
                columns |= {"device": device.type, "world_size": group.size(), "steps": request.repetitions}
                if "serial" in timed:
                    rows += compare(columns, timed, case.link_bytes, link_gb_per_s)
                del case, calls, found, parts, pieces
    products.close()
    own.close()
    if ranks.world.rank == 0:
        report(rows, faults, request.output, _SHOWN, f"{group.size()} ranks on {device.type}, {_DTYPE}")
    return 1 if faults else 0


def _wrong(case: Case, calls: dict[str, Call]) -> list[str]:
    """Return a line for each contender whose output is not that of float32 on some rank, and drop the contender."""
    expected, faults = case.reference(), list[str]()
    mean = expected.abs().mean()
    for name, call in list(calls.items()):
        error = ((call().float() - expected).abs() / (expected.abs() + mean)).nan_to_num(torch.inf).max().item()
        (worst,) = greatest([error], case.device, case.group)
        if worst > _TOLERANCE:
            faults.append(f"{case.operator}, {case.shape}: {name} is off by {worst:.2g}, at most {_TOLERANCE} is right")
            del calls[name]
    return faults


def compare(
    columns: Mapping[str, Any], timed: Mapping[str, Timed], link_bytes: int, link_gb_per_s: float
) -> list[dict[str, Any]]:
    """Return the rows of one operator at one shape, see the module.

    Args:
        columns: of all rows.
        timed: by contender, and of the parts `cublas`, `collective` and, if there are, `triton` and `own`.
        link_bytes: that leave each rank.
        link_gb_per_s: at which they can.
    """
    parts = {name: timed[name].median_ms if name in timed else None for name in _PARTS}
    cublas_ms, triton_ms = timed["cublas"].median_ms, parts["triton"]
    gemm_ms, communication_ms = (
        min(ms for name in names if (ms := parts[name]) is not None)
        for names in (("cublas", "triton"), ("collective", "own"))
    )
    floor_ms = max(gemm_ms, link_bytes / link_gb_per_s / 1e6 if link_bytes else 0.0)
    serial_ms = timed["serial"].median_ms
    rows = []
    for name in timed:
        if name in parts:
            continue
        median_ms = timed[name].median_ms
        ect_ms = median_ms - gemm_ms
        rows.append(
            {
                **columns,
                "contender": name,
                **timed[name]._asdict(),
                "gemm_ms": cublas_ms,
                "triton_gemm_ms": triton_ms,
                "triton_of_cublas": cublas_ms / triton_ms if triton_ms else None,
                "collective_ms": parts["collective"],
                "own_ms": parts["own"],
                "communication_ms": communication_ms,
                "ect_ms": ect_ms,
                "overlap_efficiency": 1 - ect_ms / (serial_ms - gemm_ms) if serial_ms > gemm_ms else None,
                "link_bytes": link_bytes,
                "link_gb_per_s": link_gb_per_s,
                "floor_ms": floor_ms,
                "of_floor": floor_ms / median_ms,
                "speedup": serial_ms / median_ms,
            }
        )
    return rows
