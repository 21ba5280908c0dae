"""Whom ranks wait for where one of them has failed."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.comm.every_rank import on_every_rank
from dlrm_overlap.config import InputError, PeerError
from tests.unit.comm.threads import Rank, Threads


def _runs_out() -> NoReturn:
    raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 GiB")


def _mistakes() -> NoReturn:
    raise InputError("x: must be y; cast it")


MISTAKE = InputError("x: must be y; cast it (rank 1)")
OUT_OF_MEMORY = PeerError("rank 1 has failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB")


@pytest.mark.parametrize(
    ("works", "raised"),
    [
        ((int, int, int), (None, None, None)),
        ((int, _mistakes, int), (MISTAKE, InputError("x: must be y; cast it"), MISTAKE)),
        ((int, _runs_out, int), (OUT_OF_MEMORY, torch.OutOfMemoryError, OUT_OF_MEMORY)),
        ((_mistakes, _runs_out, int), (OUT_OF_MEMORY, torch.OutOfMemoryError, OUT_OF_MEMORY)),
    ],
)
def test_whatever_one_rank_raises_ends_the_wait_of_all(
    works: tuple[Callable[[], int], ...], raised: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "all_gather_object", Threads(len(works)).gather)

    def outcome(rank: int) -> Any:
        try:
            return on_every_rank(works[rank], Rank(rank, len(works)))  # type: ignore[arg-type]
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(works)) as ranks:
        found = list(ranks.map(outcome, range(len(works))))
    for rank, (error, expected) in enumerate(zip(found, raised, strict=True)):
        if expected is None:
            assert error == 0
        elif isinstance(expected, type):
            assert type(error) is expected
        else:
            assert (type(error), str(error)) == (type(expected), str(expected)), f"rank {rank}"
