"""The checks that run on GPUs, by their names alone."""

from fnmatch import filter as matching

from tests.gpu.exchange.checks import CHECKS
from tests.gpu.exchange.sharing import UNSHARED


def test_each_reason_to_leave_a_check_out_names_a_check() -> None:
    assert [pattern for pattern in UNSHARED if not matching(CHECKS, pattern)] == []
