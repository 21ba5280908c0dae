import pytest

from dlrm_overlap.bench.figures import gemm
from dlrm_overlap.bench.figures.gemm import compare
from dlrm_overlap.bench.harness.timing import Timing
from tests.conftest import refuses


def test_the_exposed_communication_is_the_time_beyond_the_product() -> None:
    serial_ms, copies_ms, gemm = (Timing(ms, ms, ms, ms, 0.1, 20) for ms in (5.0, 4.0, 3.0))
    timed = {"serial": serial_ms, "copies": copies_ms}
    serial, copies = compare(timed, gemm, 700_000_000, 200.0)
    assert (serial["ect_ms"], serial["overlap_efficiency"], serial["speedup"]) == (2.0, 0.0, 1.0)
    assert (copies["ect_ms"], copies["overlap_efficiency"], copies["speedup"]) == (1.0, 0.5, 1.25)
    assert (copies["floor_ms"], copies["of_floor"]) == (3.5, 0.875), "700 MB at 200 GB/s take longer than the product"
    assert compare(timed, gemm, 0, 200.0)[0]["floor_ms"] == 3.0


@pytest.mark.parametrize("text", ["4096x4096", "4096x64x66"])
def test_shapes_that_ranks_cannot_share_are_refused(text: str) -> None:
    with refuses(f"--shapes {text}: not M x K x N with M and N divisible by 4 ranks"):
        gemm._shape(text, 4)
