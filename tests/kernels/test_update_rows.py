import weakref
from dataclasses import replace

import pytest
import torch

from dlrm_overlap.kernels.backward.optimizers import OPTIMIZERS
from dlrm_overlap.kernels.backward.update_rows import RowUpdate
from dlrm_overlap.kernels.optimizer_params import OptimizerParams
from dlrm_overlap.kernels.reference import update_rows
from tests.agreement import assert_same
from tests.kernels.emulation import interpreted, to_wire
from tests.kernels.gradients import MIXED, RULE, RULES, Case, Model, Rows, assert_near

pytestmark = [interpreted, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # of rows that are not stored

# Ranges of other dims, optimizers and numbers of rows; no id names a row of the second.
RANGES = (
    replace(MIXED, means=True),
    Rows(((0, 0),), dim=4),
    replace(MIXED, dim=4, optimizer="adagrad"),
    Rows(((2, 0, 60),), dim=8, optimizer="rowwise_adagrad"),
)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("dim", "means", "weighted"),
    [
        (4, False, False),
        (12, True, False),
        (12, False, True),
        (12, True, True),
        (128, False, False),
        (1020, True, False),
        pytest.param(1024, False, False, marks=pytest.mark.slow),
    ],
)
def test_rows_are_updated_once_by_the_sum_of_their_gradients(
    optimizer: str, dim: int, means: bool, weighted: bool
) -> None:
    model = Model(Case((replace(MIXED, dim=dim, optimizer=optimizer, means=means),), weighted=weighted))
    bags_by_key = list(zip(model.keys.tolist(), model.bags.tolist(), strict=True))
    assert len(set(bags_by_key)) < len(bags_by_key), "a bag names a row twice"
    assert (model.lengths == 0).any(), "a bag is empty"
    model.check_update(model.prepare())


@pytest.mark.parametrize(
    "numbers",
    [
        {"decoupled": 0.0, "l2": 0.125},
        {"halflife": 0, "count": 10},
        {"halflife": -1},
        {"decay_after": 9},
        {"lazy": 1},
        {"lazy": 1, "halflife": -1},
        {"lazy": 1, "halflife": -2, "decay_after": 7},
        {"lazy": 1, "halflife": -2, "decay_after": 9},
    ],
    ids=str,
)
def test_rows_decay_by_their_counter(numbers: dict[str, float]) -> None:
    optimizer = "rowwise_adagrad_with_counter"
    model, rule = Model(Case((replace(MIXED, optimizer=optimizer),))), RULES[optimizer]
    model.check_update(model.prepare(), rule=rule._replace(numbers=rule.numbers._replace(**numbers)))


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "decaying_rowwise_adagrad"])
def test_rows_that_diverge_are_not_hidden_without_a_limit_of_their_norm(optimizer: str) -> None:
    """The square of 1e30 is infinite in float32, in which the rows' norms are computed."""
    model, rule = Model(Case((replace(MIXED, optimizer=optimizer),))), RULES[optimizer]
    rule = rule._replace(numbers=rule.numbers._replace(max_norm=OptimizerParams(0).max_norm, l2=0, decoupled=0))
    touched = model.touched(0)
    model.rows(0).fill_(1e30)
    rows, gradient = model.rows(0)[touched].clone(), model.totals(0)[touched].float()
    states = [state[1:-1][touched] for state in model.states[0]]
    update_rows(rows, states, torch.arange(len(rows)), gradient, "rowwise_adagrad", rule.numbers)
    assert (rows == 1e30).all(), "the reference"
    model.update(model.prepare(), rule=rule)
    assert (model.rows(0) == 1e30).all(), "the kernel"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_row_that_every_bag_names_is_updated_once(optimizer: str) -> None:
    model = Model(Case((Rows(((2, 200, 3),), dim=128, optimizer=optimizer),), samples=20))
    assert model.bags[model.keys == 1].unique().numel() == 32, "of 40 bags, 8 are empty"
    runs = model.prepare()
    assert runs.shared[0] == 13, "more chunks than the 4 whose sums are added at once"
    model.check_update(runs)


# Runs of more than 4 ids are cut, of more than 16 into chunks of 16, of more than 256 of 64, of more than 4096 of 256.
@pytest.mark.parametrize(
    ("counts", "chunks"),
    [
        ((4, 1, 4), 0),
        ((5,), 2),
        ((4, 5, 4, 0, 8, 9), 2 + 2 + 3),
        ((16, 17), 4 + 2),
        ((1, 256, 2, 257), 16 + 5),
        pytest.param((1, 4097), 17, marks=pytest.mark.slow),
        ((5,) * 20, 40),
    ],
)
def test_runs_are_cut_into_chunks(counts: tuple[int, ...], chunks: int) -> None:
    model = Model(Case((Rows((counts,), dim=4),)))
    runs = model.prepare()
    assert runs.shared[0] == chunks <= runs.chunk_run.numel()
    model.check_update(runs)


