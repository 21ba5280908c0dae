from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_overlap.config import DataConfig, TablesConfig
from dlrm_overlap.data.loader import Loader, open_datasets
from dlrm_overlap.data.prepare import prepare_samples
from tests.agreement import assert_same_samples


@pytest.mark.gpu
@pytest.mark.parametrize("max_rows", [None, 1000])
@pytest.mark.parametrize("ids", ["rows", ["rows", "any", "rows", "any"]], ids=["rows", "any"])
def test_batches_of_a_loader_are_those_of_the_cpu(tmp_path: Path, max_rows: int | None, ids: Any) -> None:
    tables = TablesConfig(rows=[3, 300, 70_000, 40_000_000], multi_hot=[1, 100, 2, 12], ids=ids)
    folder = tmp_path / "packed"
    prepare_samples(DataConfig(tables=tables, eval_samples=8), folder, 50_000)
    config = DataConfig(kind="prepared", path=str(folder), shuffle=4096, tables=TablesConfig(max_rows=max_rows))
    train, _ = open_datasets(config)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), Loader(train, 4099, 0, 1, range(20), 3, 2, True) as loader:
        for step, batch in enumerate(loader):
            torch.cuda._sleep(1_000_000)  # the next slot must not change until its copy, which waits for this, is done
            assert batch.dense.is_cuda
            stream.synchronize()
            assert_same_samples(batch.to(torch.device("cpu")), train.read(step * 4099, 4099))
    assert step == 19
