"""The figures of the stage run on the GPUs at hand, at small shapes: outputs agree, rows are there."""

from pathlib import Path

import pytest
import torch

from tests.conftest import read_rows, run_cli

pytestmark = pytest.mark.gpu
GPUS = torch.cuda.device_count()
FIGURES = {
    "stage": (["--iterations", "4"], {"baseline", "nccl_chunked_2", "nccl_chunked_4", "pgas", "fused"}),
    "sweep": (
        ["--iterations", "4", "--pooling_factors", "1", "8", "--dims", "32", "128", "--global_batches", "1024"],
        {"baseline", "nccl_chunked_2", "nccl_chunked_4", "pgas", "fused"},
    ),
}


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", FIGURES)
def test_a_figure_of_the_stage_has_rows_of_its_contenders(kind: str, tmp_path: Path) -> None:
    options, names = FIGURES[kind]
    output = tmp_path / f"{kind}.csv"
    argv = ["bench", kind, "--config", "configs/bench/small_batch.yaml", "--tables_per_rank", "4", *options]
    result = run_cli(*argv, "--nproc", str(min(GPUS, 4)), "--output", str(output), timeout_s=300)
    assert result.returncode == 0, result.stderr
    rows = read_rows(output)
    assert names <= {row["contender"] for row in rows}