LONG_RUNS, NOT_CUT = ((1, 17, 16, 128, 0, 40, 129, 2, 3, 18), False), ((1, 17, 16, 0, 18, 2), True)
SIDE_BY_SIDE = {4: 8, 64: 4, 128: 2, 256: 1}  # dim -> runs
A_ROW = ("sgd", "rowwise_adagrad", "lamb")  # which need nothing, a sum and two norms of a whole row


@pytest.mark.parametrize(
    ("dim", "counts", "means", "optimizer", "chunks"),
    [
        *((dim, *LONG_RUNS, optimizer, 2) for dim in SIDE_BY_SIDE for optimizer in A_ROW),
        *((64, *LONG_RUNS, optimizer, 2) for optimizer in OPTIMIZERS if optimizer not in A_ROW),
        *((dim, *NOT_CUT, "sgd", 0) for dim in SIDE_BY_SIDE),
    ],
)
def test_runs_of_more_than_16_ids_are_summed_alone_and_of_more_than_128_cut(
    dim: int, counts: tuple[int, ...], means: bool, optimizer: str, chunks: int
) -> None:
    model = Model(Case((Rows((counts,), dim, optimizer, means),), samples=30, chunk_ids=128))
    runs = model.prepare()
    assert runs.shared[0] == chunks
    model.check_update(runs)


def test_runs_can_be_cut_anywhere() -> None:
    for chunk_ids in (1, 2, 8, 128):
        model = Model(Case(chunk_ids=chunk_ids))
        model.check_update(model.prepare())


@pytest.mark.slow
def test_more_runs_than_a_program_cuts_are_updated() -> None:
    counts = torch.ones(2200, dtype=torch.int64)
    counts[[3, 1023, 1024, 2199]] = torch.tensor([7, 20, 5, 300])
    model = Model(Case((Rows((tuple(counts.tolist()),), dim=4),), samples=200))
    runs = model.prepare()
    assert runs.shared[0] == 2 + 2 + 2 + 5
    model.check_update(runs)


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("offsets", [torch.int32, torch.int64])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float16])
def test_ids_offsets_and_gradients_have_any_type(ids: torch.dtype, offsets: torch.dtype, wire: torch.dtype) -> None:
    model = Model(Case((replace(MIXED, means=True),), ids=ids, offsets=offsets, wire=wire))
    model.check_update(model.prepare())


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 0, 2, 1)])
def test_ranges_are_updated_one_by_one(order: tuple[int, ...]) -> None:
    model = Model(Case(RANGES))
    runs = model.prepare()
    for index in order:
        others = [other for other in range(len(RANGES)) if other != index]
        before = [(model.weights[other].clone(), [state.clone() for state in model.states[other]]) for other in others]
        model.check_update(runs, index)
        for other, (weights, states) in zip(others, before, strict=True):
            assert_same(model.weights[other], weights, f"weights of range {other}, after an update of {index}")
            for actual, state in zip(model.states[other], states, strict=True):
                assert_same(actual, state, f"states of range {other}, after an update of {index}")


def test_one_update_serves_steps_of_other_types_and_numbers_and_keeps_none_of_their_tensors() -> None:
    model = Model(Case((replace(MIXED, optimizer="adagrad", means=True),)))
    update = RowUpdate(model.row_range(0), model.case.chunk_ids)
    steps = [(torch.int64, torch.float32, RULE), (torch.int32, torch.float32, RULE.with_rate(2.0))]
    steps += [(torch.int32, torch.bfloat16, RULE._replace(factor=0.25)), (torch.int64, torch.float32, RULE)]
    for ids, wire, rule in steps:
        model.draw_gradients()
        weights, states = model.expected(0, rule)
        runs, window, numbers = model.prepare(), model.window.to(wire, copy=True), rule.rule()
        runs = runs._replace(run_keys=runs.run_keys.to(ids))
        update(runs, window, numbers)
        assert_near(model.weights[0], weights)
        assert_near(model.states[0][0], states[0])
        given = [weakref.ref(tensor) for tensor in (*runs[:-1], window, numbers.numbers)]
        del runs, window, numbers
        assert all(tensor() is None for tensor in given), "a launch keeps a tensor of its last step"
    assert len(update._launches) == 3


def test_an_update_without_ids_changes_nothing() -> None:
    model = Model(Case((Rows(((0, 0),), optimizer="adagrad", means=True),)))
    runs = model.prepare()
    assert runs.gradient_at.numel() == 0
    model.check_update(runs)


