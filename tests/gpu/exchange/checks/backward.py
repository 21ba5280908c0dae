"""Updates of rows by pushed gradients, against the collective and FBGEMM's update; beyond 2^31 elements, too.

All backwards have the same rows, states, ids and gradients, so only the order of float32 sums differs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from dlrm_overlap.embedding.options import ExchangeOptions
from tests.agreement import assert_all_near, assert_same
from tests.gpu.exchange.checks.lookups import rows_at_borders
from tests.gpu.exchange.place import Check, Place, every
from tests.gpu.exchange.stage_by_hand import Batch, Stage, Table

_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
_LEARNING_RATE = 0.5
DIMS = (4, 12, 64, 128, 256, 1024)
FEW_DIMS = (12, 128)  # each dim compiles some kernels
_SAMPLES = 205  # a rank's: not a multiple of any block
_TOLERANCE = 2e-5  # of a row's greatest change


class Training:
    """A stage that is trained by random gradients."""

    def __init__(
        self, place: Place, tables: Sequence[Table], optimizer: str, options: ExchangeOptions, fill: bool = True
    ) -> None:
        """Make the stage, with rows and states that depend only on the tables, or left to the caller."""
        self.place = place
        self.stage = Stage(place, tables, lr=_LEARNING_RATE, optimizer=optimizer)
        self.exchange = self.stage.exchange(options)
        if fill:
            self.stage.fill(integers=False)
            for t in self.stage.owned[place.rank]:
                for state in self.tensors(t)[1:]:  # away from 0, where a step is only its gradient's sign
                    state.copy_(0.5 + torch.rand(state.shape, generator=place.generator(t), device=place.device))

    def step(self, batch: Batch, seed: int, feedback: bool = False, pause: Callable[[], None] = lambda: None) -> None:
        """Take a step; with `feedback`, its gradient depends on the rows that the forward read."""
        for lookup in self.stage.local_tables.lookups:
            lookup.set_learning_rate(_LEARNING_RATE * (1 + seed % 3))
        output = self.look_up(batch, pause)
        gradient = self._gradient(len(output), seed, output.dtype)
        if feedback:
            gradient = gradient + output.detach().tanh()
        pause()
        output.backward(gradient)

    def look_up(self, batch: Batch, pause: Callable[[], None] = lambda: None) -> torch.Tensor:
        pause()
        awaitable = self.exchange.start(self.stage.inputs(batch), batch.sizes)
        pause()
        return awaitable.wait()

    def _gradient(self, samples: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a random gradient; by seed it is contiguous, a slice of a wider tensor, or transposed."""
        generator = self.place.generator(self.place.world_size * seed + self.place.rank)
        columns = self.stage.columns[-1]
        shape = (columns + 8, samples) if seed % 4 == 3 else (samples, columns + 8)
        wider = torch.randn(shape, generator=generator, device=self.place.device).to(dtype)
        if seed % 4 == 3:
            wider = wider.T
        first = (0, 8, 1, 0)[seed % 4]
        gradient = wider[:, first : first + columns]
        return gradient.contiguous() if seed % 4 == 0 else gradient

    def tensors(self, t: int) -> list[torch.Tensor]:
        """Return the rows of a table of this rank and, if the optimizer has one, their state."""
        state = self.stage.state(t)
        return [self.stage.weight(t)] if state is None else [self.stage.weight(t), state]

    def rows(self) -> dict[str, torch.Tensor]:
        """Return copies of the rows and states of this rank's tables."""
        return {
            f"{kind} of table {t}": tensor.clone()
            for t in self.stage.owned[self.place.rank]
            for kind, tensor in zip(("rows", "state"), self.tensors(t), strict=False)
        }

    def close(self) -> None:
        self.place.close(self.exchange)


def tables_of_all_kinds(owners: Sequence[int], dims: Sequence[int] = DIMS) -> list[Table]:
    """Return tables of `owners`: of each dim, sums and means, and some that make an update's work uneven."""
    tables: list[Table] = []
    for i, dim in enumerate(dims):
        tables.append(Table(100 + i, dim, owners[i % len(owners)], longest=9))
        tables.append(Table(5 + i, dim, owners[i % len(owners)], mean=True, longest=9))  # rows twice in a bag
    first, second, third = owners[0], owners[1 % len(owners)], owners[2 % len(owners)]
    tables.append(Table(500, 128, first, hot=True))
    tables.append(Table(1, 64, second, longest=150))  # a run of more than 2^14 ids: cut into chunks, which grow
    tables.append(Table(40, 12, third, mean=True, longest=3000))
    tables += [Table(60, 64, first), Table(60, 64, first, rows_of=len(tables))]
    tables += [Table(80, 64, second), Table(80, 12, third, ids_of=len(tables))]
    return tables


