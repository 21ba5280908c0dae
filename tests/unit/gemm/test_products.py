"""What runs where `auto` has chosen a way."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlrm_overlap.dense.gemm.choose import Choice
from dlrm_overlap.dense.gemm.linear import Layer
from dlrm_overlap.dense.gemm.products import ParallelProducts
from dlrm_overlap.dense.gemm.ways import Serial
from tests.agreement import assert_same


class _Calls(TorchDispatchMode):
    """Notes every operator that runs, collectives among them, and the shapes of the tensors that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, list[torch.Size]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs))
        self.made.append((str(func), [each.shape for each in given if isinstance(each, torch.Tensor)]))
        return func(*args, **(kwargs or {}))


def _calls_of(call: Callable[[], torch.Tensor]) -> tuple[list[tuple[str, list[torch.Size]]], torch.Tensor]:
    call()  # the first of its kind asks the other ranks
    with _Calls() as calls:
        out = call()
    return calls.made, out


def test_a_damaged_file_of_choices_ends_no_training(
    tmp_path: Path, world_of_one: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    products = ParallelProducts(world_of_one, torch.device("cpu"))
    products.tuned_file = tmp_path / "tuned.json"
    products.tuned_file.write_text("{")
    out = products.begin_reduce_scatter(torch.ones(8, 3), Layer(torch.ones(4, 3)), "auto")()
    assert_same(out, torch.full((8, 4), 3.0), "by a way that is predicted")
    assert "remove it, and tune again; ways of products are predicted" in caplog.text


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("operator", ["all_gather", "reduce_scatter"])
def test_auto_that_takes_serial_does_what_serial_does(
    operator: str, measured: bool, tmp_path: Path, world_of_one: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chosen among ways that this CPU has not, by a prediction or by a file."""
    products = ParallelProducts(world_of_one, torch.device("cpu"))
    products.tuned_file = tmp_path / "tuned.json"
    able = [Choice("copies", 4), Choice("serial"), Choice("chunks", 2)]
    monkeypatch.setattr(products, "candidates", lambda _: able)
    if measured:
        problem = f"{operator} M 8 N 4 K 3 torch.bfloat16"
        products.tuned_file.write_text(json.dumps({problem: {"way": "serial", "parts": 1}}))
    x, layer = torch.ones(8, 3).bfloat16(), Layer(torch.ones(4, 3).bfloat16(), torch.ones(4).bfloat16(), "relu")

    def run(way: str) -> torch.Tensor:
        if operator == "all_gather":
            return products.all_gather_matmul(x, layer, way, keep=False)[0]
        return products.begin_reduce_scatter(x, layer, way)()

    (auto, out), (serial, expected) = (_calls_of(lambda way=way: run(way)) for way in ("auto", "serial"))
    assert auto == serial
    assert any("c10d" in name for name, _ in auto), "the collective has been noted"
    assert_same(out, expected, operator)


def test_what_is_made_in_inference_mode_serves_training(
    world_of_one: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of a way would otherwise be of tensors that nothing may write to behind it."""
    made: list[torch.Tensor] = []
    monkeypatch.setattr(Serial, "prepare", lambda *_: made.append(torch.zeros(1)))
    products, rows = ParallelProducts(world_of_one, torch.device("cpu")), torch.ones(2, 3)
    with torch.inference_mode():
        out, _ = products.all_gather_matmul(rows, Layer(torch.ones(4, 3)), "auto", keep=False)
    made[0].add_(1)
    assert not made[0].is_inference()
    assert out.is_inference()


def test_on_cpus_partial_products_are_added_up_in_the_order_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own sum has four totals from five rows on."""
    generator, ranks = torch.Generator().manual_seed(0), 7
    parts = torch.randn(ranks, 2, 3, generator=generator)

    def exchange(received: torch.Tensor, *_: Any, **__: Any) -> MagicMock:
        received.copy_(parts.flatten(0, 1))
        return MagicMock()

    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: ranks)
    layer = Layer(torch.ones(3, 3))
    out = Serial(group, torch.device("cpu")).begin_reduce_scatter(torch.ones(2 * ranks, 3), layer, 1)()
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    assert_same(out, expected, "the sums")
