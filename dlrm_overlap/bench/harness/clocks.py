"""A GPU's clock and power while it trains."""

import math
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dlrm_overlap.bench.harness.training_runs import TrainingRun

COLUMNS = ("sm_mhz", "power_w", "capped_fraction")
_ASKED = ("clocks.sm", "power.draw.instant", "clocks_event_reasons.sw_power_cap")
_EVERY_MS = 20


@contextmanager
def sampled(device: torch.device, columns: dict[str, Any]) -> Iterator[None]:
    """Fill `columns` with a GPU's median clock and power during the block, and how often power limited the clock.

    They are None on a CPU, and if nvidia-smi does not answer.
    """
    columns |= dict.fromkeys(COLUMNS)
    if device.type != "cuda":
        yield
        return
    gpu = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = ["nvidia-smi", gpu, f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader,nounits"]
    process = subprocess.Popen([*query, "-lms", str(_EVERY_MS)], stdout=subprocess.PIPE, text=True)
    try:
        yield
    finally:
        process.terminate()
        lines = [line.split(", ") for line in process.communicate()[0].splitlines() if line.count(", ") == 2]
    lines = lines[len(lines) // 4 :]  # nvidia-smi starts before the first step
    if not lines:
        return
    columns["sm_mhz"] = statistics.median(float(line[0]) for line in lines)
    columns["power_w"] = statistics.median(float(line[1]) for line in lines)
    columns["capped_fraction"] = sum(line[2] == "Active" for line in lines) / len(lines)


def clock_of(run: TrainingRun, step_ms: float, seconds: float) -> dict[str, Any]:
    """Return this rank's clock and power during `seconds` of steps of `step_ms`, None on a CPU; a collective.

    A power limit lowers the clock only after a while, so the GPU is idle before, for all contenders alike.
    """
    if run.trainer.device.type != "cuda":
        return dict.fromkeys(COLUMNS)
    columns: dict[str, Any] = {}
    time.sleep(seconds / 2)
    with sampled(run.trainer.device, columns):
        run.time(math.ceil(seconds * 1e3 / step_ms))
    return columns
