"""Plans of every kind that TorchRec's planner makes: the drop-in trains and resumes as TorchRec does, see `draws`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from dlrm_overlap.kernels.compiled import INTERPRETED
from tests.distributed.draws import CHECKS, check_draws
from tests.distributed.workers import RankPool

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")

FEW = 6
MANY = {2: {"torchrec": 25, "resume": 6, "unpooled": 6}, 4: {"torchrec": 20, "resume": 4, "unpooled": 4}}  # by ranks
Pools = Callable[[int, int], RankPool]


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    """Ranks that all tests share, by their number and that of a node, of which TorchRec makes groups that it keeps."""
    with ExitStack() as stack:
        yield cache(lambda ranks, local: stack.enter_context(RankPool(ranks, tmp_path_factory.mktemp("ranks"))))


@pytest.mark.parametrize("check", CHECKS)
def test_few(pools: Pools, check: str) -> None:
    check_draws(pools(2, 2), check, 2, FEW, derandomize=True)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "local"), [(2, 1), (2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("check", CHECKS)
def test_many(pools: Pools, ranks: int, local: int, check: str) -> None:
    check_draws(pools(ranks, local), check, local, MANY[ranks][check], derandomize=True)