def test_the_gradient_the_scale_and_the_range_of_each_id_are_found() -> None:
    model = Model(Case(RANGES))
    keys, order = model.keys.sort(stable=True)
    bags = model.bags[order]
    runs = model.prepare()
    for i, (bag, position) in enumerate(zip(bags.tolist(), runs.gradient_at.tolist(), strict=True)):
        feature, sample = divmod(bag, model.case.samples)
        gradient = model.gradients[feature][sample]
        assert_same(model.window[4 * position :][: gradient.numel()], gradient, f"gradient of id {i}")
        assert not model.features[feature].mean or runs.scales[i] == 1 / model.lengths[bag]
    first_keys = torch.tensor(model.first_keys)
    assert_same(runs.bounds, torch.searchsorted(keys.unique(), first_keys), "bounds")


def _twins(optimizer: str, weights: torch.dtype, scale: float = 1.0, dim: int = 1024) -> tuple[Model, Model]:
    """Return two models of equal rows: of half precision with stochastic rounding, and of float32."""
    rows = replace(MIXED, dim=dim, optimizer=optimizer)
    half = Model(Case((replace(rows, weights=weights, stochastic=True),)))
    half.rows(0).mul_(scale)
    full = Model(Case((rows,)))
    full.weights[0].copy_(half.weights[0])
    return half, full


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("weights", [torch.float16, torch.bfloat16])
def test_half_precision_rows_are_rounded_once(optimizer: str, weights: torch.dtype) -> None:
    half, full = _twins(optimizer, weights, dim=128)
    rows = half.row_range(0)._replace(stochastic_rounding=False)
    RowUpdate(rows, half.case.chunk_ids)(half.prepare(), half.window, RULES[optimizer].rule())
    full.update(full.prepare())
    assert_same(half.weights[0], to_wire(full.weights[0], weights), "weights")
    for actual, state in zip(half.states[0], full.states[0], strict=True):
        assert_same(actual, state, "states")


def _neighbours(exact: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest numbers of `dtype` below and above float64 `exact`, or itself twice."""
    nearest, far = exact.to(dtype), torch.tensor(torch.inf, dtype=dtype)
    below = torch.where(nearest.double() <= exact, nearest, nearest.nextafter(-far))
    above = torch.where(nearest.double() >= exact, nearest, nearest.nextafter(far))
    return below.double(), above.double()


# Most numbers near 2^-15 are subnormal in float16.
@pytest.mark.parametrize(("weights", "scale"), [(torch.float16, 1), (torch.float16, 2**-15), (torch.bfloat16, 1)])
def test_stochastic_rounding_is_to_a_neighbour_and_fair(weights: torch.dtype, scale: float) -> None:
    half, full = _twins("adagrad", weights, scale)
    rule = RULE.with_rate(RULE.numbers.lr * scale)
    full.update(full.prepare(), rule=rule)
    half.update(half.prepare(), rule=rule)
    touched = half.touched(0)
    rounded, exact = half.rows(0)[touched].double(), full.rows(0)[touched].double()
    below, above = _neighbours(exact, weights)
    assert ((rounded == below) | (rounded == above)).all()
    chance = torch.where(above > below, (exact - below) / (above - below), 0.0)
    up = (rounded == above) & (above > below)
    for some in (chance < 0.5, chance >= 0.5):  # rounding to the nearest is fair on average, but not in either half
        expected, variance = chance[some].sum(), (chance * (1 - chance))[some].sum()
        assert variance > 400
        assert (up[some].sum() - expected).abs() < 4 * variance.sqrt()


@pytest.mark.parametrize("weights", [torch.float16, torch.bfloat16])
def test_the_seed_decides_how_to_round(weights: torch.dtype) -> None:
    rows = []
    for seed in (3, 3, 4, 2**31 - 1):
        model, _ = _twins("adagrad", weights)
        before = model.rows(0).clone()
        model.update(model.prepare(), rule=RULE._replace(seed=seed))
        assert_same(model.rows(0)[~model.touched(0)], before[~model.touched(0)], "rows that no id names")
        rows.append(model.rows(0)[model.touched(0)])
    assert_same(rows[1], rows[0], "rows by the same seed")
    for other in rows[2:]:
        assert 0.25 < (other != rows[0]).double().mean() < 0.4, "a third of all pairs of fair roundings differ"


def test_each_step_rounds_otherwise() -> None:
    rule, rows = RULE.rule(), []
    for step, clock in ((2, 5), (1, 6), (3, 5), (2, 6)):  # the steps 7, 7, 8 and 8
        model, _ = _twins("adagrad", torch.bfloat16, dim=128)
        at = rule._replace(step=step, clock=torch.tensor([clock]))
        RowUpdate(model.row_range(0), model.case.chunk_ids)(model.prepare(), model.window, at)
        rows.append(model.rows(0)[model.touched(0)])
    assert_same(rows[1], rows[0], "rows of step 7")
    assert_same(rows[3], rows[2], "rows of step 8")
    assert 0.2 < (rows[2] != rows[0]).double().mean() < 0.45, "a third of all pairs of fair roundings differ"
