"""Rows to update in one process: tables, ids and gradients are CPU tensors, and expected results are float64."""

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

# Float32 against float64, relative and absolute: weights and states are near 1, and a step rounds about ten times.
TOLERANCE = 1e-6


class StepNumbers(NamedTuple):
    """The optimizer's numbers at a step, as the host knows them."""

    numbers: OptimizerParams
    seed: int = 3
    factor: float = 0.5

    def rule(self) -> Rule:
        """Return them as kernels take them, at step 7: 5 steps are counted on the device, and 2 on the host."""
        seed = (self.seed - 0x5EED * 7) % 2**31
        at_step_0 = self.numbers._replace(count=self.numbers.count - 7)
        return Rule(torch.tensor(at_step_0), torch.tensor([5]), 2, seed, self.factor)

    def with_rate(self, lr: float) -> "StepNumbers":
        return self._replace(numbers=self.numbers._replace(lr=lr))


# A gradient, an accumulated square and eps are of similar size, so that an error in any of them shows.
RULE = StepNumbers(OptimizerParams(lr=0.5, eps=0.25))
_DECAYING = OptimizerParams(lr=0.5, eps=0.25, l2=0.2, decoupled=0.1, max_norm=2.5)
_MEANS = OptimizerParams(lr=0.5, eps=0.25, decoupled=0.1, beta1=0.5, beta2=0.9375, count=3)
# The third state's rows had their last steps at counts 0 (never) to 8; `count` is 9.
_COUNTER = OptimizerParams(lr=0.5, eps=0.25, decoupled=0.125, halflife=4, decay_after=2, max_rate=1.5, count=9)
RULES: dict[str, StepNumbers] = dict.fromkeys(("sgd", "adagrad", "rowwise_adagrad"), RULE)
RULES |= dict.fromkeys(("adam", "partial_rowwise_adam", "lamb", "partial_rowwise_lamb"), RULE._replace(numbers=_MEANS))
RULES["decaying_rowwise_adagrad"] = RULE._replace(numbers=_DECAYING)
RULES["rowwise_adagrad_with_counter"] = RULE._replace(numbers=_COUNTER)


@dataclass(frozen=True)
class Rows:
    """Tables with the same dim and optimizer."""

    tables: tuple[tuple[int, ...], ...]  # ids of each row of each table; the first table has two features, others one
    dim: int = 12
    optimizer: str = "sgd"
    means: bool = False  # the first table's second feature is a mean; all others are sums
    weights: torch.dtype = torch.float32
    stochastic: bool = False


MIXED = Rows(((5, 1, 0, 23, 4, 2), (0, 1, 3)))  # 23 ids in 9 bags: duplicates within bags and across them


@dataclass(frozen=True)
class Case:
    """The rows that are updated, and their gradients."""

    ranges: tuple[Rows, ...] = (MIXED,)
    samples: int = 9  # of all ranks
    chunk_ids: int = 4
    wire: torch.dtype = torch.float32
    ids: torch.dtype = torch.int64
    offsets: torch.dtype = torch.int64
    weighted: bool = False  # whether ids have weights: multiples of 1/4 from -1 to 1


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Check float32 weights or states against float64."""
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE, atol=TOLERANCE)


def sort_ids(
    keys: torch.Tensor, bags: torch.Tensor, samples: int, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the first four of `SortedIds` as FBGEMM's sort gives them, with garbage after the last run.

    Args:
        keys: [n] int64, each id's row + its table's first key.
        bags: [n] int64, each id's feature * samples + sample.
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
    range: int
    first_key: int
    mean: bool


class Model:
    """The tables of a case, the ids of one input and their bags' gradients. Every fifth bag is empty.

    Gradients are multiples of 1/8 below 16: their sums are exact in any order and in any wire dtype.
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
        # Bits of the sample in an id's info: with three features or more, a feature's index reaches the sign bit.
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
        """Return a bag for each of a table's ids; none is a multiple of five."""
        samples = self.case.samples
        candidates = torch.arange(first_feature * samples, (first_feature + features) * samples)
        candidates = candidates[candidates % 5 != 0]
        return candidates[torch.randint(candidates.numel(), (ids,), generator=self._generator)]

    def _make_rows(self) -> None:
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
        """Make the window, with NaN where there is no gradient: between the shards, and for empty bags."""
        samples = self.case.samples
        dims = [self.case.ranges[feature.range].dim for feature in self.features]
        # In the reverse order of the features.
        self.starts = [4 + sum(dim + 4 for dim in dims[index + 1 :]) for index in range(len(dims))]
        columns = 4 + sum(dim + 4 for dim in dims)
        self.window = torch.full((columns * samples,), torch.nan, dtype=self.case.wire)
        self.gradients = [
            self.window[start * samples : (start + dim) * samples].view(samples, dim)
            for start, dim in zip(self.starts, dims, strict=True)
        ]
        self.draw_gradients()

    def draw_gradients(self) -> None:
        for gradient, lengths in zip(self.gradients, self.lengths.view(-1, self.case.samples), strict=True):
            drawn = torch.randint(-127, 128, gradient.shape, generator=self._generator) / 8
            gradient.copy_(drawn.masked_fill((lengths == 0)[:, None], torch.nan))

    def rows(self, index: int) -> torch.Tensor:
        """Return [rows, D], the rows of a range without their guards."""
        return self.weights[index][4:-4].view(-1, self.case.ranges[index].dim)

    def touched(self, index: int) -> torch.Tensor:
        """Return [rows] bool, whether any id names each row of a range."""
        first, end = self.first_keys[index : index + 2]
        return self.keys.bincount(minlength=end)[first:end] > 0

    def sorted_ids(self) -> SortedIds:
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
        rule = rule or RULES[self.case.ranges[index].optimizer]
        RowUpdate(self.row_range(index), self.case.chunk_ids)(runs, self.window, rule.rule())

    def totals(self, index: int) -> torch.Tensor:
        """Return [rows, D] float64, the sum of the gradients of each row of a range."""
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
        """Return the float64 weights and states of a range that an update must lead to."""
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
        """Update a range and check all of it, guards included, and that `runs` can serve another update.

        SGD on sums is exact except for the last rounding, so it must be equal to the last bit.
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
