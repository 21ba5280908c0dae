"""Samples as records of bytes, and the batch that a GPU makes of them.

A record has, in this order, F dense features (float32), L labels (a byte each), and the ids of all tables whose bags
have one size, in their order. An id takes the bytes that the greatest row of its table needs. Numbers are
little-endian. All records are of one size, so a range of samples is one range of bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from dlrm_overlap.data.batch import Batch
from dlrm_overlap.data.days import Day
from dlrm_overlap.kernels import reference

_ID, _LABEL, _FLOAT = 0, 1, 2  # kinds of a field, as `kernels/unpack.py` has them


def _bytes_below(end: int) -> int:
    """Return how many bytes hold each of the numbers 0 .. end - 1."""
    return max(1, -(-(end - 1).bit_length() // 8))


class Field(NamedTuple):
    """Numbers of one kind in a record; see `kernels/unpack.py` for the columns."""

    offset: int
    width: int
    count: int
    kind: int
    modulus: int
    start: int


@dataclass(frozen=True)
class RecordLayout:
    """What records hold, and how many there are: the content of a prepared folder's meta.json."""

    labels: Mapping[str, float]
    """name -> factor of its loss in the loss that is trained"""
    dense: int
    """F"""
    rows: Sequence[int]
    """of each table, for which the ids were made"""
    sizes: Sequence[int | None]
    """of each table, ids of a bag; None where bags differ in size, whose ids are in no record"""
    samples: int = 0
    held_out: int | None = None
    """of these samples, how many are to evaluate on, the last ones; None leaves it to data.eval_fraction"""
    moduli: Sequence[int] = ()
    """of each table, the number of which its ids are taken the remainder where they are unpacked; 0 leaves them"""

    @property
    def lists(self) -> list[int]:
        """The tables whose bags differ in size."""
        return [t for t, size in enumerate(self.sizes) if size is None]

    def fields(self) -> list[Field]:
        """Return the fields: dense features, labels, then tables."""
        tables = zip(self.rows, self.sizes, self.moduli or [0] * len(self.rows), strict=True)
        shapes = [(4, self.dense, _FLOAT, 0), (1, len(self.labels), _LABEL, 0)]
        shapes += [(_bytes_below(rows), size, _ID, modulus) for rows, size, modulus in tables if size]
        offsets = accumulate((width * count for width, count, *_ in shapes), initial=0)
        starts = accumulate((count for _, count, *_ in shapes), initial=0)
        return [Field(offset, *shape, start) for offset, shape, start in zip(offsets, shapes, starts, strict=False)]

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of a record."""
        last = self.fields()[-1]
        return last.offset + last.width * last.count

    def pack(self, day: Day) -> np.ndarray:
        """Return the records of `day`, [n, record_bytes] uint8."""
        samples = len(day.labels)
        tables = [day.bags(t, slice(0, samples))[0].astype("<i4") for t, size in enumerate(self.sizes) if size]
        numbers = [day.dense.astype("<f4"), np.asarray(day.labels).astype(np.uint8), *tables]
        parts = [
            _low_bytes(each, field.width).reshape(samples, field.width * field.count)
            for each, field in zip(numbers, self.fields(), strict=True)
        ]
        return np.concatenate(parts, axis=1)


def _low_bytes(numbers: np.ndarray, width: int) -> np.ndarray:
    """Return the lowest bytes of little-endian numbers, [m, width] uint8."""
    return np.ascontiguousarray(numbers).reshape(-1, 1).view(np.uint8)[:, :width]


class Packed:
    """A field of records as an array of numbers [n, count], which are unpacked where they are taken."""

    def __init__(self, records: np.ndarray, field: Field) -> None:
        """Take records [n, record_bytes] uint8."""
        self._records, self._field = records, field
        self.shape = len(records), field.count

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, samples: slice | np.ndarray) -> np.ndarray:
        """Return the numbers [samples, count] of some records: ids int32, others float32."""
        words = reference.unpack(torch.from_numpy(self._records[samples]), [self._field]).view(-1, self._field.count)
        return (words if self._field.kind == _ID else words.view(torch.float32)).numpy()


class Unpacker:
    """Makes batches on a GPU of records."""

    def __init__(self, layout: RecordLayout, device: torch.device) -> None:
        fields = layout.fields()
        counts = torch.tensor([field.count for field in fields])
        self._layout = layout
        self._fields = torch.tensor(fields, device=device)
        self._field_of = torch.arange(len(fields), dtype=torch.int32).repeat_interleave(counts).to(device)
        self._sizes = torch.tensor(layout.sizes, dtype=torch.int32, device=device)
        self._lengths: dict[int, torch.Tensor] = {}

    def __call__(self, records: torch.Tensor) -> Batch:
        """Return the batch of records [b, record_bytes] uint8 on the device, which a kernel makes."""
        from dlrm_overlap.kernels.unpack import unpack  # loads Triton, which a CPU may lack

        samples, features, labels = len(records), self._layout.dense, len(self._layout.labels)
        if samples not in self._lengths:
            self._lengths[samples] = self._sizes.repeat_interleave(samples)
        words = unpack(records, self._fields, self._field_of)
        numbers, values = words.tensor_split([(features + labels) * samples])
        dense, clicks = numbers.view(torch.float32).split([features * samples, labels * samples])
        clicks = clicks if labels == 1 else clicks.view(samples, -1)
        return Batch.from_tensors(dense.view(samples, -1), self._lengths[samples], values, clicks)
