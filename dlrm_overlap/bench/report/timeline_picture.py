"""A picture of traced steps: a lane a stream, a bar a kernel, and below them when communication is exposed."""

import pathlib
import textwrap
from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from dlrm_overlap.bench.harness.step_trace import TracedSteps
from dlrm_overlap.observe.trace_summary import KINDS, Span, Work, exposed_spans, length, merge

# Kind -> colour and hatch. Neighbours in time differ in how light they are, and what communicates is hatched, so that
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


def draw(traced: Mapping[str, TracedSteps], title: str, command: str, path: pathlib.Path) -> None:
    """Draw a typical step of each contender, one below the other on one axis of time, and write it to `path`, an SVG.

    Args:
        traced: by contender.
        title: what was measured, on what hardware.
        command: that has measured it.
        path: the file's folder must exist.
    """
    drawn = {name: (steps, steps.during(steps.typical)) for name, steps in traced.items()}
    lanes = {name: _lanes(work) for name, (_, work) in drawn.items()}
    longest = max(_ms(steps.typical, steps.typical.end) for steps, _ in drawn.values())
    heights = [len(streams) + 2.2 for streams in lanes.values()]
    # Text stays text, and the same steps give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "timeline", "font.size": 8}):
        figure = Figure(figsize=(10, 1.1 + 0.24 * sum(heights)), layout="constrained")
        panels = figure.subplots(len(drawn), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (name, (steps, work)) in zip(panels, drawn.items(), strict=True):
            _draw_step(axes, name, steps, work, lanes[name], longest * _UNSEEN)
        panels[-1].set_xlabel("time in the step, ms")
        panels[-1].set_xlim(0, 1.01 * longest)
        kinds = [kind for kind in _LOOKS if any(each.kind == kind for _, work in drawn.values() for each in work)]
        keys = [Patch(facecolor=_LOOKS[k][0], hatch=_LOOKS[k][1], lw=0.3, label=k) for k in kinds]
        keys.append(Patch(facecolor="black", label="exposed communication"))
        figure.legend(handles=keys, loc="outside upper center", ncols=6, frameon=False, title=title)
        figure.supxlabel(textwrap.fill(command, 150), fontsize=7, family="monospace")
        figure.savefig(path, metadata={"Date": None})


def _ms(step: Span, time_us: float) -> float:
    return (time_us - step.begin) * 1e-3


def _lanes(work: list[Work]) -> list[int]:
    """Return the streams of a step's work, the busiest first."""
    streams = {each.stream for each in work}
    return sorted(streams, key=lambda stream: -length(each.span for each in work if each.stream == stream))


def _draw_step(
    axes: Any, name: str, steps: TracedSteps, work: list[Work], streams: list[int], unseen_ms: float
) -> None:
    """Draw one contender's step: its streams, and a lane of exposed communication below them."""

    def bars(lane: int, spans: list[Span], **look: Any) -> None:
        top, bottom = lane - _LANE / 2, lane + _LANE / 2
        corners = []
        for begin, end in merge(Span(begin, end + unseen_ms * 1e3) for begin, end in spans):
            left, right = _ms(step, begin), _ms(step, end) - unseen_ms
            corners.append(Path([(left, top), (right, top), (right, bottom), (left, bottom), (left, top)], closed=True))
        if corners:  # one shape for all, which keeps the file short
            axes.add_patch(PathPatch(Path.make_compound_path(*corners), linewidth=0, **look))

    step, shares = steps.typical, steps.shares
    for lane, stream in enumerate(streams):
        for kind, (colour, hatch) in _LOOKS.items():
            spans = [each.span for each in work if each.stream == stream and each.kind == kind]
            bars(lane, spans, facecolor=colour, hatch=hatch, edgecolor="black")
    bars(len(streams), exposed_spans(work), facecolor="black")
    axes.set_yticks(range(len(streams) + 1), [*(f"stream {stream}" for stream in streams), "exposed"], fontsize=6)
    axes.set_ylim(len(streams) + 0.5, -0.5)
    end = _ms(step, step.end)
    axes.axvline(end, color="black", lw=1, ls="--")
    axes.set_title(
        f"{name}: this step {end:.2f} ms; of {len(steps.steps)} steps {shares.exposed / shares.length:.1%} exposed "
        f"communication, {shares.idle / shares.length:.1%} idle",
        loc="left",
        fontsize=8,
    )
    axes.spines[["top", "right"]].set_visible(False)
