"""Rows to update in one process: tables, ids and gradients are CPU tensors, what is to come of them is float64."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from dlrm_overlap.kernels.backward.optimizers import OptimizerRows, Rule
from dlrm_overlap.kernels.backward.row_runs import InputFeatures, Preparation, PreparedRuns, SortedIds
from dlrm_overlap.kernels.backward.update_rows import RowUpdate
from dlrm_overlap.kernels.optimizer_params import STATES, OptimizerParams
from dlrm_overlap.kernels.reference import update_rows
from tests.agreement import assert_same
from tests.kernels.emulation import GUARD

# Float32 against float64, relative and absolute: weights and states are near 1, a step rounds some ten times.
TOLERANCE = 1e-6
# A gradient, an accumulated square and eps of like size: a step that takes any of them wrongly is far off.


class StepNumbers(NamedTuple):
    """The optimizer's numbers at a step, as the node knows them."""

    numbers: OptimizerParams
    seed: int = 3
    factor: float = 0.5

    def rule(self) -> Rule:
        """Return them as kernels take them: the step is number 7, of which 5 are counted on the device."""
        seed = (self.seed - 0x5EED * 7) % 2**31
        at_step_0 = self.numbers._replace(count=self.numbers.count - 7)
        return Rule(torch.tensor(at_step_0), torch.tensor([5]), 2, seed, self.factor)

    def with_rate(self, lr: float) -> "StepNumbers":
        """Return them with another learning rate."""
        return self._replace(numbers=self.numbers._replace(lr=lr))


RULE = StepNumbers(OptimizerParams(lr=0.5, eps=0.25))
_DECAYING = OptimizerParams(lr=0.5, eps=0.25, l2=0.2, decoupled=0.1, max_norm=2.5)
_MEANS = OptimizerParams(lr=0.5, eps=0.25, decoupled=0.1, beta1=0.5, beta2=0.9375, count=3)
# The third state's rows have had steps at counts 0, which is never, to 8; `count` is 9.
_COUNTER = OptimizerParams(lr=0.5, eps=0.25, decoupled=0.125, halflife=4, decay_after=2, max_rate=1.5, count=9)
RULES = {
    "sgd": RULE,
    "adagrad": RULE,
    "rowwise_adagrad": RULE,
    "decaying_rowwise_adagrad": RULE._replace(numbers=_DECAYING),
    "rowwise_adagrad_with_counter": RULE._replace(numbers=_COUNTER),
    "adam": RULE._replace(numbers=_MEANS),
    "partial_rowwise_adam": RULE._replace(numbers=_MEANS),
    "lamb": RULE._replace(numbers=_MEANS),
    "partial_rowwise_lamb": RULE._replace(numbers=_MEANS),
}
"""of each optimizer, all of whose numbers count"""


@dataclass(frozen=True)
class Rows:
    """Tables that are updated alike."""

    tables: tuple[tuple[int, ...], ...]
    """of each row of each table, how many ids name it. The first table has two features, the others one"""
    dim: int = 12
    optimizer: str = "sgd"
    means: bool = False
    """the first table's second feature is a mean, all others are sums"""
    weights: torch.dtype = torch.float32
    stochastic: bool = False


MIXED = Rows(((5, 1, 0, 23, 4, 2), (0, 1, 3)))  # 23 ids over 9 bags: duplicates within bags and across them


