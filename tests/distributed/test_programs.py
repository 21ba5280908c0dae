"""Ten programs of TorchRec's users give stock's losses once two of their lines are changed."""

from collections.abc import Callable

import pytest
import torch

from dlrm_overlap.kernels.compiled import INTERPRETED
from tests.distributed.captured import captures
from tests.distributed.workers import cases_on_ranks
from tests.programs.two_lines import PROGRAMS, compare

CAPTURED = ", captured"  # for some steps, by a stand-in for CUDA graphs


def _compare(case: str) -> None:
    name = case.removesuffix(CAPTURED)
    if name == case:
        compare(name, steps=200)
        return
    with captures() as taken:
        compare(name, steps=18)
    assert taken["captured"] >= 2, "steps are captured"
    assert taken["replayed"] >= 2, "steps are replayed"


# What every `make test` runs.
QUICK = ["two_tower" + CAPTURED, "frozen_tower"] if INTERPRETED else ["frozen_tower"]
MORE = [case for name in PROGRAMS for case in (name, name + CAPTURED * INTERPRETED) if case not in QUICK]
ended, more_ended = cases_on_ranks(2, _compare, QUICK), cases_on_ranks(2, _compare, MORE)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_exchange.py runs them on GPUs")


@pytest.mark.parametrize("case", QUICK)
def test_two_lines(ended: Callable[[str], None], case: str) -> None:
    ended(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_two_lines_more(more_ended: Callable[[str], None], case: str) -> None:
    more_ended(case)
