"""The checks that run on GPUs, as far as their names tell."""

from fnmatch import filter as matching

from tests.gpu.exchange.checks import CHECKS
from tests.gpu.exchange.ranks import SKIPPED, skipped
from tests.gpu.exchange.sharing import UNSHARED


def test_a_check_is_left_out_only_where_ranks_share_a_gpu() -> None:
    assert not skipped(CHECKS, ranks_per_gpu=1)
    left_out = skipped(CHECKS, ranks_per_gpu=2)
    assert all(outcome.text.startswith(SKIPPED) for outcome in left_out.values())
    assert left_out.keys() == {name for pattern in UNSHARED for name in matching(CHECKS, pattern)}
    assert all(matching(CHECKS, pattern) for pattern in UNSHARED), "a check has another name"
