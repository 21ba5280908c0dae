"""The command `python -m tests.gpu.synthetic`: are samples that are made on the GPU those that the CPU makes, bit for
bit, and how long does a batch take?

It needs neither pytest nor several GPUs, and less than a minute. Without a GPU it checks fewer samples under Triton's
interpreter, and times nothing.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from dlrm_overlap.config import DataConfig, TablesConfig
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.data.loader import make_loader
from dlrm_overlap.data.synthetic import Synthetic
from dlrm_overlap.data.synthetic_device import DeviceSynthetic

_CONFIG = Path(__file__).parents[2] / "configs" / "mlperf_dcnv2.yaml"
_BATCHES = 100


def mlperf() -> DataConfig:
    """Return MLPerf's data set with at most 4 million rows a table."""
    tables: dict[str, Any] = yaml.safe_load(_CONFIG.read_text())["data"]["tables"]
    return DataConfig(tables=TablesConfig(max_rows=4_000_000, **tables))


def data_sets() -> dict[str, DataConfig]:
    """Return the data sets to compare, by name."""
    sets = {
        f"{rows} rows, alpha {alpha:g}": DataConfig(
            tables=TablesConfig(count=3, rows=rows, multi_hot=3, zipf_alpha=alpha)
        )
        for rows in (1, 3, 10**6, 4 * 10**7)
        for alpha in (0.0, 1.05, 2.0)
    }
    mixed = TablesConfig(
        rows=[50, 2**31 - 1, 1, 700],
        multi_hot=["0..6", "2..30", 2, 1],
        zipf_alpha=[2.0, 1.05, 1.0, 5.0],
        half_life=[0, 5, 0, 0],
    )
    return sets | {"ranges": DataConfig(tables=mixed, dense_features=2, seed=2**31 - 1), "mlperf": mlperf()}


def first_difference(made: Batch, expected: Batch) -> str | None:
    """Return where the first bit differs, with both values, or None."""
    tensors = (
        ("dense", made.dense, expected.dense),
        ("lengths", made.sparse.lengths(), expected.sparse.lengths()),
        ("values", made.sparse.values(), expected.sparse.values()),
        ("labels", made.labels, expected.labels),
    )
    for name, left, right in tensors:
        left = left.cpu()
        if left.shape != right.shape or left.dtype != right.dtype:
            return f"{name}: {tuple(left.shape)} {left.dtype}, not {tuple(right.shape)} {right.dtype}"
        wrong = (left.view(torch.int32) != right.view(torch.int32)).flatten().nonzero()
        if len(wrong):
            place = int(wrong[0])
            values = f"{left.flatten()[place]:g}, not {right.flatten()[place]:g}"
            return f"{name}[{place}]: {values}; {len(wrong)} of {left.numel()} differ"
    return None


def compare(config: DataConfig, device: torch.device, count: int) -> str | None:
    """Return where batches of `count` samples differ between `device` and the CPU, or None."""
    expected, made = Synthetic(config, "train"), DeviceSynthetic(config, "train", device)
    for first in (0, count, 10**12 + 7):  # at the last place, counters are beyond 32 bits
        if (difference := first_difference(made.read(first, count), expected.read(first, count))) is not None:
            return f"samples from {first} on: {difference}"
    return None


def compare_under_streams(config: DataConfig, device: torch.device, count: int) -> str | None:
    """Return where batches differ that a loader gives under a side stream and another one uses, or None.

    The loader keeps two steps, so later ones are given from memory, under a stream that did not make them.
    """
    expected, made = Synthetic(config, "train"), DeviceSynthetic(config, "train", device)
    loader = make_loader(made, count, 0, 1, 0, 6, workers=2, prefetch=2, pin_memory=True, distinct_steps=2)
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    for step in range(6):
        side = streams[step // 2 % 2]
        with torch.cuda.stream(side):
            batch = next(loader).to(device, non_blocking=True)
        torch.cuda.current_stream(device).wait_stream(side)
        batch.record_stream(torch.cuda.current_stream(device))
        if (difference := first_difference(batch, expected.read(step % 2 * count, count))) is not None:
            return f"step {step}: {difference}"
    return None


def batch_times_ms(config: DataConfig, device: torch.device, count: int) -> tuple[float, float]:
    """Return the GPU's and the host's mean time, in ms, to make a batch of `count` samples."""
    data = DeviceSynthetic(config, "train", device)
    for i in range(10):
        data.read(i * count, count)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(200_000_000)  # the host gets ahead, so that the GPU does not wait for it
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    start = time.perf_counter()
    for i in range(_BATCHES):
        data.read(i * count, count)
    host_ms = (time.perf_counter() - start) * 1e3 / _BATCHES
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / _BATCHES, host_ms


def main() -> int:
    """Run all comparisons, print a line for each, and return 1 if one differs."""
    on_gpu = torch.cuda.is_available()
    device, count = (torch.device("cuda", torch.cuda.current_device()), 8192) if on_gpu else (torch.device("cpu"), 3)
    differing = 0
    for name, config in data_sets().items():
        start = time.perf_counter()
        difference = compare(config, device, count)
        differing += difference is not None
        print(f"{name:28} {time.perf_counter() - start:5.1f} s  {difference or 'equal'}", flush=True)
    if on_gpu:
        difference = compare_under_streams(mlperf(), device, count)
        differing += difference is not None
        print(f"{'under side streams':36}  {difference or 'equal'}", flush=True)
        gpu_ms, host_ms = batch_times_ms(mlperf(), device, count)
        name = torch.cuda.get_device_name(device)
        print(f"mlperf, a batch of {count} samples: {gpu_ms:.3f} ms of the {name}, {host_ms:.3f} ms of its host")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
