"""The marks of the rows that a step updates, against their reference."""

import pytest
import torch

from dlrm_overlap.embedding.row_marks import RowMarks
from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels.backward.mark_rows import RowMarking
from tests.agreement import assert_same
from tests.kernels.emulation import interpreted
from tests.kernels.gradients import MIXED, Case, Model, Rows

CASES = {
    "one table": Case((Rows(((1, 0, 2, 7),)),)),
    "no ids": Case((Rows(((0, 0), (0,))),)),
    "keys of 64 bits": Case((MIXED,)),
    "keys of 32 bits, two ranges": Case((MIXED, Rows(((2,) * 40, (0, 1) * 35), dim=8)), ids=torch.int32),
}


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_a_steps_rows_are_marked_beside_those_of_earlier_steps(name: str) -> None:
    case, earlier = CASES[name], 1 << 31 | 1 << 5
    model, tables = Model(case), [table for rows in case.ranges for table in rows.tables]
    marks = RowMarks({(0, number): len(counts) for number, counts in enumerate(tables)}, torch.device("cpu"))
    marks.words.fill_(earlier - (1 << 32))
    expected, shifts, first = marks.words.clone(), [], 0
    for number, counts in enumerate(tables):
        begin = marks.first_bit((0, number))
        shifts.append([first, begin - first])
        rows = torch.tensor([row for row, count in enumerate(counts) if count], dtype=torch.int64)
        reference.mark_rows(expected, begin + rows)
        first += len(counts)
    RowMarking(marks.words, torch.tensor(shifts))(model.prepare())
    assert_same(marks.words, expected, "marks")


def test_marked_rows_are_listed_by_table_until_they_are_cleared() -> None:
    marks = RowMarks({(0, 0): 40, (1, 0): 0, (1, 1): 70}, torch.device("cpu"))
    reference.mark_rows(marks.words_of((0, 0)), torch.tensor([39, 31, 31]))
    reference.mark_rows(marks.words_of((1, 1)), torch.tensor([69, 0]))
    reference.mark_rows(marks.words_of((1, 1)), torch.tensor([63, 0]))
    found = {table: marks.marked(table).tolist() for table in ((0, 0), (1, 0), (1, 1))}
    assert found == {(0, 0): [31, 39], (1, 0): [], (1, 1): [0, 63, 69]}
    marks.clear()
    assert not marks.words.any()
