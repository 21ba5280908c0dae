"""The picture of `bench timeline`: a typical step of each contender, one below the other."""

import pathlib
import textwrap
from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from dlrm_overlap.bench.harness.step_trace import TracedSteps
from dlrm_overlap.observe.timeline import draw_lanes, lanes_of, legend_keys
from dlrm_overlap.observe.trace_summary import Work


def draw(traced: Mapping[str, TracedSteps], title: str, command: str, path: pathlib.Path) -> None:
    """Draw a typical step of each contender, one below the other on one axis of time, and write it to `path`, an SVG.

    Args:
        traced: by contender.
        title: what was measured, on what hardware.
        command: that has measured it.
        path: the file's folder must exist.
    """
    drawn = {name: (steps, steps.during(steps.typical)) for name, steps in traced.items()}
    longest = max(_ms(steps) for steps, _ in drawn.values())
    heights = [len(lanes_of(work)) + 2.2 for _, work in drawn.values()]
    # Text stays text, and the same steps give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "timeline", "font.size": 8}):
        figure = Figure(figsize=(10, 1.1 + 0.24 * sum(heights)), layout="constrained")
        panels = figure.subplots(len(drawn), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (name, (steps, work)) in zip(panels, drawn.items(), strict=True):
            _draw_step(axes, name, steps, work, longest)
        panels[-1].set_xlabel("time in the step, ms")
        panels[-1].set_xlim(0, 1.01 * longest)
        keys = legend_keys([each for _, work in drawn.values() for each in work])
        figure.legend(handles=keys, loc="outside upper center", ncols=6, frameon=False, title=title)
        figure.supxlabel(textwrap.fill(command, 150), fontsize=7, family="monospace")
        figure.savefig(path, metadata={"Date": None})


def _ms(steps: TracedSteps) -> float:
    return (steps.typical.end - steps.typical.begin) * 1e-3


def _draw_step(axes: Any, name: str, steps: TracedSteps, work: list[Work], longest_ms: float) -> None:
    """Draw one contender's step, where it ends, and what a mean step is made of."""
    shares, end_ms = steps.shares, _ms(steps)
    draw_lanes(axes, work, steps.typical.begin, longest_ms)
    axes.axvline(end_ms, color="black", lw=1, ls="--")
    axes.set_title(
        f"{name}: this step {end_ms:.2f} ms; of {len(steps.steps)} steps {shares.exposed / shares.length:.1%} exposed "
        f"communication, {shares.idle / shares.length:.1%} idle",
        loc="left",
        fontsize=8,
    )
