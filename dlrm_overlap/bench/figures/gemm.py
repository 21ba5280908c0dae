"""`bench gemm`: how much does a product save with its communication inside, and how much is left to save?

A shape M x K x N is that of two layers: M samples of all ranks, K features, N hidden units, of which each rank has
N / W. `all_gather` is the first layer, from this rank's samples [M / W, K] to its part of the hidden units [M, N / W];
`reduce_scatter` the second, from there back to [M / W, K]. Contenders: `serial`, the collective and the product one
after the other; the other ways of `dense.gemm`, and `auto`, which picks one; `torch`, the fused operators of torch's
symmetric memory. The output of each contender is held against a product in float32 before it is timed, and again
afterwards. All contenders and their parts are timed in turns, the ranks beginning together, without the CPU's time.

Columns, times being medians of the slowest rank:
    gemm_ms                   the product alone, of all rows, by cuBLAS
    communication_ms          the process group's collective alone
    ect_ms                    effective communication time: median_ms less gemm_ms
    overlap_efficiency        1 - ect_ms / that of `serial`: 1 if the product hides all communication
    link_bytes, link_gb_per_s bytes that leave each GPU, and the rate of its links, measured in the same run
    floor_ms, of_floor        the longer of the product alone and link_bytes at that rate; floor_ms / median_ms
    speedup                   median_ms of `serial` / median_ms

Source: Flux (Chang et al., arXiv 2406.06858) for the effective communication time and overlap efficiency.
"""

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
from dlrm_overlap.bench.harness.timing import Timing, counted, greatest, time_alone
from dlrm_overlap.bench.rows import report
from dlrm_overlap.config import InputError
from dlrm_overlap.dense.gemm import serial
from dlrm_overlap.dense.gemm.layer import Layer
from dlrm_overlap.dense.gemm.products import ParallelProducts
from dlrm_overlap.launching.environment import one_queue
from dlrm_overlap.train.ranks import Ranks

Call = Callable[[], torch.Tensor]

_DTYPE = torch.bfloat16
_SHAPES = {
    "cuda": (
        *("1024x12288x49152", "4096x12288x49152", "8192x12288x49152", "8192x4096x4096", "32768x4096x4096"),
        *("32768x3456x1024", "32768x1024x1024"),
    ),
    "cpu": ("64x48x96", "128x48x96"),
}
_CONTENDERS = ("serial", "torch", "copies", "tiles", "triggered", "auto")
_ONLY = {"triggered": "reduce_scatter"}  # its all-gather is that of tiles
_TOLERANCE = 0.05  # of an element's size and the mean's: partial products are rounded to bfloat16, by NCCL sums, too
_SHOWN = (
    "operator", "m", "k", "n", "contender", "median_ms", "p10_ms", "p90_ms", "gemm_ms", "communication_ms", "ect_ms",
    "overlap_efficiency", "floor_ms", "of_floor", "speedup",
)  # fmt: skip


