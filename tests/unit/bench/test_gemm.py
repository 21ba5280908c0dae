"""What the figure of products with communication inside makes of its times."""

from pathlib import Path
from typing import Any

import pytest

from dlrm_overlap.bench.figures.gemm import compare
from dlrm_overlap.bench.harness.timing import Timing
from dlrm_overlap.bench.request import GemmRequest
from dlrm_overlap.config import InputError
from tests.conftest import configuration

COLUMNS = {"operator": "all_gather", "m": 4096, "k": 64, "n": 128}


def test_what_is_left_of_the_communication_is_that_behind_the_product() -> None:
    timed = {name: Timing(ms, ms, ms, ms, ms, 0.1, 20) for name, ms in (("serial", 5.0), ("copies", 4.0))}
    serial, copies = compare(COLUMNS, timed, 3.0, 2.0, link_bytes=700_000_000, link_gb_per_s=200.0)
    assert (serial["ect_ms"], serial["overlap_efficiency"], serial["speedup"]) == (2.0, 0.0, 1.0)
    assert (copies["ect_ms"], copies["overlap_efficiency"], copies["speedup"]) == (1.0, 0.5, 1.25)
    assert (copies["floor_ms"], copies["of_floor"]) == (3.5, 0.875), "700 MB at 200 GB/s take longer than the product"
    (row, _) = compare(COLUMNS, timed, 3.0, 2.0, link_bytes=0, link_gb_per_s=200.0)
    assert (row["floor_ms"], row["communication_ms"]) == (3.0, 2.0)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"contenders": ("torch",)}, "serial is left out"),
        ({"shapes": ("4096x4096",)}, "--shapes 4096x4096: not M x K x N"),
        ({"shapes": ("4096x64x66",)}, "--shapes 4096x64x66: not M x K x N with M and N that 4 ranks divide"),
    ],
)
def test_mistakes_are_told_before_anything_runs(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        GemmRequest("gemm", Path("unused.csv"), **options).check_ranks(
            configuration("--config", "configs/bench/tiny.yaml"), 4, "cpu"
        )
