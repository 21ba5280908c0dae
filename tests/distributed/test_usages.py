"""Models that use a collection in unusual ways train under the drop-in as under TorchRec."""

from collections.abc import Callable

import pytest

from dlrm_overlap.backends import EXCHANGED
from tests.distributed.models import CPU, world
from tests.distributed.usages import COUNTING, ON_GPUS_ALONE, USAGES, compare
from tests.distributed.workers import cases_on_ranks

# A row that is updated twice, or too late, shows under an optimizer with a state alone.
CASES = [f"{usage}-rowwise_adagrad" for usage in USAGES] + ["shared_gradient-sgd", "accumulation-sgd"]
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
def test_as_under_torchrec(ended: Ended, case: str) -> None:
    ended(case)
