"""The greatest numbers of ranks, found through pipes of one machine."""

import errno
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.comm import max_reduce
from dlrm_overlap.comm.max_reduce import AsyncMaxReduce
from tests.unit.comm.threads import Rank, Threads

_SOON = timedelta(seconds=5)


def _opened(size: int, monkeypatch: pytest.MonkeyPatch) -> list[AsyncMaxReduce]:
    monkeypatch.setattr(dist, "all_gather_object", Threads(size).gather)
    with ThreadPoolExecutor(size) as ranks:
        made = list(ranks.map(lambda rank: AsyncMaxReduce(Rank(rank, size)), range(size)))  # type: ignore[arg-type]
    return made


def test_questions_are_answered_in_their_order_whichever_is_waited_for_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = _opened(3, monkeypatch)
    first = [torch.tensor([rank, 9 - rank, rank - 5]) for rank in range(3)]
    second = [torch.tensor([100 * rank]) for rank in range(3)]
    works = [(each.begin(first[rank]), each.begin(second[rank])) for rank, each in enumerate(ranks)]
    for earlier, later in works:
        later.wait(_SOON)
        assert earlier.is_completed()
    assert [each.tolist() for each in first] == [[2, 9, -3]] * 3
    assert [each.tolist() for each in second] == [[200]] * 3


def test_a_late_rank_can_be_waited_for_again_and_one_that_has_ended_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    here, other = _opened(2, monkeypatch)
    numbers = torch.tensor([1])
    late = here.begin(numbers)
    with pytest.raises(RuntimeError, match="rank 1 has not answered"):
        late.wait(timedelta(seconds=0.05))
    assert not late.is_completed()
    other.begin(torch.tensor([3]))
    here.begin(torch.tensor([1]))  # which the other rank does not read
    del other  # the pipes close
    late.wait(_SOON)
    assert numbers.tolist() == [3]
    lost = here.begin(torch.tensor([1]))
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        lost.wait(_SOON)
    assert lost.is_completed()


def test_a_later_question_fails_with_an_earlier_one_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(max_reduce, "default_pg_timeout", timedelta(0))
    here, _other = _opened(2, monkeypatch)
    _, later = (here.begin(torch.tensor([1])) for _ in range(2))
    with pytest.raises(RuntimeError, match="rank 1 has not answered"):
        later.wait(timedelta(seconds=0.05))
    assert later.is_completed()


def test_a_peer_that_does_not_read_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe has room for few questions of many numbers, and for none of 30,000: gloo takes these."""
    asked_gloo = list[int]()
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: range(group.size()))
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: "gloo")
    monkeypatch.setattr(dist, "all_reduce", lambda numbers, *_, group, **__: asked_gloo.append(len(numbers)) or group)
    here, _other = _opened(2, monkeypatch)
    for size in (max_reduce._MAX_BYTES // 8, 30_000):
        for _ in range(6):
            work = here.begin(torch.zeros(size, dtype=torch.int64))
            if not asked_gloo:
                with pytest.raises(RuntimeError, match="rank 1 has not answered"):
                    work.wait(timedelta(seconds=0.01))
    assert asked_gloo == [30_000] * 6


@pytest.mark.parametrize("fault", ["a rank has no room for files", "a rank sees no other process", "pipes are small"])
def test_without_pipes_all_ranks_ask_gloo_and_leave_no_file_open(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    calls = itertools.count()

    def fails_once(owner: Any, name: str, code: int) -> None:
        real = getattr(owner, name)

        def call(*given: Any) -> Any:
            if next(calls) == 2:
                raise OSError(code, os.strerror(code))
            return real(*given)

        monkeypatch.setattr(owner, name, call)

    if fault == "a rank has no room for files":
        fails_once(os, "pipe2", errno.EMFILE)
    elif fault == "a rank sees no other process":
        fails_once(max_reduce, "_open", errno.ENOENT)
    else:
        monkeypatch.setattr(max_reduce, "_MAX_MESSAGES", 17)
    before = os.listdir("/proc/self/fd")
    assert [each._pipes for each in _opened(3, monkeypatch)] == [None] * 3
    assert os.listdir("/proc/self/fd") == before
