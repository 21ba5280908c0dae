"""Outputs to the last bit, against FBGEMM's lookup, `all_to_all_single` and unpacking; beyond 2^31 elements, too."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from dlrm_overlap.embedding.options import PUTS, ExchangeOptions
from dlrm_overlap.train.model import JoinInPlace
from tests.agreement import assert_same
from tests.gpu.exchange.place import Place, every
from tests.gpu.exchange.stage_by_hand import Batch, Stage, Table, pool_exactly

BACKENDS = ("nccl", "pgas", "fused")
_DIMS = (4, 12, 64, 92, 128, 256, 512, 1024)
_SAMPLES = 333  # a rank's: not a multiple of any block
_WIRES = [{"wire_dtype": dtype} for dtype in (torch.bfloat16, torch.float16)]
_SCHEDULES = [{"schedule": schedule} for schedule in ("linear", "remote_first", "balanced")]
_SLICES = [{"slice_bags": bags, "programs_per_sm": most} for bags, most in product((4, 32, 128), (1, None))]


def _by_put(backend: str) -> list[ExchangeOptions]:
    """Return the backend's options with each of its puts."""
    return [ExchangeOptions(backend, put=put) for put in (PUTS if backend == "fused" else ("direct",))]


def _tables_of_all_dims(world_size: int) -> list[Table]:
    """Return tables of all dims, some of which each rank owns; one launch has sums and means."""
    tables: list[Table] = []
    for i, dim in enumerate(_DIMS):
        owner = i % world_size
        tables.append(Table(100 + i, dim, owner, longest=70 if dim == 64 else 4))
        tables.append(Table(50 + i, dim, owner, mean=True, longest=9))
        tables.append(Table(30 + i, dim, (i + 1) % world_size, torch.float16))
    return tables


def _tables(world_size: int) -> list[Table]:
    """Return three tables a rank, with ranks interleaved; few dims, since each compiles a kernel."""
    owners = range(world_size)
    kinds = [(200, 64, torch.float32), (77, 12, torch.float16), (1000, 64, torch.float32)]
    return [Table(rows, dim, owner, dtype) for rows, dim, dtype in kinds for owner in owners]


@torch.no_grad()
def _assert_lookups(
    stage: Stage, options: ExchangeOptions, batches: Sequence[Batch], tables: Sequence[int] | None = None
) -> None:
    """Compare the output of a step for each batch, of `tables` or all, with the baseline's."""
    exchange = stage.exchange(options)
    for step, batch in enumerate(batches):
        expected = stage.baseline(batch, options.wire_dtype).to(options.output_dtype)
        actual = exchange.start(stage.inputs(batch), batch.sizes).wait()
        assert actual.shape == expected.shape
        for t in range(len(stage.tables)) if tables is None else tables:
            columns = slice(stage.columns[t], stage.columns[t + 1])
            assert_same(actual[:, columns], expected[:, columns], f"{options}, step {step}, {stage.tables[t]}")
        del actual  # its window must be free before the next step
    stage.place.close(exchange)


def _check_dims(place: Place, backend: str, mean: bool) -> None:
    tables = _tables_of_all_dims(place.world_size)
    stage = Stage(place, tables)
    stage.fill(integers=False)
    batches = [Batch(place, tables, [_SAMPLES] * place.world_size, seed) for seed in range(3)]
    wanted = [t for t, table in enumerate(tables) if table.mean == mean]
    for options in _by_put(backend):
        _assert_lookups(stage, options, batches, wanted)


def _stage(place: Place) -> Stage:
    """Return a filled stage of `_tables`."""
    stage = Stage(place, _tables(place.world_size))
    stage.fill(integers=False)
    return stage


def _batches(stage: Stage, count: int) -> list[Batch]:
    return [Batch(stage.place, stage.tables, [_SAMPLES] * stage.place.world_size, seed) for seed in range(count)]


def _check_ids(place: Place, backend: str) -> None:
    stage, sizes = _stage(place), [_SAMPLES] * place.world_size
    batches = [Batch(place, stage.tables, sizes, seed, ids) for seed, ids in enumerate((torch.int64, torch.int32) * 2)]
    _assert_lookups(stage, ExchangeOptions(backend), batches)


def _check_options(place: Place, backend: str, changed: Sequence[Mapping[str, Any]]) -> None:
    """Check each of the `changed` options with each put."""
    stage = _stage(place)
    batches = _batches(stage, 2)
    for changes, options in product(changed, _by_put(backend)):
        _assert_lookups(stage, replace(options, **changes), batches)


def _check_in_place(place: Place, backend: str) -> None:
    """Outputs in the wire's dtype, given as views after columns that only this rank fills."""
    stage = _stage(place)
    batches = _batches(stage, 4)
    shapes = ((torch.bfloat16, 64), (torch.bfloat16, 12), (torch.float16, 8), (torch.float32, 128))
    for (wire, leading), by_put in product(shapes, _by_put(backend)):
        options = replace(by_put, wire_dtype=wire, output_dtype=wire, leading_columns=leading)
        _assert_lookups(stage, options, batches)
        exchange = stage.exchange(options)
        for step, batch in enumerate(batches):
            expected = stage.baseline(batch, wire).to(wire)
            with torch.no_grad():
                values = exchange.start(stage.inputs(batch), batch.sizes).wait()
            dense = torch.full((_SAMPLES, leading), float(step), dtype=wire, device=place.device)
            joined = JoinInPlace.apply(dense, values)
            assert_same(joined, torch.cat((dense, expected), dim=1), f"{options}, step {step}, joined")
            del values, joined
        place.close(exchange)


