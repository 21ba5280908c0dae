"""`bench gemm`: times products with their communication inside (docs/results/gemm.md).

For M samples of all ranks, K features and N hidden units, `all_gather` maps [M / W, K] to [M, N / W] and
`reduce_scatter` maps [M, N / W] to [M / W, K]. Columns, as medians of the slowest rank:
    gemm_ms             the product alone, by cuBLAS
    ect_ms              effective communication time: median_ms - gemm_ms
    overlap_efficiency  1 - ect_ms / (ect_ms of `serial`): 1 if the product hides all communication
    floor_ms            the longer of gemm_ms and link_bytes at link_gb_per_s

Source: Flux (Chang et al., arXiv 2406.06858) for ect_ms and overlap_efficiency.
"""

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from dlrm_overlap.bench.harness.limits import measure_ceilings
from dlrm_overlap.bench.harness.timing import Timing, max_over_ranks, time_alone
from dlrm_overlap.bench.rows import report
from dlrm_overlap.config import InputError
from dlrm_overlap.dense.gemm import serial
from dlrm_overlap.dense.gemm.layer import ProductLayer
from dlrm_overlap.dense.gemm.products import ParallelProducts
from dlrm_overlap.launching.environment import one_queue
from dlrm_overlap.launching.lifetime import DISAGREEMENT
from dlrm_overlap.train.ranks import Ranks

Call = Callable[[], torch.Tensor]

_DTYPE = torch.bfloat16
_WIDE = ("1024x12288x49152", "4096x12288x49152", "8192x12288x49152")
_NARROW = ("8192x4096x4096", "32768x4096x4096", "32768x3456x1024", "32768x1024x1024")
_SHAPES = {"cuda": _WIDE + _NARROW, "cpu": ("64x48x96", "128x48x96")}
_CONTENDERS = ("serial", "torch", "copies", "tiles", "triggered", "auto")
_TOLERANCE = 0.05  # relative to element plus mean: partial products, and NCCL's sums, are rounded to bfloat16
_SHOWN = (
    "operator", "m", "k", "n", "contender", "median_ms", "p10_ms", "p90_ms", "gemm_ms", "ect_ms", "overlap_efficiency",
    "floor_ms", "of_floor", "speedup",
)  # fmt: skip