def uneven_batches(place: Place, tables: Sequence[Table]) -> list[Batch]:
    """Return batches of int32 and int64 ids: even, uneven, without ids, without samples, growing."""
    ranks = range(place.world_size)
    even = [_SAMPLES] * place.world_size
    uneven = [(300, 0, 17, 150)[rank % 4] for rank in ranks]
    grown = [(3, 400, 64, 250)[rank % 4] for rank in ranks]
    sizes = (even, uneven, even, [0] * place.world_size, grown, uneven[::-1], even)
    kinds = (torch.int32, torch.int64)
    return [Batch(place, tables, each, i, kinds[i % 2], empty=i == 2) for i, each in enumerate(sizes)]


def train(
    place: Place, tables: Sequence[Table], batches: Sequence[Batch], optimizer: str, options: ExchangeOptions
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the rows and states of this rank's tables before and after a step for each batch."""
    training = Training(place, tables, optimizer, options)
    before = training.rows()
    for seed, batch in enumerate(batches):
        training.step(batch, seed)
    after = training.rows()
    training.close()
    return before, after


def _assert_close(
    before: Mapping[str, torch.Tensor],
    after: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    steps: int,
    tolerance: float,
) -> None:
    """Compare updates row by row, relative to the row's greatest change; rows without a change must be equal."""
    assert after.keys() == expected.keys()
    for name in expected:
        begin, end, wanted = (x[name].double().view(len(x[name]), -1) for x in (before, after, expected))
        change = (wanted - begin).abs().amax(1)
        assert change.any(), f"{name}: nothing was learnt"
        rounding = steps * 2.0**-23 * torch.maximum(begin.abs(), wanted.abs()).amax(1)
        allowed = torch.where(change > 0, tolerance * change + rounding, 0.0)
        error = (end - wanted).abs().amax(1)
        row = int((error - allowed).argmax())
        assert (error <= allowed).all(), (
            f"{name}, row {row}: changed by {change[row]:.3e}, error {error[row]:.1e}, more than {allowed[row]:.1e}; "
            f"{int((error > allowed).sum())} of {len(error)} rows differ"
        )


def _compare(
    place: Place,
    tables: Sequence[Table],
    batches: Sequence[Batch],
    optimizer: str,
    options: ExchangeOptions,
    tolerance: float,
) -> None:
    """Compare the updates under `options` with the collective's."""
    before, after = train(place, tables, batches, optimizer, options)
    same, expected = train(place, tables, batches, optimizer, replace(options, backward="collective"))
    assert_all_near(before, same, 0.0, "at the beginning:")
    _assert_close(before, after, expected, len(batches), tolerance)


def _check_update(place: Place, optimizer: str) -> None:
    tables = tables_of_all_kinds(range(place.world_size))
    _compare(place, tables, uneven_batches(place, tables), optimizer, ExchangeOptions(), _TOLERANCE)


def _check_wire(place: Place) -> None:
    """Gradients are rounded to the wire's dtype, and divided by the number of ranks where rows are updated.

    The last rank has no tables. If the output has the wire's dtype, gradients are not copied.
    """
    tables = tables_of_all_kinds(range(place.world_size - 1), FEW_DIMS)
    batches = uneven_batches(place, tables)
    _, exact = train(place, tables, batches, "adagrad", ExchangeOptions())
    for wire in (torch.bfloat16, torch.float16):
        options = ExchangeOptions(wire_dtype=wire)
        _compare(place, tables, batches, "adagrad", options, _TOLERANCE)
        _, rounded = train(place, tables, batches, "adagrad", options)
        assert all((rounded[name] != exact[name]).any() for name in exact), f"{wire}: gradients were not rounded"
        in_place = replace(options, output_dtype=wire, leading_columns=64)
        _, same = train(place, tables, batches, "adagrad", in_place)
        assert_all_near(same, rounded, 0.0, f"{wire}, {in_place}:")


def _check_half_precision(place: Place, optimizer: str) -> None:
    """Rows of float16 are those of float32, rounded to the nearest on CPUs and stochastically on GPUs."""
    kinds, owners = ((64, False), (12, True)), range(place.world_size)
    full = [Table(2000, dim, owner, mean=mean) for dim, mean in kinds for owner in owners]
    half = [replace(table, dtype=torch.float16) for table in full]
    batch = Batch(place, full, [5 * _SAMPLES] * place.world_size, seed=0)
    rounded = Training(place, half, optimizer, ExchangeOptions())
    exact = Training(place, full, optimizer, ExchangeOptions(backward="collective"))
    owned = exact.stage.owned[place.rank]
    for t in owned:
        exact.stage.weight(t).copy_(rounded.stage.weight(t))
    before = exact.rows()
    for training in (rounded, exact):
        training.step(batch, seed=0)
    errors, not_nearest = [], []
    for t in owned:
        wanted, got = exact.stage.weight(t), rounded.stage.weight(t)
        touched = (wanted != before[f"rows of table {t}"]).any(1)
        assert_same(got[~touched].float(), wanted[~touched], f"rows of table {t} that no id names")
        error = got[touched].float() - wanted[touched]
        unit = torch.exp2(torch.frexp(wanted[touched])[1].float() - 11).clamp(min=2.0**-24)
        off = error.abs() > unit + 1e-6  # by another order of float32 sums
        assert not off.any(), f"table {t}: {int(off.sum())} of {off.numel()} elements are no neighbours"
        errors.append((error / unit).flatten())
        not_nearest.append((got != wanted.half())[touched].flatten())
    error, chance = torch.cat(errors), torch.cat(not_nearest).float().mean()
    assert len(error) > 10_000
    assert error.mean().abs() < 2 / len(error) ** 0.5, f"{len(error)} errors have a mean of {error.mean():.1e} units"
    if place.on_gpu:
        assert 0.2 < chance < 0.3, f"{chance:.2f} of all are not the nearest; fair rounding gives a quarter"
    ends = (before, rounded.rows(), exact.rows())
    states = [{name: x for name, x in rows.items() if "state" in name} for rows in ends]
    _assert_close(*states, steps=1, tolerance=_TOLERANCE)
    rounded.close()
    exact.close()


def _check_large(place: Place) -> None:
    """Rows at the ends of tables of more than 2^31 elements, of one table or two together, are updated correctly."""
    elements = 1 << (31 if place.on_gpu else 18)
    last = place.world_size - 1
    tables = [
        Table(elements // 128 + 1000, 128, owner=0),
        *[Table(elements // 2 // 64 + 1000, 64, owner=last, longest=9)] * 2,
    ]
    around = [torch.tensor(rows_at_borders(table, elements), device=place.device) for table in tables]
    few = [replace(table, rows=len(rows)) for table, rows in zip(tables, around, strict=True)]
    small = Training(place, few, "adagrad", ExchangeOptions())
    large = Training(place, tables, "adagrad", ExchangeOptions(), fill=False)
    owned = large.stage.owned[place.rank]
    for t in owned:
        for whole, part in zip(large.tensors(t), small.tensors(t), strict=True):
            for row, values in zip(around[t].tolist(), part, strict=True):
                whole[row].copy_(values)
    for seed in range(3):
        batch = Batch(place, few, [20] * place.world_size, seed)  # few samples: not all rows are touched
        small.step(batch, seed)
        batch.values = [rows[ids.long()].int() for rows, ids in zip(around, batch.values, strict=True)]
        large.step(batch, seed)
    for t in owned:
        for whole, part in zip(large.tensors(t), small.tensors(t), strict=True):
            assert_same(torch.stack([whole[row] for row in around[t].tolist()]), part, f"table {t}")
    small.close()
    large.close()


CHECKS = (
    every("update", _check_update, optimizer=_OPTIMIZERS, timeout_s=180)
    | {"update_wire": Check(_check_wire, timeout_s=180), "update_large": Check(_check_large)}
    | every("update_weights_fp16", _check_half_precision, optimizer=_OPTIMIZERS)
)
