"""Rows that are put by over several steps, under Triton's interpreter: all as they were behind the first."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlrm_overlap.embedding.device.kept_rows import KeptRows
from dlrm_overlap.kernels.backward.keep_rows import KeptPlaces, copy_rows, keep_rows
from dlrm_overlap.kernels.backward.optimizers import RowRange
from dlrm_overlap.kernels.backward.row_runs import PreparedRuns
from tests.agreement import assert_same
from tests.kernels.emulation import interpreted

pytestmark = interpreted
KEYS, FIRST_OF_SECOND = 44, 30  # two ranges: 30 rows of 12 columns, 14 of 4
DIMS = (12, 4)


def _runs(keys: list[int]) -> PreparedRuns:
    """Return the runs of ids that name the rows `keys`, and garbage behind the last."""
    bounds = torch.tensor([0, sum(key < FIRST_OF_SECOND for key in keys), len(keys)])
    none = torch.empty(0)
    return PreparedRuns(torch.tensor([*sorted(keys), *[-7] * 3]), none, none, none, none, none, none, bounds)


class _Tables:
    """Two ranges of rows in allocations with rows of others in front, and where they are put by."""

    def __init__(self, optimizer: str, dtype: torch.dtype) -> None:
        self.ranges, self.kept = [], []
        self.marks = torch.zeros(KEYS, dtype=torch.int32)
        self.control = torch.tensor([0, 0])
        for index, (first, end, dim) in enumerate(
            zip((0, FIRST_OF_SECOND), (FIRST_OF_SECOND, KEYS), DIMS, strict=True)
        ):
            lead = 5  # units of 4 in front of the first row
            per_row = 1 if optimizer == "rowwise_adagrad" else dim
            weights = torch.randn(4 * lead + (end - first) * dim).to(dtype)
            states = torch.rand(4 * lead + (end - first) * per_row)
            state_at = 4 * lead - first if optimizer == "rowwise_adagrad" else lead - first * dim // 4
            at = lead - first * dim // 4
            self.ranges.append(RowRange(index, weights, states, at, state_at, dim, False, optimizer))
            kept = torch.full_like(weights, 9), torch.full_like(states, 9)
            self.kept.append(KeptPlaces(*kept, self.marks, self.control))

    def step(self, keys: list[int]) -> None:
        """Put by, and then change, the rows of `keys`, as a step that updates them."""
        runs = _runs(keys)
        for rows, kept in zip(self.ranges, self.kept, strict=True):
            keep_rows(2, runs, rows, kept)
        self.change(keys)

    def change(self, keys: list[int]) -> None:
        for rows in self.ranges:
            for key in keys:
                if (key < FIRST_OF_SECOND) == (rows.index == 0):
                    at = 4 * (rows.weight_at + key * rows.dim // 4)
                    rows.weights[at : at + rows.dim] += 1
                    if rows.optimizer == "rowwise_adagrad":
                        rows.states[rows.state_at + key] += 1
                    elif rows.optimizer == "adagrad":
                        at = 4 * (rows.state_at + key * rows.dim // 4)
                        rows.states[at : at + rows.dim] += 1

    def copy(self, index: int, first: int, end: int) -> None:
        copy_rows(first, end, self.ranges[index], self.kept[index])
        self.control[1] = end


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [("adagrad", torch.float32), ("rowwise_adagrad", torch.float16), ("sgd", torch.float32)],
)
def test_rows_are_put_by_as_they_were_though_steps_change_them(optimizer: str, dtype: torch.dtype) -> None:
    tables = _Tables(optimizer, dtype)
    tables.step([1, 31])
    for copy in (1, 2):  # the marks of a copy are none to the next
        expected = [(rows.weights.clone(), rows.states.clone()) for rows in tables.ranges]
        tables.control.copy_(torch.tensor([copy, 0]))
        tables.copy(0, 0, 11)
        tables.step([3, 12, 29, 30, 43])  # copied already; not yet, in both ranges
        tables.copy(0, 11, 30)
        tables.step([3, 12, 30, 31])  # twice
        tables.copy(1, 30, 44)
        tables.control[0] = 0
        tables.step([2, 40])  # too late to matter
        for rows, (weights, states), kept in zip(tables.ranges, expected, tables.kept, strict=True):
            assert_same(kept[0][20:], weights[20:], "rows")
            if optimizer != "sgd":
                assert_same(kept[1][20:], states[20:], "states")
            assert (kept[0][:20] == 9).all(), f"what is in front of range {rows.index} belongs to others"


def test_a_copy_of_all_rows_is_spread_over_steps() -> None:
    tables = _Tables("adagrad", torch.float32)
    features = SimpleNamespace(boundaries=torch.tensor([0, FIRST_OF_SECOND, KEYS]))
    ranges = [SimpleNamespace(rows=rows) for rows in tables.ranges]
    kept = KeptRows(torch.device("cpu"))
    inputs: list[Any] = [SimpleNamespace(input_features=features, ranges=ranges)]
    kept.follow(inputs)
    for _ in range(2):
        parts = [rows.weights[20:].view(-1, rows.dim) for rows in tables.ranges]
        parts += [rows.states[20:].view(-1, rows.dim) for rows in tables.ranges]
        expected = [part.clone() for part in parts]
        kept.begin()
        steps = 0
        while not kept.advance(most_bytes=9 * 12 * 8):  # nine rows of the first range, then many of the second
            steps += 1
            keys = [steps, 12 + steps, 29, 31, 43 - steps]
            for rows in tables.ranges:
                kept.keep(0, rows, _runs(keys))
            tables.change(keys)
        assert steps == 3
        for part, before in zip(parts, expected, strict=True):
            copy = kept.of(part)
            assert copy is not None
            assert_same(copy, before, "put by")
    assert kept.of(torch.empty(3)) is None
