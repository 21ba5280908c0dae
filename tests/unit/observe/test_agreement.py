"""What counts as agreement, without noise and within it, and how often the verdict is wrong."""

import math
import random
from collections.abc import Sequence

import pytest

from dlrm_overlap.observe.agreement import Losses, find_fault, loss_tolerance
from tests.unit.observe.drift import CALM, CHAOTIC, FAULTS, Regime, train_copies

REFERENCE = {20: 0.5, 40: 0.4, 60: 0.2}
RTOL = 1e-4


def _runs(*deviations: float, steps: int = 40) -> list[dict[int, float]]:
    """Return runs whose losses deviate by these shares, growing tenfold over the first half of the steps."""
    growth = [min(1.0, 10 ** (2 * i / steps - 1)) for i in range(steps)]
    return [{i + 1: 0.5 * (1 + d * g) for i, g in enumerate(growth)} for d in deviations]


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({40: 0.4 * (1 + 0.9e-4)}, None),
        ({40: 0.4 * (1 + 1.1e-4)}, ["step 40: loss 0.400044 against 0.4", "1.1e-04", "tolerance 0.0001"]),
        ({40: 0.4 * (1 - 1.1e-4)}, ["step 40: loss 0.399956"]),
        ({40: 0.41, 60: 0.9}, ["step 40"]),  # the first step, not the worst
        ({40: math.nan}, ["step 40: loss nan against 0.4", "not finite"]),
        ({60: math.inf}, ["step 60: loss inf", "not finite"]),
        ({80: 0.1}, ["step 80: loss 0.1 against -", "missing"]),
    ],
)
def test_fault(changed: dict[int, float], parts: list[str] | None) -> None:
    fault = find_fault(REFERENCE | changed, REFERENCE, [], RTOL)
    assert (fault is None) == (parts is None), fault
    assert all(part in (fault or "") for part in parts or []), fault


def test_a_fault_of_a_repeated_reference_is_named() -> None:
    again = [REFERENCE | {40: math.nan}, {20: 0.5}]
    fault = "step 40: loss 0.4 against 0.4, {} in a repeated run of the reference; tolerance 0.0001"
    assert find_fault(REFERENCE, REFERENCE, again[:1], RTOL) == fault.format("not finite")
    assert find_fault(REFERENCE, REFERENCE, again, RTOL) == fault.format("missing")


def test_runs_without_losses_do_not_agree() -> None:
    assert find_fault({}, {}, [{}], RTOL) == "no run has logged a loss"


@pytest.mark.parametrize("references", [1, 3])
def test_a_reference_that_is_not_finite_agrees_with_nothing(references: int) -> None:
    broken = REFERENCE | {40: math.nan}
    runs = [broken, *[REFERENCE] * (references - 1)]
    assert find_fault(broken, runs[0], runs[1:], RTOL) is not None
    assert find_fault(REFERENCE, runs[0], runs[1:], RTOL) is not None
    assert find_fault(REFERENCE, runs[-1], runs[:-1], RTOL) is not None


def test_the_bound_follows_the_noise_and_more_runs_narrow_it() -> None:
    first, *again = _runs(0.0, -1e-4, 2e-4)
    one, two = (loss_tolerance(first, again[:runs], RTOL) for runs in (1, 2))
    assert (one[40], two[40]) == pytest.approx((25 * 1e-4, 10 * 2e-4))
    assert two[1] == pytest.approx(two[40] / 10, rel=0.2)
    assert loss_tolerance(first, [first], RTOL) == dict.fromkeys(range(1, 41), RTOL)


def _refused(runs: Sequence[Losses], references: Sequence[Sequence[Losses]]) -> float:
    """Return the share of `runs` refused, over all `references`."""
    faults = [find_fault(run, first, again, RTOL) for first, *again in references for run in runs]
    return sum(fault is not None for fault in faults) / len(faults)


def _refused_without_fault(copies: list[dict[int, float]], references: int, draws: int) -> float:
    """Return the share of copies without a fault that are refused against copies drawn as the reference."""
    chance = random.Random(0)
    shares = []
    for _ in range(draws):
        drawn = chance.sample(copies, references + 6)
        shares.append(_refused(drawn[references:], [drawn[:references]]))
    return sum(shares) / draws


def test_faults_are_found_where_runs_stay_together() -> None:
    good = train_copies(6, 1, CALM)
    assert _refused(good[3:], [good[:3]]) == 0
    for fault in FAULTS:
        assert _refused(train_copies(2, 1, CALM, fault), [good[:3]]) == 1, fault


def test_noise_is_taken_for_noise_and_faults_are_found_where_runs_diverge() -> None:
    good = train_copies(16, 1, CHAOTIC)
    diverged = max(abs(run[150] / good[0][150] - 1) for run in good)
    assert diverged > 3 * RTOL, "these runs show nothing"
    assert _refused_without_fault(good, 1, 20) > 0.2
    assert _refused_without_fault(good, 3, 40) < 0.01
    for fault in ("scaled", "faster", "dropped"):
        assert _refused(train_copies(2, 1, CHAOTIC, fault), [good[:3]]) == 1, fault


@pytest.mark.slow
def test_rates_over_many_models() -> None:
    regimes = [CHAOTIC, Regime("adagrad", 0.5, 1e-5)]
    good: dict[int, list[float]] = {2: [], 3: [], 4: []}
    found: dict[str, list[float]] = {fault: [] for fault in FAULTS}
    chance = random.Random(0)
    for seed in range(11, 14):
        for regime in regimes:
            copies = train_copies(24, seed, regime)
            for references, shares in good.items():
                shares.append(_refused_without_fault(copies, references, 30))
            references = [chance.sample(copies, 3) for _ in range(3)]
            for fault, shares in found.items():
                shares.append(_refused(train_copies(2, seed, regime, fault), references))
    rates = {name: sum(shares) / len(shares) for name, shares in (good | found).items()}
    assert all(rates[references] < 0.01 for references in good), rates
    least = {"scaled": 0.7, "faster": 0.95, "lost": 0.4, "dropped": 1.0, "stale": 0.9}
    assert all(rates[fault] >= rate for fault, rate in least.items()), rates
