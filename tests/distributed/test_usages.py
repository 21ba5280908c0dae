"""Models that use a collection in unusual ways train under the drop-in as under stock TorchRec."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException

from dlrm_overlap.embedding.forward import BACKENDS
from tests.distributed.models import CPU, world
from tests.distributed.usages import USAGES, compare
from tests.distributed.workers import run_ranks

FAST = [f"{usage}-sgd" for usage in USAGES if usage != "compiled"]
SLOW = ["compiled-sgd", *(f"{usage}-rowwise_adagrad" for usage in USAGES if usage != "compiled")]
Ended = Callable[[str], None]
"""fails where a case did not end well, telling what ended the ranks"""


def _compare(folder: Path, *cases: str) -> None:
    for case in cases:
        usage, optimizer = case.split("-")
        compare(usage, optimizer, [{"backend": backend} for backend in BACKENDS], world(), CPU)
        dist.barrier()
        if dist.get_rank() == 0:
            (folder / case).touch()


def _compare_all(cases: Sequence[str], folder: Path) -> Ended:
    error = ""
    try:
        run_ranks(_compare, 2, folder, *cases)
    except ProcessRaisedException as raised:
        error = str(raised)

    def check(case: str) -> None:
        if not (folder / case).exists():
            failed = next(case for case in cases if not (folder / case).exists())
            pytest.fail(error if case == failed else f"did not run, since {failed} failed", pytrace=False)

    return check


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return _compare_all(FAST, tmp_path_factory.mktemp("fast"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return _compare_all(SLOW, tmp_path_factory.mktemp("slow"))


@pytest.mark.parametrize("case", FAST)
def test_as_under_stock(fast: Ended, case: str) -> None:
    fast(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_slowly_as_under_stock(slow: Ended, case: str) -> None:
    slow(case)