def _check_sizes(place: Place, backend: str) -> None:
    """Ranks with one sample, none, or many; no samples or ids at all; batches that grow, so windows are replaced."""
    stage = _stage(place)
    uneven = [(17, 1, 0, 5)[rank % 4] for rank in range(place.world_size)]
    grown = [(3, 700, 64, 333)[rank % 4] for rank in range(place.world_size)]
    one, none, many = ([samples] * place.world_size for samples in (1, 0, _SAMPLES))
    sizes = (one, uneven, none, uneven[::-1], grown, many, uneven)
    batches = [Batch(place, stage.tables, each, seed) for seed, each in enumerate(sizes)]
    batches.insert(5, Batch(place, stage.tables, grown, seed=9, empty=True))
    for options in _by_put(backend):
        _assert_lookups(stage, options, batches)


def _check_many_bags(place: Place, backend: str) -> None:
    """So many bags that the persistent kernel takes larger tasks, and then few, with the state kept for many."""
    stage = _stage(place)
    many = (1 << 17) // place.world_size + 1 if place.on_gpu else 300
    crowded = [many if rank == 0 else 1 for rank in range(place.world_size)]
    sizes = ([many - 8] * place.world_size, crowded, [many] * place.world_size, crowded)
    batches = [Batch(place, stage.tables, each, seed) for seed, each in enumerate(sizes)]
    for slice_bags, options in product((32, 4), _by_put(backend)):
        _assert_lookups(stage, replace(options, slice_bags=slice_bags), batches)


@torch.no_grad()
def _check_large_tables(place: Place, backend: str) -> None:
    """Rows at the ends of tables of more than 2^32 elements, and around powers of two where an index may overflow.

    Ranks above the second have no tables.
    """
    elements = 1 << (32 if place.on_gpu else 18)
    tables = [
        Table(elements // 128 + 1000, 128, owner=0),
        Table(elements // 64 + 1000, 64, owner=1 % place.world_size, dtype=torch.float16),
    ]
    stage = Stage(place, tables)
    sizes = [_SAMPLES] * place.world_size
    rows_of_interest: list[torch.Tensor] = []
    for t, table in enumerate(tables):
        around = rows_at_borders(table, elements)
        rows_of_interest.append(torch.tensor(around, device=place.device))
        if table.owner == place.rank:
            rows = _integers(place, len(around), table.dim, seed=t).to(table.dtype)
            for row, new in zip(around, rows, strict=True):
                stage.weight(t)[row].copy_(new)
    few = [Table(len(rows), table.dim, table.owner) for rows, table in zip(rows_of_interest, tables, strict=True)]
    exchange = stage.exchange(ExchangeOptions(backend))
    for seed in range(2):
        batch = Batch(place, few, sizes, seed)
        everyones = [_integers(place, table.rows, table.dim, seed=t) for t, table in enumerate(few)]
        expected = pool_exactly(batch, everyones, place.rank)
        batch.values = [rows[ids.long()].int() for rows, ids in zip(rows_of_interest, batch.values, strict=True)]
        actual = exchange.start(stage.inputs(batch), sizes).wait()
        assert_same(actual, expected, f"{backend}, batch {seed}")
        del actual
    place.close(exchange)


def rows_at_borders(table: Table, elements: int) -> list[int]:
    """Return, ascending, the rows around the table's ends and around element `elements`, `elements` / 2, .. / 16."""
    borders = [0, table.rows, *((elements >> shift) // table.dim for shift in range(5))]
    return sorted({row for border in borders for row in range(border - 20, border + 20) if 0 <= row < table.rows})


def _integers(place: Place, rows: int, dim: int, seed: int) -> torch.Tensor:
    generator = place.generator(seed)
    return torch.randint(-1000, 1000, (rows, dim), generator=generator, device=place.device).float()


@torch.no_grad()
def _check_large_windows(place: Place, backend: str) -> None:
    """Windows of more than 2^31 elements, with one id a bag."""
    dim, elements = (1024, 1 << 31) if place.on_gpu else (64, 1 << 15)
    tables = [Table(64, dim, owner, longest=1) for owner in range(place.world_size)]
    stage = Stage(place, tables)
    everyones = stage.fill(integers=True)
    samples = elements // (dim * place.world_size) + 100
    batch = Batch(place, tables, [samples] * place.world_size, seed=0)
    for options in _by_put(backend):
        exchange = stage.exchange(options)
        for _ in range(2):
            actual = exchange.start(stage.inputs(batch), batch.sizes).wait()
            assert actual.numel() > elements
            for t, rows in enumerate(everyones):
                bag, ids = batch.bags(t, place.rank)
                expected = rows.new_zeros(samples, dim).index_copy_(0, bag, rows[ids])
                assert_same(actual[:, stage.columns[t] : stage.columns[t + 1]], expected, f"{options}, table {t}")
                del expected
            del actual
        place.close(exchange)


_OURS = BACKENDS[1:]
CHECKS = (
    every("dims", partial(_check_dims, mean=False), backend=BACKENDS, timeout_s=150)
    | every("mean", partial(_check_dims, mean=True), backend=BACKENDS)
    | every("ids", _check_ids, backend=BACKENDS)
    | every("wire", partial(_check_options, changed=_WIRES), backend=BACKENDS)
    | every("wire_in_place", _check_in_place, backend=_OURS)
    | every("schedules", partial(_check_options, changed=_SCHEDULES), backend=_OURS)
    | every("slices", partial(_check_options, changed=_SLICES), backend=["fused"])
    | every("sizes", _check_sizes, backend=BACKENDS)
    | every("many_bags", _check_many_bags, backend=BACKENDS)
    | every("large_tables", _check_large_tables, backend=BACKENDS)
    | every("large_windows", _check_large_windows, backend=_OURS)
)