class Case:
    """`all_gather` or `reduce_scatter` at one shape, with this rank's tensors; W divides M and N."""

    def __init__(self, operator: str, shape: tuple[int, ...], group: dist.ProcessGroup, device: torch.device) -> None:
        self.operator, self.shape, self.group, self.device = operator, shape, group, device
        self.gathers, ranks, (m, k, n) = operator == "all_gather", group.size(), shape
        generator = torch.Generator(device).manual_seed(group.rank())
        make = partial(torch.randn, generator=generator, device=device, dtype=_DTYPE)
        self.x = make(m // ranks, k) if self.gathers else make(m, n // ranks)
        self.weight = (make(n // ranks, k) if self.gathers else make(k, n // ranks)) * self.x.shape[1] ** -0.5
        self.link_bytes = (ranks - 1) * (m // ranks) * k * _DTYPE.itemsize

    def contenders(self, products: ParallelProducts) -> dict[str, Call]:
        """Return the contenders that can run at this shape; the same on every rank."""
        left_out = {"triggered"} if self.gathers else set[str]()  # its all-gather is the same as of tiles
        if self.device.type == "cpu" or self.group.size() == 1:
            left_out |= {"torch", "copies", "tiles", "triggered"}
        if one_queue() or any(size % 8 for size in self.weight.shape):  # see `dense.gemm.products`
            left_out |= {"tiles", "triggered"}
        calls = {name: partial(self.run, name, products) for name in _CONTENDERS if name not in left_out}
        for name, call in list(calls.items()):
            try:
                call()
            except InputError:  # on every rank
                del calls[name]
        return calls

    def run(self, name: str, products: ParallelProducts) -> torch.Tensor:
        if name == "torch":
            import torch.distributed._symmetric_memory

            operators: Any = torch.ops.symm_mem
            group, turned = self.group.group_name, self.weight.t()
            if self.gathers:
                return operators.fused_all_gather_matmul(self.x, [turned], 0, group, return_A=False)[1][0]
            return operators.fused_matmul_reduce_scatter(self.x, turned, "sum", 0, group)
        if self.gathers:
            return products.all_gather_matmul(self.x, ProductLayer(self.weight), name, keep=False)[0]
        return products.begin_reduce_scatter(self.x, ProductLayer(self.weight), name)()

    def _gathered(self) -> torch.Tensor:
        if not self.gathers:
            return self.x
        x = self.x.new_empty(*self.shape[:2])
        serial.all_gather(x, self.x, group=self.group)
        return x

    def reference(self) -> torch.Tensor:
        out = functional.linear(self._gathered().float(), self.weight.float())
        if not self.gathers:
            dist.all_reduce(out, group=self.group)  # gloo has no reduce-scatter
            out = out.chunk(self.group.size())[self.group.rank()].clone()
        return out

    def product(self) -> Call:
        x, turned = self._gathered(), self.weight.t()
        return partial(torch.mm, x, turned, out=torch.mm(x, turned))


def run(kind: str, ranks: Ranks) -> int:
    """Return `DISAGREEMENT` if the output of a contender was wrong; such a contender has no row."""
    device, values = ranks.device, ranks.values
    shapes = [_shape(text, ranks.world.world_size) for text in values.shapes or _SHAPES[device.type]]
    group = ranks.connect()
    link_gb_per_s = measure_ceilings(group, device)[1]
    products = ParallelProducts(group, device)
    products.wait_timeout_s = 60.0
    rows, faults = list[dict[str, Any]](), list[str]()
    with torch.no_grad():
        for operator, shape in itertools.product(("all_gather", "reduce_scatter"), shapes):
            case = Case(operator, shape, group, device)
            calls = case.contenders(products)
            faults += _wrong(case, calls)
            gemm, *each = time_alone([case.product(), *calls.values()], values.repetitions, device)
            timed = dict(zip(calls, each, strict=True))
            faults += _wrong(case, calls)
            about = {"kind": kind, "operator": operator, **dict(zip("mkn", shape, strict=True))}
            about["world_size"] = group.size()
            right = {name: timed[name] for name in calls}
            found = compare(right, gemm, case.link_bytes, link_gb_per_s) if "serial" in right else []
            rows += [about | row for row in found]
            del case, calls
    products.close()
    if ranks.world.rank == 0:
        report(rows, faults, Path(values.output), _SHOWN)
    return DISAGREEMENT if faults else 0


def _shape(text: str, world_size: int) -> tuple[int, ...]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if not match or any(int(match[i]) % world_size for i in (1, 3)):
        raise InputError(
            f"--shapes {text}: not M x K x N with M and N divisible by {world_size} ranks; for example 4096x12288x49152"
        )
    return tuple(map(int, match.groups()))


def _wrong(case: Case, calls: dict[str, Call]) -> list[str]:
    expected, faults = case.reference(), list[str]()
    mean = expected.abs().mean()
    for name, call in list(calls.items()):
        error = ((call().float() - expected).abs() / (expected.abs() + mean)).nan_to_num(torch.inf).max().item()
        (worst,) = max_over_ranks([error], case.device)
        if worst > _TOLERANCE:
            faults.append(f"{case.operator}, {case.shape}: {name} is off by {worst:.2g}, tolerance {_TOLERANCE}")
            del calls[name]
    return faults


def compare(timed: Mapping[str, Timing], gemm: Timing, link_bytes: int, link_gb_per_s: float) -> list[dict[str, Any]]:
    floor_ms = max(gemm.median_ms, link_bytes / link_gb_per_s / 1e6 if link_bytes else 0.0)
    serial_ms = timed["serial"].median_ms
    hidden = serial_ms - gemm.median_ms
    return [
        {
            "contender": name,
            **asdict(times),
            "gemm_ms": gemm.median_ms,
            "ect_ms": times.median_ms - gemm.median_ms,
            "overlap_efficiency": 1 - (times.median_ms - gemm.median_ms) / hidden if hidden > 0 else None,
            "link_bytes": link_bytes,
            "link_gb_per_s": link_gb_per_s,
            "floor_ms": floor_ms,
            "of_floor": floor_ms / times.median_ms,
            "speedup": serial_ms / times.median_ms,
        }
        for name, times in timed.items()
    ]