@dataclass(frozen=True)
class Case:
    """What is updated, and by what gradients."""

    ranges: tuple[Rows, ...] = (MIXED,)
    samples: int = 9
    """of all ranks"""
    chunk_ids: int = 4
    wire: torch.dtype = torch.float32
    ids: torch.dtype = torch.int64
    offsets: torch.dtype = torch.int64
    weighted: bool = False
    """whether ids have weights: fourths up to 1, 0 and numbers below it among them"""


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Check float32 weights or states against float64."""
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE, atol=TOLERANCE)


def sort_ids(
    keys: torch.Tensor, bags: torch.Tensor, samples: int, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the first four of `SortedIds` as FBGEMM's sort gives them, and garbage behind the last run.

    Args:
        keys: [n] int64, of each id, its table's first key + its row.
        bags: [n] int64, of each id, feature * samples + sample.
        samples: of all ranks.
        bits: of a sample in an id's info.
    """
    keys, order = keys.sort(stable=True)
    infos = (bags // samples << bits | bags % samples).int()[order]
    unique, counts = keys.unique_consecutive(return_counts=True)
    run_keys = torch.full_like(keys, -5)
    run_keys[: unique.numel()] = unique
    run_starts = torch.full((keys.numel() + 1,), 10**9, dtype=torch.int32)
    run_starts[0] = 0
    run_starts[1 : unique.numel() + 1] = counts.cumsum(0)
    return run_keys, run_starts, torch.tensor([unique.numel()], dtype=torch.int32), infos


class Feature(NamedTuple):
    """One feature of an input."""

    range: int
    first_key: int
    mean: bool


class Model:
    """The tables of a case, the ids of one input and their bags' gradients. Every fifth bag is empty.

    Gradients are eighths below 16, so that sums of them are exact in any order, and on any wire.
    """

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        self._generator = torch.Generator().manual_seed(seed)
        self.features: list[Feature] = []
        self.first_keys = [0]
        bags: list[torch.Tensor] = []
        keys: list[torch.Tensor] = []
        key = 0
        for index, rows in enumerate(case.ranges):
            for table, counts in enumerate(rows.tables):
                twice = table == 0
                bags.append(self._bags(len(self.features), 1 + twice, sum(counts)))
                named = key + torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
                keys.append(named[torch.randperm(named.numel(), generator=self._generator)])
                means = [False, rows.means] if twice else [False]
                self.features += [Feature(index, key, mean) for mean in means]
                key += len(counts)
            self.first_keys.append(key)
        # Bits of the sample in an id's info: so many that with three features or more a feature's index
        # reaches the sign.
        self.bits = 32 - max(2, (len(self.features) - 1).bit_length())
        self.bags, order = torch.cat(bags).sort(stable=True)
        self.keys = torch.cat(keys)[order]
        self.lengths = self.bags.bincount(minlength=len(self.features) * case.samples)
        self.offsets = torch.cat((torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0))).to(case.offsets)
        first_keys = torch.tensor([feature.first_key for feature in self.features])
        self.values = (self.keys - first_keys[self.bags // case.samples]).to(case.ids)
        self.id_weights: torch.Tensor | None = None
        if case.weighted:
            self.id_weights = torch.randint(-4, 5, self.keys.shape, generator=self._generator) / 4
        self._make_rows()
        self._make_gradients()

    def _bags(self, first_feature: int, features: int, ids: int) -> torch.Tensor:
        """Return a bag for each of a table's ids, none a multiple of five."""
        samples = self.case.samples
        candidates = torch.arange(first_feature * samples, (first_feature + features) * samples)
        candidates = candidates[candidates % 5 != 0]
        return candidates[torch.randint(candidates.numel(), (ids,), generator=self._generator)]

    def _make_rows(self) -> None:
        """Make the rows of each range and their states, with guards at both ends."""
        self.weights: list[torch.Tensor] = []
        self.states: list[list[torch.Tensor]] = []
        for index, rows in enumerate(self.case.ranges):
            count = self.first_keys[index + 1] - self.first_keys[index]
            weights = torch.full((count * rows.dim + 8,), GUARD, dtype=rows.weights)
            weights[4:-4] = torch.randn(count * rows.dim, generator=self._generator)
            self.weights.append(weights)
            self.states.append([])
            for kind in STATES[rows.optimizer]:
                each, guard = (rows.dim, 4) if kind == "elements" else (1, 1)
                state = torch.full((count * each + 2 * guard,), GUARD)
                state[guard : guard + count * each] = torch.rand(count * each, generator=self._generator)
                self.states[-1].append(state)
            if rows.optimizer == "rowwise_adagrad_with_counter":
                self.states[-1][1][1:-1] = torch.arange(count) % 9
                self.states[-1][2][1:-1] += torch.arange(count)

    def _make_gradients(self) -> None:
        """Make the window, of NaN where there is no gradient: between the shards, and for empty bags."""
        samples = self.case.samples
        dims = [self.case.ranges[feature.range].dim for feature in self.features]
        # The other way round than the features, which must not matter.
        self.starts = [4 + sum(dim + 4 for dim in dims[index + 1 :]) for index in range(len(dims))]
        columns = 4 + sum(dim + 4 for dim in dims)
        self.window = torch.full((columns * samples,), torch.nan, dtype=self.case.wire)
        self.gradients = [
            self.window[start * samples : (start + dim) * samples].view(samples, dim)
            for start, dim in zip(self.starts, dims, strict=True)
        ]
        self.draw_gradients()

    def draw_gradients(self) -> None:
        """Draw other gradients."""
        for gradient, lengths in zip(self.gradients, self.lengths.view(-1, self.case.samples), strict=True):
            drawn = torch.randint(-127, 128, gradient.shape, generator=self._generator) / 8
            gradient.copy_(drawn.masked_fill((lengths == 0)[:, None], torch.nan))

    def rows(self, index: int) -> torch.Tensor:
        """Return the rows of a range without their guards, [rows, D]."""
        return self.weights[index][4:-4].view(-1, self.case.ranges[index].dim)

    def touched(self, index: int) -> torch.Tensor:
        """Return whether ids name each row of a range, [rows] bool."""
        first, end = self.first_keys[index : index + 2]
        return self.keys.bincount(minlength=end)[first:end] > 0

    def sorted_ids(self) -> SortedIds:
        """Return what FBGEMM's sort gives."""
        samples = self.case.samples
        run_keys, run_starts, run_count, infos = sort_ids(self.keys, self.bags, samples, self.bits)
        runs, weights = (run_keys.to(self.case.ids), run_starts, run_count), self.id_weights
        if weights is not None:
            weights = weights[self.keys.sort(stable=True).indices]
        return SortedIds(*runs, infos, self.bits, self.offsets, samples, weights)

    def input_features(self) -> InputFeatures:
        entries = [
            [start // 4, self.case.ranges[feature.range].dim // 4, int(feature.mean), feature.first_key]
            for start, feature in zip(self.starts, self.features, strict=True)
        ]
        any_mean = any(feature.mean for feature in self.features)
        return InputFeatures(torch.tensor(entries), any_mean, torch.tensor(self.first_keys))

    def prepare(self, row_units: int = 0) -> PreparedRuns:
        ids = self.sorted_ids()
        return Preparation(ids, self.input_features(), row_units, self.case.chunk_ids)(ids)

    def row_range(self, index: int) -> OptimizerRows:
        rows, first = self.case.ranges[index], self.first_keys[index]
        units = rows.dim // 4
        return OptimizerRows(
            index=index,
            weights=self.weights[index],
            states=tuple(self.states[index]),
            weight_at=1 - first * units,
            state_at=tuple(1 - first * (units if kind == "elements" else 1) for kind in STATES[rows.optimizer]),
            dim=rows.dim,
            any_mean=rows.means,
            optimizer=rows.optimizer,
            stochastic_rounding=rows.stochastic,
        )

    def update(self, runs: PreparedRuns, index: int = 0, rule: StepNumbers | None = None) -> None:
        """Run the kernel that updates the rows of a range."""
        rule = rule or RULES[self.case.ranges[index].optimizer]
        RowUpdate(self.row_range(index), self.case.chunk_ids)(runs, self.window, rule.rule())

    def totals(self, index: int) -> torch.Tensor:
        """Return the sum of the gradients of each row of a range, [rows, D] float64."""
        totals = torch.zeros(self.rows(index).shape, dtype=torch.float64)
        for i, feature in enumerate(self.features):
            if feature.range == index:
                here = self.bags // self.case.samples == i
                gradient = self.gradients[i].double()[self.bags[here] % self.case.samples]
                if feature.mean:
                    gradient /= self.lengths[self.bags[here], None]
                if self.id_weights is not None:
                    gradient *= self.id_weights[here, None]
                totals.index_add_(0, self.keys[here] - self.first_keys[index], gradient)
        return totals

    def expected(self, index: int = 0, rule: StepNumbers | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the weights and the states of a range as an update of those at hand is to leave them, float64."""
        rows, touched = self.case.ranges[index], self.touched(index).nonzero().flatten()
        rule = rule or RULES[rows.optimizer]
        weights, states = self.weights[index].double(), [state.double() for state in self.states[index]]
        views = [
            state[4:-4].view(-1, rows.dim) if kind == "elements" else state[1:-1]
            for kind, state in zip(STATES[rows.optimizer], states, strict=True)
        ]
        gradient = rule.factor * self.totals(index)[touched]
        update_rows(weights[4:-4].view(-1, rows.dim), views, touched, gradient, rows.optimizer, rule.numbers)
        return weights, states

    def check_update(self, runs: PreparedRuns, index: int = 0, rule: StepNumbers | None = None) -> None:
        """Update a range, and check it, guards and untouched rows included, and that `runs` serve another update.

        SGD on sums is exact but for the last rounding, so that it must be right to the last bit.
        """
        rows, touched = self.case.ranges[index], self.touched(index)
        weights, states = self.expected(index, rule)
        before = self.rows(index).clone()
        self.update(runs, index, rule)
        assert_same(self.rows(index)[~touched], before[~touched], "rows that no id names")
        if rows.optimizer == "sgd" and not rows.means:
            assert_same(self.weights[index], weights.float(), "weights")
        assert_near(self.weights[index], weights)
        for state, expected in zip(self.states[index], states, strict=True):
            assert_near(state, expected)
        assert_same(runs.shared[1:], torch.zeros_like(runs.shared[1:]), "finished chunks")
