"""Endless synthetic click logs: Zipf-distributed ids, and labels from a hidden teacher model.

Sample i is drawn from a fixed range of a counter-based random stream (Philox, Salmon et al., SC 2011) of (seed, split).
It has the same bits on every rank and device (`synthetic_device.py`): ids and lengths come from integers, and
floating-point operations round identically everywhere.

In a table whose ids are any or hashed, each row has a 64-bit id (`id_of`), which hashed tables reduce to a row
(`hashed_rows`). So both have the same ids and labels. With drift, a row gets a new id, its next generation, every
2 * drift samples. The rows' replacements are evenly spaced, so after `drift` samples half of the ids are new.
"""

import math
from typing import Literal, TypeVar

import numpy as np
import torch

from dlrm_overlap.config import DataConfig, parse_multi_hot
from dlrm_overlap.data.batch import Batch, Dataset, id_type
from dlrm_overlap.data.hashed import hashed_rows
from dlrm_overlap.data.teacher import Teacher
from dlrm_overlap.data.zipf import ZipfRanks, ZipfTable
from dlrm_overlap.kernels.ids.id_map import mix

_T = TypeVar("_T")
DRAWS_PER_BLOCK = 4  # 64-bit draws of one Philox counter value
_BLOCK_SAMPLES = 1024  # made at once, so that they fit in a core's cache
_TABLE_BITS = 40  # a row and its table are mixed as row + (table << 40)
_POSITIVE = 2**63 - 1  # TorchRec cannot divide negative ids over several ranks
NORMAL_SCALE = math.sqrt(3 / (2.0**32 - 1))  # scales the centered sum of four 16-bit fields to variance 1


class Synthetic(Dataset):
    """Samples with near-normal dense features in (-3.5, 3.5).

    The splits are different streams with the same tables and teacher. Reading beyond `num_samples` continues the
    stream. data.tables.max_rows makes tables smaller instead of folding ids.
    """

    def __init__(self, config: DataConfig, split: Literal["train", "eval"]):
        tables, number = config.tables, config.tables.number()
        cap, sizes = tables.max_rows or math.inf, tables.synthetic_rows
        kinds, hashed = _per_table(tables.ids, number), _per_table(tables.hashed_rows or 0, number)
        self._wide = [kind != "rows" for kind in kinds]
        """whether the ids of a table are 64-bit integers"""
        self._hashed = [
            int(min(rows, cap)) if kind == "hashed" else 0 for kind, rows in zip(kinds, hashed, strict=True)
        ]
        """rows of each table whose ids are hashed; 0 for others"""
        self.rows: list[int | None] = [
            None if kind == "any" else hashed or size
            for kind, size, hashed in zip(kinds, sizes, self._hashed, strict=True)
        ]
        self._period = 2 * tables.drift
        """number of samples after which the id of a row is replaced; 0: never"""
        self.num_samples: int | None = None if split == "train" else config.eval_samples
        self.bag_sizes: list[tuple[int, int]] = [parse_multi_hot(spec) for spec in _per_table(tables.multi_hot, number)]
        self.pooling: list[float] = [(low + high) / 2 for low, high in self.bag_sizes]

        rng = np.random.default_rng((config.seed, 2))
        shapes = list(zip(sizes, _per_table(tables.zipf_alpha, number), strict=True))
        ranks = {shape: ZipfRanks(*shape) for shape in set(shapes)}
        self._tables = [ZipfTable(ranks[shape], int(rng.integers(shape[0]))) for shape in shapes]
        half_lives = _per_table(tables.half_life, number)
        drifts = [wide and self._period > 0 for wide in self._wide]
        self._teacher = Teacher(self._tables, self.bag_sizes, config.dense_features, rng, half_lives, drifts)
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
        # Dense features and sizes of bags.
        generator = np.random.Philox(key=self._key, counter=first * self._blocks_per_sample)
        draws = generator.random_raw(count * self._blocks_per_sample * DRAWS_PER_BLOCK).reshape(count, -1)
        dense = _near_normal(draws[:, 1 : 1 + self.dense_features])
        sizes = draws[:, 1 + self.dense_features : self._first_id].T >> np.uint64(32)
        low, high = np.array(self.bag_sizes, dtype=np.uint64).T[..., None]
        lengths = (low + (sizes * (high - low + np.uint64(1)) >> np.uint64(32))).astype(np.int32, order="C")

        # Rows, and ids of tables of any or hashed ids.
        rows = np.empty(int(lengths.sum()), dtype=np.int32)
        values = rows
        if any(self._wide):
            values = np.empty(rows.size, dtype=np.int64 if id_type(self.rows) == torch.int64 else np.int32)
        generations = np.zeros(rows.size, dtype=np.int64) if self._period else None
        start, column = 0, self._first_id
        for t, (table, bags, (low, high)) in enumerate(zip(self._tables, lengths, self.bag_sizes, strict=True)):
            kept = draws[:, column : column + high]
            if low < high:
                kept = kept[np.arange(high) < bags[:, None]]
            drawn = table.row_ids(table.ranks.draw(kept.reshape(-1)))
            part = slice(start, start + drawn.size)
            rows[part] = drawn
            if self._wide[t]:
                generation = np.zeros(1, dtype=np.int64)
                if generations is not None:
                    samples = np.repeat(np.arange(first, first + count), bags)
                    generation = generations[part] = generation_of(drawn, table.rows, samples, self._period)
                ids = id_of(t, drawn, generation)
                values[part] = hashed_rows(ids, self._hashed[t]) if self._hashed[t] else ids
            elif values is not rows:
                values[part] = drawn
            start += drawn.size
            column += high

        # Labels.
        uniform = (draws[:, 0] >> np.uint64(11)) * 2.0**-53
        labels = uniform < self._teacher.click_probability(dense, lengths, rows, generations)
        tensors = (dense, lengths.reshape(-1), values, labels.astype(np.float32))
        return Batch.from_tensors(*map(torch.from_numpy, tensors))


def generation_of(rows: np.ndarray, number: int, samples: np.ndarray, period: int) -> np.ndarray:
    """Return how often the ids of `rows` [n], of `number` rows, were replaced before `samples` [n], [n] int64.

    Example: 4 rows and a period of 8: row 0 gets a new id at the samples 8, 16, .., row 1 at 6, 14, .., row 2 at 4, ..
    """
    return (samples + rows.astype(np.int64) * period // number) // period


def id_of(table: int, rows: np.ndarray, generations: np.ndarray) -> np.ndarray:
    """Return the ids [n] int64, from 0 on, of `rows` [n] of a table: hashes of table, row and generation."""
    return _mixed(rows + np.int64(table << _TABLE_BITS) ^ _mixed(generations)) & _POSITIVE


def _mixed(values: np.ndarray) -> np.ndarray:
    """Return the hash `mix` of int64 values; 0 stays 0."""
    return mix(torch.from_numpy(values)).numpy()


def _per_table(value: _T | list[_T], number: int) -> list[_T]:
    return value if isinstance(value, list) else [value] * number


def _near_normal(draws: np.ndarray) -> np.ndarray:
    """Map draws [b, F] uint64 to float32: the sum of a draw's four 16-bit fields, scaled to mean 0 and variance 1."""
    sums = np.full(draws.shape, -2 * 65535, dtype=np.int32)
    for bits in (0, 16, 32, 48):
        sums += (draws >> np.uint64(bits)).astype(np.uint16)
    return sums.astype(np.float32) * np.float32(NORMAL_SCALE)
