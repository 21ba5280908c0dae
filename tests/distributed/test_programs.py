"""Programs of TorchRec's users give the same losses once two of their lines are changed."""

from collections.abc import Callable

import pytest
import torch

from dlrm_overlap.kernels.compiled import INTERPRETED
from tests.distributed.captured import captures
from tests.distributed.workers import cases_on_ranks
from tests.programs.two_lines import PROGRAMS, compare

# Steps of programs whose captured steps are not covered by `foreign`.
CAPTURED = {"accumulation": 12, "dlrm_main": 24, "frozen_tower": 10, "histories": 10, "multi_task": 20}
BY_GRAPHS = ", captured"


def _compare(case: str) -> None:
    name = case.removesuffix(BY_GRAPHS)
    if name == case:
        compare(name, steps=80)
        return
    with captures() as taken:
        compare(name, CAPTURED[name])
    assert taken["captured"] >= 2, "steps are captured"
    assert taken["replayed"] >= 2, "steps are replayed"


# What every `make test` runs.
QUICK = ["frozen_tower"] + ["accumulation" + BY_GRAPHS] * INTERPRETED
MORE = [*PROGRAMS, *(name + BY_GRAPHS for name in CAPTURED if INTERPRETED)]
MORE = [case for case in MORE if case not in QUICK]
ended, more_ended = cases_on_ranks(2, _compare, QUICK), cases_on_ranks(2, _compare, MORE)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_exchange.py runs them on GPUs")


@pytest.mark.parametrize("case", QUICK)
def test_two_lines(ended: Callable[[str], None], case: str) -> None:
    ended(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_two_lines_more(more_ended: Callable[[str], None], case: str) -> None:
    more_ended(case)
