"""Plans of every kind that TorchRec's planner makes: the drop-in trains and resumes as stock does, see `plans`."""

from pathlib import Path

import pytest

from dlrm_overlap.kernels.compiled import INTERPRETED
from tests.distributed.plans import CHECKS, check_plans
from tests.distributed.workers import run_ranks

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")

FEW, MANY = 6, {"stock": 80, "resume": 12}


@pytest.mark.parametrize(("ranks", "local"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("check", CHECKS)
def test_few(tmp_path: Path, ranks: int, local: int, check: str) -> None:
    run_ranks(check_plans, ranks, tmp_path, check, local, range(FEW))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "local"), [(2, 1), (2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("check", CHECKS)
def test_many(tmp_path: Path, ranks: int, local: int, check: str) -> None:
    run_ranks(check_plans, ranks, tmp_path, check, local, range(FEW, FEW + MANY[check]), timeout_s=1800)
