"""`bench update`: times the update of table rows on one GPU, with nothing exchanged (docs/fused_tables.md).

Each row is one shape: T tables of one dim, whose bags of 0 to 2 L ids are uniform over the rows or follow Zipf's law.
Rows and states of `FusedTables` must agree with FBGEMM's before times are taken. Columns, medians of the GPU's time:
    forward_ms      FBGEMM's forward
    sort_ms         our sort of the ids
    update_ms       our update of the rows, ids sorted
    whole_ms        both, one after the other
    beside_ms       a step of `FusedTables` minus forward_ms: the sort runs during the forward, as in training
    fbgemm_ms       FBGEMM's backward, which sorts and updates
    floor_ms        bytes of the update at the rate of a copy: rows and states that ids name, read and written, the
                    gradient read, each once
    speedup         fbgemm_ms / whole_ms
    speedup_beside  (a step of FBGEMM minus forward_ms) / beside_ms
    host_ms         the CPU's time to issue a step of `FusedTables`; fbgemm_host_ms of FBGEMM
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.bench.harness.agreement import ROW_TOLERANCE, Agreement
from dlrm_overlap.bench.harness.limits import count_tables, measure_ceilings
from dlrm_overlap.bench.harness.timing import time_alone
from dlrm_overlap.bench.harness.workload import collect_garbage
from dlrm_overlap.bench.rows import append_rows, print_table
from dlrm_overlap.config import InputError
from dlrm_overlap.data.zipf import ZipfRanks, ZipfTable
from dlrm_overlap.embedding.fused_tables import CheckedIds, FusedTables
from dlrm_overlap.embedding.steps import UpdateRule
from dlrm_overlap.embedding.tables import rule_of
from dlrm_overlap.embedding.traffic import update_bytes
from dlrm_overlap.launching.lifetime import DISAGREEMENT
from dlrm_overlap.torchrec_private import (
    ComputeDevice,
    EmbeddingLocation,
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from dlrm_overlap.torchrec_private.fbgemm import counts
from dlrm_overlap.train.ranks import Ranks

_ALPHAS = {"uniform": 0.0, "zipf": 1.05}
_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
}
_TOLERANCE = {**ROW_TOLERANCE, "adam": 1e-4}
_SHOWN = (
    "pooling", "ids_by", "optimizer", "dim", "ids", "touched_rows", "forward_ms", "sort_ms", "update_ms", "whole_ms",
    "beside_ms", "fbgemm_ms", "floor_ms", "speedup", "speedup_beside", "host_ms", "fbgemm_host_ms",
    "max_difference",
)  # fmt: skip


class Shape(NamedTuple):
    tables: int
    rows: int
    """of a table"""
    samples: int
    mean_ids: int
    """of a bag"""


class Case(NamedTuple):
    pooling: str
    """weighted (sums of weighted rows) or unpooled"""
    ids_by: str
    optimizer: str
    dim: int


class Batch(NamedTuple):
    ids: KeyedJaggedTensor
    gradient: torch.Tensor
    """[B, T * dim], or [n, dim] unpooled; float32"""

    @property
    def arguments(self) -> tuple[Any, ...]:
        weights = self.ids.weights_or_none()
        return self.ids.values(), self.ids.offsets(), *(() if weights is None else (weights,))


def make_batch(case: Case, shape: Shape, device: torch.device) -> Batch:
    random, count = np.random.default_rng(0), shape.tables * shape.samples
    lengths = random.integers(0, 2 * shape.mean_ids + 1, count)
    ranks = ZipfRanks(shape.rows, _ALPHAS[case.ids_by])
    values = [
        ZipfTable(ranks, offset=table).row_ids(ranks.draw(random.integers(0, 2**64, int(bags.sum()), dtype=np.uint64)))
        for table, bags in enumerate(lengths.reshape(shape.tables, -1))
    ]
    ids = torch.from_numpy(np.concatenate(values)).to(device, torch.int64)
    generator = torch.Generator(device).manual_seed(0)
    weights, gradients = None, (ids.numel(), case.dim)
    if case.pooling == "weighted":
        weights = torch.rand(ids.numel(), generator=generator, device=device)
        gradients = shape.samples, shape.tables * case.dim
    keys = [f"t{table}" for table in range(shape.tables)]
    sizes = torch.from_numpy(lengths).to(device)
    features = KeyedJaggedTensor(keys, ids, weights, lengths=sizes, stride=shape.samples)
    return Batch(features, torch.randn(gradients, generator=generator, device=device))


def make_tables(case: Case, shape: Shape, device: torch.device) -> FusedTables:
    """Return tables with random rows and states, so that a wrong row or state shows."""
    on_gpu = device.type == "cuda"
    place = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
    tables = FusedTables(
        [(shape.rows, case.dim, place, ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU)] * shape.tables,
        optimizer=_OPTIMIZERS[case.optimizer],
        learning_rate=0.01,
        pooling_mode=PoolingMode.SUM if case.pooling == "weighted" else PoolingMode.NONE,
        device=device,
    )
    tables.init_embedding_weights_uniform(-1.0, 1.0)
    for states in tables.split_optimizer_states():
        for state in states:
            state.uniform_(0.5, 1.5)
    return tables


class Contenders:
    """Pieces of a step on one batch: each begins and ends on the current stream."""

    def __init__(self, tables: FusedTables, batch: Batch) -> None:
        self._tables, self._batch, self._device = tables, batch, tables.current_device
        self._checked = CheckedIds(*self._prepared(), self._now())
        self._sorted = tables.row_update.sort(self._checked)
        # Hooks leave out the check that rows are as the forward saw them: the backward is repeated.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            self._output = self._by_fbgemm()

    def _prepared(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return self._tables.prepare_inputs(*self._batch.arguments)[:3]

    def _now(self) -> torch.Event:
        return torch.cuda.current_stream(self._device).record_event()

    def _by_fbgemm(self) -> torch.Tensor:
        return SplitTableBatchedEmbeddingBagsCodegen.forward(self._tables, *self._batch.arguments)

    def forward(self) -> None:
        self._by_fbgemm()

    def sort(self) -> None:
        batch = self._tables.row_update.sort(self._checked._replace(ready=self._now()))
        torch.cuda.current_stream(self._device).wait_event(batch.done)

    def update(self) -> None:
        self._tables.row_update.update(self._sorted, self._batch.gradient, self._rule(), step=0)

    def whole(self) -> None:
        batch = self._tables.row_update.sort(self._checked._replace(ready=self._now()))
        self._tables.row_update.update(batch, self._batch.gradient, self._rule(), step=0)

    def _rule(self) -> UpdateRule:
        return rule_of(self._tables)

    def step(self) -> None:
        with torch.enable_grad():
            self._tables(*self._batch.arguments).backward(self._batch.gradient)

    def fbgemm(self) -> None:
        self._output.backward(self._batch.gradient, retain_graph=True)

    def fbgemm_step(self) -> None:
        with torch.enable_grad():
            self._by_fbgemm().backward(self._batch.gradient)

    def all(self) -> dict[str, Callable[[], None]]:
        names = "forward", "sort", "update", "whole", "step", "fbgemm", "fbgemm_step"
        return {name: getattr(self, name) for name in names}


def check(tables: FusedTables, batch: Batch, contenders: Contenders, case: Case) -> Agreement:
    """Compare the rows and states that one step of each leads to, relative to a table's greatest change or state."""
    touched = [ids.values().unique() for ids in batch.ids.to_dict().values()]
    states = tables.split_optimizer_states() or [[] for _ in touched]
    live = [[rows, *own] for rows, own in zip(tables.split_embedding_weights(), states, strict=True)]

    def take(step: Callable[[], None]) -> list[list[torch.Tensor]]:
        tbe: Any = tables
        for count in (tbe.iter, tbe.iter_cpu) if counts(tbe) else ():
            count.zero_()
        before = read()
        step()
        after = read()
        for tensors, rows, old in zip(live, touched, before, strict=True):
            for tensor, each in zip(tensors, old, strict=True):
                tensor.index_copy_(0, rows, each)
        return [[each[0] - old[0], *each[1:]] for each, old in zip(after, before, strict=True)]

    def read() -> list[list[torch.Tensor]]:
        return [
            [tensor.index_select(0, rows) for tensor in tensors] for tensors, rows in zip(live, touched, strict=True)
        ]

    expected, actual = take(contenders.fbgemm_step), take(contenders.step)
    worst = 0.0
    for theirs, ours in zip(expected, actual, strict=True):
        for want, found in zip(theirs, ours, strict=True):
            difference = ((found - want).abs().max() / want.abs().max()).item()
            worst = max(worst, difference if difference == difference else float("inf"))
    return Agreement(worst, _TOLERANCE[case.optimizer])


