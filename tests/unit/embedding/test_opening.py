"""What the log says of the ranks that reach each other."""

import logging
from typing import cast

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.comm.reach import Reach
from dlrm_overlap.embedding import opening
from dlrm_overlap.embedding.options import ExchangeOptions
from tests.unit.comm.threads import Rank

RACK, APART = "1 NVLink domain over 18 machines", "1 NVLink domain over 17 machines, and GPUs of 1 machine outside"


@pytest.mark.parametrize(
    ("reach", "level", "told"),
    [
        (Reach(0, (range(72),), RACK), logging.INFO, f"1 node (ranks 0 to 71; {RACK}): all ranks store into each"),
        (Reach(1, (range(72),), RACK), logging.INFO, None),
        (Reach(0, (range(68), range(68, 72)), APART), logging.WARNING, f"ranks 68 to 71; {APART}): stores within a"),
    ],
)
def test_rank_0_tells_which_ranks_reach_each_other_and_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reach: Reach, level: int, told: str | None
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(opening, "find_reach", lambda *_: reach)
    group = cast("dist.ProcessGroup", Rank(reach.rank, 72))
    assert opening.reach_of(ExchangeOptions("pgas"), group, torch.device("cpu")) is reach
    assert [record.levelno for record in caplog.records] == ([level] if told else [])
    assert (told or "") in caplog.text
