"""The hidden model that labels synthetic samples."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from dlrm_overlap.data.zipf import ZipfTable

_BIAS, _STD = -1.0, 2.6
_VARIANCE_SHARES = (0.2, 0.5, 0.15, 0.15)  # dense, signals, dense x signal, signal x signal
CURVE_END = 16.0  # the curve covers logits in [-16, 16]
GENERATION_KEY = np.uint32(0x9E3779B1)  # added to the key of a table's scores by each generation of an id
CURVE_STEPS = 64  # linear pieces of the curve per unit of the logit


def click_curve() -> np.ndarray:
    """Return the sigmoid at the logits -16, -16 + 1/64, .. 16, [2049] float64."""
    return 1 / (1 + np.exp(-np.arange(-CURVE_END, CURVE_END + 0.5 / CURVE_STEPS, 1 / CURVE_STEPS)))


class Teacher:
    """The model that draws labels: click ~ Bernoulli(sigmoid(logit)).

    A row's score is a hash of its number and, if ids drift, of the generation of its id. A bag's signal is the sum of
    its rows' scores, standardised to mean 0 and variance 1 for every bag size; with a half-life, later ids of the bag
    have less weight. The logit is a weighted sum of dense features, signals, and products of a signal with a dense
    feature or another signal, which only a model with an interaction layer can learn. The best AUROC is near 0.9.

    Labels have the same bits on every processor: sums of bags are integers, the rest is float64 sums and products in a
    fixed order, and linear interpolation replaces the sigmoid, within 3e-6.
    """

    bias = _BIAS

    def __init__(
        self,
        tables: Sequence[ZipfTable],
        bag_sizes: Sequence[tuple[int, int]],
        dense_features: int,
        rng: np.random.Generator,
        half_lives: Sequence[int],
        drifts: Sequence[bool],
    ):
        """Draw the model by `rng`; `drifts` says of each table whether its rows get new ids, and so new scores."""
        self.keys = rng.integers(2**32, size=len(tables), dtype=np.uint32)
        """[T] uint32: key of the hash that scores a table's rows"""
        self.weights: dict[int, np.ndarray] = {}
        """table with a half-life -> [largest bag] uint32, weight of an id by its position in the bag, in 256ths"""
        means, factors, starts, start = [], [], [], 0
        for t, (table, key, (low, high)) in enumerate(zip(tables, self.keys, bag_sizes, strict=True)):
            # Over all generations, scores are uniform, and a bag's equal ids have equal scores.
            mean, std = (2.0**15, 2.0**16 / math.sqrt(12)) if drifts[t] else _score_moments(table, key)
            equal = table.ranks.chance_of_equal() if drifts[t] else 0.0
            weights = np.ones(high, dtype=np.uint32)
            if half_lives[t]:
                weights = np.rint(256 * 0.5 ** (np.arange(high) / half_lives[t])).astype(np.uint32)
                self.weights[t] = weights
            total, squares = (np.append(0, np.cumsum(each, dtype=np.int64))[low:] for each in (weights, weights**2))
            # The signals of empty bags are 0; a gain on the others keeps the variance at 1.
            gain = math.sqrt((high - low + 1) / (high - max(low, 1) + 1))
            means.append(total * mean)
            squares = squares + (total**2 - squares) * equal
            factors.append(gain / (std * np.sqrt(np.maximum(squares, 1))))
            starts.append(start - low)
            start += high - low + 1
        self.means = np.concatenate(means)
        """float64, table after table: mean score of a bag, by its size"""
        self.factors = np.concatenate(factors)
        """float64, table after table: factor that standardises a bag's score, by its size"""
        self.factor_starts = np.array(starts, dtype=np.int64)
        """[T] int64, index into `means` and `factors` of bags of 0 ids"""
        self.signals = [t for t, table in enumerate(tables) if table.rows > 1]
        bags, dense = len(self.signals), dense_features
        groups = [dense, bags, min(dense, bags), len(list(pairwise(range(bags))))]
        present = sum(share for share, size in zip(_VARIANCE_SHARES, groups, strict=True) if size)
        drawn = []
        for share, size in zip(_VARIANCE_SHARES, groups, strict=True):
            weights = rng.uniform(0.5, 1.5, size) * rng.choice([-1.0, 1.0], size)
            drawn.append(weights * (_STD * math.sqrt(share / present) / max(float(np.linalg.norm(weights)), 1e-9)))
        self.dense_weights = drawn[0]
        """[F] float64"""
        self.signal_weights = np.zeros((bags, 3))
        """[signals, 3] float64, weights of signal n and of its products with dense feature n and signal n - 1"""
        self.signal_weights[:, 0] = drawn[1]
        self.signal_weights[: groups[2], 1] = drawn[2]
        self.signal_weights[1:, 2] = drawn[3]
        self._curve = click_curve()

    def logit(
        self, dense: np.ndarray, lengths: np.ndarray, values: np.ndarray, generations: np.ndarray | None = None
    ) -> np.ndarray:
        """Return each sample's logit, [b] float64.

        `dense` is [b, F]; `lengths` of bags are [T, b], and the rows `values` are [sum of lengths] int32, table after
        table, as are the `generations` of their ids, int64; None: all are 0.
        """
        features, signals = dense.T.astype(np.float64), self._signals(lengths, values, generations)
        # Term by term, since the rounding of a matrix product depends on the number of samples.
        logit = np.full(len(dense), self.bias)
        for weight, feature in zip(self.dense_weights, features, strict=True):
            logit += weight * feature
        before: float | np.ndarray = 0.0
        for n, (t, (alone, with_dense, with_before)) in enumerate(zip(self.signals, self.signal_weights, strict=True)):
            signal = signals[t]
            logit += alone * signal
            if n < len(features):
                logit += with_dense * features[n] * signal
            logit += with_before * before * signal
            before = signal
        return logit

    def click_probability(
        self, dense: np.ndarray, lengths: np.ndarray, values: np.ndarray, generations: np.ndarray | None = None
    ) -> np.ndarray:
        """Return each sample's probability of a click, [b] float64; arguments as in `logit`."""
        position = self.logit(dense, lengths, values, generations)
        np.clip(position, -CURVE_END, CURVE_END, out=position)
        position += CURVE_END
        position *= CURVE_STEPS
        piece = np.minimum(position.astype(np.int64), len(self._curve) - 2)
        begin = self._curve[piece]
        return begin + (self._curve[piece + 1] - begin) * (position - piece)

    def _signals(self, lengths: np.ndarray, values: np.ndarray, generations: np.ndarray | None = None) -> np.ndarray:
        # A bag's sum is a difference of running sums modulo 2**32, which is exact for up to 65,536 scores of 16 bits.
        running = np.zeros(values.size + 1, dtype=np.uint32)
        ids = lengths.sum(axis=1)
        keys = np.repeat(self.keys, ids)
        if generations is not None:
            keys += generations.astype(np.uint32) * GENERATION_KEY
        counted, ends = scores(values, keys), ids.cumsum()
        for t, weights in self.weights.items():
            positions = np.arange(ids[t]) - np.repeat(lengths[t].cumsum() - lengths[t], lengths[t])
            counted[ends[t] - ids[t] : ends[t]] *= weights.take(positions)
        np.cumsum(counted, dtype=np.uint32, out=running[1:])
        sums = np.diff(running.take(np.append(0, lengths.cumsum()))).reshape(lengths.shape)
        sizes = self.factor_starts[:, None] + lengths
        return (sums - self.means.take(sizes)) * self.factors.take(sizes)


def scores(ids: np.ndarray, keys: np.ndarray | np.uint32) -> np.ndarray:
    """Return each id's score, uint32, uniform in [0, 65536); `ids` are int32, `keys` is one key or one key per id."""
    bits = ids.view(np.uint32) ^ keys
    for multiplier in (0x9E3779B1, 0x85EBCA77):
        bits *= np.uint32(multiplier)
        bits ^= bits >> np.uint32(15)
    bits *= np.uint32(0xC2B2AE3D)
    bits >>= np.uint32(16)
    return bits


def _score_moments(table: ZipfTable, key: np.uint32) -> tuple[float, float]:
    ranks = np.arange(min(table.rows, 4096))
    own = scores(table.row_ids(ranks), key).astype(np.float64)
    probability = table.ranks.probability(ranks)
    rest = max(0.0, 1.0 - float(probability.sum()))
    mean = float(probability @ own) + rest * 2.0**15
    variance = float(probability @ (own - mean) ** 2) + rest * (2.0**32 / 12 + (2.0**15 - mean) ** 2)
    # Without the floor, standardised scores of a very skewed table's rare rows would reach hundreds.
    return mean, math.sqrt(max(variance, 0.02 * 2.0**32 / 12))
