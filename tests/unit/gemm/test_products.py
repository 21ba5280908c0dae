"""The way that runs, and the state that a call leaves for the next one."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.config import InputError
from dlrm_overlap.dense.gemm.problem import Layer, Problem
from dlrm_overlap.dense.gemm.products import Choice, ParallelProducts
from dlrm_overlap.dense.gemm.serial import scatter
from tests.agreement import assert_same

CPU = torch.device("cpu")


def _between_gpus() -> ParallelProducts:
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    return ParallelProducts(group, torch.device("cuda"))


LARGE = Problem("all_gather", 32768, 512, 3456, torch.bfloat16, False, "none")


@pytest.mark.parametrize(
    ("problem", "way", "choice"),
    [
        (LARGE, "auto", Choice("copies", 4)),
        (LARGE._replace(operator="reduce_scatter", columns=3456, inner=512), "auto", Choice("copies", 4)),
        (LARGE._replace(columns=8192), "auto", Choice("copies", 1)),
        (LARGE._replace(rows=64), "auto", Choice("serial", 1)),
        (LARGE._replace(dtype=torch.float32), "auto", Choice("serial", 1)),
        (LARGE, "tiles", Choice("tiles", 4)),
        (LARGE, "triggered/8", Choice("triggered", 8)),
    ],
)
def test_a_way_is_chosen_between_gpus(problem: Problem, way: str, choice: Choice) -> None:
    assert _between_gpus()._pick(problem, way) == choice


@pytest.mark.parametrize(
    ("problem", "way", "message"),
    [
        (LARGE, "chunks/2", "way chunks/2 is not known; take auto, serial, copies, tiles, triggered, or one"),
        (LARGE, "copies/3", "take one of copies/1, copies/2, copies/4, copies/8"),
        (LARGE._replace(dtype=torch.float32), "copies", "torch.float32: copies takes float16 and bfloat16"),
        (LARGE._replace(rows=0), "copies", "there is nothing to multiply; take serial"),
        (LARGE._replace(inner=12), "triggered", "triggered takes N and K that are multiples of 8"),
    ],
)
def test_a_way_that_cannot_run_is_refused(problem: Problem, way: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _between_gpus()._pick(problem, way)


def test_auto_runs_serially_where_there_is_no_room(
    world_of_one: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(problem: Problem, choice: Choice) -> None:
        raise InputError("no room for a window; take a smaller batch")

    products = ParallelProducts(world_of_one, CPU)
    monkeypatch.setattr(products, "_prepare", no_room)
    out = products.begin_reduce_scatter(torch.ones(8, 3), Layer(torch.ones(4, 3)), "auto")()
    assert_same(out, torch.full((8, 4), 3.0), "serially")
    assert "runs serially, since no room for a window" in caplog.text
    with pytest.raises(InputError, match="no room for a window"):
        products.begin_reduce_scatter(torch.ones(8, 3), Layer(torch.ones(4, 3)), "serial")


def test_on_cpus_partial_products_are_added_up_in_the_order_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own sum has four totals from five rows on."""
    generator, ranks = torch.Generator().manual_seed(0), 7
    parts = torch.randn(ranks, 2, 3, generator=generator)

    def exchange(received: torch.Tensor, *_: Any, **__: Any) -> MagicMock:
        received.copy_(parts.flatten(0, 1))
        return MagicMock()

    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: ranks)
    out = scatter(group, torch.ones(2 * ranks, 3), Layer(torch.ones(3, 3)), 1)()
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    assert_same(out, expected, "the sums")
