"""Plots can be read in grey, and their names fit."""

from itertools import combinations

import pytest
from matplotlib.colors import to_rgb

from dlrm_overlap.bench.report.drawing import bars
from dlrm_overlap.bench.report.style import Look, Picture, looks

FIGURES = {
    "stage": [
        *("baseline", "nccl_chunked", "nccl_registered_4", "nccl_copy_engines_4", "torchrec", "nccl", "pgas"),
        *("fused", "fused_stores", "fused_dma", "pgas_copied"),
    ],
    "step": ["torchrec", "torchrec_strongest", "torchrec_bf16_output", "pgas", "fused", "pgas_graph", "fused_graph"],
    "gemm": ["serial", "torch", "chunks", "copies", "pushes", "tiles", "triggered", "auto"],
    "backward": ["baseline", "push", "push_exposed", "atomic"],
}


def _grey(look: Look) -> float:
    """Return how light a look is in grey, from 0 to 1."""
    red, green, blue = to_rgb(look.colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue


@pytest.mark.parametrize("names", FIGURES.values(), ids=list(FIGURES))
def test_no_two_contenders_of_a_figure_look_alike_in_grey(names: list[str]) -> None:
    found = looks(names)
    assert list(found) == names
    for (one, look), (other, its) in combinations(found.items(), 2):
        assert look.hatch != its.hatch or abs(_grey(look) - _grey(its)) > 0.1, f"{one} and {other}"
        assert (look.marker, look.line) != (its.marker, its.line), f"{one} and {other}"
    assert all(_grey(look) > 0.5 for look in found.values() if look.hatch), "a black hatch is seen on light bars alone"


def test_a_legend_is_not_wider_than_its_plot() -> None:
    names = ["torchrec", "torchrec_strongest", "pgas_graph_partition", "pgas_graph_collective", "fused_graph"]
    picture = Picture(2.0)
    (axes,) = picture.panels
    for name in names:
        axes.plot([0, 1], label=name * 2)
    picture.legend(axes)
    picture.svg()  # places the legend
    (legend,) = picture.figure.legends
    box = legend.get_window_extent()
    assert picture.figure.bbox.x0 <= box.x0
    assert box.x1 <= picture.figure.bbox.x1


def test_a_bar_that_is_cut_tells_its_height_with_an_arrow() -> None:
    (axes,) = Picture(2.0).panels
    group = {"baseline": {"median_ms": "2"}, "push": {"median_ms": "1"}, "atomic": {"median_ms": "9"}}
    bars(axes, [group], ["a shape"], over="baseline", cut=1.6)
    assert [bar.get_height() for bar in axes.patches] == [1.0, 0.5, 1.6]
    assert [text.get_text() for text in axes.texts] == ["1.00", "0.50", "4.50 \u2191"]
    assert axes.get_xticklabels()[0].get_text() == "a shape\nbaseline 2.00 ms"
