"""Who takes part in each figure of the stage's forward, and in which order."""

from dataclasses import replace
from typing import Any

import pytest

from dlrm_overlap.bench.figures.stage import make_contenders
from dlrm_overlap.bench.harness.workload import Workload
from dlrm_overlap.config import Config


@pytest.mark.parametrize(
    ("kind", "keys", "names"),
    [
        ("stage", {}, ["baseline", "torchrec", "nccl", "pgas", "fused", "pgas_copied"]),
        ("sweep", {}, ["baseline", "pgas", "fused"]),
        (
            "stage",
            {"put": "staged", "slice_bags": 4, "schedule": "linear"},
            ["baseline", "torchrec", "nccl", "pgas", "fused_stores", "pgas_copied"],
        ),
    ],
)
def test_contenders(kind: str, keys: dict[str, Any], names: list[str], config: Config, workload: Workload) -> None:
    made = make_contenders(kind, replace(config, embedding=replace(config.embedding, **keys)), workload)
    found = {contender.name: contender.columns for contender in made}
    for contender in made:
        contender.close()
    assert list(found) == names
    assert "put" not in found["pgas"]
    asked = {"put": "direct", "slice_bags": 32, "schedule": "balanced", "programs_per_sm": None} | keys
    assert found["fused_stores" if keys else "fused"] == asked
