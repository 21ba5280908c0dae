"""The interval of a speedup holds the true ratio about as often as it says, also where step times drift."""

import numpy as np

from dlrm_overlap.observe.bootstrap import speedup_interval


def _times(generator: np.random.Generator, median: float) -> list[float]:
    """Return 200 times whose noise lasts for about four steps."""
    noise = np.convolve(generator.normal(size=203), np.ones(4) / 2, mode="valid")
    return (median * np.exp(0.1 * noise)).tolist()


def test_the_interval_holds_the_true_ratio_in_about_95_of_100_pairs() -> None:
    generator = np.random.default_rng(1)
    held = 0
    for _ in range(25):
        interval = speedup_interval(_times(generator, 10.0), _times(generator, 4.0))
        assert interval is not None
        assert interval.low < interval.high < 1.2 * interval.low
        held += interval.low <= 2.5 <= interval.high
    assert held >= 21


def test_of_runs_in_turns_noise_that_both_have_is_not_in_the_interval() -> None:
    generator = np.random.default_rng(2)
    shared = np.array(_times(generator, 1.0)) * np.repeat(np.exp(generator.normal(0, 0.3, size=20)), 10)
    reference, own = (10 * shared).tolist(), (4 * shared * np.exp(generator.normal(0, 0.01, size=200))).tolist()
    apart, in_turns = speedup_interval(reference, own), speedup_interval(reference, own, in_turns=True)
    assert apart
    assert in_turns
    assert in_turns.low <= 2.5 <= in_turns.high
    assert in_turns.high - in_turns.low < 0.2 * (apart.high - apart.low)
