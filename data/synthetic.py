"""Endless synthetic click logs: Zipf-distributed ids, and labels that a hidden teacher draws.

Sample i is a function of (seed, split, i) alone: it is drawn from its own fixed stretch of a counter-based random
stream (Philox, Salmon et al., SC 2011). So any rank jumps straight to its samples, and however the ranks share a batch,
its bits are the same.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, TypeVar

import numpy as np
import torch

from dlrm_overlap.config import DataConfig, InputError, parse_multi_hot
from dlrm_overlap.data.batch import Batch, Dataset

_T = TypeVar("_T")
_DRAWS_PER_BLOCK = 4  # 64-bit draws of one Philox counter value
_BLOCK_SAMPLES = 1024  # made at once; more would not fit in a core's cache, and many readers share the memory


def _uniform(draws: np.ndarray) -> np.ndarray:
    """Map uint64 draws to float64 in [0, 1), as numpy's own generators do."""
    return (draws >> np.uint64(11)) * 2.0**-53


class ZipfTable:
    """The popularity of a table's rows: P(rank r) = (r + 1)**-alpha / Z for r = 0 .. rows - 1, any alpha >= 0.

    A rank here is a row's place in the order of popularity. Each is made from one uniform draw by inverting the
    survival function S(r) = P(rank >= r). For ranks below 256, S is tabulated exactly. From there on, the probability
    of rank r is the integral of t**-alpha over [r + .5, r + 1.5] (midpoint rule), whose relative error is
    alpha (alpha + 1) / (24 r**2): below 2e-6 at alpha 1.05, below 5e-5 at alpha 8. So a table of 40 million rows costs
    no more than a small one.
    """

    _HEAD = 256
    _MAX_ALPHA = 32.0  # above, all but 3e-10 of the ids are the first row, and rows**alpha would overflow

    def __init__(self, rows: int, alpha: float, offset: int):
        """Take the rows, alpha, and an offset in [0, rows) by which the rows of the ranks of equal tables differ."""
        self.rows = rows
        # The formulas below divide by alpha - 1, and at alpha 1 their limit holds; 1e-9 comes within 2e-8 of it.
        self._excess = (min(alpha, self._MAX_ALPHA) - 1) or 1e-9
        head, end = min(rows, self._HEAD), rows + 0.5
        weights = np.arange(1, head + 1) ** -(self._excess + 1)
        tail = end**-self._excess * math.expm1(self._excess * math.log(end / (head + 0.5))) / self._excess
        survival = np.append(weights[::-1].cumsum()[::-1] + tail, tail)
        self._total = float(survival[0])
        # The last entry stands for all ranks beyond the head: no draw reaches it.
        self._survival = np.append(survival / self._total, 2.0)
        self._slope = self._excess * end**self._excess * self._total
        self._multiplier = next(m for m in range(int(0.618 * rows), rows + 1) if math.gcd(m, rows) == 1)
        self._offset = offset

    def probability(self, ranks: np.ndarray) -> np.ndarray:
        """Return P(rank), float64, of each of `ranks`."""
        return (ranks + 1.0) ** -(self._excess + 1) / self._total

    def ranks(self, uniform: np.ndarray) -> np.ndarray:
        """Return a rank, int64, for each of `uniform`, float64 in [0, 1); small values give rare ranks."""
        # Solve (integral of t**-alpha from x to rows + .5) = uniform * Z for x.
        position = uniform * self._slope
        np.log1p(position, out=position)
        position /= -self._excess
        np.exp(position, out=position)
        position *= self.rows + 0.5
        position -= 0.5
        ranks = position.astype(np.int64)
        # t**-alpha is convex, so the integral over the tabulated ranks exceeds the sum of their probabilities, by less
        # than one of these: such a rank is right, or one too high.
        ranks -= uniform >= self._survival.take(ranks, mode="clip")
        return np.minimum(ranks, self.rows - 1, out=ranks)

    def row_ids(self, ranks: np.ndarray) -> np.ndarray:
        """Return the row, int32 in [0, rows), of each of `ranks`, by a bijection that scatters the popular rows."""
        ids = ranks * self._multiplier
        ids += self._offset
        # The remainder, written out because numpy vectorises the division by a scalar, but not `%`.
        ids -= ids // self.rows * self.rows
        return ids.astype(np.int32)


