"""The embedding exchange on GPUs: checks that all ranks run together, most of them on the same processes.

`--nproc` and `--ranks_per_gpu` set the number of ranks. Without a GPU, `--nproc 2` runs the checks that need none, on
CPU processes. `--left FILE` continues a run that ended early: it runs the checks that the file names, if it exists,
and writes the checks that have not passed to it.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import REPORT
from tests.gpu.exchange.checks import CHECKS
from tests.gpu.exchange.place import Check
from tests.gpu.exchange.ranks import default_world
from tests.gpu.exchange.schedule import Schedule
from tests.gpu.exchange.sharing import why_not_shared

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(scope="module")
def schedule(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Schedule]:
    options, gpus = request.config.option, torch.cuda.device_count()
    if not gpus and not options.nproc:
        pytest.skip("needs NVIDIA GPUs, or --nproc to run on CPU processes")
    sharing: int = options.ranks_per_gpu or (1 if gpus != 1 else 2)
    world_size: int = options.nproc or default_world(sharing)
    if world_size % sharing:
        pytest.fail(f"--ranks_per_gpu {sharing} does not divide the ranks, which are {world_size}; give --nproc, too")
    left = Path(options.left) if options.left else None
    wanted = set(left.read_text().split()) if left is not None and left.exists() else set(CHECKS)
    asked = [name for name in map(_name_of, request.session.items) if name in wanted]
    checks = {name: CHECKS[name] for name in asked if not _why_not(CHECKS[name], name, sharing)}
    budget_s: float = options.budget_s or 540.0 * sharing
    made = Schedule(checks, world_size, sharing, lambda: tmp_path_factory.mktemp("set"), budget_s, left)
    yield made
    made.close()
    request.config.stash[REPORT] = made.report()


def _why_not(check: Check, name: str, ranks_per_gpu: int) -> str:
    """Return why a check cannot run here, or an empty string."""
    if check.gpu_only and not torch.cuda.is_available():
        return "needs NVIDIA GPUs"
    return why_not_shared(name) if ranks_per_gpu > 1 else ""


def _name_of(item: pytest.Item) -> str:
    """Return the name of the check that a test runs; empty for other tests."""
    found = isinstance(item, pytest.Function) and item.originalname == test_exchange.__name__
    return item.name.removeprefix(f"{test_exchange.__name__}[").removesuffix("]") if found else ""


@pytest.mark.parametrize("name", sorted(CHECKS, key=lambda name: CHECKS[name].alone))
def test_exchange(schedule: Schedule, name: str) -> None:
    if name not in schedule.checks:
        pytest.skip(_why_not(CHECKS[name], name, schedule.ranks_per_gpu) or "has passed before, by --left")
    outcome = schedule.result(name).outcome
    if outcome is None:
        pytest.skip("the time of --budget_s was not enough")
    if outcome != "ok":
        pytest.fail(outcome, pytrace=False)
