"""The greatest numbers of ranks, found in memory of one machine."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.comm import maxima
from dlrm_overlap.comm.maxima import Maxima
from tests.unit.comm.threads import Rank, Threads

_SOON = timedelta(seconds=5)


def _opened(size: int, monkeypatch: pytest.MonkeyPatch) -> list[Maxima]:
    monkeypatch.setattr(dist, "all_gather_object", Threads(size).gather)
    with ThreadPoolExecutor(size) as ranks:
        made = list(ranks.map(lambda rank: Maxima(Rank(rank, size)), range(size)))  # type: ignore[arg-type]
    return made


def test_questions_are_answered_in_their_order_whichever_is_waited_for_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = _opened(3, monkeypatch)
    first = [torch.tensor([rank, 9 - rank]) for rank in range(3)]
    second = [torch.tensor([100 * rank]) for rank in range(3)]
    works = [(each.begin(first[rank]), each.begin(second[rank])) for rank, each in enumerate(ranks)]
    for earlier, later in works:
        later.wait(_SOON)
        assert not earlier.is_completed()
        earlier.wait(_SOON)
    assert [each.tolist() for each in first] == [[2, 9]] * 3
    assert [each.tolist() for each in second] == [[200]] * 3


def test_a_late_rank_can_be_waited_for_again_until_the_groups_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    here, other = _opened(2, monkeypatch)
    numbers = torch.tensor([1])
    late = here.begin(numbers)
    with pytest.raises(RuntimeError, match="rank 1 has not answered"):
        late.wait(timedelta(seconds=0.05))
    assert not late.is_completed()
    other.begin(torch.tensor([3]))
    late.wait(_SOON)
    assert numbers.tolist() == [3]
    monkeypatch.setattr(maxima, "default_pg_timeout", timedelta(0))
    lost = here.begin(numbers)
    with pytest.raises(RuntimeError, match="rank 1 has not answered"):
        lost.wait(_SOON)
    assert lost.is_completed()


def test_ranks_of_other_features_are_told_and_many_numbers_are_gloos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: range(group.size()))
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: "gloo")
    monkeypatch.setattr(dist, "all_reduce", lambda numbers, *_, group, **__: group)
    here, other = _opened(2, monkeypatch)
    assert here.begin(torch.zeros(maxima._MOST + 1, dtype=torch.int64)) == "gloo"
    other.begin(torch.zeros(2, dtype=torch.int64))
    unlike = here.begin(torch.zeros(maxima._MOST, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=f"rank 1 has other features: 2 numbers, not {maxima._MOST}"):
        unlike.wait(_SOON)
    assert unlike.is_completed()