def count_bytes(case: Case, batch: Batch) -> tuple[int, float]:
    """Return the number of rows that ids name, and the bytes of an update that reads and writes all memory once."""
    traffic = count_tables(batch.ids, case.dim, element_bytes=4)
    if case.pooling == "unpooled":  # each id has a gradient
        traffic = [each._replace(filled_bags=each.ids) for each in traffic]
    sizes: dict[str, Any] = dict.fromkeys(("samples", "own_samples", "total_dim", "owner_dim"), 0)
    found = update_bytes(traffic, **sizes, wire_bytes=4, gradient_bytes=4, optimizer=case.optimizer)
    return int(sum(each.touched_rows for each in traffic)), found.compulsory


@torch.no_grad()
def measure(
    case: Case, shape: Shape, device: torch.device, hbm_gb_per_s: float, repetitions: int
) -> tuple[dict[str, Any], str | None]:
    """Return the row of a case, without times if its rows disagree, and then what is wrong."""
    batch, tables = make_batch(case, shape, device), make_tables(case, shape, device)
    contenders = Contenders(tables, batch)
    found = check(tables, batch, contenders, case)
    rows, floor_bytes = count_bytes(case, batch)
    row: dict[str, Any] = {**case._asdict(), **shape._asdict(), "ids": batch.ids.values().numel()}
    row |= {"touched_rows": rows, "floor_bytes": int(floor_bytes), "hbm_gb_per_s": hbm_gb_per_s, **found._asdict()}
    if not found.agrees:
        name = ", ".join(map(str, case))
        return row, f"{name}: rows or states differ from FBGEMM's by {found.max_difference:.1e}; no time is reported"
    pieces = contenders.all()
    timings = time_alone(list(pieces.values()), repetitions, device)
    ms = {name: timing.median_ms for name, timing in zip(pieces, timings, strict=True)}
    beside = ms["step"] - ms["forward"]
    row |= {f"{name}_ms": value for name, value in ms.items()}
    host = {name: timing.host_ms for name, timing in zip(pieces, timings, strict=True)}
    row |= {
        "host_ms": host["step"],
        "fbgemm_host_ms": host["fbgemm_step"],
        "beside_ms": beside,
        "floor_ms": floor_bytes / hbm_gb_per_s / 1e6,
        "speedup": ms["fbgemm"] / ms["whole"],
        "speedup_beside": (ms["fbgemm_step"] - ms["forward"]) / beside,
    }
    return row, None


def run(kind: str, ranks: Ranks) -> int:
    """Return `DISAGREEMENT` if rows or states disagree for some shape, which then has no row in the CSV file."""
    device, values = ranks.device, ranks.values
    if ranks.world.world_size > 1:
        raise InputError(f"bench {kind}: {ranks.world.world_size} ranks, but nothing is exchanged; add --nproc 1")
    hbm_gb_per_s, _ = measure_ceilings(ranks.connect(), device)
    shape = Shape(values.tables, values.rows, values.samples, values.mean_ids)
    cases = itertools.product(values.poolings, values.ids_by, values.optimizers, values.dims)
    rows, faults = list[dict[str, Any]](), list[str]()
    for case in itertools.starmap(Case, cases):
        row, fault = measure(case, shape, device, hbm_gb_per_s, values.repetitions)
        if fault is None:
            rows.append({"kind": kind, **row})
            output = append_rows(Path(values.output), rows[-1:])  # a run that is cut short keeps its rows
        else:
            faults.append(fault)
        print(f"{', '.join(map(str, case))}: {fault or 'timed'}", flush=True)
        collect_garbage(device)
    if rows:
        print_table(rows, _SHOWN)
        print(f"rows in {output}")
    return DISAGREEMENT if faults else 0
