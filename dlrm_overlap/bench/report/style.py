"""One look for all plots: lightness, hatch and marker separate contenders in grey; hardware and command below each."""

import io
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure


class Look(NamedTuple):
    """How a contender is drawn."""

    colour: str
    hatch: str
    marker: str
    line: str


# In grey, any two of a figure differ in lightness or in hatch. A hatch is black, so a bar that has one is light.
_LOOKS = {
    "baseline": Look("#d4d9df", "", "o", "--"),
    "torchrec": Look("#9aa5b1", "////", "s", "--"),
    "torchrec_strongest": Look("#d4d9df", "\\\\\\\\", "D", "--"),
    "nccl": Look("#f2f2f2", "----", "v", ":"),
    "pgas": Look("#1f6f8b", "", "o", "-"),
    "fused": Look("#f0b27a", "xxxx", "^", "-"),
}
_ALIKE = {"serial": "baseline", "torch": "torchrec", "fused_graph": "fused", "stores": "fused"}
_ALIKE |= dict.fromkeys(("pgas_graph", "push", "dma", "auto"), "pgas")
_OTHERS = (
    Look("#c6dbef", "....", "P", "-."),
    Look("#252525", "", "X", ":"),
    Look("#fdd0a2", "||||", "<", "-."),
    Look("#bdbdbd", "++++", ">", ":"),
    Look("#969696", "", "*", "-."),
    Look("#f7f7f7", "////", "p", ":"),
    Look("#9ecae1", "oo", "h", "-."),
    Look("#7fb3a8", "----", "d", ":"),
)
EDGE: dict[str, Any] = {"edgecolor": "black", "linewidth": 0.5}
LIMIT: dict[str, Any] = {"color": "black", "linewidth": 1.4}
_SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "plot", "font.size": 8, "hatch.linewidth": 0.5}
_WIDTH = 9.0
_CAPTION = 150  # letters of a line, all of the width
_DPI = 110
_LEGEND_PT, _KEY_PT, _LETTER_PT = 620, 42, 4.4  # of a legend: its width, a key with its distances, a letter


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Return name -> its look, no two alike as long as there are enough.

    Of names that share a look of their own, as `pgas` and `pgas_graph`, the first has it.
    """
    found: dict[str, Look] = {}
    others = 0
    for name in names:
        own = _LOOKS.get(_ALIKE.get(name, name))
        if own is None or own in found.values():
            own = _OTHERS[others % len(_OTHERS)]
            others += 1
        found[name] = own
    return found


class Picture:
    """A plot that is drawn once and saved as SVG and as PNG."""

    def __init__(self, height: float, columns: int = 1, rows: int = 1) -> None:
        """Make `rows` x `columns` panels, without lines at the top and on the right.

        Args:
            height: of the plot in inches, the caption included.
            columns: of panels.
            rows: of panels.
        """
        with matplotlib.rc_context(_SETTINGS):
            self.figure = Figure(figsize=(_WIDTH, height), layout="constrained")
            self.panels: list[Any] = self.figure.subplots(rows, columns, squeeze=False).ravel().tolist()
        for each in self.panels:
            each.spines[["top", "right"]].set_visible(False)
            each.tick_params(labelsize=7)
            each.xaxis.label.set_size(8)
            each.yaxis.label.set_size(8)

    def caption(self, *texts: str) -> None:
        """Write below the plot its hardware and its command."""
        text = "\n".join(line for each in texts for line in textwrap.wrap(each, _CAPTION))
        self.figure.supxlabel(text, fontsize=6.5, family="monospace")

    def legend(self, axes: Any) -> None:
        """Put the names of what `axes` holds above the plot, those of bars before that of the limit."""
        found = sorted(
            zip(*axes.get_legend_handles_labels(), strict=True), key=lambda each: isinstance(each[0], LineCollection)
        )
        handles, names = zip(*found, strict=True)
        columns = int(_LEGEND_PT / (_KEY_PT + _LETTER_PT * max(map(len, names))))
        columns = max(1, min(columns, len(names)))
        self.figure.legend(handles, names, loc="outside upper center", ncols=columns, frameon=False, fontsize=7.5)

    def svg(self) -> bytes:
        """Return the plot as SVG, whose text is text; the same plot gives the same bytes."""
        file = io.BytesIO()
        with matplotlib.rc_context(_SETTINGS):
            self.figure.savefig(file, format="svg", metadata={"Date": None})
        return file.getvalue()

    def save_png(self, path: Path) -> None:
        """Write the plot as PNG."""
        with matplotlib.rc_context(_SETTINGS):
            FigureCanvasAgg(self.figure)
            self.figure.savefig(path, dpi=_DPI, metadata={"Software": None})
