"""The sequence in which the all-gather of `tiles` issues its work; nothing of it runs."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("triton")

from dlrm_overlap.dense.gemm import gathers
from dlrm_overlap.dense.gemm.problem import Layer
from tests.distributed.interpreted import without_streams

RANKS = 4


@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("rows", [2000, 4096])
def test_the_first_copy_waits_for_the_first_part_of_the_rows_alone(
    parts: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    issued, engine, shard = list[str](), MagicMock(), torch.empty(rows, 2048, dtype=torch.half)
    engine.follow = lambda: issued.append("follow")
    engine.copy = lambda *_: issued.append("copy")
    engine.stream.wait_event = lambda _: issued.append("wait until all are published")
    monkeypatch.setattr(gathers, "publish_rows", lambda *_: issued.append("publish"))
    monkeypatch.setattr(gathers, "gathered_product", lambda *_: issued.append("product"))
    monkeypatch.setattr(gathers, "replace", MagicMock())
    window = MagicMock(rank=0, world_size=RANKS, engine=engine)
    window.at = lambda rank, dtype: torch.empty(rows * 2048, dtype=dtype)
    windows: Any = SimpleNamespace(
        rank=0, world_size=RANKS, turns=[1, 2, 3], device=torch.device("cpu"), begin=lambda _: window
    )
    with without_streams():
        gathers.TiledGather(windows)(shard, Layer(torch.empty(8, 2048, dtype=torch.half)), parts, keep=False)
    assert issued[:5] == ["publish", "follow", "publish", "copy", "wait until all are published"]
    assert issued.count("wait until all are published") == 1
    assert issued.count("product") == 1
