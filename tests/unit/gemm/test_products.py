from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.config import InputError
from dlrm_overlap.dense.gemm.layer import ProductLayer
from dlrm_overlap.dense.gemm.products import ParallelProducts
from dlrm_overlap.dense.gemm.serial import scatter
from tests.agreement import assert_same
from tests.conftest import refuses

LARGE = torch.ones(8192, 512, dtype=torch.bfloat16)


def test_auto_runs_serially_where_ranks_do_not_reach_each_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    products, layer = ParallelProducts(group, torch.device("cuda")), ProductLayer(LARGE)
    opened = Mock(side_effect=InputError("the GPUs of these 2 ranks do not reach each other's memory"))
    monkeypatch.setattr(products, "_open_windows", opened)
    assert products._choose(False, 8, LARGE, layer, "auto") == ("serial", 4), "few bytes"
    assert products._choose(False, 8192, LARGE.float(), layer, "auto") == ("serial", 4)
    opened.assert_not_called()
    for _ in range(2):
        assert products._choose(False, 8192, LARGE, layer, "auto") == ("serial", 4)
    opened.assert_called_once()
    assert "run serially, since the GPUs of these 2 ranks" in caplog.text


def test_ways_that_the_gpu_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    layer, device = ProductLayer(LARGE), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    products = ParallelProducts(group, device)
    for way in ("tiles", "triggered"):
        with refuses(rf"way: {way} on a GPU of compute capability 8\.0, .* from 9\.0 on; take copies"):
            products._choose(True, 8192, LARGE, layer, way)
    assert products._choose(True, 8192, LARGE, layer, "copies")[0] == "copies"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert products._choose(True, 8192, LARGE, layer, "tiles")[0] == "tiles"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    products = ParallelProducts(group, device)
    assert products._choose(True, 8192, LARGE, layer, "auto")[0] == "serial"
    for way in ("copies", "tiles", "triggered"):
        with refuses(f"way: {way} on AMD GPUs; .* take serial"):
            products._choose(True, 8192, LARGE, layer, way)


def test_on_cpus_partial_products_are_added_up_in_the_order_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own sum has four totals from five rows on."""
    generator, ranks = torch.Generator().manual_seed(0), 7
    parts = torch.randn(ranks, 2, 3, generator=generator)

    def exchange(received: torch.Tensor, *_: Any, **__: Any) -> MagicMock:
        received.copy_(parts.flatten(0, 1))
        return MagicMock()

    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: ranks)
    out = scatter(group, torch.ones(2 * ranks, 3), ProductLayer(torch.ones(3, 3)))()
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    assert_same(out, expected, "the sums")
