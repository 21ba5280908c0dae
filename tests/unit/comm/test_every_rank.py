"""What ranks ask each other before a call, and what they do not."""

from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import MagicMock

import pytest
import torch

from dlrm_overlap.gemm.choose import Choice
from dlrm_overlap.gemm.linear import Layer
from dlrm_overlap.gemm.products import ParallelProducts
from dlrm_overlap.gemm.ways import Problem


def _tell(_: Problem) -> NoReturn:
    raise AssertionError("the host writes a text for nobody")


def test_a_known_product_on_gpus_takes_the_host_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrm_overlap.gemm.products._fault", lambda *_: "")
    monkeypatch.setattr(Problem, "__str__", _tell)
    ranks, choice = MagicMock(), Choice("serial")
    ranks.size.return_value = 2
    known = {(Problem("reduce_scatter", 4, 2, 3, torch.float32, False, "none"), "auto"): choice}
    products: Any = SimpleNamespace(_known=known, group=ranks, device=torch.device("cuda"))
    layer = Layer(torch.zeros(2, 3))
    assert ParallelProducts._choose(products, "reduce_scatter", torch.zeros(4, 3), layer, "auto") is choice
