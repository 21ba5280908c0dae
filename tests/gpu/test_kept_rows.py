"""Rows put by on a GPU while steps update them: more than the interpreter can take, and beside a product."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlrm_overlap.kernels.backward.optimizers import RowRange
from dlrm_overlap.kernels.backward.row_runs import PreparedRuns

pytestmark = pytest.mark.gpu
ROWS, DIM, NAMED = 1 << 20, 128, 300_000


def _runs(device: torch.device) -> PreparedRuns:
    """Return runs of ids that name some rows."""
    keys = torch.randint(ROWS, (NAMED,), device=device).unique()
    none = torch.empty(0, device=device)
    bounds = torch.tensor([0, keys.numel()], device=device)
    return PreparedRuns(keys, none, none, none, none, none, none, bounds)


def test_all_rows_are_put_by_as_they_were() -> None:
    from dlrm_overlap.embedding.device.kept_rows import KeptRows

    device = torch.device("cuda", 0)
    weights, states = (torch.rand(ROWS, DIM, device=device) for _ in range(2))
    rows = RowRange(0, weights.view(-1), states.view(-1), 0, 0, DIM, False, "adagrad")
    features = SimpleNamespace(boundaries=torch.tensor([0, ROWS]))
    kept = KeptRows(device)
    inputs: list[Any] = [SimpleNamespace(input_features=features, ranges=[SimpleNamespace(rows=rows)])]
    kept.follow(inputs)
    factor, beside = torch.rand(4096, 4096, device=device), torch.cuda.Stream()
    for _ in range(2):
        expected = weights.clone(), states.clone()
        kept.begin()
        while not kept.advance(1 << 25):
            runs = _runs(device)
            with torch.cuda.stream(beside):
                torch.mm(factor, factor)
            kept.keep(0, rows, runs)
            weights[runs.run_keys] += 1
            states[runs.run_keys] += 1
        for found, before in zip((kept.of(weights), kept.of(states)), expected, strict=True):
            assert found is not None
            wrong = (found != before).any(dim=1).nonzero()
            assert not len(wrong), f"{len(wrong)} of {ROWS} rows differ, the first of them {wrong[:4].flatten()}"
