"""Draws the pictures of README from measured rows: `python -m tests.pictures`.

`docs/results/step_times.svg` has the step times of `docs/results/four_h200`, and `docs/results/timeline.svg` one
training step of two traces, whose spans are kept in `docs/results/four_h200/timeline.csv`. To replace these, give the
traces that `log.trace_steps` has written:

    python -m tests.pictures TorchRec=runs/a/torchrec/traces/rank0.json.gz dlrm-overlap=runs/a/pgas/traces/rank0.json.gz

The fonts are the reader's: text stays text in the SVG, so `test_pages.py` compares its numbers with the rows.
"""

import csv
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dlrm_overlap.observe.trace_summary import Span, Work, gpu_work, issued_work, read_events
from tests.pages import FOLDER, strongest
from tests.simulated_pages import read

STEP_TIMES, TIMELINE = FOLDER / "step_times.svg", FOLDER / "timeline.svg"
SPANS = FOLDER / "four_h200" / "timeline.csv"
MODELS = {"mlperf": "DLRM-DCNv2 (MLPerf)", "dot": "DLRM, dot products", "sequence": "item histories"}
CONTENDERS = ("TorchRec as users run it", "TorchRec's fastest configuration", "dlrm-overlap")
# Kinds of `trace_summary.KINDS` that share a row of the timeline and a color.
GROUPS = {
    "embedding lookup": ("lookup",),
    "communication": ("exchange", "all-reduce", "ids"),
    "dense part": ("products", "dense", "optimizer"),
    "sort and row update": ("sort", "update"),
}
_COLORS = ("#4c78a8", "#e45756", "#9d9da1", "#f2a541")


class Piece(NamedTuple):
    """A time in which a GPU does one kind of work within a step, in us since the step began."""

    contender: str
    group: str
    begin_us: float
    end_us: float


def step_times() -> list[tuple[str, list[float]]]:
    """Return for each model its name and the GPU times of `CONTENDERS`, in ms."""
    found = []
    for name, title in MODELS.items():
        rows = read(f"four_h200/step_{name}.csv")
        of = {row["contender"]: float(row["busy_ms"]) for row in reversed(rows)}
        found.append((title, [of["torchrec"], float(strongest(rows, "busy_ms")["busy_ms"]), of["pgas_graph"]]))
    return found


def pieces_of(contender: str, trace: Path) -> Iterator[Piece]:
    """Yield the pieces of the middle step of a trace: from its first lookup to that of the step after."""
    events = read_events(trace)
    marks = [event for event in events if event.get("cat") == "user_annotation" and "ProfilerStep#" in event["name"]]
    work = sorted(gpu_work(issued_work(events)), key=lambda each: each.span)
    lookups = [each.span.begin for each in work if each.kind == "lookup"]
    a_step = len(lookups) // len(marks)
    middle = len(marks) // 2
    first, after = lookups[middle * a_step], lookups[(middle + 1) * a_step]
    for group, kinds in GROUPS.items():
        for span in merged(each for each in work if each.kind in kinds):
            begin, end = max(span.begin, first), min(span.end, after)
            if begin < end:
                yield Piece(contender, group, round(begin - first, 1), round(end - first, 1))


def merged(work: Iterable[Work], gap_us: float = 2.0) -> list[Span]:
    """Return the spans of `work`, sorted by their begin, where spans at most `gap_us` apart are one."""
    found: list[Span] = []
    for span in (each.span for each in work):
        if found and span.begin <= found[-1].end + gap_us:
            found[-1] = Span(found[-1].begin, max(found[-1].end, span.end))
        else:
            found.append(span)
    return found


def read_pieces() -> list[Piece]:
    """Return the pieces of `SPANS`."""
    rows = read(SPANS.relative_to(FOLDER).as_posix())
    return [Piece(row["contender"], row["group"], float(row["begin_us"]), float(row["end_us"])) for row in rows]


def length_ms(pieces: Sequence[Piece], contender: str) -> float:
    """Return the end of the last piece of a contender."""
    return max(each.end_us for each in pieces if each.contender == contender) / 1e3


def draw_step_times() -> None:
    """Write `STEP_TIMES`: a group of bars for each model, one bar for each contender."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(8, 2.8))
    times = step_times()
    for number, (contender, color) in enumerate(zip(CONTENDERS, ("#c9c9cd", "#9d9da1", "#4c78a8"), strict=True)):
        values = [ms[number] for _, ms in times]
        bars = axes.barh([group + 0.27 * (number - 1) for group in range(len(times))], values, 0.25, color=color)
        axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=3, fontsize=8)
        bars.set_label(contender)
    axes.set_yticks(range(len(times)), [title for title, _ in times])
    axes.invert_yaxis()
    axes.set_xlabel("GPU time of a training step on 4 x H200, ms (less is better)")
    _save(figure, axes, STEP_TIMES)


def draw_timeline() -> None:
    """Write `TIMELINE`: a row for each contender and group, on one axis of time."""
    plt = _pyplot()
    pieces = read_pieces()
    contenders = list(dict.fromkeys(each.contender for each in pieces))
    figure, axes = plt.subplots(figsize=(8, 3.2))
    rows = [(contender, group) for contender in contenders for group in GROUPS]
    for number, (contender, group) in enumerate(rows):
        place = number + 0.8 * contenders.index(contender)
        own = [each for each in pieces if (each.contender, each.group) == (contender, group)]
        color = _COLORS[list(GROUPS).index(group)]
        spans = [(each.begin_us / 1e3, (each.end_us - each.begin_us) / 1e3) for each in own]
        axes.broken_barh(spans, (place - 0.4, 0.8), color=color, label=group if contender == contenders[0] else None)
    for number, contender in enumerate(contenders):
        top, length = number * (len(GROUPS) + 0.8) - 0.5, length_ms(pieces, contender)
        axes.plot([length, length], [top, top + len(GROUPS)], color="black", linewidth=0.8)
        axes.text(length, top + len(GROUPS) / 2, f"  {length:.2f} ms", va="center", fontsize=8)
    centers = [number * (len(GROUPS) + 0.8) + (len(GROUPS) - 1) / 2 for number in range(len(contenders))]
    axes.set_yticks(centers, contenders)
    axes.invert_yaxis()
    axes.set_xlabel("one training step of DLRM-DCNv2 on one of 4 x H200, ms since its first lookup (traced)")
    _save(figure, axes, TIMELINE)


def _pyplot():
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "dlrm-overlap", "font.family": "sans-serif"}
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    return pyplot


def _save(figure, axes, path: Path) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, axes.get_xlim()[1] * 1.08)
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=4)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    text = path.read_text()
    path.write_text(re.sub(r" +$", "", text, flags=re.MULTILINE).replace("<svg ", '<svg style="background:white" ', 1))


def main(traces: Sequence[str]) -> None:
    """Draw both pictures, the timeline from new traces if some are given."""
    if traces:
        found = [piece for each in traces for piece in pieces_of(each.partition("=")[0], Path(each.partition("=")[2]))]
        with SPANS.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(Piece._fields)
            writer.writerows(found)
    draw_step_times()
    if SPANS.exists():
        draw_timeline()


if __name__ == "__main__":
    main(sys.argv[1:])
