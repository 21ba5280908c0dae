"""The ranks that checks on GPUs run on, here on CPUs: one's failure, crash or hang fails its check and no other."""

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.gpu.exchange.place import Check, Place
from tests.gpu.exchange.ranks import Ranks
from tests.gpu.exchange.schedule import Schedule

pytestmark = pytest.mark.slow


def _meet(place: Place) -> None:
    place.meet()


def _raise(place: Place) -> None:
    if place.rank == 1:
        raise ValueError("no such thing")


def _hang(place: Place) -> None:
    if place.rank == 1:
        print("on my way", flush=True)
        time.sleep(60)


def _die(place: Place) -> None:
    if place.rank == 1:
        print("on my way", flush=True)
        os._exit(3)


def _raise_while_others_wait(place: Place) -> None:
    """Fail on a rank whose GPU would wait for a peer, and which can say so only before."""
    if place.rank == 0:
        time.sleep(60)
    place.synchronize = lambda: time.sleep(60)  # type: ignore[method-assign]
    raise ValueError("no such thing")


@pytest.fixture
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    made = Ranks(2, 1, lambda: tmp_path_factory.mktemp("set"), time.monotonic() + 600, alone=1)
    yield made
    made.close()


def test_a_check_that_fails_leaves_the_ranks_to_the_next(ranks: Ranks) -> None:
    first = ranks.lasting()
    assert str(ranks.run("raises", Check(_raise))).startswith(
        "ranks [1] failed, rank 1 first: ValueError: no such thing"
    )
    assert ranks.run("meets", Check(_meet)) == "ok"
    assert ranks.lasting() is first
    hangs = str(ranks.run("hangs", Check(_hang, timeout_s=4.0)))
    assert hangs.startswith("hangs: ranks [1] did not report within 4 s\nrank 1, exit code None:\non my way")
    assert "in _hang" in hangs, "where it hangs"
    assert ranks.run("meets again", Check(_meet)) == "ok"
    assert ranks.lasting() is not first
    assert str(ranks.run("dies", Check(_die))).startswith("ranks [1] did not report\nrank 1, exit code 3:\non my way")
    assert ranks.run("alone", Check(_meet, alone=True)) == "ok"


def test_a_check_ends_in_seconds_on_all_ranks_where_one_fails(ranks: Ranks) -> None:
    assert ranks.run("meets", Check(_meet)) == "ok"
    began = time.monotonic()
    told = str(ranks.run("raises", Check(_raise_while_others_wait, timeout_s=30.0)))
    assert time.monotonic() - began < 20
    assert told.startswith("ranks [1] failed, rank 1 first: ValueError: no such thing")
    assert "ranks [0, 1] did not report\nrank 0, exit code None:\n" in told
    assert "in _raise_while_others_wait" in told, "where rank 0 waits"


def test_no_check_begins_after_the_time_for_all(tmp_path: Path) -> None:
    over = Ranks(2, 1, lambda: tmp_path, time.monotonic() - 1, alone=0)
    assert over.run("meets", Check(_meet)) is None
    over.close()


def _count(place: Place, ranks: int) -> None:
    assert place.world_size == ranks


# "ids_pgas" is a check of two ranks, "dims_pgas" one of all.
CHECKS = {"ids_pgas": Check(partial(_count, ranks=2)), "dims_pgas": Check(partial(_count, ranks=4))}


def test_checks_of_two_ranks_run_on_pairs_and_the_rest_on_all(tmp_path_factory: pytest.TempPathFactory) -> None:
    left = tmp_path_factory.mktemp("left") / "left.txt"
    checks = CHECKS | {"ids_nccl": Check(_raise), "held_pgas": Check(_meet, alone=True)}
    schedule = Schedule(checks, 4, 1, lambda: tmp_path_factory.mktemp("set"), 600.0, left)
    results = {name: schedule.result(name) for name in checks}
    schedule.close()
    assert {name for name, result in results.items() if result.outcome != "ok"} == {"ids_nccl"}
    assert left.read_text() == "ids_nccl\n"
    report = schedule.report(slowest=2)
    assert report[0].startswith("4 of 4 checks ran in ")
    assert "the 2 slowest:" in report


def test_two_ranks_with_gpus_share_them_with_other_sets(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    schedule = Schedule(CHECKS, 2, 1, lambda: tmp_path_factory.mktemp("set"), 0.0)
    monkeypatch.undo()
    schedule.close()
    assert [[lane.name for lane in lanes] for lanes in schedule.phases] == [
        ["all ranks (set 0)", "all ranks (set 1)"],
        [],
        [],
    ]


def test_what_did_not_run_in_time_is_named(tmp_path: Path) -> None:
    left = tmp_path / "left.txt"
    schedule = Schedule(CHECKS, 2, 1, lambda: tmp_path, 0.0, left)
    assert [schedule.result(name).outcome for name in CHECKS] == [None, None]
    schedule.close()
    assert schedule.report()[-1] == "2 did not run: ids_pgas dims_pgas"
    assert left.read_text() == "ids_pgas\ndims_pgas\n"
