"""Bars and lines of contenders, as several plots have them."""

import math
from collections.abc import Sequence
from typing import Any

from dlrm_overlap.bench.report.measured import (
    Run,
    contenders,
    milliseconds,
    need,
    number,
    trusted,
)
from dlrm_overlap.bench.report.style import EDGE, LIMIT, Look, looks

_SPAN = 0.84  # of the place of a group of bars
_LEAST_BARS = 4  # of a group, whose place fewer bars do not fill
_NARROW = 32  # bars of a plot from which on their numbers stand upright
_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.2}  # keeps a number readable beside a higher bar
_LYING, _UPRIGHT = 0.08, 0.16  # of the highest bar, about: what a number takes above its own


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
    a number that it would cross stands on it. What is higher than `cut` ends there, with an arrow behind its number.
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
    seen = set()
    for place, (group, base) in enumerate(zip(groups, bases, strict=True)):
        bound = number(next(iter(group.values())), limit) if limit else None
        across = bound / base if bound is not None else 0.0
        for name, row in group.items():
            x = place + (names.index(name) - (len(names) - 1) / 2) * width if len(group) > 1 else place
            look, height = shown[name], heights[place][name]
            told = f"{height:.2f}" if over else milliseconds(height)
            label = name if name not in seen else "_"
            seen.add(name)
            alpha = {} if trusted(row) else {"linestyle": ":", "alpha": 0.5}
            axes.bar(
                x, min(height, cut), width * 0.94, color=look.colour, hatch=look.hatch, label=label, **EDGE, **alpha
            )
            if height > cut:
                axes.annotate(f"{told} \u2191", (x, cut), xytext=(0, -1), va="top", **text)
            else:
                foot = across if height < across < height + room else height
                axes.annotate(told, (x, foot), xytext=(0, 1.5), va="bottom", **text)
        if bound is not None:
            label = bound_name if "limit" not in seen else "_"
            seen.add("limit")
            axes.hlines(across, place - _SPAN / 2, place + _SPAN / 2, label=label, zorder=3, **LIMIT)
    if not all(trusted(row) for group in groups for row in group.values()):
        axes.bar(0, 0, color="white", **EDGE, linestyle=":", label="dotted: results differ")
    if over:
        labels = [f"{each}\n{over} {milliseconds(base)} ms" for each, base in zip(labels, bases, strict=True)]
    axes.set_xticks(range(len(groups)), labels, fontsize=7)
    axes.set_xlim(-0.6, len(groups) - 0.4)


def _numbers(groups: int, names: int, highest: float) -> tuple[dict[str, Any], float]:
    """Return how numbers above bars are written, and how high they are, about, in the unit of the bars."""
    upright = groups * names >= _NARROW
    text = {
        "ha": "center",
        "fontsize": 5.5 if groups > 6 else 6.5,
        "rotation": 90 if upright else 0,
        "textcoords": "offset points",
        "bbox": _BOX,
        "zorder": 4,
    }
    return text, (_UPRIGHT if upright else _LYING) * highest


def line(axes: Any, name: str, x: Sequence[float], y: Sequence[float], look: Look, **more: Any) -> None:
    """Draw a contender's points and the line through them."""
    axes.plot(x, y, look.line, marker=look.marker, color="black", markerfacecolor=look.colour, lw=1, label=name, **more)
