"""Two ranks, or three, send each other rows into memory that they share."""

from collections.abc import Callable

import pytest

from tests.distributed import collectives
from tests.distributed.workers import cases_on_ranks


def _run(case: str) -> None:
    collectives.QUICK[case]()


two_ranks, three_ranks = (cases_on_ranks(world_size, _run, list(collectives.QUICK)) for world_size in (2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("case", collectives.QUICK)
def test_two_ranks(two_ranks: Callable[[str], None], case: str) -> None:
    two_ranks(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", collectives.QUICK)
def test_three_ranks(three_ranks: Callable[[str], None], case: str) -> None:
    three_ranks(case)
