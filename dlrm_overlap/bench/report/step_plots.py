"""The plots of the whole training step: contenders, ablation, parts of its time, input."""

from collections.abc import Callable, Mapping

from dlrm_overlap.bench.report.measured import Measured, Row, Table, milliseconds, ms, need, number, runs, trusted
from dlrm_overlap.bench.report.style import EDGE, Picture, bars, looks, stack
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
    picture = Picture(3.6)
    (axes,) = picture.panels
    bars(axes, groups, [step_title(next(iter(group.values()))) for group in groups], "floor_ms", bound_name="floor")
    axes.set_ylabel("ms a step, median")
    picture.legend(axes)
    return picture


def step_table(measured: Measured) -> Table:
    """Return a line a contender of each step."""
    bases = [column.removeprefix(_OVER) for column in measured.rows[0] if column.startswith(_OVER)]
    table: Table = []
    for name, row in (each for group in runs(measured.rows) for each in group.items()):
        cells = {"step": step_title(row).replace("\n", ", "), "contender": name}
        cells |= ms(row, "p10_ms", "median_ms", "p90_ms", "floor_ms")
        for base in bases:
            speedup = number(row, f"{_OVER}{base}")
            text = "-" if speedup is None else f"{speedup:.3g}x"
            cells[f"speedup over {base}"] = text if trusted(row) else "none: losses differ"
        table.append(cells)
    return table


def _ablation_gains(measured: Measured) -> dict[str, tuple[str, float]]:
    """Return contender -> its reference and its time less the reference's in the same turns, in ms."""
    found = {row["contender"]: row for row in measured.rows if row.get("over_reference")}
    return {
        name: (row["reference"], need(row, "median_ms") - need(row, "reference_ms"))
        for name, row in found.items()
        if row["reference"] and name != row["reference"]
    }


def draw_ablation(measured: Measured) -> Picture:
    """Draw the plot of `bench ablation`."""
    gains = _ablation_gains(measured)
    picture = Picture(1.2 + 0.25 * len(gains))
    (axes,) = picture.panels
    for reference, look in looks(dict.fromkeys(reference for reference, _ in gains.values())).items():
        own = {name: gain for name, (against, gain) in gains.items() if against == reference}
        label = f"against {reference}"
        drawn = axes.barh(list(own), list(own.values()), 0.7, color=look.colour, hatch=look.hatch, label=label, **EDGE)
        axes.bar_label(drawn, fmt="{:+.2f}", padding=3, fontsize=6.5)
    axes.axvline(0, color="black", lw=0.5)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set_xlabel("ms a step more (right) or less (left) than the reference in the same turns")
    picture.legend(axes)
    return picture


def ablation_table(measured: Measured) -> Table:
    """Return a line a contender, with its reference and the thing that it has more or less."""
    gains = _ablation_gains(measured)
    table: Table = []
    for row in measured.rows:
        name, reference = row["contender"], row["reference"]
        words = ABLATION.get(reference, {}).get(name)
        joint = "with" if reference == "torchrec" else "without"
        cells = {"contender": name, **ms(row, "median_ms"), "reference": reference or "-"}
        cells["its median, ms"] = milliseconds(number(row, "reference_ms"))
        cells["difference, ms"] = f"{gains[name][1]:+.2f}" if name in gains else "-"
        table.append(cells | {"what it is": f"{reference} {joint} {words}" if words else "-"})
    return table


_TIMELINE = {
    "compute": ("#c6dbef", ""),
    "exposed": ("#fd8d3c", "////"),
    "copying": ("#525252", ""),
    "idle": ("#ffffff", ""),
}


def draw_timeline(measured: Measured) -> Picture:
    """Draw the plot of `bench timeline`."""
    picture = Picture(3.4)
    (axes,) = picture.panels
    labels = [f"{row['contender'].replace('_', chr(10))}\nrank {row['rank']}" for row in measured.rows]
    stack(axes, _TIMELINE, {part: [need(row, f"{part}_ms") for row in measured.rows] for part in _TIMELINE})
    axes.set_xticks(range(len(labels)), labels, fontsize=6)
    axes.set_ylabel("ms a traced step")
    picture.legend(axes)
    return picture


def timeline_table(measured: Measured) -> Table:
    """Return a line a contender and rank."""
    return [
        {"contender": row["contender"], "rank": row["rank"]}
        | {"traced step, ms": milliseconds(number(row, "step_ms"))}
        | ms(row, *(f"{part}_ms" for part in _TIMELINE), "untraced_ms")
        for row in measured.rows
    ]


def draw_pairs(columns: Mapping[str, str], label: Callable[[Row], str]) -> Callable[[Measured], Picture]:
    """Return the function that draws the two times in `columns`, column -> name, of each row side by side."""

    def draw(measured: Measured) -> Picture:
        picture = Picture(3.0)
        (axes,) = picture.panels
        for aside, shade, (column, name) in zip((-0.2, 0.2), ("#d4d9df", "#1f6f8b"), columns.items(), strict=True):
            times = [need(row, column) for row in measured.rows]
            places = [place + aside for place in range(len(times))]
            drawn = axes.bar(places, times, 0.38, color=shade, label=name, **EDGE)
            axes.bar_label(drawn, [*map(milliseconds, times)], fontsize=6.5)
        axes.set_xticks(range(len(measured.rows)), [label(row) for row in measured.rows], fontsize=6.5)
        axes.set_ylabel("ms a step")
        picture.legend(axes)
        return picture

    return draw


def pairs_table(columns: Mapping[str, str], label: Callable[[Row], str]) -> Callable[[Measured], Table]:
    """Return the function that makes the table of that plot."""
    return lambda measured: [
        {"run": label(row).replace("\n", ", ")}
        | {f"{name}, ms": milliseconds(number(row, column)) for column, name in columns.items()}
        for row in measured.rows
    ]


def input_label(row: Row) -> str:
    """Return the lines that name a row of `bench input`."""
    run = f", run {row['run']}" if row.get("run") else ""
    dense = "\ndense part captured" if row["graph_dense"] == "True" else ""
    return f"{row['backend']}{run}{dense}\n{row['data']}\n{row['workers']} workers"


def baseline_step_label(row: Row) -> str:
    """Return the name of a row of the baseline's step."""
    return "dense part captured" if row["graph_dense"] == "True" else "dense part eager"
