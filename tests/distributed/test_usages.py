"""Models that use a collection in unusual ways train under the drop-in as under stock TorchRec."""

from collections.abc import Callable

import pytest

from dlrm_overlap.backends import EXCHANGED
from tests.distributed.models import CPU, world
from tests.distributed.usages import USAGES, compare
from tests.distributed.workers import cases_on_ranks

FAST = [f"{usage}-sgd" for usage in USAGES if usage != "compiled"]
SLOW = ["compiled-sgd", *(f"{usage}-rowwise_adagrad" for usage in USAGES if usage != "compiled")]
Ended = Callable[[str], None]
"""fails where a case did not end well, telling what ended the ranks"""


def _compare(case: str) -> None:
    usage, optimizer = case.split("-")
    compare(usage, optimizer, [{"backend": backend} for backend in EXCHANGED], world(), CPU)


fast, slow = cases_on_ranks(2, _compare, FAST), cases_on_ranks(2, _compare, SLOW)


@pytest.mark.parametrize("case", FAST)
def test_as_under_stock(fast: Ended, case: str) -> None:
    fast(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_slowly_as_under_stock(slow: Ended, case: str) -> None:
    slow(case)
