"""Endless synthetic click logs: Zipf-distributed ids, and labels from a hidden teacher model.

Sample i is drawn from a fixed range of a counter-based random stream (Philox, Salmon et al., SC 2011) of (seed, split).
It has the same bits on every rank and device (`synthetic_device.py`): ids and lengths come from integers, and
floating-point operations round identically everywhere.
"""

import math
from typing import Literal, TypeVar

import numpy as np
import torch

from dlrm_overlap.config import DataConfig, parse_multi_hot
from dlrm_overlap.data.batch import Batch, Dataset
from dlrm_overlap.data.teacher import Teacher
from dlrm_overlap.data.zipf import ZipfRanks, ZipfTable
from dlrm_overlap.kernels.ids.id_map import mix

_T = TypeVar("_T")
DRAWS_PER_BLOCK = 4  # 64-bit draws of one Philox counter value
_BLOCK_SAMPLES = 1024  # made at once, so that they fit in a core's cache
_TABLE_BITS = 40  # a row's id is a bijective hash of its number + its table << 40
NORMAL_SCALE = math.sqrt(3 / (2.0**32 - 1))  # scales the centered sum of four 16-bit fields to variance 1


class Synthetic(Dataset):
    """Samples with near-normal dense features in (-3.5, 3.5).

    The splits are different streams with the same tables and teacher. Reading beyond `num_samples` continues the
    stream. data.tables.max_rows makes tables smaller instead of folding ids.
    """

    def __init__(self, config: DataConfig, split: Literal["train", "eval"]):
        tables, number = config.tables, config.tables.number()
        assert tables.rows is not None, "DataConfig checks that synthetic tables have rows"
        cap = tables.max_rows or math.inf
        counts = [int(min(rows, cap)) for rows in _per_table(tables.rows, number)]
        self._takes_any = [kind == "any" for kind in _per_table(tables.ids, number)]
        self.rows = [None if any_id else count for any_id, count in zip(self._takes_any, counts, strict=True)]
        self.num_samples: int | None = None if split == "train" else config.eval_samples
        self.bag_sizes: list[tuple[int, int]] = [parse_multi_hot(spec) for spec in _per_table(tables.multi_hot, number)]
        self.pooling: list[float] = [(low + high) / 2 for low, high in self.bag_sizes]

        rng = np.random.default_rng((config.seed, 2))
        shapes = list(zip(counts, _per_table(tables.zipf_alpha, number), strict=True))
        ranks = {shape: ZipfRanks(*shape) for shape in set(shapes)}
        self._tables = [ZipfTable(ranks[shape], int(rng.integers(shape[0]))) for shape in shapes]
        half_lives = _per_table(tables.half_life, number)
        self._teacher = Teacher(self._tables, self.bag_sizes, config.dense_features, rng, half_lives)
        self._key = np.random.SeedSequence((config.seed, int(split == "eval"))).generate_state(2, np.uint64)
        self.dense_features = config.dense_features
        # A sample's draws: label, dense features, bag size of each table, ids of each table.
        self._first_id = 1 + config.dense_features + number
        self._blocks_per_sample = math.ceil((self._first_id + self.max_ids) / DRAWS_PER_BLOCK)

    def read(self, first: int, count: int) -> Batch:
        """Make the samples [first, first + count); `count` is at least 1."""
        if count > _BLOCK_SAMPLES:
            blocks = range(first, first + count, _BLOCK_SAMPLES)
            return Batch.join([self.read(block, min(_BLOCK_SAMPLES, first + count - block)) for block in blocks])
        generator = np.random.Philox(key=self._key, counter=first * self._blocks_per_sample)
        draws = generator.random_raw(count * self._blocks_per_sample * DRAWS_PER_BLOCK).reshape(count, -1)
        dense = _near_normal(draws[:, 1 : 1 + self.dense_features])
        sizes = draws[:, 1 + self.dense_features : self._first_id].T >> np.uint64(32)
        low, high = np.array(self.bag_sizes, dtype=np.uint64).T[..., None]
        lengths = (low + (sizes * (high - low + np.uint64(1)) >> np.uint64(32))).astype(np.int32, order="C")

        values = np.empty(int(lengths.sum()), dtype=np.int32)
        start, column = 0, self._first_id
        for table, bags, (low, high) in zip(self._tables, lengths, self.bag_sizes, strict=True):
            kept = draws[:, column : column + high]
            if low < high:
                kept = kept[np.arange(high) < bags[:, None]]
            ids = table.row_ids(table.ranks.draw(kept.reshape(-1)))
            values[start : start + ids.size] = ids
            start += ids.size
            column += high

        uniform = (draws[:, 0] >> np.uint64(11)) * 2.0**-53
        labels = uniform < self._teacher.click_probability(dense, lengths, values)
        tensors = (dense, lengths.reshape(-1), values, labels.astype(np.float32))
        return self._with_ids(Batch.from_tensors(*map(torch.from_numpy, tensors)))

    def _with_ids(self, batch: Batch) -> Batch:
        """Return the batch with 64-bit ids instead of rows, int64, in tables of any id; on any device."""
        if not any(self._takes_any):
            return batch
        lengths, rows = batch.sparse.lengths(), batch.sparse.values().long()
        tables = torch.arange(len(self.rows), device=rows.device).repeat_interleave(batch.sparse.stride())
        table = tables.repeat_interleave(lengths, output_size=rows.numel())
        takes_any = torch.tensor(self._takes_any, device=rows.device)[table]
        values = torch.where(takes_any, mix(rows + (table << _TABLE_BITS)), rows)
        return Batch.from_tensors(batch.dense, lengths, values, batch.labels)


def _per_table(value: _T | list[_T], number: int) -> list[_T]:
    return value if isinstance(value, list) else [value] * number


def _near_normal(draws: np.ndarray) -> np.ndarray:
    """Map draws [b, F] uint64 to float32: the sum of a draw's four 16-bit fields, scaled to mean 0 and variance 1."""
    sums = np.full(draws.shape, -2 * 65535, dtype=np.int32)
    for bits in (0, 16, 32, 48):
        sums += (draws >> np.uint64(bits)).astype(np.uint16)
    return sums.astype(np.float32) * np.float32(NORMAL_SCALE)
