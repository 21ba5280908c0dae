"""The plots of the whole training step: contenders, ablation, where its time goes, input."""

from collections.abc import Callable, Mapping
from typing import Any

from dlrm_overlap.bench.report.bars import bars
from dlrm_overlap.bench.report.measured import (
    Measured,
    Row,
    Table,
    cells,
    milliseconds,
    need,
    number,
    runs,
    trusted,
)
from dlrm_overlap.bench.report.style import EDGE, Picture, looks
from dlrm_overlap.bench.step_contenders import ABLATION

_OVER = "speedup_over_"


def step_title(row: Row) -> str:
    """Return two or three lines that name the step of a row."""
    gpus, batch = int(row["world_size"]), int(row["global_batch"])
    pinned = "\nhost short of time" if row.get("pinned_host") == "True" else ""
    return f"{row['arch']}, {row['tables']} tables, {row['precision']}\n{gpus} x {batch // gpus} samples{pinned}"


def draw_step(measured: Measured) -> Picture:
    """Draw the plot of `bench step`."""
    groups = runs(measured.rows)
    picture = Picture(measured.name, 3.6)
    (axes,) = picture.panels()
    bars(axes, groups, [step_title(next(iter(group.values()))) for group in groups], "floor_ms", bound_name="floor")
    axes.set_ylabel("ms a step, median")
    picture.legend(axes)
    return picture


def step_table(measured: Measured) -> Table:
    """Return the table of the numbers behind the plot of `bench step`."""
    groups = runs(measured.rows)
    bases = [column.removeprefix(_OVER) for column in measured.rows[0] if column.startswith(_OVER)]
    times = ("p10_ms", "median_ms", "p90_ms", "floor_ms")
    lines: list[list[Any]] = [["step", "contender", *(f"{name.removesuffix('_ms')}, ms" for name in times)]]
    lines[0] += [f"speedup over {base}" for base in bases]
    for group in groups:
        for name, row in group.items():
            own = [step_title(row).replace("\n", ", "), name, *(milliseconds(number(row, column)) for column in times)]
            speedups = [number(row, f"{_OVER}{base}") for base in bases]
            told = ["-" if each is None else f"{each:.3g}x" for each in speedups]
            lines.append([*own, *(told if trusted(row) else ["none: losses differ"] * len(bases))])
    return cells(lines)


def _ablation_gains(measured: Measured) -> dict[str, tuple[str, float]]:
    """Return contender -> its reference and its time less the reference's in the same turns, in ms."""
    found = {row["contender"]: row for row in measured.rows if row.get("over_reference")}
    return {
        name: (row["reference"], need(row, "median_ms") - need(row, "reference_ms"))
        for name, row in found.items()
        if row["reference"] and name != row["reference"]
    }


def _ablation_words(row: Row) -> str:
    """Return what a contender is: its reference with something more, or without something."""
    words = ABLATION.get(reference := row["reference"], {}).get(row["contender"])
    return f"{reference} {'with' if reference == 'torchrec' else 'without'} {words}" if words else "-"


def draw_ablation(measured: Measured) -> Picture:
    """Draw the plot of `bench ablation`."""
    gains = _ablation_gains(measured)
    picture = Picture(measured.name, 1.2 + 0.25 * len(gains))
    (axes,) = picture.panels()
    shown = looks(dict.fromkeys(reference for reference, _ in gains.values()))
    for reference, look in shown.items():
        own = {name: gain for name, (against, gain) in gains.items() if against == reference}
        label = f"against {reference}"
        axes.barh(list(own), list(own.values()), 0.7, color=look.colour, hatch=look.hatch, label=label, **EDGE)
        for name, gain in own.items():
            aside = {"xytext": (3 if gain >= 0 else -3, 0), "textcoords": "offset points"}
            side = "left" if gain >= 0 else "right"
            axes.annotate(f"{gain:+.2f}", (gain, name), va="center", ha=side, fontsize=6.5, **aside)
    axes.axvline(0, color="black", lw=0.5)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set_xlabel("ms a step more (right) or less (left) than the reference in the same turns")
    picture.legend(axes)
    return picture


