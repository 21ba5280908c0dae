"""Models that use a collection in unusual ways train under the drop-in as under TorchRec."""

from collections.abc import Callable

import pytest

from dlrm_overlap.backends import EXCHANGED
from tests.distributed.models import CPU, world
from tests.distributed.usages import COUNTING, ON_GPUS_ALONE, USAGES, compare
from tests.distributed.workers import cases_on_ranks

# Only an optimizer with a state shows a row that is updated twice, or too late.
CASES = [f"{usage}-rowwise_adagrad" for usage in USAGES] + ["shared_gradient-sgd", "accumulation-sgd"]
CASES += [f"evaluation_between-{name}" for name in COUNTING if name not in ON_GPUS_ALONE]
pytestmark = pytest.mark.slow


def _compare(case: str) -> None:
    usage, optimizer = case.split("-")
    # Tracing takes seven seconds of a core for each backend, and does not see which it is.
    backends = ["fused"] if usage == "compiled" else EXCHANGED
    options = [{"backend": backend} for backend in backends]
    compare(usage, optimizer, [*options, {"backend": "pgas", "input_dist": "windows"}], world(), CPU)


ended = cases_on_ranks(2, _compare, CASES)


@pytest.mark.parametrize("case", CASES)
def test_as_under_torchrec(ended: Callable[[str], None], case: str) -> None:
    ended(case)
