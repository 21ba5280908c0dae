"""The ablation of the whole step: one thing more or less, measured beside its reference."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dlrm_overlap.bench.figures import ablation, step
from dlrm_overlap.bench.harness import training_runs
from dlrm_overlap.bench.request import AblationRequest
from dlrm_overlap.bench.step_contenders import ABLATION, STEP_CONTENDERS, StepContender
from dlrm_overlap.config import InputError
from tests.conftest import read_rows
from tests.distributed.workers import quickstart, ranks_here


def _keys(name: str) -> dict[str, Any]:
    return {**STEP_CONTENDERS[name].keys, "int32_ids": STEP_CONTENDERS[name].int32_ids}


@pytest.mark.parametrize("reference", ABLATION)
def test_each_contender_of_the_ablation_differs_from_its_reference_in_what_it_says(reference: str) -> None:
    alike = _keys(reference)
    for name in ABLATION[reference]:
        differs = {key for key, value in _keys(name).items() if alike.get(key) != value}
        if name not in ("torchrec_strongest", "pgas"):  # these differ in several things
            assert len(differs) == 1, f"{name} differs in {differs}"


def test_only_contenders_of_the_ablation_are_taken() -> None:
    with pytest.raises(InputError, match=r"--contenders fused: not a contender; known: torchrec_no_balance, "):
        AblationRequest("ablation", Path("unused.csv"), contenders=("fused",))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_groups_take_turns_with_both_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_of_one: dist.ProcessGroup
) -> None:
    eager = {"train.graph_dense": False, "train.compile_dense": False}
    for name in (*ABLATION, "pgas_eager", "torchrec_no_balance"):
        contender = STEP_CONTENDERS[name]
        monkeypatch.setitem(STEP_CONTENDERS, name, StepContender({**contender.keys, **eager}))
    monkeypatch.setattr(ablation, "_IN_A_GROUP", 1)
    monkeypatch.setattr(training_runs, "_WARMUP_STEPS", 1)
    for figure in (ablation, step):
        monkeypatch.setattr(figure, "CHECKED_STEPS", 3)
    config = quickstart(tmp_path, "run", "--train.batch_size", "64", "--train.steps", "4")
    request = AblationRequest(
        "ablation", tmp_path / "a.csv", contenders=("pgas_eager", "torchrec_no_balance"), steps=4, batches=2
    )
    assert ablation.run(request, ranks_here(config)) == 0
    rows = read_rows(request.output)
    assert [(row["group"], row["contender"], row["reference"], row["plan"]) for row in rows] == [
        ("0", "torchrec", "torchrec", "auto"),
        ("0", "pgas_graph", "pgas_graph", "auto"),
        ("0", "pgas_eager", "torchrec", "auto"),
        ("1", "torchrec", "torchrec", "auto"),
        ("1", "pgas_graph", "pgas_graph", "auto"),
        ("1", "torchrec_no_balance", "torchrec", "table_wise"),
    ]
    medians = {(row["group"], row["contender"]): row["median_ms"] for row in rows}
    for row in rows:
        assert row["reference_ms"] == medians[row["group"], row["reference"]]
        ratio = float(row["median_ms"]) / float(row["reference_ms"])
        assert float(row["over_reference"]) == pytest.approx(ratio, rel=1e-2)
        assert (row["agrees"], row["fullest_rank_rows"], row["fullest_rank_columns"]) == ("True", "1", "1")
