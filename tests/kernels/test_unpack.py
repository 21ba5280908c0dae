"""Records that the kernel unpacks are those that plain PyTorch unpacks, and what was packed."""

import numpy as np
import pytest
import torch

from dlrm_overlap.data.batch import Records
from dlrm_overlap.data.days import Day, Days
from dlrm_overlap.data.records import Layout, Packed, Unpacker
from dlrm_overlap.kernels import reference
from tests.gpu.synthetic import first_difference
from tests.kernels.emulation import CPU, interpreted

ROWS = [1, 256, 257, 2**16, 2**16 + 1, 2**24, 2**24 + 1, 2**31 - 1]
SIZES = [1, 3, 2, 1, 5, 1, 2, 1]
WIDTHS = [1, 1, 2, 2, 3, 3, 4, 4]


def random_day(samples: int, labels: int = 1) -> Day:
    rng = np.random.default_rng(0)
    ids = [rng.integers(rows, size=(samples, size), dtype=np.int32) for rows, size in zip(ROWS, SIZES, strict=True)]
    for table, rows in zip(ids, ROWS, strict=True):
        table[0, 0], table[-1, -1] = rows - 1, 0
    dense = rng.normal(size=(samples, 5)).astype(np.float16).astype(np.float32)
    dense[0] = [-0.0, 1e-7, -65504, np.pi, 3]
    dense[0] = dense[0].astype(np.float16)
    return Day("day", rng.integers(2, size=(samples, labels)), dense, ids)


def test_ids_take_the_bytes_that_their_table_needs() -> None:
    layout = Layout(5, 2, ROWS, SIZES)
    assert [field.width for field in layout.fields()] == [4, 1, *WIDTHS]
    assert layout.record_bytes == 4 * 5 + 2 + sum(w * n for w, n in zip(WIDTHS, SIZES, strict=True))


@interpreted
@pytest.mark.parametrize(("labels", "half", "samples"), [(1, False, 33), (2, True, 7), (1, False, 1)])
@pytest.mark.parametrize("max_rows", [None, 100])
def test_a_batch_is_what_was_packed(labels: int, half: bool, samples: int, max_rows: int | None) -> None:
    day, layout = random_day(samples, labels), Layout(5, labels, ROWS, SIZES, half)
    packed = layout.pack(day)
    assert packed.shape == (samples, layout.record_bytes)
    expected = Days([day], ROWS, max_rows).read(0, samples)
    moduli = [max_rows if max_rows and rows > max_rows else 0 for rows in ROWS]
    records = torch.from_numpy(packed)
    made = Unpacker(layout, moduli, CPU)(Records(records))
    assert first_difference(made, expected) is None
    words = torch.cat([made.dense.view(torch.int32).flatten(), made.labels.view(torch.int32).flatten()])
    twin = reference.unpack(records, layout.fields(moduli))
    assert torch.equal(twin, torch.cat([words, made.sparse.values()]))
    columns = [Packed(packed, field) for field in layout.fields()]
    assert all(np.array_equal(column[1:3], whole[1:3]) for column, whole in zip(columns[2:], day.ids, strict=True))
