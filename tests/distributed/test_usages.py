"""Models that use a collection in unusual ways train under the drop-in as under stock TorchRec."""

from collections.abc import Callable

import pytest

from dlrm_overlap.backends import EXCHANGED
from tests.distributed.models import CPU, world
from tests.distributed.usages import COUNTING, ON_GPUS_ALONE, USAGES, compare
from tests.distributed.workers import cases_on_ranks

CASES = [f"{usage}-{optimizer}" for usage in USAGES for optimizer in ("sgd", "rowwise_adagrad")]
CASES.remove("compiled-rowwise_adagrad")  # compiling takes its time
CASES += [f"evaluation_between-{name}" for name in COUNTING if name not in ON_GPUS_ALONE]
Ended = Callable[[str], None]
"""fails where a case did not end well, telling what ended the ranks"""

pytestmark = pytest.mark.slow


def _compare(case: str) -> None:
    usage, optimizer = case.split("-")
    # Tracing takes seven seconds of a core for each backend, and looks into none of them.
    backends = ["fused"] if usage == "compiled" else EXCHANGED
    compare(usage, optimizer, [{"backend": backend} for backend in backends], world(), CPU)


ended = cases_on_ranks(2, _compare, CASES)


@pytest.mark.parametrize("case", CASES)
def test_as_under_stock(ended: Ended, case: str) -> None:
    ended(case)
