"""Samples as records of bytes, and how a GPU unpacks them.

A record has F dense features (float32), L labels (a byte each), and the ids of tables with bags of a fixed size, in
this order. An id takes the bytes that its table's greatest row needs, and 8 in a table of any id. Numbers are
little-endian.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from dlrm_overlap.data.batch import Batch, id_type
from dlrm_overlap.data.day import Day
from dlrm_overlap.kernels import reference

_ID, _LABEL, _FLOAT = 0, 1, 2  # kinds of a field, as in `kernels/unpack.py`


ID_BYTES = 8  # of a table of any id


def _id_bytes(rows: int | None) -> int:
    return ID_BYTES if rows is None else _bytes_below(rows)


def _bytes_below(end: int) -> int:
    return max(1, -(-(end - 1).bit_length() // 8))


class Field(NamedTuple):
    """Numbers of one kind in a record; `kernels/unpack.py` describes the columns."""

    offset: int
    width: int
    count: int
    kind: int
    modulus: int
    start: int


@dataclass(frozen=True)
class RecordLayout:
    """Layout and number of records: the content of a prepared folder's meta.json."""

    labels: Mapping[str, float]
    dense: int
    """F"""
    rows: Sequence[int | None]
    """number of rows that each table's ids were made for; None for a table of any id"""
    sizes: Sequence[int | None]
    """ids per bag of each table; None if a table's bags differ in size: its ids are then not in records"""
    samples: int = 0
    held_out: int | None = None
    """number of last samples to evaluate on, unless data.eval_fraction is given; None: it decides"""
    encoding: str | None = None
    """digest of the `encoding`; None if the samples were not made from a table"""
    unordered: int | None = None
    """how many samples are older than one before them; None if samples have no times"""
    moduli: Sequence[int] = ()
    """per table, the modulus that folds ids when they are unpacked; 0 for none"""

    @property
    def lists(self) -> list[int]:
        return [t for t, size in enumerate(self.sizes) if size is None]

    @property
    def id_type(self) -> torch.dtype:
        """Type of all ids of a batch: int64 if there is a table of any id, else int32."""
        return id_type(self.rows)

    def fields(self) -> list[Field]:
        tables = zip(self.rows, self.sizes, self.moduli or [0] * len(self.rows), strict=True)
        shapes = [(4, self.dense, _FLOAT, 0), (1, len(self.labels), _LABEL, 0)]
        shapes += [(_id_bytes(rows), size, _ID, modulus) for rows, size, modulus in tables if size]
        offsets = accumulate((width * count for width, count, *_ in shapes), initial=0)
        starts = accumulate((count for _, count, *_ in shapes), initial=0)
        return [Field(offset, *shape, start) for offset, shape, start in zip(offsets, shapes, starts, strict=False)]

    @cached_property
    def record_bytes(self) -> int:
        last = self.fields()[-1]
        return last.offset + last.width * last.count

    def pack(self, day: Day) -> np.ndarray:
        """Return the samples of `day` as records [n, record_bytes] uint8."""
        samples = len(day.labels)
        tables = [
            day.bags(t, slice(0, samples))[0].astype(id_format(self.rows[t]))
            for t, size in enumerate(self.sizes)
            if size
        ]
        numbers = [day.dense.astype("<f4"), np.asarray(day.labels).astype(np.uint8), *tables]
        parts = [
            _low_bytes(each, field.width).reshape(samples, field.width * field.count)
            for each, field in zip(numbers, self.fields(), strict=True)
        ]
        return np.concatenate(parts, axis=1)


def id_format(rows: int | None) -> str:
    """Return the type, in numpy's notation, in which the ids of a table are kept before they are packed."""
    return "<i4" if rows is not None else "<i8"


def _low_bytes(numbers: np.ndarray, width: int) -> np.ndarray:
    return np.ascontiguousarray(numbers).reshape(-1, 1).view(np.uint8)[:, :width]


class Packed:
    """A field of records as an array of numbers [n, count], unpacked on access."""

    def __init__(self, records: np.ndarray, field: Field) -> None:
        """`records` is [n, record_bytes] uint8."""
        self._records, self._field = records, field
        self.shape = len(records), field.count

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, samples: slice | np.ndarray) -> np.ndarray:
        """Return the field's numbers for `samples`, [samples, count].

        Ids are int32, or int64 for a table of any id; other numbers are float32.
        """
        dtype = torch.int64 if self._field.width == ID_BYTES else torch.int32
        words = reference.unpack(torch.from_numpy(self._records[samples]), [self._field], dtype)
        words = words.view(-1, self._field.count)
        return (words if self._field.kind == _ID else words.view(torch.float32)).numpy()


class Unpacker:
    def __init__(self, layout: RecordLayout, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._sizes = torch.tensor(layout.sizes, dtype=torch.int32, device=device)
        self._lengths: dict[int, torch.Tensor] = {}
        fields = layout.fields()
        if layout.id_type == torch.int32:
            self._parts = [self._part(fields, torch.int32)]
        else:  # one launch for each size of numbers
            self._parts = [self._part(fields[:2], torch.int32), self._part(fields[2:], torch.int64)]

    def _part(self, fields: Sequence[Field], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
        """Return the arguments of `kernels.unpack.unpack` after the records, for some fields of a record."""
        counts = torch.tensor([field.count for field in fields])
        moved = [field._replace(start=field.start - fields[0].start) for field in fields]
        field_of = torch.arange(len(fields), dtype=torch.int32).repeat_interleave(counts)
        return torch.tensor(moved, device=self._device), field_of.to(self._device), dtype

    def __call__(self, records: torch.Tensor) -> Batch:
        """Unpack `records`, [b, record_bytes] uint8 on the device, on the current stream."""
        from dlrm_overlap.kernels.unpack import unpack  # needs Triton

        samples, features, labels = len(records), self._layout.dense, len(self._layout.labels)
        if samples not in self._lengths:
            self._lengths[samples] = self._sizes.repeat_interleave(samples)
        words, *ids = (unpack(records, *part) for part in self._parts)
        numbers, values = (words, *ids) if ids else words.tensor_split([(features + labels) * samples])
        dense, clicks = numbers.view(torch.float32).split([features * samples, labels * samples])
        clicks = clicks if labels == 1 else clicks.view(samples, -1)
        return Batch.from_tensors(dense.view(samples, -1), self._lengths[samples], values, clicks)
