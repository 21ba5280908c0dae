"""Synthetic samples made on a GPU, with the same bits as `synthetic.py` makes."""

from typing import Literal

import numpy as np
import torch

from dlrm_overlap.config import DataConfig
from dlrm_overlap.data.batch import Batch, id_type
from dlrm_overlap.data.synthetic import DRAWS_PER_BLOCK, NORMAL_SCALE, Synthetic
from dlrm_overlap.data.teacher import CURVE_END, click_curve
from dlrm_overlap.data.zipf import ZipfRanks
from dlrm_overlap.kernels.synthetic import Source, draw_samples


class DeviceSynthetic(Synthetic):
    on_gpu = True

    def __init__(self, config: DataConfig, split: Literal["train", "eval"], device: torch.device):
        super().__init__(config, split)
        teacher, (least, most) = self._teacher, np.array(self.bag_sizes).T
        arrays = (
            self._key.view(np.int64),
            np.stack([least, most - least + 1], axis=1),
            *self._tables_of_ids(),
            np.stack([np.array(teacher.signals, dtype=np.int64), teacher.factor_starts[teacher.signals]], axis=1),
            teacher.signal_weights,
            teacher.dense_weights,
            np.stack([teacher.means, teacher.factors], axis=1),
            click_curve(),
        )
        tensors = (torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays)
        ids = self.max_ids if (least == most).all() else None
        self._source = Source(
            *tensors,
            end=CURVE_END,
            bias=teacher.bias,
            scale=NORMAL_SCALE,
            ids=ids,
            id_type=id_type(self.rows),
            has_wide_ids=any(self._wide),
        )

    def read(self, first: int, count: int) -> Batch:
        """Make the samples [first, first + count) on the current stream; `count` is at least 1."""
        return Batch.from_tensors(*draw_samples(self._source, first, count))

    def _tables_of_ids(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        columns = np.full(self._blocks_per_sample * DRAWS_PER_BLOCK, -1, dtype=np.int32)
        tables, cells, begins, words, column = [], [], {}, 0, self._first_id
        for t, (table, (_, most)) in enumerate(zip(self._tables, self.bag_sizes, strict=True)):
            ranks, weights = table.ranks, -1
            if ranks not in begins:  # equal tables share their cells
                begins[ranks] = words
                cells.append(_cells(ranks))
                words += cells[-1].size
            if t in self._teacher.weights:
                weights = words
                cells.append(self._teacher.weights[t].astype(np.int64))
                words += cells[-1].size
            shape = begins[ranks], ranks.bits, table.rows, table.multiplier, table.offset
            period = self._period if self._wide[t] else -1
            where = column, most, column - self._first_id
            tables.append((*shape, int(self._teacher.keys[t]), *where, weights, period, self._hashed[t]))
            columns[column : column + most] = t
            column += most
        return columns, np.array(tables), np.concatenate(cells)


def _cells(ranks: ZipfRanks) -> np.ndarray:
    """Return the cells of `ranks` in the layout that the kernel reads, [cells * 8] int64."""
    cells = np.zeros((len(ranks.thresholds), 8), dtype=np.int64)
    cells[:, 0] = ranks.thresholds.view(np.int64)
    for word, part in enumerate((ranks.first_ranks, ranks.slopes.view(np.int64), ranks.curves.view(np.int64))):
        cells[:, [1 + word, 5 + word]] = part.reshape(-1, 2)
    return cells.reshape(-1)
