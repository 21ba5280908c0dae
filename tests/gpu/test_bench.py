from pathlib import Path

import pytest
import torch

from tests.conftest import read_rows, run_cli

pytestmark = pytest.mark.gpu
GPUS = torch.cuda.device_count()
CONTENDERS = {"baseline", "nccl_chunked_2", "nccl_chunked_4", "pgas", "fused"}
SHAPES = {"stage": [], "sweep": ["--pooling_factors", "1", "8", "--dims", "32", "128", "--global_batches", "1024"]}


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", SHAPES)
def test_a_figure_of_the_stage_has_rows_of_its_contenders(kind: str, tmp_path: Path) -> None:
    output = tmp_path / f"{kind}.csv"
    argv = ["bench", kind, "--config", "configs/bench/small_batch.yaml", "--tables_per_rank", "4", *SHAPES[kind]]
    argv += ["--iterations", "4", "--nproc", str(min(GPUS, 4)), "--output", str(output)]
    result = run_cli(*argv, timeout_s=300)
    assert result.returncode == 0, result.stderr
    assert {row["contender"] for row in read_rows(output)} >= CONTENDERS
