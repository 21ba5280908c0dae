"""`PeerCollectives` behind an exception, on one rank."""

from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.comm.collectives import PeerCollectives
from dlrm_overlap.comm.flows import HostFlow
from dlrm_overlap.comm.record import ExchangeTimeoutError
from tests.agreement import assert_same


@pytest.fixture
def collectives(world_of_one: dist.ProcessGroup) -> Iterator[PeerCollectives]:
    made = PeerCollectives(world_of_one, torch.device("cpu"), 1 << 10)
    yield made
    made.close()


def _expires(*_: Any) -> NoReturn:
    raise ExchangeTimeoutError([0, 1, 0, 2, 1], 0.3)


@pytest.mark.parametrize("part", ["begin", "wait"])
def test_a_call_that_has_failed_between_the_ranks_is_the_last(
    part: str, collectives: PeerCollectives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers may wait for its rows, and would take those of a later call for them."""
    output, sent = collectives.empty((1, 4), torch.float32), torch.ones(1, 4)
    works = []

    def call() -> None:
        works.append(collectives.all_to_all(output, sent))
        works[0].wait()

    with monkeypatch.context() as patch:
        patch.setattr(HostFlow, part, _expires)
        with pytest.raises(ExchangeTimeoutError):
            call()
    name = "all_to_all" if part == "begin" else "wait"
    refused = rf"all_gather: {name} has failed \(ExchangeTimeoutError: rank 0 waited .* make another one$"
    with pytest.raises(RuntimeError, match=refused):
        collectives.all_gather(output, sent[0])
    for work in works:
        with pytest.raises(RuntimeError, match="wait has failed"):
            work.wait()  # does not say that the rows are here


def test_a_call_whose_work_an_exception_has_taken_is_waited_for_by_the_next(collectives: PeerCollectives) -> None:
    output, sent = collectives.empty((1, 4), torch.float32), torch.ones(1, 4)

    def step(scale: float) -> None:
        work = collectives.all_to_all(output, sent * scale)
        _ = 1 / scale
        work.wait()

    with pytest.raises(ZeroDivisionError):
        step(0.0)
    step(2.0)
    assert_same(output, sent * 2, "the output of the next call")
