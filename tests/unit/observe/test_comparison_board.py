"""What `compare` adds to TensorBoard: the layout, the table, what steps are made of, differences of losses."""

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout  # pyright: ignore[reportAttributeAccessIssue]

from dlrm_overlap.observe.comparison import write_board
from dlrm_overlap.observe.trace_summary import PARTS

STEP = dict.fromkeys(PARTS, 0.25)


def _comparison(breakdown_ms: dict[str, float] | None, device: str) -> dict[str, Any]:
    backend = {"samples_per_s": 64678.4, "step_ms_p95": 30.0, "agree": True, "breakdown_ms": breakdown_ms}
    backend |= {"train_loss": 0.5, "eval_auroc": 0.75, "max_relative_difference": 0.0}
    reference = {"step_ms_p50": 20.0, "speedup": 1.0, "speedup_interval": None}
    pgas = {"step_ms_p50": 10.0, "speedup": 2.0, "speedup_interval": [1.75, 2.25]}
    return {
        "reference": "torchrec",
        "device": device,
        "interleave": 10,
        "noise": {"runs": {"torchrec_again": {"step_ms_p50": 16.0, "max_relative_difference": 1e-5}}},
        "backends": {"torchrec": backend | reference, "pgas": backend | pgas},
    }


def _board(folder: Path, breakdown_ms: dict[str, float] | None, device: str = "cuda") -> dict[str, EventAccumulator]:
    """Write a comparison's board and return run -> what TensorBoard reads of it."""
    losses = {"torchrec": {5: 0.5, 10: 0.4}, "pgas": {5: 0.5, 10: 0.44}, "torchrec_again": {5: 0.5, 10: 0.4}}
    comparison = _comparison(breakdown_ms, device)
    write_board(folder / "comparison", {name: folder / name for name in losses}, losses, comparison)
    found = {name: EventAccumulator(str(folder / name)) for name in (*losses, "comparison")}
    for events in found.values():
        events.Reload()
    return found


def _text(events: EventAccumulator, tag: str) -> str:
    (event,) = events.Tensors(f"{tag}/text_summary")
    return event.tensor_proto.string_val[0].decode()


def _charts(events: EventAccumulator) -> dict[str, list[str]]:
    """Return the title of each chart of the page Custom Scalars -> its tags."""
    (event,) = events.Tensors("custom_scalars__config__")
    categories = Layout.FromString(event.tensor_proto.string_val[0]).category
    return {
        chart.title: [*chart.multiline.tag, *(tag for s in chart.margin.series for tag in (s.value, s.lower, s.upper))]
        for category in categories
        for chart in category.chart
    }


def test_the_board_has_table_charts_and_what_the_steps_are_made_of(tmp_path: Path) -> None:
    board = _board(tmp_path, STEP)
    lines = _text(board["comparison"], "comparison").splitlines()
    assert lines[2:] == [
        "| torchrec | 0.500000 | 0.7500 | 64678 | 20 | 30 | 1.00 | - | reference (noise 1.0e-5) |",
        "| pgas | 0.500000 | 0.7500 | 64678 | 10 | 30 | 2.00 | 1.75 to 2.25 | identical |",
        "| torchrec_again | - | - | - | 16 | - | 1.25 | - | reference again |",
    ]
    charts = _charts(board["comparison"])
    assert next(iter(charts.values())) == ["speed/step_ms_p50", "speed/step_ms_p10", "speed/step_ms_p90"]
    assert {"speed/exposed_ms", "train/loss", "compare/loss_difference", "speed/samples_per_s"} <= {
        tag for tags in charts.values() for tag in tags
    }
    assert f"| pgas | {' | '.join(['0.25'] * len(PARTS))} | 2 |" in _text(board["comparison"], "breakdown")
    differences = [event.value for event in board["pgas"].Scalars("compare/loss_difference")]
    assert differences == pytest.approx([0, 0.1])


def test_a_board_without_traced_steps_has_no_empty_chart(tmp_path: Path) -> None:
    board = _board(tmp_path, None)
    assert "speed/exposed_ms" not in {tag for tags in _charts(board["comparison"]).values() for tag in tags}
    assert len(_charts(board["comparison"])) == 4
