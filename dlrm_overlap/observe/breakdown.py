"""The parts of a training step on a GPU, from a trace of some steps: numbers that add up to the step.

Each instant counts once, for the first of `PARTS` that ran then. So of an exchange or an all-reduce only the exposed
time counts. A kernel that looks up rows and stores them at peers at once counts as a lookup, as in `trace_summary`.
"""

from collections.abc import Mapping

from dlrm_overlap.launching.text_table import markdown_table
from dlrm_overlap.observe.trace_summary import Span, Work, length, subtract

_OWN_KINDS = {
    "dense": ("products", "dense", "optimizer"),
    "lookup": ("lookup",),
    "update": ("update", "sort"),
    "inputs": ("ids", "samples"),
    "exposed exchange": ("exchange",),
    "exposed all-reduce": ("all-reduce",),
    "copies": ("copies",),
}
PARTS = (*_OWN_KINDS, "idle")
_EXPOSED = ("exposed exchange", "exposed all-reduce")


def mean_step(work: list[Work], steps: int) -> dict[str, float] | None:
    """Return part -> ms a step of the `steps` steps that `work` is, for each of `PARTS`, or None if it is empty.

    Example: of a step of 10 ms with products in the first 6, an exchange from 4 to 8 and nothing after it, 6 are dense,
    2 are exposed exchange and 2 idle, if something else ends at 10.
    """
    if not work:
        return None
    whole = Span(min(each.span.begin for each in work), max(each.span.end for each in work))
    found, covered = {}, []
    for part in _OWN_KINDS:
        own = [each.span for each in work if _part(each) == part]
        found[part] = length(subtract(own, covered))
        covered += own
    found["idle"] = length(subtract([whole], covered))
    return {part: us * 1e-3 / steps for part, us in found.items()}


def _part(work: Work) -> str:
    if work.kind == "ids" and work.communicates:
        return "exposed exchange"
    return next(part for part, kinds in _OWN_KINDS.items() if work.kind in kinds)


def exposed_ms(parts: Mapping[str, float]) -> float:
    """Return the communication that nothing hides, in ms a step."""
    return sum(parts[part] for part in _EXPOSED)


def breakdown_markdown(runs: Mapping[str, Mapping[str, float]]) -> str:
    """Return a Markdown table, a line a run: ms of a traced step in each of `PARTS`, and in all."""
    lines = [["ms a traced step", *PARTS, "in all"]]
    for name, parts in runs.items():
        lines.append([name, *(f"{parts[part]:.3g}" for part in PARTS), f"{sum(parts.values()):.3g}"])
    return markdown_table(lines)