class Case:
    """One operator at one shape: this rank's tensors, who runs it, and its two parts alone."""

    def __init__(self, operator: str, shape: tuple[int, ...], group: dist.ProcessGroup, device: torch.device) -> None:
        """Draw the tensors of all_gather or reduce_scatter; W must divide M and N."""
        self.operator, self.shape, self.group, self.device = operator, shape, group, device
        ranks, (m, k, n) = group.size(), shape
        generator = torch.Generator(device).manual_seed(group.rank())
        make = partial(torch.randn, generator=generator, device=device, dtype=_DTYPE)
        gathers = operator == "all_gather"
        self.x = make(m // ranks, k) if gathers else make(m, n // ranks)
        self.weight = (make(n // ranks, k) if gathers else make(k, n // ranks)) * self.x.shape[1] ** -0.5
        self.link_bytes = (ranks - 1) * (m // ranks) * k * _DTYPE.itemsize
        """that leave each rank for its peers"""

    def contender(self, name: str, products: ParallelProducts) -> Call | None:
        """Return the call of the contender `name`, or None where it cannot run or has nothing of its own.

        All ranks call this alike.
        """
        if _ONLY.get(name, self.operator) != self.operator:
            return None
        between_gpus = self.device.type == "cuda" and self.group.size() > 1
        tiled = name in ("tiles", "triggered")
        if name not in ("serial", "auto") and not between_gpus:
            return None
        if tiled and (one_queue() or any(size % 8 for size in self.weight.shape)):  # see `dense.gemm.products`
            return None
        if name == "torch":
            return self._torch()
        layer = Layer(self.weight)

        def call() -> torch.Tensor:
            if self.operator == "all_gather":
                return products.all_gather_matmul(self.x, layer, name, keep=False)[0]
            return products.begin_reduce_scatter(self.x, layer, name)()

        try:
            call()
        except InputError:  # on every rank alike
            return None
        return call

    def _torch(self) -> Call:
        import torch.distributed._symmetric_memory

        operators: Any = torch.ops.symm_mem
        name, turned = self.group.group_name, self.weight.t()
        if self.operator == "all_gather":
            return lambda: operators.fused_all_gather_matmul(self.x, [turned], 0, name, return_A=False)[1][0]
        return lambda: operators.fused_matmul_reduce_scatter(self.x, turned, "sum", 0, name)

    def _gathered(self) -> torch.Tensor:
        """Return the rows that the product has: those of all ranks, or for a reduce-scatter this rank's x."""
        if self.operator == "reduce_scatter":
            return self.x
        x = self.x.new_empty(*self.shape[:2])
        serial.all_gather(x, self.x, group=self.group)
        return x

    def reference(self) -> torch.Tensor:
        """Return the right output of the operator, computed in float32, as float32."""
        out = functional.linear(self._gathered().float(), self.weight.float())
        if self.operator == "reduce_scatter":
            dist.all_reduce(out, group=self.group)  # gloo has no reduce-scatter
            out = out.chunk(self.group.size())[self.group.rank()].clone()
        return out

    def alone(self) -> dict[str, Call]:
        """Return the product alone by cuBLAS, and the process group's collective alone."""
        x, turned, group = self._gathered(), self.weight.t(), self.group
        out = x.new_empty(x.shape[0], self.weight.shape[0])
        rows = torch.zeros(*self.shape[:2], device=self.device, dtype=_DTYPE)
        part = rows[: self.shape[0] // group.size()].clone()
        if self.operator == "all_gather":
            collective: Any = partial(serial.all_gather, rows, part, group=group)
        elif self.device.type == "cuda":
            collective = partial(serial.reduce_scatter, part, rows, group=group)
        else:  # as `serial.scatter` does over gloo
            collective = partial(dist.all_to_all_single, torch.empty_like(rows), rows, group=group)
        return {"gemm": partial(torch.mm, x, turned, out=out), "communication": collective}


def run(kind: str, ranks: Ranks) -> int:
    """Measure the figure, print its table, and append its rows on rank 0. All ranks call this.

    Returns:
        The exit code: 1 if an output was wrong; that contender has no row.
    """
    device, values = ranks.device, ranks.values
    shapes = [_shape(text, ranks.world.world_size) for text in values.shapes or _SHAPES[device.type]]
    group = ranks.connect()
    link_gb_per_s = measure_ceilings(group, device)[1]
    products = ParallelProducts(group, device)
    products.wait_timeout_s = 60.0
    rows, faults = list[dict[str, Any]](), list[str]()
    with torch.no_grad():
        for operator in values.operators:
            for shape in counted(f"shapes of {operator}", shapes):
                case = Case(operator, shape, group, device)
                calls = {name: case.contender(name, products) for name in _CONTENDERS}
                found = {name: call for name, call in calls.items() if call is not None}
                faults += _wrong(case, found)
                alone = case.alone()
                times = time_alone([*found.values(), *alone.values()], values.repetitions, device, group)
                timed = dict(zip([*found, *alone], times, strict=True))
                faults += _wrong(case, found)
                columns = {
                    "kind": kind,
                    "operator": operator,
                    **dict(zip("mkn", shape, strict=True)),
                    "dtype": str(_DTYPE)[6:],
                }
                columns |= {"device": device.type, "world_size": group.size()}
                if "serial" in found:
                    right = {name: timed[name] for name in found}
                    rows += compare(columns, right, timed, (case.link_bytes, link_gb_per_s))
                del case, calls, found, alone
    products.close()
    if ranks.world.rank == 0:
        report(rows, faults, Path(values.output), _SHOWN, f"{group.size()} ranks on {device.type}, {_DTYPE}")
    return 1 if faults else 0


def _shape(text: str, world_size: int) -> tuple[int, ...]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if not match or any(int(match[i]) % world_size for i in (1, 3)):
        raise InputError(
            f"--shapes {text}: not M x K x N with M and N that {world_size} ranks divide; write it as 4096x12288x49152"
        )
    return tuple(map(int, match.groups()))


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
    columns: Mapping[str, Any], timed: Mapping[str, Timing], alone: Mapping[str, Timing], link: tuple[int, float]
) -> list[dict[str, Any]]:
    """Return the rows of one operator at one shape, see the module.

    Args:
        columns: of all rows.
        timed: by contender, serial among them.
        alone: of gemm and communication.
        link: bytes that leave a GPU, and the GB/s of its links.
    """
    gemm_ms, serial_ms, (link_bytes, link_gb_per_s) = alone["gemm"].median_ms, timed["serial"].median_ms, link
    floor_ms = max(gemm_ms, link_bytes / link_gb_per_s / 1e6 if link_bytes else 0.0)
    hidden = serial_ms - gemm_ms
    return [
        {
            **columns,
            "contender": name,
            **asdict(times),
            "gemm_ms": gemm_ms,
            "communication_ms": alone["communication"].median_ms,
            "ect_ms": times.median_ms - gemm_ms,
            "overlap_efficiency": 1 - (times.median_ms - gemm_ms) / hidden if hidden > 0 else None,
            "link_bytes": link_bytes,
            "link_gb_per_s": link_gb_per_s,
            "floor_ms": floor_ms,
            "of_floor": floor_ms / times.median_ms,
            "speedup": serial_ms / times.median_ms,
        }
        for name, times in timed.items()
    ]
