"""Programs of TorchRec's users give stock's losses under the captured step's logic."""

from collections.abc import Callable

import pytest

from dlrm_overlap.kernels.compiled import INTERPRETED
from tests.distributed.captured import captures
from tests.distributed.foreign import PROGRAMS, STEPS, compare
from tests.distributed.models import CPU, world
from tests.distributed.workers import cases_on_ranks

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")


def _compare(name: str) -> None:
    with captures() as taken:
        compare(name, world(), CPU)
    assert taken == {"captured": 2, "replayed": STEPS - 3 - 2}


ended = cases_on_ranks(2, _compare, list(PROGRAMS))


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_under_stock(ended: Callable[[str], None], name: str) -> None:
    ended(name)
