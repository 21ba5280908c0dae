"""What runs where `auto` has chosen a way."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlrm_overlap.gemm.choose import Choice
from dlrm_overlap.gemm.linear import Layer
from dlrm_overlap.gemm.products import ParallelProducts
from dlrm_overlap.gemm.ways import Serial
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
