"""Models that use a collection in unusual ways train under the drop-in as under stock TorchRec."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException

from dlrm_overlap.embedding.forward import BACKENDS
from tests.distributed.models import CPU, world
from tests.distributed.usages import LEARNING_RATES, USAGES, compare
from tests.distributed.workers import run_ranks

CASES = [f"{usage}-{optimizer}" for usage, optimizer in itertools.product(USAGES, LEARNING_RATES)]


def _compare_all(folder: Path) -> None:
    for case in CASES:
        compare(*case.split("-"), [{"backend": backend} for backend in BACKENDS], world(), CPU)
        dist.barrier()
        if dist.get_rank() == 0:
            (folder / case).touch()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], None]:
    """Return what fails where a case did not end well, telling what ended the ranks."""
    folder, error = tmp_path_factory.mktemp("usages"), ""
    try:
        run_ranks(_compare_all, 2, folder)
    except ProcessRaisedException as raised:
        error = str(raised)

    def check(case: str) -> None:
        if not (folder / case).exists():
            failed = next(case for case in CASES if not (folder / case).exists())
            pytest.fail(error if case == failed else f"did not run, since {failed} failed", pytrace=False)

    return check


@pytest.mark.parametrize("case", CASES)
def test_as_under_stock(ended: Callable[[str], None], case: str) -> None:
    ended(case)
