"""Bars and lines of contenders, as several plots have them."""

from collections.abc import Callable, Sequence
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


def bars(
    axes: Any,
    groups: Sequence[Run],
    labels: Sequence[str],
    limit: str | None = None,
    over: str | None = None,
    digits: Callable[[float], str] = milliseconds,
    bound_name: str = "limit of the hardware",
) -> None:
    """Draw each group's times side by side, in ms or over that of the contender `over`, with ms above the bars.

    A bar of dots is of a contender whose results were not the reference's. `limit` is the column of the line across.
    """
    names = contenders(groups)
    shown = looks(names)
    width = _SPAN / len(names)
    seen = set()
    for place, group in enumerate(groups):
        base = need(group[over], "median_ms") if over else 1.0
        for i, (name, row) in enumerate(group.items()):
            time = need(row, "median_ms")
            x = place - _SPAN / 2 + (names.index(name) + 0.5) * width if len(group) > 1 else place
            look = shown[name]
            label = name if name not in seen else "_"
            seen.add(name)
            alpha = {} if trusted(row) else {"linestyle": ":", "alpha": 0.5}
            axes.bar(x, time / base, width * 0.94, color=look.colour, hatch=look.hatch, label=label, **EDGE, **alpha)
            axes.text(x, time / base, digits(time), ha="center", va="bottom", fontsize=5.5 if len(groups) > 6 else 6.5)
            if limit and i == 0 and (bound := number(row, limit)) is not None:
                label = bound_name if "limit" not in seen else "_"
                seen.add("limit")
                axes.hlines(bound / base, place - _SPAN / 2, place + _SPAN / 2, label=label, **LIMIT)
    axes.set_xticks(range(len(groups)), labels, fontsize=7)


def line(axes: Any, name: str, x: Sequence[float], y: Sequence[float], look: Look, **more: Any) -> None:
    """Draw a contender's points and the line through them."""
    axes.plot(x, y, look.line, marker=look.marker, color="black", markerfacecolor=look.colour, lw=1, label=name, **more)
