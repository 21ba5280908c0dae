"""Who takes part in each figure of the stage's forward, and in which order."""

import pytest

from dlrm_overlap.bench.figures.stage import make_contenders
from dlrm_overlap.bench.harness.workload import Workload
from dlrm_overlap.config import Config
from tests.unit.bench.conftest import values_of

EVERY = ["baseline", "torchrec", "nccl", "pgas", "fused"]


@pytest.mark.parametrize(
    ("kind", "options", "names"),
    [
        ("stage", "", [*EVERY, "pgas_copied"]),
        ("weak", "--tables_per_rank 3", EVERY),
        ("sweep", "", ["baseline", "pgas", "fused"]),
        ("stage", "--slice_bags 4 128", [*EVERY, "fused_stores", "fused_stores"]),
        ("stage", "--schedules linear balanced", [*EVERY, "pgas", "pgas", "fused", "fused"]),
        ("stage", "--programs_per_sm 1 2", [*EVERY, "fused", "fused"]),
    ],
)
def test_contenders(kind: str, options: str, names: list[str], config: Config, workload: Workload) -> None:
    made = make_contenders(kind, values_of(kind, *options.split()), config, workload)
    found = [(contender.name, contender.columns()) for contender in made]
    for contender in made:
        contender.close()
    assert [name for name, _ in found] == names
    if kind == "stage" and options:
        setting, *values = options.removeprefix("--").split()
        column = "schedule" if setting == "schedules" else setting
        assert [str(columns[column]) for _, columns in found[5:]] == [*values] * ((len(found) - 5) // len(values))
    for name, columns in found:
        assert columns.get("put") == {"fused": "in_place", "fused_stores": "stores"}.get(name)
