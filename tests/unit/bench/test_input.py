"""`bench input`: what its timed steps include."""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlrm_overlap.bench.figures.input import run, take_turn
from dlrm_overlap.data.synthetic import Synthetic
from tests.conftest import read_rows
from tests.distributed.workers import quickstart, ranks_here
from tests.unit.bench.conftest import values_of


def test_every_timed_step_reads_a_batch() -> None:
    ready, read_by_step = deque[int](), list[int]()

    def step(segment: Iterator[int]) -> None:  # as TorchRec's pipeline, which has three batches in flight
        read = list(itertools.islice(segment, 3 - len(ready)))
        ready.extend(read)
        read_by_step.append(len(read))
        ready.popleft()

    trainer: Any = SimpleNamespace(
        step=step, device=torch.device("cpu"), pipeline=SimpleNamespace(reset=lambda: ready.clear())
    )
    batches: Any = itertools.count()
    for _ in range(2):  # turns
        step_ms, _ = take_turn(trainer, batches, 2, 5)
        assert len(step_ms) == 5
        assert read_by_step == [3, 1, *[1] * 5, 0, 0]
        read_by_step.clear()
        assert not ready, "no batch of a turn is left for the next one"


@pytest.mark.usefixtures("world_of_one")
def test_samples_that_the_gpu_makes_have_no_loader_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Synthetic, "on_gpu", True)
    ranks = ranks_here(quickstart(tmp_path, "run", "--train.batch_size", "64", "--data.workers", "2"))
    values = values_of("input", "--steps", "4", "--output", str(tmp_path / "input.csv"))
    assert run("input", replace(ranks, values=values)) == 0
    (row,) = read_rows(tmp_path / "input.csv")
    assert row["workers"] == "0"
    assert float(row["loaded_to_cached"]) == pytest.approx(
        float(row["loaded_mean_ms"]) / float(row["cached_mean_ms"]), rel=1e-2
    )
