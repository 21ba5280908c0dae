"""The ranks that checks on GPUs run on, here on CPUs: one's failure, crash or hang fails its check and no other."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.exchange.place import Check, Place
from tests.gpu.exchange.ranks import Ranks

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


@pytest.fixture
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    made = Ranks(2, 1, lambda: tmp_path_factory.mktemp("set"), budget_s=600, alone=1)
    yield made
    made.close()


def test_a_check_that_fails_leaves_the_ranks_to_the_next(ranks: Ranks) -> None:
    first = ranks._of_all()
    assert str(ranks.run("raises", Check(_raise))).startswith(
        "ranks [1] failed, rank 1 first: ValueError: no such thing"
    )
    assert ranks.run("meets", Check(_meet)) == "ok"
    assert ranks._of_all() is first
    hangs = str(ranks.run("hangs", Check(_hang, timeout_s=4.0)))
    assert hangs.startswith("hangs: ranks [1] did not report within 4 s\nrank 1, exit code None:\non my way")
    assert "in _hang" in hangs, "where it hangs"
    assert ranks.run("meets again", Check(_meet)) == "ok"
    assert ranks._of_all() is not first
    assert str(ranks.run("dies", Check(_die))).startswith("ranks [1] did not report\nrank 1, exit code 3:\non my way")
    assert ranks.run("alone", Check(_meet, alone=True)) == "ok"


def test_no_check_begins_after_the_time_for_all(tmp_path: Path) -> None:
    over = Ranks(2, 1, lambda: tmp_path, budget_s=0, alone=0)
    assert over.run("meets", Check(_meet)) is None
    over.close()
