"""The rule by two roofs, and how well it does on the measured cases."""

import subprocess
import sys

import pytest

from dlrm_overlap.bench.two_roofs import Communication, Computation, Roofs, preferred

PRODUCT, LOOKUP = Computation("gemm", 6.5e11, 1e8), Computation("lookup", 0.0, 4.2e9)  # 1 ms each


def test_it_loads_no_torch() -> None:
    script = "import sys, dlrm_overlap.bench.two_roofs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("computation", "communication", "expected"),
    [
        (PRODUCT, Communication("all_to_all", 64e6), "dma_carved_4"),
        (Computation("gemm", 1e9, 4.2e9), Communication("all_gather", 64e6), "dma_apart"),  # few operations a byte
        (LOOKUP, Communication("all_to_all", 64e6), "dma_apart"),
        (LOOKUP, Communication("all_reduce", 64e6), "dma_averaged"),
        (PRODUCT, Communication("all_reduce", 219e6), "dma_averaged_carved_4"),  # 2 * 219 * 3 / 4 MB in 0.995 ms
        (PRODUCT, Communication("all_reduce", 221e6), "dma_averaged_carved_12"),
    ],
)
def test_the_rule(computation: Computation, communication: Communication, expected: str) -> None:
    assert preferred(computation, communication, 4)[0] == expected
    slow = Roofs(tflop_per_s=65.0, hbm_gb_per_s=420.0, link_gb_per_s=33.0)
    assert preferred(computation, communication, 4, slow)[0] == expected, "only the ratios of the roofs count"


def test_what_no_gpu_of_old_had_is_preferred_last() -> None:
    assert preferred(PRODUCT, Communication("all_reduce", 1e6), 2)[1:] == ("dma_averaged", "dma_aside")
