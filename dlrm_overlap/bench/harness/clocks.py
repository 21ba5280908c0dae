"""A GPU's clock and power while it trains."""

import math
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from dlrm_overlap.bench.harness.training_runs import TrainingRun

COLUMNS = ("sm_mhz", "power_w", "capped_fraction")
_ASKED = ("clocks.sm", "power.draw.instant", "clocks_event_reasons.sw_power_cap")
_EVERY_MS = 20


@contextmanager
def sampled(device: torch.device, columns: dict[str, Any]) -> Iterator[None]:
    """Fill `columns` with a GPU's median clock and power during the block, and how often power limited the clock.

    They are None on a CPU, and if nvidia-smi is not there, does not answer or does not know them.
    """
    columns |= dict.fromkeys(COLUMNS)
    process = _start(device) if device.type == "cuda" else None
    if process is None:
        yield
        return
    try:
        yield
    finally:
        process.terminate()
        lines = [line.split(", ") for line in process.communicate()[0].splitlines() if line.count(", ") == 2]
    lines = lines[len(lines) // 4 :]  # nvidia-smi starts before the first step
    if not lines:
        return
    mhz, watts, capped = zip(*lines, strict=True)
    columns |= {"sm_mhz": _median(mhz), "power_w": _median(watts)}
    if known := [each for each in capped if each.endswith("Active")]:  # else [N/A]
        columns["capped_fraction"] = known.count("Active") / len(known)


def _start(device: torch.device) -> subprocess.Popen[str] | None:
    gpu = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = ["nvidia-smi", gpu, f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.Popen([*query, "-lms", str(_EVERY_MS)], stdout=subprocess.PIPE, text=True)
    except OSError:
        return None


def _median(values: Sequence[str]) -> float | None:
    """Return the median of the numbers in `values`; None if all are texts such as [N/A]."""
    numbers = list[float]()
    for value in values:
        with suppress(ValueError):
            numbers.append(float(value))
    return statistics.median(numbers) if numbers else None


def clock_of(run: TrainingRun, step_ms: float, seconds: float) -> dict[str, Any]:
    """Return this rank's clock and power during `seconds` of steps of `step_ms`, None on a CPU; a collective.

    A power limit lowers the clock only after a while, so the GPU first idles, to begin equally for all contenders.
    """
    if run.trainer.device.type != "cuda":
        return dict.fromkeys(COLUMNS)
    columns: dict[str, Any] = {}
    time.sleep(seconds / 2)
    with sampled(run.trainer.device, columns):
        run.time(math.ceil(seconds * 1e3 / step_ms))
    return columns
