"""A picture of traced steps: a lane a stream, a bar a kernel, and below them when communication is exposed."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from dlrm_overlap.observe.trace_summary import KINDS, Span, Work, exposed_spans, length, merge

# Kind -> colour and hatch. Neighbours in time differ in how light they are, and communication is hatched, so that
# the picture can be read in grey.
_LOOKS = {
    "products": ("#c6dbef", ""),
    "dense": ("#6baed6", ""),
    "optimizer": ("#084594", ""),
    "lookup": ("#238b45", ""),
    "update": ("#00441b", ""),
    "sort": ("#a1d99b", ""),
    "ids": ("#d9f0d3", "----"),
    "exchange": ("#fd8d3c", "////"),
    "all-reduce": ("#fdd0a2", "\\\\\\\\"),
    "samples": ("#d9d9d9", ""),
    "copies": ("#969696", ""),
}
assert set(_LOOKS) == set(KINDS)
_LANE = 0.75  # of a lane's height
_UNSEEN = 1 / 4000  # of the axis: bars of one kind that are nearer to each other are drawn as one


def lanes_of(work: Sequence[Work]) -> list[int]:
    """Return the streams of `work`, the busiest first."""
    streams = {each.stream for each in work}
    return sorted(streams, key=lambda stream: -length(each.span for each in work if each.stream == stream))


def draw_lanes(axes: Any, work: Sequence[Work], begin_us: float, axis_ms: float) -> None:
    """Draw the lanes of `work` from top to bottom, and one of exposed communication below them.

    Args:
        axes: matplotlib's, with time in ms to the right.
        work: kernels and copies.
        begin_us: is 0 on the axis.
        axis_ms: how long the axis is.
    """
    unseen_ms = axis_ms * _UNSEEN

    def bars(lane: int, spans: Sequence[Span], **look: Any) -> None:
        top, bottom = lane - _LANE / 2, lane + _LANE / 2
        corners = []
        for begin, end in merge(Span(begin, end + unseen_ms * 1e3) for begin, end in spans):
            left, right = (begin - begin_us) * 1e-3, (end - begin_us) * 1e-3 - unseen_ms
            corners.append(Path([(left, top), (right, top), (right, bottom), (left, bottom), (left, top)], closed=True))
        if corners:  # one shape for all, which keeps the file short
            axes.add_patch(PathPatch(Path.make_compound_path(*corners), linewidth=0, **look))

    streams = lanes_of(work)
    for lane, stream in enumerate(streams):
        for kind, (colour, hatch) in _LOOKS.items():
            spans = [each.span for each in work if each.stream == stream and each.kind == kind]
            bars(lane, spans, facecolor=colour, hatch=hatch, edgecolor="black")
    bars(len(streams), exposed_spans(work), facecolor="black")
    axes.set_yticks(range(len(streams) + 1), [*(f"stream {stream}" for stream in streams), "exposed"], fontsize=6)
    axes.set_ylim(len(streams) + 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)


def legend_keys(work: Sequence[Work]) -> list[Patch]:
    """Return a key for each kind in `work`, and one for exposed communication."""
    kinds = {each.kind for each in work}
    keys = [Patch(facecolor=c, hatch=h, lw=0.3, label=kind) for kind, (c, h) in _LOOKS.items() if kind in kinds]
    return [*keys, Patch(facecolor="black", label="exposed communication")]


def draw_timeline(work: Sequence[Work], title: str) -> np.ndarray:
    """Return a picture of `work`, which is not empty, [height, width, 3] uint8."""
    begin = min(each.span.begin for each in work)
    whole_ms = (max(each.span.end for each in work) - begin) * 1e-3
    with matplotlib.rc_context({"font.size": 8}):
        figure = Figure(figsize=(8, 1.5 + 0.2 * len(lanes_of(work))), dpi=165, layout="constrained")
        axes = figure.subplots()
        draw_lanes(axes, work, begin, whole_ms)
        axes.set_xlim(0, 1.01 * whole_ms)
        axes.set_xlabel("ms on rank 0")
        figure.legend(handles=legend_keys(work), loc="outside upper center", ncols=6, frameon=False, title=title)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()
