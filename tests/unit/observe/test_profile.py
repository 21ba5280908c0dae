"""Where the time of a step goes, on traces whose times are known, and of steps that torch alone takes."""

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from dlrm_overlap import profile_steps
from dlrm_overlap.train.profiling import Profile, step_parts


def _event(name: str, begin: float, end: float, cat: str = "kernel", thread: int = 7) -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": begin, "dur": end - begin, "tid": thread, "args": {"stream": thread}}


# Two steps in us. 1.2 of the 3.2 ms of NCCL overlap the products.
STEPS = [
    _event("Memcpy HtoD (Pinned -> Device)", 900, 1200, "gpu_memcpy", 9),
    _event("nvjet_sm90_tst_192x192_64x3_1x2_h_bz_coopB_NNN", 1000, 2000),
    _event("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 1600, 2600, thread=20),
    _event("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 2600, 2800, thread=20),
    _event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 2700, 4700, thread=21),
    _event("void at::native::vectorized_elementwise_kernel<4, ...>", 4000, 4800),
]


def test_the_parts_of_a_step_on_a_gpu() -> None:
    assert step_parts(STEPS, steps=2, step_ms=2.5) == pytest.approx(
        {
            "step": 2.5,
            "GPU busy": (3900 / 2) * 1e-3,
            "  it computes": 0.9,
            "  exposed communication": (2000 / 2) * 1e-3,
            "  it only copies": 0.05,
            "GPU waits for the CPU": 2.5 - 1.95,
            "collectives, hidden or not": (3100 / 2) * 1e-3,
        }
    )


def test_the_report_has_the_lines_of_the_page_and_estimates_a_captured_step() -> None:
    """Rank 1 computes longer, and rank 0's collectives wait for it."""
    late = [*STEPS[:-1], _event("void at::native::vectorized_elementwise_kernel<4, ...>", 3000, 5100)]
    profile = Profile("made-up GPU", 2, [step_parts(events, steps=2, step_ms=2.5) for events in (STEPS, late)])
    assert profile.captured_ms == pytest.approx((1.55, 1.95))
    report = str(profile)
    shown = Path("docs/torchrec.md").read_text().partition("An example of its report:\n\n")[2].partition("\n\n")[0]
    assert shown
    assert set(dedent(shown).splitlines()) <= set(report.splitlines()), report


def test_steps_of_ones_own_are_profiled_and_go_on() -> None:
    taken = []
    found = profile_steps(lambda: taken.append(torch.ones(8, 8) @ torch.ones(8, 8)), steps=3, after=2)
    assert len(taken) == 2 + 3 + 1 + 3
    assert (found.device, len(found.ranks)) == ("cpu", 1)
    assert 0 < found.ranks[0]["step"] < 1000
    assert "Nothing ran on a GPU" in str(found)
