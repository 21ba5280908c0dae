"""One look for all plots: lightness, hatch and marker separate contenders in grey; hardware and command below each."""

import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from dlrm_overlap.bench.report.measured import Run, contenders, milliseconds, need, number, trusted


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
_SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "plot", "font.size": 8, "hatch.linewidth": 0.5}
_WIDTH = 9.0
_CAPTION = 150  # letters of a line, all of the width
_DPI = 110
_LEGEND_PT, _KEY_PT, _LETTER_PT = 620, 42, 4.4  # of a legend: its width, a key with its distances, a letter

_SPAN = 0.84  # of the room of a group of bars
_LEAST_BARS = 4  # of a group, whose room fewer bars do not fill
_NARROW = 32  # bars of a plot from which on their numbers stand upright
_LYING, _UPRIGHT = 0.08, 0.16  # of the highest bar, about: the height of a number above its own


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


def line(axes: Any, name: str, points: Sequence[tuple[float, float]], look: Look, **more: Any) -> None:
    """Draw a contender's points (x, y) and the line through them."""
    style = {"marker": look.marker, "color": "black", "markerfacecolor": look.colour, "lw": 1, "label": name} | more
    axes.plot([x for x, _ in points], [y for _, y in points], look.line, **style)


def stack(axes: Any, parts: Mapping[str, tuple[str, str]], heights: Mapping[str, Sequence[float]]) -> None:
    """Draw bars that are stacks of `parts`, name -> colour and hatch, each of so many `heights`."""
    below = [0.0] * len(next(iter(heights.values())))
    for name, (colour, hatch) in parts.items():
        if any(heights[name]):
            axes.bar(
                range(len(below)), heights[name], 0.65, bottom=below, color=colour, hatch=hatch, label=name, **EDGE
            )
            below = [one + other for one, other in zip(below, heights[name], strict=True)]


def bars(
    axes: Any,
    groups: Sequence[Run],
    labels: Sequence[str],
    limit: str | None = None,
    over: str | None = None,
    bound_name: str = "limit of the hardware",
    cut: float = math.inf,
) -> None:
    """Draw each group's times side by side, with the numbers above the bars: in ms, or over that of `over`.

    That contender's ms are then below each group's label.
    A bar of dots is of a contender whose results were not the reference's. `limit` is the column of the line across;
    a number that it would cross stands on it. A bar higher than `cut` ends there, with an arrow after its number.
    """
    names = contenders(groups)
    shown = looks(names)
    width = _SPAN / max(len(names), _LEAST_BARS)
    bases = [need(group[over], "median_ms") if over else 1.0 for group in groups]
    heights = [
        {name: need(row, "median_ms") / base for name, row in group.items()}
        for group, base in zip(groups, bases, strict=True)
    ]
    text, room = _numbers(len(groups), len(names), min(cut, max(max(each.values()) for each in heights)))
    for place, (group, base) in enumerate(zip(groups, bases, strict=True)):
        bound = number(next(iter(group.values())), limit) if limit else None
        across = bound / base if bound is not None else 0.0
        for name, row in group.items():
            x = place + (names.index(name) - (len(names) - 1) / 2) * width if len(group) > 1 else place
            look, height = shown[name], heights[place][name]
            written = f"{height:.2f}" if over else milliseconds(height)
            dotted = {} if trusted(row) else {"linestyle": ":", "alpha": 0.5}
            drawn = axes.bar(x, min(height, cut), width * 0.94, color=look.colour, hatch=look.hatch, **EDGE, **dotted)
            _label(axes, drawn, name)
            if height > cut:
                axes.annotate(f"{written} \u2191", (x, cut), xytext=(0, -1), va="top", **text)
            else:
                foot = across if height < across < height + room else height
                axes.annotate(written, (x, foot), xytext=(0, 1.5), va="bottom", **text)
        if bound is not None:
            _label(axes, axes.hlines(across, place - _SPAN / 2, place + _SPAN / 2, zorder=3, **LIMIT), bound_name)
    if not all(trusted(row) for group in groups for row in group.values()):
        axes.bar(0, 0, color="white", **EDGE, linestyle=":", label="dotted: results differ")
    if over:
        labels = [f"{each}\n{over} {milliseconds(base)} ms" for each, base in zip(labels, bases, strict=True)]
    axes.set_xticks(range(len(groups)), labels, fontsize=7)
    axes.set_xlim(-0.6, len(groups) - 0.4)


def _label(axes: Any, drawn: Any, name: str) -> None:
    """Name the drawn thing in the legend, once."""
    if name not in axes.get_legend_handles_labels()[1]:
        drawn.set_label(name)


def _numbers(groups: int, names: int, highest: float) -> tuple[dict[str, Any], float]:
    """Return the style of the numbers above bars, and their height, about, in the unit of the bars."""
    upright = groups * names >= _NARROW
    text = {
        "ha": "center",
        "fontsize": 5.5 if groups > 6 else 6.5,
        "rotation": 90 if upright else 0,
        "textcoords": "offset points",
        "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.2},  # a number is readable beside a higher bar
        "zorder": 4,
    }
    return text, (_UPRIGHT if upright else _LYING) * highest
