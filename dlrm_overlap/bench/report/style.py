"""One look for all plots: told apart in grey by lightness, hatch and marker; hardware and command below each."""

import io
import itertools
import textwrap
from collections.abc import Iterable, Sequence
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


# In grey, any two of a figure differ in lightness or in hatch. A hatch is black, so what has one is light.
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
    "serial": Look("#d4d9df", "", "o", "--"),
    "torch": Look("#9aa5b1", "////", "s", "--"),
    "auto": Look("#1f6f8b", "", "o", "-"),
}
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
_SETTINGS = {"svg.fonttype": "none", "font.size": 8, "hatch.linewidth": 0.5}
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
        own = _LOOKS.get(name)
        if own is None or own in found.values():
            own = _OTHERS[others % len(_OTHERS)]
            others += 1
        found[name] = own
    return found


def legend_columns(names: Sequence[str]) -> int:
    """Return in how many columns a legend of `names`, filled column by column, is as wide as a plot at most."""
    for columns in range(len(names), 1, -1):
        each, more = divmod(len(names), columns)
        sizes = [each + 1] * more + [each] * (columns - more)
        ends = list(itertools.accumulate(sizes))
        longest = [max(map(len, names[end - size : end])) for size, end in zip(sizes, ends, strict=True)]
        if sum(_KEY_PT + _LETTER_PT * letters for letters in longest) <= _LEGEND_PT:
            return columns
    return 1


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
        text = "\n".join([*textwrap.wrap(hardware, _CAPTION), *textwrap.wrap(command, _CAPTION)])
        self.figure.supxlabel(text, fontsize=6.5, family="monospace")

    def title(self, text: str) -> None:
        """Write above a plot without a legend what its numbers are."""
        self.figure.suptitle(text, fontsize=8.5)

    def legend(self, axes: Any) -> None:
        """Put the names of what `axes` holds above the plot, those of bars before that of the limit."""
        found = sorted(
            zip(*axes.get_legend_handles_labels(), strict=True), key=lambda each: isinstance(each[0], LineCollection)
        )
        handles, names = zip(*found, strict=True)
        columns = legend_columns(names)
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
