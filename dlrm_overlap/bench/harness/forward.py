"""The procedure that the figures of the embedding stage's forward share.

Every contender takes the same ids, rows and types in one run, and no time is reported unless the outputs of all agree
with the baseline's (Chen et al. 2024: FBGEMM's lookup, All-to-All, unpacking). A row is a contender: its times, the
bytes that the stage must move, how fast the memory and the links of these GPUs move bytes, and the fraction of that
limit that the contender reaches.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from dlrm_overlap.bench.harness.agreement import check_outputs, disagreements
from dlrm_overlap.bench.harness.computations import Computation, make_product
from dlrm_overlap.bench.harness.contenders import Baseline, Contender, close_all
from dlrm_overlap.bench.harness.limits import describe, forward_limit, measure_ceilings, times
from dlrm_overlap.bench.harness.timing import Timing, fraction_of_ideal, time_contenders, time_parts
from dlrm_overlap.bench.harness.turns import greatest
from dlrm_overlap.bench.harness.workload import Workload, collect_garbage, make_workload, read_ids
from dlrm_overlap.bench.report.rows import report
from dlrm_overlap.bench.request import ForwardRequest
from dlrm_overlap.config import Config, EmbeddingConfig
from dlrm_overlap.train.ranks import Ranks

Row = dict[str, Any]
MakeContenders = Callable[[EmbeddingConfig, Workload], list[Contender]]
ExtraColumns = Callable[[Contender, ForwardRequest], Row]

_PRODUCT = {"cuda": 8192, "cpu": 128}  # rows and columns of the matrices of --beside_product
_BESIDE = ("product", "product_ms", "together_ms", "fraction_of_ideal")
_SETTINGS = ("schedule", "put", "slice_bags", "programs_per_sm")
_SHOWN = (
    "contender", *_SETTINGS, "world_size", "median_ms", "p10_ms", "p90_ms", "host_ms",
    "limit_ms", "fraction_of_limit", "speedup", "lookup_ms", "all_to_all_ms", "unpack_ms", "together_ms",
    "fraction_of_ideal", "equal",
)  # fmt: skip


def measure_forward(
    request: ForwardRequest,
    ranks: Ranks,
    make_contenders: MakeContenders,
    extra_columns: ExtraColumns = lambda contender, request: {},
    shown: Sequence[str] = (),
    compare_worlds: Callable[[Sequence[Sequence[Row]]], None] = lambda measured: None,
) -> int:
    """Measure a figure, print its table and append its rows on rank 0. All ranks call this.

    Args:
        request: the options, the numbers of ranks to measure on among them.
        ranks: this rank's configuration, device and place; the process group is made unless there is one.
        make_contenders: returns who takes part, the baseline first. All ranks call it.
        extra_columns: returns the columns of a contender's row that only this figure has. All ranks call it, after
            the contenders have been timed.
        shown: those of the extra columns that the printed table has too.
        compare_worlds: fills in the columns that compare numbers of ranks. It takes the rows of each number of ranks,
            from the smallest on.

    Returns:
        The exit code: 1 if outputs disagree on some number of ranks, for which no time is reported.
    """
    ranks.connect()
    world, device = ranks.world, ranks.device
    agreed = True
    measured: list[tuple[list[Row], list[str]]] = []
    # The most ranks come first: symmetric memory numbers its collectives by process, so the ranks of a group must have
    # taken part in all of the earlier ones.
    for world_size in reversed(request.worlds(world.world_size)):
        group = dist.group.WORLD if world_size == world.world_size else dist.new_group(list(range(world_size)))
        if world.rank < world_size:
            assert isinstance(group, dist.ProcessGroup)
            shape = request.shape(ranks.config, world_size)
            workload = make_workload(
                shape, read_ids(shape, group, device), group, device, world.local_world_size, request.check_ids
            )
            measured.append(_measure(request, shape, workload, make_contenders, extra_columns))
            agreed = not measured[-1][1]
            del workload
            collect_garbage(device)
        agreed = greatest([float(not agreed)], device)[0] == 0.0  # ranks that took no part wait here
        if not agreed:
            break
    if world.rank == 0:
        measured.reverse()
        compare_worlds([rows for rows, _ in measured])
        for rows, faults in measured:
            report(rows, faults, request.output, [*_SHOWN, *shown])
    return 0 if agreed else 1


def _measure(
    request: ForwardRequest,
    config: Config,
    workload: Workload,
    make_contenders: MakeContenders,
    extra_columns: ExtraColumns,
) -> tuple[list[Row], list[str]]:
    """Return a row for each contender and no fault, or no row and a fault for each contender that disagrees."""
    contenders = make_contenders(config.embedding, workload)
    agreements = check_outputs(contenders, workload)
    faults = disagreements(contenders, agreements)
    rows: list[Row] = []
    if not faults:
        limit = forward_limit(workload, measure_ceilings(workload.group, workload.device))
        timings = time_contenders(contenders, workload.batches, workload, request.iterations)
        beside = [dict[str, Any].fromkeys(_BESIDE)] * len(contenders)
        if request.beside_product:
            beside = _time_beside_product(contenders, timings, workload, request.iterations)
        shape = describe(config, workload) | {"check_ids": request.check_ids}
        for contender, agreement, timing, product in zip(contenders, agreements, timings, beside, strict=True):
            rows.append(
                {"kind": request.kind, "contender": contender.name}
                | {**dict.fromkeys(_SETTINGS), **contender.columns(), **shape}
                | times(timing, timings[0], limit)
                | product
                | asdict(agreement)
                | _parts(contender, workload, timing.steps)
                | extra_columns(contender, request)
            )
    close_all(contenders, workload)
    return rows, faults


class _Product(Contender):
    """A square product in bf16 alone, or beside the step of `contender`: the product first, on a stream of its own."""

    def __init__(self, product: Computation, workload: Workload, contender: Contender | None = None) -> None:
        super().__init__(product.name, workload)
        self._multiply, self._contender = product.call, contender
        beside = contender is not None and workload.device.type == "cuda"
        self._stream = torch.cuda.Stream(workload.device, priority=-1) if beside else None

    def step(self, batch: Any) -> None:
        """Multiply, and take the contender's step; the current stream waits for both."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.workload.device))
        with torch.cuda.stream(self._stream):
            self._multiply()
        if self._contender is not None:
            self._contender.step(batch)
        if self._stream is not None:
            torch.cuda.current_stream(self.workload.device).wait_stream(self._stream)


