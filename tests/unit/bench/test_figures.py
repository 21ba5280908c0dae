"""Who takes part in each figure of the forward, and in which order."""

from types import SimpleNamespace
from typing import Any

import pytest

from dlrm_overlap.bench.figures import occupancy, scaling, schedule, slice, stage
from dlrm_overlap.bench.harness.contenders import Contender, Overlap
from dlrm_overlap.bench.harness.workload import Workload
from dlrm_overlap.bench.registry import FIGURES
from dlrm_overlap.config import Config, InputError


def _contenders(
    kind: str, config: Config, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, dict[str, Any]]]:
    """Return the names of those that the figure `kind` hands to the shared procedure, and their settings."""
    made: list[Contender] = []

    def measure(request: object, ranks: object, make: Any, *_: object, **__: object) -> int:
        made.extend(make(config.embedding, workload))
        return 0

    for figure in (occupancy, scaling, schedule, slice, stage):
        monkeypatch.setattr(figure, "measure_forward", measure)
    request = SimpleNamespace(chunks=(2,))
    assert FIGURES[kind].load()(request, None) == 0
    found = [(contender.name, contender.columns()) for contender in made]
    for contender in made:
        contender.close()
    return found


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            "stage",
            ["baseline", "torchrec", "nccl", "pgas", "fused", "pgas_copied"],
        ),
        ("weak", ["baseline", "torchrec", "nccl", "pgas", "fused"]),
        ("strong", ["baseline", "torchrec", "nccl", "pgas", "fused"]),
        ("slice", ["baseline", "pgas", *["fused_stores"] * 6]),
        ("schedule", ["baseline", *["pgas"] * 3, *["fused"] * 3]),
    ],
)
def test_contenders(
    kind: str, names: list[str], config: Config, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _contenders(kind, config, workload, monkeypatch)
    assert [name for name, _ in found] == names
    puts = {"fused": "in_place", "fused_stores": "stores", "fused_dma": "dma"}
    assert all(columns.get("put") == puts.get(name) for name, columns in found)
    assert all((columns.get("slice_bags") is not None) == (name in puts) for name, columns in found)
    if kind == "slice":
        assert [columns["slice_bags"] for _, columns in found[2:]] == [4, 8, 16, 32, 64, 128]
    if kind == "schedule":
        assert [columns["schedule"] for _, columns in found[1:]] == ["linear", "remote_first", "balanced"] * 2


def test_occupancy_ends_where_no_more_programs_fit(
    config: Config, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(contender: Overlap, batch: object) -> None:
        assert contender.options.programs_per_sm is not None
        if contender.options.programs_per_sm > 4:
            raise InputError("more than fit")

    monkeypatch.setattr(Overlap, "step", step)
    found = _contenders("occupancy", config, workload, monkeypatch)
    assert [name for name, _ in found] == ["baseline", "fused", "fused", "fused", "fused"]
    assert [columns["programs_per_sm"] for _, columns in found[1:]] == [1, 2, 4, None]
