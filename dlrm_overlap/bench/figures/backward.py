"""`bench backward`: how long does the embedding stage's backward take, by each way that gradients can go?

A step begins with the gradient [b, D_total] of every rank's samples and ends when the owners have updated their rows;
it is measured under one optimizer after the other. Every contender takes the same ids, rows, gradients and plan, and no
time is reported unless the rows and the optimizer's state that each leaves agree with the baseline's. A row is a
contender under an optimizer.

Contenders: the baseline (packing, All-to-All, FBGEMM's operator, its sort of the ids included), `push`, and
`push_exposed`, with the part that needs the ids alone, which training does beside the dense layers, in every step.
Extra columns: the optimizer, the ids of a rank, and `prepare_ms` of that part.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dlrm_overlap.bench.harness.agreement import check_rows, disagreements
from dlrm_overlap.bench.harness.contenders import Contender, close_all
from dlrm_overlap.bench.harness.limits import find_limit, measure_ceilings, times
from dlrm_overlap.bench.harness.timing import time_contenders, time_parts
from dlrm_overlap.bench.harness.workload import (
    Ids,
    Workload,
    collect_garbage,
    describe,
    exchange_options,
    make_workload,
    read_ids,
    shape_of,
    with_keys,
)
from dlrm_overlap.bench.rows import report
from dlrm_overlap.config import Config
from dlrm_overlap.embedding.backends.base import WindowState
from dlrm_overlap.embedding.opening import build_exchange
from dlrm_overlap.embedding.options import ExchangeContext, ExchangeOptions, StepCounters
from dlrm_overlap.embedding.steps import BatchSizes, PendingBackward, Step
from dlrm_overlap.train.ranks import Ranks

_SHOWN = (
    "optimizer", "contender", "median_ms", "p10_ms", "p90_ms", "host_ms", "prepare_ms",
    "limit_ms", "fraction_of_limit", "speedup", "max_difference",
)  # fmt: skip


class GradientBatch(NamedTuple):
    """A batch: its ids on the ranks that own their rows, and the gradient of its pooled embeddings."""

    ids: Ids
    gradient: torch.Tensor
    """[b, D_total] float32, of this rank's samples, in the layout that autograd leaves"""


def make_batches(workload: Workload) -> list[GradientBatch]:
    """Return the batches of `workload` with gradients whose elements have mean 0 and variance 1."""
    shape = workload.batch_sizes[workload.rank], workload.layout.total_dim
    generator = torch.Generator(workload.device).manual_seed(workload.rank)
    make = partial(torch.randn, shape, generator=generator, device=workload.device)
    return [GradientBatch(ids, make()) for ids in workload.batches]


class Update(Contender):
    """One of the exchange's backwards, from the moment the gradient is there until the rows are updated.

    The part that needs only the ids (`prepare`) is done here once for each batch, before any clock starts, or with
    `exposed` in every step.
    """

    def __init__(
        self, name: str, workload: Workload, options: ExchangeOptions, batches: Sequence[GradientBatch], exposed: bool
    ) -> None:
        super().__init__(name, workload)
        self._batch_sizes = BatchSizes.of(workload.batch_sizes)
        about = workload.layout, workload.tables, options, workload.group, workload.device
        most, counters = max(workload.batch_sizes), StepCounters(workload.device)
        self._halves = build_exchange(ExchangeContext(*about, most, counters))
        self._prepared = {} if exposed else {id(batch): self._begun(batch, prepared=True) for batch in batches}

    def _begun(self, batch: GradientBatch, prepared: bool = False) -> PendingBackward:
        pending = self._halves.backward.note_forward(Step(list(batch.ids.inputs), self._batch_sizes))
        return self._halves.backward.prepare(pending) if prepared else pending

    def step(self, batch: GradientBatch) -> None:
        """Send the batch's gradient to the owners and update the rows there."""
        pending = self._prepared[id(batch)] if self._prepared else self._begun(batch)
        self._halves.backward.finish(self._halves.backward.start(pending, batch.gradient))

    def prepare(self, batch: GradientBatch, *_: object) -> None:
        """Do the part of a push that needs only the ids."""
        pending = self._begun(batch, prepared=True)
        if self.workload.device.type == "cuda":
            self._halves.backward.finish(WindowState(pending, ()))  # only waits for the stream that prepares

    def close(self) -> None:
        """Free the windows. Every rank must have finished its steps."""
        self._halves.close()


def run(kind: str, ranks: Ranks) -> int:
    """Measure the figure; on rank 0 print each optimizer's table and append its rows. All ranks call this.

    Returns:
        The exit code: 1 if rows or states disagree under some optimizer, of which no time is reported.
    """
    world, device, values = ranks.world, ranks.device, ranks.values
    config = shape_of(ranks.config, world.world_size, values.tables_per_rank)
    config = with_keys(config, {"train.precision": "fp32"})  # the gradient's type
    group = ranks.connect()
    sparse = read_ids(config, group, device)
    ceilings = measure_ceilings(group, device)
    wrong = False
    for optimizer in values.optimizers:
        workload = make_workload(config, sparse, group, device, world.local_world_size, optimizer)
        rows, faults = _measure(config, workload, optimizer, ceilings, values.iterations)
        if world.rank == 0:
            report([{"kind": kind, **row} for row in rows], faults, Path(values.output), _SHOWN)
        wrong |= bool(faults)
        del workload
        collect_garbage(device)
    return int(wrong)


def make_contenders(config: Config, workload: Workload, batches: Sequence[GradientBatch]) -> list[Update]:
    """Return who takes part, the baseline first."""
    push = exchange_options(config, "pgas")
    return [
        Update("baseline", workload, replace(push, backend="nccl", backward="collective"), batches, exposed=True),
        Update("push", workload, push, batches, exposed=False),
        Update("push_exposed", workload, push, batches, exposed=True),
    ]


@torch.no_grad()
def _measure(
    config: Config, workload: Workload, optimizer: str, ceilings: tuple[float, float], iterations: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row for each contender and no fault, or no row and a fault for each contender that disagrees."""
    batches = make_batches(workload)
    contenders = make_contenders(config, workload, batches)
    agreements = check_rows(contenders, workload, batches, optimizer)
    faults = disagreements(contenders, agreements, f"rows or state under {optimizer}")
    rows: list[dict[str, Any]] = []
    if not faults:
        limit, ids = find_limit(workload, ceilings, optimizer)
        timings = time_contenders(contenders, batches, workload, iterations)
        rows = [
            {"contender": contender.name, **describe(config, workload.group.size()), "optimizer": optimizer, "ids": ids}
            | {**times(timing, timings[0], limit), **agreement._asdict(), "prepare_ms": None}
            for contender, agreement, timing in zip(contenders, agreements, timings, strict=True)
        ]
        for contender, row in zip(contenders[1:], rows[1:], strict=True):
            (row["prepare_ms"],) = time_parts(contender.prepare, 1, batches, workload, iterations)
    close_all(contenders)
    return rows, faults
