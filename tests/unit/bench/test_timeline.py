"""The figure of a step's timeline, on a trace whose times are known."""

import gzip
import json
from pathlib import Path

import pytest
import torch.distributed as dist

from dlrm_overlap.bench.figures import timeline
from dlrm_overlap.bench.harness.training_runs import TrainingRun, mean_step_columns
from dlrm_overlap.bench.request import TimelineRequest
from dlrm_overlap.bench.step_contenders import STEP_CONTENDERS, StepContender
from dlrm_overlap.config import InputError
from tests.conftest import read_rows
from tests.distributed.workers import quickstart, ranks_here

_MARK = "at::cuda::(anonymous namespace)::spin_kernel(long)"
# Name, stream, begin and end in us. Three steps: 100 .. 200, 200 .. 320, 320 .. 400, and work before and after them.
_KERNELS = [
    ("sm90_gemm", 7, 0, 90),
    (_MARK, 7, 100, 102),
    ("_store_pooled", 7, 110, 150),
    ("_await_flags", 7, 150, 160),
    ("sm90_gemm", 7, 160, 199),
    (_MARK, 7, 200, 202),
    ("_push_gradients", 8, 190, 240),
    ("Memcpy HtoD (Pinned -> Device)", 9, 230, 260),
    ("_update_rows", 10, 280, 330),
    (_MARK, 7, 320, 322),
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)", 11, 325, 390),
    (_MARK, 7, 400, 402),
    ("sm90_gemm", 7, 402, 500),
]


def _write(path: Path) -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": end - begin, "args": {"stream": stream}}
        for name, stream, begin, end in _KERNELS
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))


def test_a_trace_is_cut_into_steps_at_its_marks(tmp_path: Path) -> None:
    _write(tmp_path / "trace.json.gz")
    # Of 300 us: rows looked up 40, products 39, rows updated 50; exposed are the wait, the push from 199 to 240, and
    # the all-reduce from 330 on.
    columns = {name: round(value, 6) for name, value in mean_step_columns(tmp_path / "trace.json.gz").items()}
    assert (columns["traced_steps"], columns["step_ms"]) == (3, 0.1)
    parts = {"compute": 129, "exposed": 10 + 41 + 60, "exposed_most": 40 + 10 + 41 + 60, "copying": 20, "idle": 40}
    for name, expected_us in parts.items():
        assert columns[f"{name}_ms"] == pytest.approx(expected_us / 3e3, abs=1e-6), name
        assert columns[f"{name}_fraction"] == pytest.approx(expected_us / 300, abs=1e-6), name
    assert columns["exchange_kernels_ms"] == pytest.approx((10 + 50) / 3e3, abs=1e-6)
    assert columns["all_reduce_kernels_ms"] == pytest.approx(65 / 3e3, abs=1e-6)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_figure_has_a_row_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_of_one: dist.ProcessGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    eager = {"train.graph_dense": False, "train.compile_dense": False}
    monkeypatch.setitem(STEP_CONTENDERS, "pgas", StepContender({"embedding.backend": "pgas", **eager}))
    monkeypatch.setattr(TrainingRun, "trace", lambda self, steps, path: _write(path))
    monkeypatch.setattr(timeline, "_UNTRACED_STEPS", 3)
    config = quickstart(tmp_path, "run", "--train.batch_size", "64", "--train.steps", "4")
    request = TimelineRequest("timeline", tmp_path / "made" / "t.csv", contenders=("pgas",), batches=2)
    assert timeline.run(request, ranks_here(config)) == 0
    rows = read_rows(request.output)
    assert [(row["contender"], row["rank"], row["exposed_fraction"]) for row in rows] == [("pgas", "0", "0.37")]
    assert float(rows[0]["untraced_ms"]) > 0
    assert f"traces: {tmp_path / 'made' / 't'}" in capsys.readouterr().out


def test_what_has_no_timeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--output runs/made: must end in \.csv"):
        TimelineRequest("timeline", Path("runs/made"))
    request = TimelineRequest("timeline", tmp_path / "t.csv")
    with pytest.raises(InputError, match="bench timeline: a CPU lacks the trace"):
        request.check_ranks(quickstart(tmp_path, "run"), 2, "cpu")
