"""Checks of hypothesis's draws on the ranks of a pool: of pooled tables in `plans`, of others in `unpooled_plans`.

The tests draw the same in every run. This makes other draws until one fails, and shows the simplest that does:

    python -m tests.distributed.draws CHECK RANKS RANKS_OF_A_NODE EXAMPLES
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from tests.distributed.plans import compare_with_torchrec, drawn_plans, resume
from tests.distributed.unpooled_plans import compare_unpooled, drawn_sequences
from tests.distributed.workers import RankPool
from tests.warm import fork_server
from tests.without_gpu import interpret_kernels


class Check(NamedTuple):
    draws: Callable[[int, int], SearchStrategy[Any]]
    """by the number of ranks, and of a node's ranks"""
    make: Callable[[Any, Path], Iterator[Callable[[], None]]]
    """called on all ranks with a draw and a folder; yields checks, which raise AssertionError"""


CHECKS = {
    "torchrec": Check(drawn_plans, compare_with_torchrec),
    "resume": Check(drawn_plans, resume),
    "unpooled": Check(drawn_sequences, compare_unpooled),
}


def _check(folder: Path, kind: str, local: int, drawn: Any) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(local)
    failures = []
    for number, check in enumerate(_with_other_errors(CHECKS[kind].make(drawn, folder)), 1):
        try:
            check()
        except AssertionError as error:  # the other ranks may agree, and go on
            failures.append(f"{drawn}\nrank {dist.get_rank()}, way {number}: {error}")
    assert not failures, "\n\n".join(failures)


def _with_other_errors(checks: Iterator[Callable[[], None]]) -> Iterator[Callable[[], None]]:
    """Yield the same; an assertion that fails within `checks` ends the ranks, which have not all come to the end."""
    try:
        yield from checks
    except AssertionError as error:
        raise RuntimeError(str(error)) from error


def check_draws(pool: RankPool, kind: str, local: int, examples: int, **options: Any) -> None:
    """Make one of CHECKS of `examples` draws, and raise what the simplest draw that fails raises."""

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
        phases=[Phase.generate, Phase.shrink],
        **options,
    )
    @given(CHECKS[kind].draws(pool.world_size, local))
    def check(drawn: Any) -> None:
        pool.run(_check, kind, local, drawn)

    check()


if __name__ == "__main__":
    interpret_kernels()
    fork_server()
    kind, ranks, local, examples = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, RankPool(int(ranks), Path(folder)) as pool:
        check_draws(pool, kind, int(local), int(examples))
