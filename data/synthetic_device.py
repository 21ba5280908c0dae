"""Synthetic samples made on the GPU: bit for bit those of `synthetic.py`, in a small part of a training step's time."""

from typing import Literal

import numpy as np
import torch

from dlrm_overlap.config import DataConfig
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.data.synthetic import DRAWS_PER_BLOCK, NORMAL_SCALE, Synthetic
from dlrm_overlap.data.teacher import CURVE_END, Teacher, click_curve
from dlrm_overlap.data.zipf import ZipfRanks
from dlrm_overlap.kernels.synthetic.draws import IdTables, Stream, draw_features, draw_ids
from dlrm_overlap.kernels.synthetic.labels import ClickModel, draw_labels


class DeviceSynthetic(Synthetic):
    """The samples of `Synthetic`, on a GPU."""

    on_gpu = True

    def __init__(self, config: DataConfig, split: Literal["train", "eval"], device: torch.device):
        """Build the stream of `split` for `config`, and copy its tables to `device`.

        Raises:
            InputError: as `Synthetic` raises it.
        """
        super().__init__(config, split)
        self._device = device
        self._stream = Stream(self._to_device(self._key.view(np.int64)), self._blocks_per_sample)
        sizes = np.array(self.bag_sizes)
        self._has_ranges = bool((sizes[:, 0] < sizes[:, 1]).any())
        self._least_and_sizes = self._to_device(np.stack([sizes[:, 0], sizes[:, 1] - sizes[:, 0] + 1], axis=1))
        self._id_tables = self._copy_tables()
        self._click_model = self._copy_teacher(self._teacher)

    def read(self, first: int, count: int) -> Batch:
        """Return the samples [first, first + count), count >= 1, made by kernels on the current stream.

        The host does not wait for them, unless bags of a table differ in size: then it waits for the number of ids,
        which the current stream computes first.
        """
        assert (first + count) * self._blocks_per_sample < 2**63, "beyond the kernels' 64-bit counters"
        bags, device = len(self.rows) * count, self._device
        dense = torch.empty(count, self.dense_features, device=device)
        labels = torch.empty(count, device=device)
        lengths = torch.empty(bags, dtype=torch.int32, device=device)
        sums = torch.empty(bags, dtype=torch.int32, device=device)
        draw_features(self._stream, first, dense, lengths, sums, self._least_and_sizes, NORMAL_SCALE)
        ids, offsets = count * self.max_ids, None
        if self._has_ranges:
            offsets = torch.zeros(bags + 1, dtype=torch.int64, device=device)
            torch.cumsum(lengths, 0, out=offsets[1:])
            ids = int(offsets[-1])
        values = torch.empty(ids, dtype=torch.int32, device=device)
        draw_ids(self._stream, first, values, lengths, offsets, sums, self._id_tables, self._first_id)
        draw_labels(self._stream, first, labels, dense, lengths, sums, self._click_model)
        return Batch.from_tensors(dense, lengths, values, labels)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def _copy_tables(self) -> IdTables:
        columns = np.full(self._blocks_per_sample * DRAWS_PER_BLOCK, -1, dtype=np.int32)
        entries, cells, begins, words, column = [], [], {}, 0, self._first_id
        for t, (table, (_, most)) in enumerate(zip(self._tables, self.bag_sizes, strict=True)):
            ranks = table.ranks
            if id(ranks) not in begins:  # equal tables share their cells
                begins[id(ranks)] = words
                cells.append(_cells(ranks))
                words += cells[-1].size
            key, before, weights = int(self._teacher.keys[t]), column - self._first_id, -1
            if t in self._teacher.weights:
                weights = words
                cells.append(self._teacher.weights[t].astype(np.int64))
                words += cells[-1].size
            shape = begins[id(ranks)], ranks.bits, table.rows, table.multiplier, table.offset
            entries.append((*shape, key, column, most, before, weights))
            columns[column : column + most] = t
            column += most
        return IdTables(*map(self._to_device, (columns, np.array(entries), np.concatenate(cells))))

    def _copy_teacher(self, teacher: Teacher) -> ClickModel:
        signals = teacher.signals
        arrays = (
            np.stack([np.array(signals, dtype=np.int64), teacher.factor_starts[signals]], axis=1),
            teacher.signal_weights,
            teacher.dense_weights,
            np.stack([teacher.means, teacher.factors], axis=1),
            click_curve(),
        )
        return ClickModel(*map(self._to_device, arrays), bias=teacher.bias, end=CURVE_END)


def _cells(ranks: ZipfRanks) -> np.ndarray:
    """Return the cells of a popularity as the kernel reads them, [cells * 8] int64."""
    cells = np.zeros((len(ranks.thresholds), 8), dtype=np.int64)
    cells[:, 0] = ranks.thresholds.view(np.int64)
    for word, part in enumerate((ranks.first_ranks, ranks.slopes.view(np.int64), ranks.curves.view(np.int64))):
        cells[:, [1 + word, 5 + word]] = part.reshape(-1, 2)
    return cells.reshape(-1)