def ablation_table(measured: Measured) -> Table:
    """Return the table of the numbers behind the plot of `bench ablation`."""
    lines: list[list[Any]] = [["contender", "median, ms", "reference", "its median, ms", "difference, ms"]]
    lines[0].append("what it is")
    gains = _ablation_gains(measured)
    for row in measured.rows:
        gain = gains.get(row["contender"])
        times = [
            milliseconds(number(row, "median_ms")),
            row["reference"] or "-",
            milliseconds(number(row, "reference_ms")),
        ]
        lines.append([row["contender"], *times, f"{gain[1]:+.2f}" if gain else "-", _ablation_words(row)])
    return cells(lines)


_TIMELINE = ("compute", "exposed", "copying", "idle")


def draw_timeline(measured: Measured) -> Picture:
    """Draw the plot of `bench timeline`."""
    picture = Picture(measured.name, 3.4)
    (axes,) = picture.panels()
    labels = [f"{row['contender'].replace('_', chr(10))}\nrank {row['rank']}" for row in measured.rows]
    below = [0.0] * len(labels)
    shades = (("#c6dbef", ""), ("#fd8d3c", "////"), ("#525252", ""), ("#ffffff", ""))
    for part, (colour, hatch) in zip(_TIMELINE, shades, strict=True):
        heights = [need(row, f"{part}_ms") for row in measured.rows]
        axes.bar(range(len(labels)), heights, 0.7, bottom=below, color=colour, hatch=hatch, label=part, **EDGE)
        below = [one + other for one, other in zip(below, heights, strict=True)]
    axes.set_xticks(range(len(labels)), labels, fontsize=6)
    axes.set_ylabel("ms a traced step")
    picture.legend(axes)
    return picture


def timeline_table(measured: Measured) -> Table:
    """Return the table of the numbers behind the plot of `bench timeline`."""
    lines: list[list[Any]] = [
        ["contender", "rank", "traced step, ms", *(f"{part}, ms" for part in _TIMELINE), "untraced, ms"]
    ]
    for row in measured.rows:
        columns = ("step_ms", *(f"{part}_ms" for part in _TIMELINE), "untraced_ms")
        lines.append([row["contender"], row["rank"], *(milliseconds(number(row, column)) for column in columns)])
    return cells(lines)


def draw_pairs(columns: Mapping[str, str], label: Callable[[Row], str]) -> Callable[[Measured], Picture]:
    """Return what draws for each row the times in `columns`, column -> what it is, side by side."""

    def draw(measured: Measured) -> Picture:
        picture = Picture(measured.name, 3.0)
        (axes,) = picture.panels()
        for i, ((column, name), shade) in enumerate(zip(columns.items(), ("#d4d9df", "#1f6f8b"), strict=True)):
            for place, row in enumerate(measured.rows):
                time, x = need(row, column), place + (i - 0.5) * 0.4
                axes.bar(x, time, 0.38, color=shade, label=name if place == 0 else "_", **EDGE)
                axes.text(x, time, milliseconds(time), ha="center", va="bottom", fontsize=6.5)
        axes.set_xticks(range(len(measured.rows)), [label(row) for row in measured.rows], fontsize=6.5)
        axes.set_ylabel("ms a step")
        picture.legend(axes)
        return picture

    return draw


def pairs_table(columns: Mapping[str, str], label: Callable[[Row], str]) -> Callable[[Measured], Table]:
    """Return what makes the table of the numbers behind that plot."""

    def table(measured: Measured) -> Table:
        lines: list[list[Any]] = [["run", *(f"{name}, ms" for name in columns.values())]]
        for row in measured.rows:
            lines.append([label(row).replace("\n", ", "), *(milliseconds(number(row, column)) for column in columns)])
        return cells(lines)

    return table


def input_label(row: Row) -> str:
    """Return the lines that name a row."""
    run = f", run {row['run']}" if row.get("run") else ""
    dense = "\ndense part captured" if row["graph_dense"] == "True" else ""
    return f"{row['backend']}{run}{dense}\n{row['data']}\n{row['workers']} workers"


def baseline_step_label(row: Row) -> str:
    """Return the lines that name a row."""
    return "dense part captured" if row["graph_dense"] == "True" else "dense part eager"
