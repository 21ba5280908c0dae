"""What the tuner measures and keeps; the GPU's part of it is replaced."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.config import InputError
from dlrm_overlap.dense.gemm import tuner
from dlrm_overlap.dense.gemm.choose import Choice, key
from dlrm_overlap.dense.gemm.products import ParallelProducts
from dlrm_overlap.dense.gemm.ways import Problem

PROBLEMS = [Problem("all_gather", rows, 4, 3, torch.bfloat16, False, "none", keep=True) for rows in (8, 16)]


@pytest.fixture
def products(world_of_one: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> ParallelProducts:
    """Of one rank, which has `copies`, too, but no room for it; calls are made where a GPU would replay them."""
    made = ParallelProducts(world_of_one, torch.device("cpu"))
    monkeypatch.setattr(made, "candidates", lambda _: [Choice("copies", 4), Choice("serial")])

    def captured(call: Callable[[], None], device: torch.device, memory: object) -> Callable[[], None]:
        call()
        return call

    monkeypatch.setattr(tuner, "_captured", captured)
    monkeypatch.setattr(tuner, "measure", tuner._measured)  # on no stream
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return made


def test_a_way_that_has_no_room_is_left_out_and_told(
    products: ParallelProducts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tuned.json"
    with caplog.at_level(logging.WARNING, "dlrm_overlap"):
        found = tuner.tune(products, PROBLEMS[:1], path, rounds=2)
    assert "copies/4 is not measured, since" in caplog.text
    (times,) = found.values()
    assert set(times) == {"serial/1"}
    assert times["serial/1"] > 0
    assert json.loads(path.read_text())[key(PROBLEMS[0])]["way"] == "serial"
    assert products.tuned_file == path


def test_without_serial_nothing_is_kept(products: ParallelProducts, tmp_path: Path) -> None:
    wrong = PROBLEMS[0]._replace(dtype=torch.float64)
    with pytest.raises(InputError, match="float64: must be all float16"):
        tuner.tune(products, [wrong], tmp_path / "tuned.json", rounds=1)
    assert not list(tmp_path.iterdir())


def test_who_is_killed_loses_one_problem(
    products: ParallelProducts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, measure = tmp_path / "tuned.json", tuner.measure

    def measured(products: ParallelProducts, problem: Problem, rounds: int) -> dict[str, float]:
        if problem is PROBLEMS[1]:
            raise KeyboardInterrupt
        return measure(products, problem, rounds)

    monkeypatch.setattr(tuner, "measure", measured)
    with pytest.raises(KeyboardInterrupt):
        tuner.tune(products, PROBLEMS, path, rounds=1)
    assert set(json.loads(path.read_text())) == {key(PROBLEMS[0])}
