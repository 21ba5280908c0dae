"""One look for all plots: told apart in grey by lightness, hatch and marker; hardware and command below each."""

import io
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


class Look(NamedTuple):
    """How a contender is drawn."""

    colour: str
    hatch: str
    marker: str
    line: str


# Neighbours in a figure differ in lightness; where they cannot, in hatch.
_LOOKS = {
    "baseline": Look("#d4d9df", "", "o", "--"),
    "torchrec": Look("#9aa5b1", "////", "s", "--"),
    "torchrec_strongest": Look("#d4d9df", "\\\\\\\\", "D", "--"),
    "nccl": Look("#f2f2f2", "----", "v", ":"),
    "pgas": Look("#1f6f8b", "", "o", "-"),
    "pgas_graph": Look("#1f6f8b", "", "o", "-"),
    "push": Look("#1f6f8b", "", "o", "-"),
    "dma": Look("#1f6f8b", "", "o", "-"),
    "fused": Look("#f0b27a", "xxxx", "^", "-"),
    "fused_graph": Look("#f0b27a", "xxxx", "^", "-"),
    "stores": Look("#f0b27a", "xxxx", "^", "-"),
}
_OTHERS = (
    Look("#c6dbef", "", "P", "-."),
    Look("#525252", "", "X", ":"),
    Look("#fdd0a2", "||||", "<", "-."),
    Look("#bdbdbd", "++++", ">", ":"),
    Look("#08306b", "", "*", "-."),
)
EDGE: dict[str, Any] = {"edgecolor": "black", "linewidth": 0.5}
LIMIT: dict[str, Any] = {"color": "black", "linewidth": 1.4}
_SETTINGS = {"svg.fonttype": "none", "font.size": 8, "hatch.linewidth": 0.5}
_WIDTH = 9.0
_DPI = 110


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Return name -> its look, no two of those without a look of their own alike as long as there are enough."""
    found, others = {}, 0
    for name in names:
        if name in _LOOKS:
            found[name] = _LOOKS[name]
        else:
            found[name] = _OTHERS[others % len(_OTHERS)]
            others += 1
    return found


class Picture:
    """A plot that is drawn once and saved as SVG and as PNG."""

    def __init__(self, name: str, height: float) -> None:
        """Begin a plot of `height` inches, the caption included; `name` makes the SVG's ids those of no other plot."""
        self._settings: Any = _SETTINGS | {"svg.hashsalt": name}
        with matplotlib.rc_context(self._settings):
            self.figure = Figure(figsize=(_WIDTH, height), layout="constrained")

    def panels(self, columns: int = 1, rows: int = 1) -> Sequence[Any]:
        """Return `rows` x `columns` axes, without lines at the top and on the right."""
        with matplotlib.rc_context(self._settings):
            axes = self.figure.subplots(rows, columns, squeeze=False).ravel().tolist()
        for each in axes:
            each.spines[["top", "right"]].set_visible(False)
            each.tick_params(labelsize=7)
            each.xaxis.label.set_size(8)
            each.yaxis.label.set_size(8)
        return axes

    def caption(self, hardware: str, command: str) -> None:
        """Write below the plot what it was measured on and by which command."""
        text = "\n".join([*textwrap.wrap(hardware, 150), *textwrap.wrap(command, 130)])
        self.figure.supxlabel(text, fontsize=6.5, family="monospace")

    def legend(self, axes: Any, columns: int = 7) -> None:
        """Put the names of what `axes` holds above the plot."""
        handles, names = axes.get_legend_handles_labels()
        self.figure.legend(handles, names, loc="outside upper center", ncols=columns, frameon=False, fontsize=7.5)

    def svg(self) -> bytes:
        """Return the plot as SVG, whose text is text; the same plot gives the same bytes."""
        file = io.BytesIO()
        with matplotlib.rc_context(self._settings):
            self.figure.savefig(file, format="svg", metadata={"Date": None})
        return file.getvalue()

    def save_png(self, path: Path) -> None:
        """Write the plot as PNG."""
        with matplotlib.rc_context(self._settings):
            FigureCanvasAgg(self.figure)
            self.figure.savefig(path, dpi=_DPI, metadata={"Software": None})
