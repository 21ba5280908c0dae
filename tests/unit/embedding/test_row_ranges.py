"""Gradients as kernels read them: which are taken as they are, and which are copied before."""

import pytest
import torch

from dlrm_overlap.embedding.backends.rows import in_readable_rows
from tests.agreement import assert_same

_ROWS = torch.arange(48.0).view(4, 12)


@pytest.mark.parametrize(
    ("gradient", "taken"),
    [
        (_ROWS, True),
        (_ROWS[:, 4:], True),
        (_ROWS[:, 1:], False),
        (_ROWS.view(12, 4).t(), False),
        (_ROWS[0].expand(4, 12), False),
        (torch.ones(()).expand(4, 12), False),
        (_ROWS[:0], True),
    ],
    ids=["whole", "columns", "unaligned", "transposed", "of a sum over samples", "of a sum", "empty"],
)
def test_gradients_are_copied_where_they_cannot_be_read(gradient: torch.Tensor, taken: bool) -> None:
    read = in_readable_rows(gradient)
    assert (read is gradient) == taken
    assert_same(read, gradient, "gradient")
    assert read.shape[0] == 0 or (read.stride(1) == 1 and read.stride(0) >= read.shape[1])
