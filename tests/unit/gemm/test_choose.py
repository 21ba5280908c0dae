"""Which way is taken: as measured, else as predicted."""

from pathlib import Path

import pytest
import torch

from dlrm_overlap.config import InputError
from dlrm_overlap.gemm.choose import Choice, choose, key, predicted_us, read_tuned
from dlrm_overlap.gemm.tuner import _keep, entry
from dlrm_overlap.gemm.ways import Problem

ABLE = [Choice("serial"), *(Choice("copies", parts) for parts in (0, 1, 2, 4, 8)), Choice("chunks", 2)]
ABLE += [Choice("pushes", parts) for parts in (1, 2, 4)]


def problem(operator: str, rows: int, columns: int, inner: int) -> Problem:
    return Problem(operator, rows, columns, inner, torch.bfloat16, True, "relu")


def test_what_was_measured_is_taken(tmp_path: Path) -> None:
    known, path = problem("all_gather", 4096, 1024, 512), tmp_path / "folder" / "tuned.json"
    assert read_tuned(path) == {}
    _keep(path, {key(known): {"serial/1": 90.0, "copies/2": 70.0}})
    _keep(path, {"another": {"serial/1": 90.0}})
    entries = read_tuned(path)
    assert choose(known, 4, ABLE, entries) == Choice("copies", 2)
    assert choose(known._replace(bias=False, activation="none"), 4, ABLE, entries) == Choice("copies", 2)
    assert choose(known, 4, ABLE[:1], entries) == Choice("serial"), "a way that cannot run the problem"


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"a": 1}', '{"a": {"way": "copies"}}', '{"a": {"way": "copies", "parts": "2"}}']
)
def test_a_damaged_file_is_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(text)
    with pytest.raises(InputError, match="remove it, and tune again"):
        read_tuned(path)


def test_serial_stays_unless_another_way_gains() -> None:
    assert entry({"copies/4": 99.5, "serial/1": 100.0})["way"] == "serial"
    assert entry({"copies/4": 98.0, "serial/1": 100.0})["way"] == "copies"


@pytest.mark.parametrize("operator", ["all_gather", "reduce_scatter"])
def test_without_a_measurement(operator: str) -> None:
    small = choose(problem(operator, 64, 64, 64), 4, ABLE, {})
    assert small.way == "serial", "communication takes less than cutting"
    narrow = problem(operator, 32768, 1024, 4096) if operator == "all_gather" else problem(operator, 32768, 4096, 1024)
    assert choose(narrow, 4, ABLE, {}).parts > 1, "links bound: the last product is to be short"
    if operator == "all_gather":
        two = choose(problem(operator, 32768, 512, 3456), 2, ABLE, {})
        assert two == Choice("pushes", 4), "on two ranks much is published before most of it can be read"
    wide = problem(operator, 8192, 12288, 12288)
    assert choose(wide, 4, ABLE, {}) == Choice("copies", 0), "the product bounds: as few as there can be"


@pytest.mark.parametrize(
    ("operator", "shape", "way", "measured_us", "ranks"),
    [
        ("all_gather", (32768, 1024, 4096), Choice("serial"), 1016, 4),
        ("all_gather", (32768, 1024, 4096), Choice("copies", 1), 700, 4),
        ("all_gather", (32768, 1024, 4096), Choice("pushes", 2), 623, 4),
        ("all_gather", (8192, 1024, 4096), Choice("pushes", 2), 196, 4),
        ("all_gather", (4096, 12288, 12288), Choice("copies", 0), 1610, 4),
        ("all_gather", (1024, 12288, 12288), Choice("copies", 0), 442, 4),
        ("all_gather", (32768, 1024, 4096), Choice("copies", 4), 644, 4),
        ("all_gather", (32768, 512, 3456), Choice("copies", 4), 446, 2),  # read on when all rows are in the windows
        ("all_gather", (32768, 512, 3456), Choice("pushes", 4), 360, 2),
        ("reduce_scatter", (32768, 4096, 1024), Choice("copies", 1), 739, 4),
        ("reduce_scatter", (4096, 12288, 12288), Choice("copies", 0), 1646, 4),
        ("reduce_scatter", (32768, 1024, 256), Choice("serial"), 232, 4),
    ],
)
def test_predictions_are_near_what_h200s_took(
    operator: str, shape: tuple[int, int, int], way: Choice, measured_us: float, ranks: int
) -> None:
    assert predicted_us(problem(operator, *shape), ranks, way) == pytest.approx(measured_us, rel=0.1)
