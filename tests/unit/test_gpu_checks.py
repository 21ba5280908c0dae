"""The checks that run on GPUs, by their names alone."""

from fnmatch import filter as matching

from tests.gpu.exchange.checks import CHECKS
from tests.gpu.exchange.room import EXCLUSIVE, OF_ALL
from tests.gpu.exchange.sharing import UNSHARED


def test_each_pattern_names_a_check() -> None:
    assert [pattern for pattern in (*UNSHARED, *OF_ALL, *EXCLUSIVE) if not matching(CHECKS, pattern)] == []
