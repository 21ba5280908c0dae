"""The scripts of `tests/gpu` that are run by hand, rehearsed on CPU ranks: each runs to its end, and gives its rows.

Their times mean nothing here. Steps are captured by stand-ins, and products are not compiled.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap import FusedTables
from dlrm_overlap.bench.step_contenders import STEP_CONTENDERS
from dlrm_overlap.kernels.compiled import INTERPRETED
from dlrm_overlap.kernels.ids.id_map import Policy
from dlrm_overlap.torchrec_private.check import check_private_api
from tests.conftest import configuration, read_rows
from tests.distributed.captured import captures
from tests.distributed.interpreted import updating, without_streams
from tests.distributed.models import CPU
from tests.distributed.workers import ranks_here, run_ranks
from tests.gpu import (
    caching,
    cross,
    dense,
    fabric,
    fused_tables,
    host_time,
    insert_ids,
    kernels_alone,
    launched,
    stages,
    step_parts,
)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")]
_TINY = ["--config", "configs/bench/tiny.yaml", "--train.device", "cpu"]


def _ranks(argv: list[str], **values: Any) -> Any:
    ranks = ranks_here(configuration(*argv))
    return replace(ranks, values=SimpleNamespace(**values))


def _run_stages(folder: Path) -> None:
    with patch.multiple(stages, _BAGS=(2,), _REPETITIONS=2):
        assert stages.work(_ranks(_TINY, output=folder / "stages.csv")) == 0


def test_stages(tmp_path: Path) -> None:
    run_ranks(_run_stages, 2, tmp_path)
    rows = read_rows(tmp_path / "stages.csv")
    assert [row["part"] for row in rows] == ["forward"] * 3 + ["both"] * 3
    assert [row["contender"] for row in rows] == ["torchrec", "pgas", "fused"] * 2


def _run_step_parts(folder: Path) -> None:
    keys = {"pgas_graph": {**STEP_CONTENDERS["pgas_graph"], "train.compile_dense": False}}
    options = {"samples": [4], "seconds": 0.01, "output": folder / "parts.csv"}
    with patch.dict(STEP_CONTENDERS, keys), patch.object(step_parts, "_FIRST_STEPS", 4), captures() as taken:
        assert step_parts.work(_ranks(_TINY, **options)) == 0
    assert taken["captured"] == 3 * 2, "each variant is captured again"
    assert taken["replayed"] > 0


def test_step_parts(tmp_path: Path) -> None:
    run_ranks(_run_step_parts, 2, tmp_path)
    rows = read_rows(tmp_path / "parts.csv")
    assert [row["variant"] for row in rows] == ["whole", "no_sort", "no_update"]
    assert [row["global_batch"] for row in rows] == ["8"] * 3


def _run_caching(_: Path) -> None:
    options = [*caching._CHECK, "--train.device", "cpu", "--log.tensorboard", "false"]
    with patch.object(caching, "_ON_CPUS", ["adagrad"]):
        assert caching.work(_ranks(options)) == 0


def test_caching(tmp_path: Path) -> None:
    run_ranks(_run_caching, 1, tmp_path)


def _captured(step: Callable[[], Any], warmup: int = 3) -> Any:
    for _ in range(warmup):
        step()
    return SimpleNamespace(replay=step)


def _times(graphs: Any) -> list[float]:
    for graph in graphs:
        graph.replay()
    return [1.0 for _ in graphs]


_GRAPHS = {"capture": _captured, "times_us": _times}


@pytest.mark.parametrize("form", dense._FORMS)
def test_dense_checks(form: str) -> None:
    with patch.multiple(dense, **_GRAPHS, STEPS=5):
        dense.check_taken_over(form, CPU)


def test_dense_times() -> None:
    with patch.multiple(dense, **_GRAPHS, TIMED_ELEMENTS=1 << 10):
        assert dense.time_update("adam", torch.bfloat16, CPU).startswith("adam     bfloat16 shadow")


def test_cross(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        patch.multiple(cross, **_GRAPHS, DEVICE=CPU, RANK=16, LAYERS=1),
        patch.object(torch, "compile", lambda function, **_: function),
    ):
        cross.time_head(8)
    assert capsys.readouterr().out.count("head, 8 samples") == 4


def _ones(call: Any, batches: Any) -> list[float]:
    for batch in batches:
        call(batch)
    return [1.0 for _ in batches]


def test_insert_ids(capsys: pytest.CaptureFixture[str]) -> None:
    sizes: dict[str, Any] = {"ROWS": 1024, "NEW_IDS": 512, "STEP_IDS": 300, "DIM": 4}
    with patch.multiple(insert_ids, DEVICE=CPU, times_us=_ones, **sizes):
        insert_ids.time_ours(Policy.LRU)
    *_, full, step, evicted = capsys.readouterr().out.splitlines()
    assert "100% of the rows in use" in full
    assert "LRU: 300 ids of which 2% are new" in step
    assert int(evicted.split()[1]) > 0


# FBGEMM on a CPU has not all optimizers and types, updates decaying rows feature by feature, and does not divide the
# gradient of weighted means; a state dict has no rows of a GPU.
_ON_GPUS_ONLY = {
    "Adam", "partial row-wise Adam", "LAMB", "partial row-wise LAMB", "row-wise Adagrad, L2", "means",
    "row-wise Adagrad, decoupled", "row-wise Adagrad, counter", "unpooled, Adam", "rows in bfloat16",
    "outputs in bfloat16", "state dicts and copies",
}  # fmt: skip


@pytest.mark.parametrize("part", sorted(fused_tables.PARTS.keys() - _ON_GPUS_ONLY))
def test_fused_tables(part: str) -> None:
    made = fused_tables.make

    def make(kind: Any, **options: Any) -> Any:
        return updating(made(kind, **options)) if kind is FusedTables else made(kind, **options)

    check_private_api()  # of FBGEMM's own operators, before one is replaced
    sizes: dict[str, Any] = {"STEPS": 2, "SAMPLES": 5, "MOST_IDS": 3, "LONGEST": 20, "STRESS_STEPS": 2}
    tables = [(30, 8), (7, 12), (2, 8), (9, 4)]
    waits = patch.object(torch.cuda, "synchronize", lambda: None)
    with patch.multiple(fused_tables, DEVICE=CPU, TABLES=tables, make=make, **sizes), waits, without_streams():
        fused_tables.PARTS[part]()


def _run_kernels_alone(folder: Path) -> None:
    os.chdir(folder)
    sys.argv = ["tests.gpu.kernels_alone"]
    tests = str(Path(__file__).parents[1] / "kernels/test_flags.py")
    assert kernels_alone.run_on(CPU, ["-p", "no:cacheprovider", tests]) == 0


def test_kernels_alone(tmp_path: Path) -> None:
    run_ranks(_run_kernels_alone, 1, tmp_path)


@contextmanager
def _noting() -> Iterator[dict[str, Any]]:
    yield {"flags._signal_flags": None, f"of rank {dist.get_rank()}": None}


def _run_launched(_: Path) -> None:
    expected = {"flags._signal_flags": ["rows"], "a CPU's": ["rows"], "of another step": ["mlperf"]}
    stand_ins = {"noting_on_gpu": _noting, "on_a_cpu": lambda names, ranks: expected}
    options = {"steps": ["rows"], "max_rows": 1000, "max_samples": 8}
    output = StringIO()
    compiles = patch.object(torch, "compile", lambda function, **_: function)
    with patch.multiple(launched, **stand_ins), compiles, captures(), redirect_stdout(output):
        assert launched.work(_ranks(_TINY, **options)) == (dist.get_rank() == 0)
    if dist.get_rank() == 0:
        assert output.getvalue().splitlines() == [
            "rows: 3 on GPUs, 2 found on a CPU, 1 in both",
            "  only on GPUs: of rank 0",
            "  only on GPUs: of rank 1",
            "  only on a CPU: a CPU's",
        ]


def test_launched(tmp_path: Path) -> None:
    run_ranks(_run_launched, 2, tmp_path)


def _run_fabric(_: Path) -> None:
    gpu = SimpleNamespace(name="a GPU", uuid="of no GPU", major=9, minor=0)
    block = SimpleNamespace(fault="no driver", handle=b"", close=lambda: None)
    stand_ins = {"fabric_of": lambda _: fabric.read_fabric(gpu.uuid, gpu.major), "ExportedBlock": lambda *_: block}
    properties = patch.object(torch.cuda, "get_device_properties", lambda _: gpu)
    nvml, group = patch.object(fabric, "_nvml_fields", lambda _: "none"), dist.group.WORLD
    assert group is not None
    with patch.multiple(fabric, **stand_ins), properties, nvml, redirect_stdout(output := StringIO()):
        fabric.report(CPU, group)
    if dist.get_rank() == 0:
        assert output.getvalue().count("POSIX_FILE_DESCRIPTOR no driver; FABRIC no driver") == 2
        assert output.getvalue().endswith("reach: 1 node (ranks 0 to 1; 1 machine)\n")


def test_fabric(tmp_path: Path) -> None:
    run_ranks(_run_fabric, 2, tmp_path)


def _run_host_time(_: Path) -> None:
    with patch.multiple(host_time, _STEPS=2, _TRACED=1, _SAMPLED=2), redirect_stdout(output := StringIO()):
        assert host_time.work(_ranks(_TINY, contenders=["drop_in"])) == 0
    if dist.get_rank() == 0:
        step, _with_warm_up, *lines = output.getvalue().splitlines()
        assert step.startswith("drop_in: ")
        tables = [line.split() for line in lines]
        assert [cells[:2] for cells in tables if cells[:1] in (["part"], ["ms"])] == [
            ["part", "calls"],
            ["part", "ops"],
            ["ms", "line"],
        ]
        for name in ("Exchange.start_backward", "OverlapShardedEmbeddingBagCollection.input_dist"):
            assert next(cells for cells in tables if cells[0] == name)[1] == "1", f"{name}: calls in a step"


def test_host_time(tmp_path: Path) -> None:
    run_ranks(_run_host_time, 2, tmp_path)


def test_every_script_is_rehearsed() -> None:
    folder = Path(kernels_alone.__file__).parent
    texts = {path.stem: path.read_text() for path in folder.glob("*.py") if not path.stem.startswith("test_")}
    scripts = {name for name, text in texts.items() if "__main__" in text}
    rehearsed = (caching, cross, dense, fabric, fused_tables, host_time, insert_ids)
    rehearsed += (kernels_alone, launched, stages, step_parts)
    assert scripts == {each.__name__.rpartition(".")[2] for each in rehearsed}
