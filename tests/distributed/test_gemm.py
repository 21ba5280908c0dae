"""Two ranks, or three, multiply with communication inside the product."""

from collections.abc import Callable

import pytest

from tests.distributed import gemm
from tests.distributed.workers import cases_on_ranks


def _run(case: str) -> None:
    gemm.QUICK[case]()


two_ranks, three_ranks = (cases_on_ranks(world_size, _run, list(gemm.QUICK)) for world_size in (2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("case", gemm.QUICK)
def test_two_ranks(two_ranks: Callable[[str], None], case: str) -> None:
    two_ranks(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", gemm.QUICK)
def test_three_ranks(three_ranks: Callable[[str], None], case: str) -> None:
    three_ranks(case)
