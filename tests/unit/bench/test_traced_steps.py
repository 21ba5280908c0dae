import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.bench.figures import step
from dlrm_overlap.bench.harness.training_runs import TracedSteps, TrainingRun, traced_steps
from dlrm_overlap.observe.trace_summary import GpuWork, Span
from tests.conftest import refuses

_MARK = "at::cuda::(anonymous namespace)::spin_kernel(long)"
# Name, stream, begin and end in us. Three steps: 100 .. 200, 200 .. 320, 320 .. 400, and work before and after them.
_KERNELS = [
    ("sm90_gemm", 7, 0, 90),
    (_MARK, 7, 100, 102),
    ("_store_pooled", 7, 110, 150),
    ("_wait_for_flags", 7, 150, 160),
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


def test_timed_steps_go_round_all_batches(world_of_one: dist.ProcessGroup) -> None:
    """Else a cache holds the rows of the few batches that each round would begin with."""
    taken = list[Any]()

    def take(batches: Any) -> torch.Tensor:
        taken.append(next(batches))
        return torch.zeros(())

    trainer: Any = SimpleNamespace(
        step=take,
        check=lambda: None,
        learning_rate=SimpleNamespace(set=lambda step: None),
        pipeline=SimpleNamespace(reset=lambda: None),
        device=torch.device("cpu"),
    )
    batches: Any = list(range(17))
    run = TrainingRun("pgas", trainer, batches)
    run.losses(5)
    run.time(3)
    run.time(3)
    assert taken == [i % 17 for i in range(5 + 2 * (10 + 3 + 2))]
    run.losses(2)
    assert taken[-2:] == [0, 1]


def test_a_trace_is_cut_into_steps_at_its_marks(tmp_path: Path) -> None:
    _write(tmp_path / "trace.json.gz")
    # Of 300 us: rows looked up 40, products 39, rows updated 50; exposed are the wait, the push from 199 to 240, and
    # the all-reduce from 330 on.
    columns, timeline, work, *_ = traced = traced_steps(tmp_path / "trace.json.gz")
    parts = {"compute": 129, "exposed": 10 + 41 + 60, "exposed_most": 40 + 10 + 41 + 60, "copying": 20, "idle": 40}
    assert columns == {
        f"{name}_ms": pytest.approx(us / 3e3, abs=1e-6) for name, us in (parts | {"busy": 300 - 40}).items()
    }
    # Of 80, 100 and 120 us the step of 100 is the median, 100 .. 200: what begins later or ended before is not in it.
    assert timeline == [("lookup", 10, 50), ("exchange", 50, 60), ("exchange", 90, 100), ("products", 60, 99)]
    assert traced.busy_ms(work) == columns["busy_ms"]


def _rank(busy: float, work: list[GpuWork]) -> TracedSteps:
    columns = {"busy_ms": busy, "exposed_ms": busy / 2, "exposed_most_ms": busy, "idle_ms": 1.0}
    return TracedSteps(columns, [], work, Span(0, 2000), 2)


def test_waits_for_a_later_rank_are_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange begins when the later rank does; each rank is the later one once. Other columns: least busy rank."""
    begins = [(0, 900), (600, 1000)], [(500, 600), (900, 1000)]  # the second rank issues one kernel more
    ranks = []
    for busy, exchanges in zip((3.0, 2.0), begins, strict=True):
        work = [GpuWork("ncclDevKernel_SendRecv", 8, Span(begin, end)) for begin, end in reversed(exchanges)]
        work += [GpuWork("sm90_gemm", 7, Span(1200, 1500))]
        work += [GpuWork("_wait_for_flags", 9, Span(1600, 1700))] * (busy == 2.0)
        ranks.append(_rank(busy, work))

    def gather(found: list[object], own: object) -> None:
        assert own == ranks[0]
        found[:] = ranks

    monkeypatch.setattr(dist, "all_gather_object", gather)
    trainer = SimpleNamespace(device=torch.device("cuda"), world=SimpleNamespace(world_size=2))
    run: Any = SimpleNamespace(trainer=trainer, traced=lambda steps: ranks[0])
    # Each exchange takes 100 us; on the first rank they are at 800 .. 900 and 900 .. 1000, and a product takes 300.
    expected = {"work_ms": (200 + 300 + 100) / 2e3, "busy_ms": 2.0, "exposed_ms": 1.0, "exposed_most_ms": 2.0}
    assert step._columns(step._trace(run)) == expected


def test_timelines_are_appended_and_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    path, traced = tmp_path / "new" / "timelines.csv", TracedSteps({}, [("lookup", 10.0, 50.5)], [], Span(0, 0), 1)
    step._append_timelines(path, ["torchrec", "on_a_cpu"], [[traced, traced], []])
    step._append_timelines(path, ["pgas_graph"], [[traced]])
    assert path.read_text().split() == [
        "contender,kind,begin_us,end_us",
        "torchrec,lookup,10.0,50.5",
        "pgas_graph,lookup,10.0,50.5",
    ]
    with refuses("--timeline: .* cannot be written"):
        step._append_timelines(tmp_path, ["pgas_graph"], [[traced]])
