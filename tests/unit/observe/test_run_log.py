"""The warnings that ranks write to standard error."""

import logging
import warnings
from collections.abc import Iterator

import pytest

from dlrm_overlap.observe.run_log import log, start_logging


@pytest.fixture
def _unchanged() -> Iterator[None]:
    before = log.handlers, log.level, log.propagate
    with warnings.catch_warnings():
        yield
    log.handlers, log.propagate = before[0], before[2]
    log.setLevel(before[1])


@pytest.mark.usefixtures("_unchanged")
@pytest.mark.parametrize(("rank", "shown"), [(0, 2), (1, 1)])
def test_rank_0_alone_shows_the_warnings_of_libraries(rank: int, shown: int, recwarn: pytest.WarningsRecorder) -> None:
    warnings.simplefilter("always")
    start_logging(rank)
    for module in ("torchrec.distributed.types", "dlrm_overlap.cli"):
        warnings.warn_explicit("of no interest", UserWarning, "file.py", 1, module=module)
    assert len(recwarn) == shown
    assert log.isEnabledFor(logging.INFO) == (rank == 0)