class Teacher:
    """The hidden model behind the labels: click ~ Bernoulli(sigmoid(logit)).

    A row's score is a hash of its id, so nothing is stored. A table's signal for a bag is the sum of its rows' scores,
    standardised to mean 0 and variance 1 whatever the size of the bag. The logit is the sum, with hidden weights, of
    the dense features, the signals, products of a dense feature and a signal, and products of two tables' signals; a
    model without an interaction layer misses the products. The spread of the logit puts the best possible AUROC near
    0.9 and the click rate near 0.37.
    """

    _BIAS, _STD = -1.0, 2.6
    _VARIANCE_SHARES = (0.2, 0.5, 0.15, 0.15)  # dense, signals, dense x signal, signal x signal

    def __init__(
        self,
        tables: Sequence[ZipfTable],
        bag_sizes: Sequence[tuple[int, int]],
        dense_features: int,
        rng: np.random.Generator,
    ):
        self._keys = rng.integers(2**32, size=len(tables), dtype=np.uint32)
        self._moments = [self._score_moments(table, key) for table, key in zip(tables, self._keys, strict=True)]
        # Where bags may be empty, some signals are 0; a gain on the others keeps the variance at 1.
        self._gains = [math.sqrt((high - low + 1) / (high - max(low, 1) + 1)) for low, high in bag_sizes]
        dense = range(1, 1 + dense_features)  # signal 0 is the constant 1
        bags = [1 + dense_features + t for t, table in enumerate(tables) if table.rows > 1]
        groups = [
            [(0, f) for f in dense],
            [(0, t) for t in bags],
            list(zip(dense, bags, strict=False)),
            list(pairwise(bags)),
        ]
        self._terms: list[tuple[int, int, float]] = [(0, 0, self._BIAS)]
        present = sum(share for share, pairs in zip(self._VARIANCE_SHARES, groups, strict=True) if pairs)
        for share, pairs in zip(self._VARIANCE_SHARES, groups, strict=True):
            weights = rng.uniform(0.5, 1.5, len(pairs)) * rng.choice([-1.0, 1.0], len(pairs))
            weights *= self._STD * math.sqrt(share / present) / max(float(np.linalg.norm(weights)), 1e-9)
            self._terms += [(i, j, float(w)) for (i, j), w in zip(pairs, weights, strict=True)]

    def logit(self, dense: np.ndarray, lengths: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return the logits [b], float64, of dense [b, F], lengths [T, b] and values [sum of lengths]."""
        signals = [np.ones(len(dense)), *dense.T.astype(np.float64)]
        start = 0
        for t, bags in enumerate(lengths):
            end = start + int(bags.sum())
            signals.append(self._bag_signal(t, values[start:end], bags))
            start = end
        logit = np.zeros(len(dense))
        # Term by term: the rounding of a matrix product would depend on the number of samples.
        for i, j, weight in self._terms:
            logit += weight * signals[i] * signals[j]
        return logit

    def _bag_signal(self, t: int, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        # A bag's sum is a difference of running sums, which wrap at 2**32: exact for up to 65,536 scores of 16 bits.
        running = np.zeros(ids.size + 1, dtype=np.uint32)
        np.cumsum(self._scores(ids, self._keys[t]), dtype=np.uint32, out=running[1:])
        ends = lengths.cumsum()
        sums = running[ends] - running[ends - lengths]
        mean, std = self._moments[t]
        return (sums - lengths * mean) * self._gains[t] / (std * np.sqrt(np.maximum(lengths, 1)))

    @staticmethod
    def _scores(ids: np.ndarray, key: np.uint32) -> np.ndarray:
        """Return one score, uint32 and uniform in [0, 65536), for each of ids (int32): a multiply-and-shift hash."""
        bits = ids.view(np.uint32) ^ key
        for multiplier in (0x9E3779B1, 0x85EBCA77):
            bits *= np.uint32(multiplier)
            bits ^= bits >> np.uint32(15)
        bits *= np.uint32(0xC2B2AE3D)
        bits >>= np.uint32(16)
        return bits

    @classmethod
    def _score_moments(cls, table: ZipfTable, key: np.uint32) -> tuple[float, float]:
        """Return mean and standard deviation of a drawn id's score.

        The most popular 4096 rows, which matter most, count with their own scores, the others as uniform ones.
        """
        ranks = np.arange(min(table.rows, 4096))
        scores = cls._scores(table.row_ids(ranks), key).astype(np.float64)
        probability = table.probability(ranks)
        rest = max(0.0, 1.0 - float(probability.sum()))
        mean = float(probability @ scores) + rest * 2.0**15
        variance = float(probability @ (scores - mean) ** 2) + rest * (2.0**32 / 12 + (2.0**15 - mean) ** 2)
        # The floor keeps the standardised scores of a very skewed table's rare rows from reaching hundreds.
        return mean, math.sqrt(max(variance, 0.02 * 2.0**32 / 12))


class Synthetic(Dataset):
    """Synthetic samples: near-normal dense features in (-3.5, 3.5), Zipf-distributed ids, a teacher's labels.

    The bags of a table hold a fixed number of ids, or one drawn uniformly from a range; a range from 0 on gives empty
    bags too. The two splits are different streams with the same tables and teacher. Reading beyond `num_samples` gives
    more samples of the stream. data.tables.max_rows makes a larger table smaller here, and folds no ids.
    """

    def __init__(self, config: DataConfig, split: Literal["train", "eval"]):
        """Build the stream of `split` for `config`, whose kind is synthetic.

        Raises:
            InputError: if a table has more rows than an int32 id can name.
        """
        tables, number = config.tables, config.tables.number()
        assert tables.rows is not None, "DataConfig checks that synthetic tables have rows"
        cap = tables.max_rows or math.inf
        self.rows: list[int] = [int(min(rows, cap)) for rows in _per_table(tables.rows, number)]
        if max(self.rows) >= 2**31:
            raise InputError(f"data.tables.rows: {max(self.rows)} overflows int32 ids; stay below {2**31}")
        self.num_samples: int | None = None if split == "train" else config.eval_samples
        self.bag_sizes: list[tuple[int, int]] = [parse_multi_hot(spec) for spec in _per_table(tables.multi_hot, number)]
        self.pooling: list[float] = [(low + high) / 2 for low, high in self.bag_sizes]
        """mean ids a bag, of each table"""
        self.max_ids = sum(high for _, high in self.bag_sizes)

        rng = np.random.default_rng((config.seed, 2))
        alphas = _per_table(tables.zipf_alpha, number)
        self._tables = [
            ZipfTable(rows, alpha, int(rng.integers(rows))) for rows, alpha in zip(self.rows, alphas, strict=True)
        ]
        self._teacher = Teacher(self._tables, self.bag_sizes, config.dense_features, rng)
        self._key = np.random.SeedSequence((config.seed, int(split == "eval"))).generate_state(2, np.uint64)
        self.dense_features = config.dense_features
        # A sample's draws: its dense features, its label, the bag size of each table, then each table's ids.
        draws = config.dense_features + 1 + number + self.max_ids
        self._blocks_per_sample = math.ceil(draws / _DRAWS_PER_BLOCK)

    def read(self, first: int, count: int) -> Batch:
        """Return the samples [first, first + count), count >= 1: dense [count, F] float32, int32 lengths and values."""
        if count > _BLOCK_SAMPLES:
            blocks = range(first, first + count, _BLOCK_SAMPLES)
            return Batch.join([self.read(block, min(_BLOCK_SAMPLES, first + count - block)) for block in blocks])
        generator = np.random.Philox(key=self._key, counter=first * self._blocks_per_sample)
        draws = generator.random_raw(count * self._blocks_per_sample * _DRAWS_PER_BLOCK).reshape(count, -1)
        column = self.dense_features
        dense = _near_normal(draws[:, :column])
        label_draw = _uniform(draws[:, column])
        column += 1

        lengths = np.empty((len(self.rows), count), dtype=np.int32)
        for t, (low, high) in enumerate(self.bag_sizes):
            lengths[t] = low if low == high else low + _uniform(draws[:, column + t]) * (high - low + 1)
        column += len(self.rows)

        values = np.empty(int(lengths.sum()), dtype=np.int32)
        start = 0
        for table, bags, (low, high) in zip(self._tables, lengths, self.bag_sizes, strict=True):
            kept = draws[:, column : column + high]
            if low < high:
                kept = kept[np.arange(high) < bags[:, None]]
            ids = table.row_ids(table.ranks(_uniform(kept).reshape(-1)))
            values[start : start + ids.size] = ids
            start += ids.size
            column += high

        labels = label_draw < _sigmoid(self._teacher.logit(dense, lengths, values))
        tensors = (dense, lengths.reshape(-1), values, labels.astype(np.float32))
        return Batch.from_tensors(*map(torch.from_numpy, tensors))

    def click_probability(self, batch: Batch) -> torch.Tensor:
        """Return the teacher's probability of a click, [b] float64, for each sample of a CPU batch of this data set.

        No model can rank the samples better, so the AUROC of this probability bounds what training can reach.
        """
        dense, values = batch.dense.numpy(), batch.sparse.values().numpy()
        lengths = batch.sparse.lengths().numpy().reshape(len(self.rows), -1)
        return torch.from_numpy(_sigmoid(self._teacher.logit(dense, lengths, values)))


def _per_table(value: _T | list[_T], number: int) -> list[_T]:
    return value if isinstance(value, list) else [value] * number


def _near_normal(draws: np.ndarray) -> np.ndarray:
    """Map draws [b, F] uint64 to float32: the sum of a draw's four 16-bit fields, scaled to mean 0 and variance 1."""
    fields = np.ascontiguousarray(draws).view(np.uint16).reshape(*draws.shape, 4)
    sums = fields.sum(axis=2, dtype=np.int32) - 2 * 65535
    return sums.astype(np.float32) * np.float32(math.sqrt(3 / (2.0**32 - 1)))


def _sigmoid(logit: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logit))
