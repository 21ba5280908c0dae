"""A step's parts add up to it, and each instant counts once."""

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dlrm_overlap.observe.breakdown import PARTS, exposed_ms, mean_step
from dlrm_overlap.observe.run_log import write_breakdown
from dlrm_overlap.observe.tensorboard import TensorBoard
from dlrm_overlap.observe.timeline import draw_timeline
from dlrm_overlap.observe.trace_summary import read_steps

KERNELS = [  # name, stream, begin and end in us
    ("_store_pooled", 7, 0, 300),
    ("sm90_gemm", 8, 200, 1000),
    ("_await_flags", 7, 900, 1200),
    ("_pull_ids", 9, 1100, 1300),
    ("ncclDevKernel_AllReduce_Sum", 9, 1250, 1500),
    ("_update_rows", 7, 1450, 1600),
    ("DeviceRadixSort", 9, 500, 600),
    ("Memcpy HtoD", 10, 1700, 1750),
]


def _trace(folder: Path, kernels: list[tuple[str, int, int, int]], steps: int = 1) -> Path:
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": end - begin, "args": {"stream": stream}}
        for name, stream, begin, end in kernels
    ]
    events += [{"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{i}"} for i in range(steps)]
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_each_instant_counts_for_the_first_part_that_ran_then(tmp_path: Path) -> None:
    parts = mean_step(*read_steps(_trace(tmp_path, KERNELS)))
    expected = [0.8, 0.2, 0.15, 0.0, 0.3, 0.15, 0.05, 0.1]
    assert parts == pytest.approx(dict(zip(PARTS, expected, strict=True)))
    assert sum(expected) == pytest.approx(1.75)
    halves = mean_step(*read_steps(_trace(tmp_path, KERNELS, steps=2)))
    assert halves == pytest.approx({part: ms / 2 for part, ms in zip(PARTS, expected, strict=True)})


def test_a_trace_of_a_cpu_has_none(tmp_path: Path) -> None:
    assert mean_step(*read_steps(_trace(tmp_path, []))) is None


def test_a_runs_breakdown_is_a_text_a_timeline_and_curves(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, 0)
    parts = write_breakdown(_trace(tmp_path, KERNELS), 22, board)
    board.close()
    assert parts is not None
    events = EventAccumulator(str(tmp_path)).Reload()
    (exposed,) = events.Scalars("speed/exposed_ms")
    assert (exposed.step, exposed.value) == (22, pytest.approx(0.45)) == (22, pytest.approx(exposed_ms(parts)))
    assert events.Tags()["images"] == ["timeline"]
    text = events.Tensors("breakdown/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text.splitlines()[-1] == "| this run | 0.8 | 0.2 | 0.15 | 0 | 0.3 | 0.15 | 0.05 | 0.1 | 1.75 |"


def test_a_trace_that_cannot_be_read_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("{")
    assert write_breakdown(tmp_path / "trace.json", 22, None) is None


def test_the_timeline_shows_when_a_kernel_ran(tmp_path: Path) -> None:
    early, late = [*KERNELS, ("_await_flags", 11, 100, 200)], [*KERNELS, ("_await_flags", 11, 1000, 1100)]
    first, second = (draw_timeline(read_steps(_trace(tmp_path, kernels))[0], "steps") for kernels in (early, late))
    assert first.shape == second.shape
    assert (first != second).any()