def _time_beside_product(
    contenders: Sequence[Contender], alone: Sequence[Timing], workload: Workload, steps: int
) -> list[Row]:
    """Return the columns `_BESIDE` of each contender, given its times alone. All ranks call this.

    Example: a product of 1.4 ms and a stage of 2 ms take 2.2 ms together: the speedup over one after the other is
    3.4 / 2.2 = 1.55, the ideal 3.4 / 2 = 1.7, the fraction of the ideal 0.55 / 0.7 = 0.78.
    """
    size = _PRODUCT[workload.device.type]
    product = make_product(f"product_{size}", size, size, size, workload.device)
    pieces = [_Product(product, workload, contender) for contender in (None, *contenders)]
    timed = time_contenders(pieces, workload.batches, workload, steps)
    first, *together = (timing.times.median_ms for timing in timed)
    fractions = [
        fraction_of_ideal(first, stage.times.median_ms, both)["fraction_of_ideal"]
        for stage, both in zip(alone, together, strict=True)
    ]
    return [
        dict(zip(_BESIDE, (product.name, first, both, fraction), strict=True))
        for both, fraction in zip(together, fractions, strict=True)
    ]


def _parts(contender: Contender, workload: Workload, steps: int) -> dict[str, float | None]:
    """Return the columns of the baseline's parts, which are empty for the other contenders."""
    names = ("lookup_ms", "all_to_all_ms", "unpack_ms")
    if not isinstance(contender, Baseline):
        return dict.fromkeys(names)
    return dict(zip(names, time_parts(contender.step, len(names), workload.batches, workload, steps), strict=True))
