"""What `tiles` issues, in which order; nothing of it runs."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("triton")

from dlrm_overlap.dense.gemm import gathering, tiles
from dlrm_overlap.dense.gemm.linear import Layer
from dlrm_overlap.dense.gemm.tiles import Tiles
from dlrm_overlap.dense.gemm.triggered import Triggered
from dlrm_overlap.dense.gemm.ways import Problem
from tests.distributed.interpreted import without_streams

RANKS = 4


def _made(kind: type[Tiles]) -> Tiles:
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: RANKS)
    return kind(group, torch.device("cpu"), 1.0)


@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("rows", [2000, 4096])
def test_the_first_copy_waits_for_the_first_part_of_the_rows_alone(
    parts: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    issued, engine, shard = list[str](), MagicMock(), torch.empty(rows, 2048, dtype=torch.half)
    engine.follow = lambda: issued.append("follow")
    engine.copy = lambda *_: issued.append("copy")
    engine.stream.wait_event = lambda _: issued.append("await all published")
    monkeypatch.setattr(gathering, "publish_rows", lambda *_: issued.append("publish"))
    monkeypatch.setattr(tiles, "gathered_product", lambda *_: issued.append("product"))
    ready = SimpleNamespace(local=torch.zeros(RANKS, 8, dtype=torch.int64))
    monkeypatch.setattr(tiles, "replace", lambda *_, **__: ready)
    window = MagicMock(rank=0, world_size=RANKS, engine=engine, flags=MagicMock(ready=[ready] * 8))
    window.at = lambda rank, dtype: torch.empty(rows * 2048, dtype=dtype)
    with without_streams():
        way = _made(Tiles)
        way._window = lambda _: window  # type: ignore[method-assign]
        way.all_gather_matmul(shard, Layer(torch.empty(8, 2048, dtype=torch.half)), parts, keep=False)
    assert issued[:5] == ["publish", "follow", "publish", "copy", "await all published"]
    assert issued.count("await all published") == 1
    assert issued.count("product") == 1


@pytest.mark.parametrize("kind", [Tiles, Triggered])
def test_one_queue_for_all_streams_is_refused(kind: type[Tiles], monkeypatch: pytest.MonkeyPatch) -> None:
    """There a captured copy may come behind the kernel that waits for it."""
    problem = Problem("all_gather", 64, 8, 8, torch.half, False, "none")
    with without_streams():
        way = _made(kind)
    way.device = torch.device("cuda")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert not way.fault(problem)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert "CUDA_DEVICE_MAX_CONNECTIONS is 1" in way.fault(problem)
