"""The embedding exchange on GPUs: checks that all ranks take together, on ranks that are started once for most.

`--nproc` and `--ranks_per_gpu` say how many ranks there are. Where there is no GPU, `--nproc 2` runs the checks that
need none on CPU processes.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.exchange.checks import CHECKS
from tests.gpu.exchange.ranks import Ranks, default_world
from tests.gpu.exchange.sharing import why_not_shared

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    options, gpus = request.config.option, torch.cuda.device_count()
    if not gpus and not options.nproc:
        pytest.skip("needs NVIDIA GPUs, or --nproc to run on CPU processes")
    sharing: int = options.ranks_per_gpu or (1 if gpus != 1 else 2)
    world_size: int = options.nproc or default_world(sharing)
    if world_size % sharing:
        pytest.fail(f"--ranks_per_gpu {sharing} does not divide the ranks, which are {world_size}; give --nproc, too")
    alone = sum(CHECKS[name].alone for name in map(_name_of, request.session.items) if name)
    budget_s: float = options.budget_s or 540.0 * sharing
    made = Ranks(world_size, sharing, lambda: tmp_path_factory.mktemp("set"), budget_s, alone)
    yield made
    made.close()


def _name_of(item: pytest.Item) -> str:
    """Return the name of the check that a test runs; empty for another test."""
    found = isinstance(item, pytest.Function) and item.originalname == test_exchange.__name__
    return item.name.removeprefix(f"{test_exchange.__name__}[").removesuffix("]") if found else ""


@pytest.mark.parametrize("name", sorted(CHECKS, key=lambda name: CHECKS[name].alone))
def test_exchange(ranks: Ranks, name: str) -> None:
    check = CHECKS[name]
    if check.gpu_only and not torch.cuda.is_available():
        pytest.skip("needs NVIDIA GPUs")
    if ranks.ranks_per_gpu > 1 and (why := why_not_shared(name)):
        pytest.skip(why)
    told = ranks.run(name, check)
    if told is None:
        pytest.skip("the time of --budget_s was not enough")
    if told != "ok":
        pytest.fail(told, pytrace=False)
