"""The pictures of `docs/simulator.md` show all points that they draw."""

import importlib
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest


def test_every_point_of_a_simulated_figure_lies_within_its_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("docs/results")
    plots = importlib.import_module("plot_simulated")
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(plots, "_save", lambda figure, path: drawn.update({path.stem: figure}))
    plots.main(Path("docs/results"))
    assert {f"{name}.svg" for name in drawn} == {path.name for path in Path("docs/results").glob("simulated_*.svg")}
    for name, figure in drawn.items():
        for axes in figure.axes:
            low, high = axes.get_ylim()
            curves = [line for line in axes.lines if not line.get_label().startswith("_")]
            assert curves or axes.patches, name
            assert low > 0 or axes.get_yscale() == "linear", name
            assert all(low <= y <= high for line in curves for y in line.get_ydata()), name
            assert all(bar.get_height() <= high for bar in axes.patches), name
        plt.close(figure)
