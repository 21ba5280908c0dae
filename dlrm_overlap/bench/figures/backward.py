"""`bench backward`: times the embedding stage's backward, by each way of sending gradients.

A step starts with the gradient [b, D_total] of each rank's pooled embeddings, and ends when the owners have updated
their rows. Contenders: the baseline (All-to-All, then FBGEMM's update); `push`, our exchange; `push_exposed`, which
includes the preparation that needs only ids, and overlaps with dense layers in training. `prepare_ms` is the time of
this preparation.
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
from dlrm_overlap.launching.lifetime import DISAGREEMENT
from dlrm_overlap.train.ranks import Ranks

_SHOWN = (
    "optimizer", "contender", "median_ms", "p10_ms", "p90_ms", "host_ms", "prepare_ms",
    "limit_ms", "fraction_of_limit", "speedup", "max_difference",
)  # fmt: skip


class GradientBatch(NamedTuple):
    """A batch's ids on the owners of their rows, and the gradient of the pooled embeddings of this rank's samples."""

    ids: Ids
    gradient: torch.Tensor
    """[b, D_total] float32"""


def make_batches(workload: Workload) -> list[GradientBatch]:
    shape = workload.batch_sizes[workload.rank], workload.layout.total_dim
    generator = torch.Generator(workload.device).manual_seed(workload.rank)
    make = partial(torch.randn, shape, generator=generator, device=workload.device)
    return [GradientBatch(ids, make()) for ids in workload.batches]


class Update(Contender):
    """A backward of the exchange. If `exposed`, each step includes the preparation that needs only ids."""

    def __init__(
        self, name: str, workload: Workload, options: ExchangeOptions, batches: Sequence[GradientBatch], exposed: bool
    ) -> None:
        super().__init__(name, workload)
        self._batch_sizes = BatchSizes.of(workload.batch_sizes)
        about = workload.layout, workload.tables, options, workload.group, workload.device
        capacity, counters = max(workload.batch_sizes), StepCounters(workload.device)
        self._parts = build_exchange(ExchangeContext(*about, capacity, counters))
        self._prepared = {} if exposed else {id(batch): self._begun(batch, prepared=True) for batch in batches}

    def _begun(self, batch: GradientBatch, prepared: bool = False) -> PendingBackward:
        pending = self._parts.backward.note_forward(Step(list(batch.ids.inputs), self._batch_sizes))
        return self._parts.backward.prepare(pending) if prepared else pending

    def step(self, batch: GradientBatch) -> None:
        pending = self._prepared[id(batch)] if self._prepared else self._begun(batch)
        self._parts.backward.finish(self._parts.backward.start(pending, batch.gradient))

    def prepare(self, batch: GradientBatch, *_: object) -> None:
        """Do the preparation that needs only ids."""
        pending = self._begun(batch, prepared=True)
        if self.workload.device.type == "cuda":
            self._parts.backward.finish(WindowState(pending, ()))  # only waits for the preparing stream

    def close(self) -> None:
        self._parts.close()


def run(kind: str, ranks: Ranks) -> int:
    """Return `DISAGREEMENT` if table rows or states disagree for some optimizer, which then has no rows in the file."""
    world, device, values = ranks.world, ranks.device, ranks.values
    config = shape_of(ranks.config, world.world_size, values.tables_per_rank)
    config = with_keys(config, {"train.precision": "fp32"})  # the gradient's dtype
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
    return DISAGREEMENT if wrong else 0


def make_contenders(config: Config, workload: Workload, batches: Sequence[GradientBatch]) -> list[Update]:
    """The first contender is the baseline."""
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
