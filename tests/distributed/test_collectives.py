"""Three ranks send each other rows into memory that they share, and multiply with that inside the product."""

from collections.abc import Callable

import pytest

from tests.distributed import collectives, gemm
from tests.distributed.workers import cases_on_ranks

pytestmark = pytest.mark.slow

CASES = {f"products, {name}": run for name, run in gemm.QUICK.items()}
CASES |= {f"collectives, {name}": run for name, run in collectives.QUICK.items()}


def _run(case: str) -> None:
    CASES[case]()


three_ranks = cases_on_ranks(3, _run, list(CASES))


@pytest.mark.parametrize("case", CASES)
def test_three_ranks(three_ranks: Callable[[str], None], case: str) -> None:
    three_ranks(case)
