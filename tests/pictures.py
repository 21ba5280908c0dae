"""Draws the pictures of the pages from measured rows: `python -m tests.pictures`. It needs the extra `plots`.

Text stays text in the SVG, so `test_pages.py` compares its numbers with the rows.
"""

import re
from pathlib import Path
from statistics import fmean

from dlrm_overlap.bench.step_contenders import expand
from tests.calibration import read_rows
from tests.measured import values
from tests.simulated_pages import FOLDER, read

STEP_TIMES = FOLDER / "step_times.svg"
MODELS = {"mlperf": "DLRM-DCNv2 (MLPerf)", "dot": "DLRM, dot products", "sequence": "item histories"}
CONTENDERS = {
    "torchrec": "TorchRec as users run it",
    "strongest": "TorchRec's fastest configuration",
    "pgas_graph": "dlrm-overlap",
}

STEP_PARTS, PART_ROWS = FOLDER / "step_parts.svg", FOLDER / "four_h200/step_parts.csv"
# Contenders in which a step changes part by part from TorchRec's to ours, by the part that each one adds.
_PARTS = {
    "TorchRec": expand(["strongest"]),
    "dense part": expand(["our_dense"]),
    "exchange": ("pgas_graph_no_capture",),
    "CUDA graph": ("pgas_graph",),
}
_PART_COLORS = ("#4c78a8", "#9d9da1", "#e45756", "#b3d9a9")

TIMELINES = FOLDER / "timelines.svg"
TIMELINE_ROWS = "traced_step"
TIMELINE_CONTENDERS = {"torchrec_strongest_default_plan": "TorchRec, compiled", "pgas_graph": "dlrm-overlap"}
# Lanes of a timeline by the kinds of work of `observe.trace_summary`, and the kinds' colors.
_LANES = {
    "dense part": ("products", "dense", "optimizer"),
    "embeddings": ("lookup", "update", "ids", "sort"),
    "between GPUs": ("exchange", "all-reduce"),
    "copies": ("copies", "samples"),
}
_COLORS = {
    **dict.fromkeys(("products", "dense", "optimizer"), "#4c78a8"),
    **{"lookup": "#54a24b", "update": "#54a24b", "ids": "#b3d9a9", "sort": "#b3d9a9"},
    **{"exchange": "#e45756", "all-reduce": "#f3b4a3", "copies": "#9d9da1", "samples": "#9d9da1"},
}
_LEGEND = (
    ("dense", "dense part"),
    ("lookup", "lookup and update"),
    ("ids", "ids, sort"),
    ("exchange", "embedding exchange"),
    ("all-reduce", "all-reduce"),
)
_BARS = ("#c9c9cd", "#9d9da1", "#4c78a8")

CURVES = FOLDER / "movielens/curves.svg"
CURVE_ROWS = "movielens/curves.csv"
# Panels of the curves by their titles, with the metrics and the styles of their lines.
_PANELS = {"loss": {"train/loss": ":", "eval/loss": "-"}, "AUROC": {"eval/auroc": "-"}}
_METRICS = {"train/loss": "training", "eval/loss": "last weeks", "eval/auroc": "last weeks"}
_CURVE_COLORS = ("#4c78a8", "#e45756")

# Pictures of learned curves, with the files of their panels by title.
LEARNING = {
    "learning/movielens.svg": {
        "DLRM": "learning/movielens.csv",
        "DLRM with attention": "learning/movielens_attention.csv",
    },
    "learning/mlperf.svg": {
        "8192 samples a step": "learning/mlperf.csv",
        "16384 samples a step": "learning/mlperf_16384.csv",
    },
}
# Contenders that they show, if a file has them, and the styles of their lines.
_LEARNING_STYLES = {
    "torchrec": ("-", "#e45756"),
    "pgas": ("--", "#4c78a8"),
    "torchrec_bf16": ("-", "#f58518"),
    "pgas_bf16": (":", "black"),
}

DRIFTS = ("drift", "drift_gpu")  # names of files of rows, and of their pictures
# Contenders of `bench drift`, and the colors and styles of their lines.
_DESIGNS = {
    "modulus": ("#9d9da1", "-"),
    "modulus_twice": ("#9d9da1", ":"),
    "any_lfu": ("#e45756", "-"),
    "any_distance_lfu": ("#54a24b", "-"),
    "any": ("#4c78a8", "-"),
    "any_admit_2": ("#b279a2", "-"),
    "any_admit_2_forever": ("#b279a2", ":"),
    "mpzch": ("#f58518", "-"),
    "unlimited": ("black", "--"),
}


def step_times() -> list[tuple[str, list[float]]]:
    """Return for each model its name and the GPU times of `CONTENDERS`, in ms."""
    found = []
    for name, title in MODELS.items():
        rows = read(f"four_h200/step_{name}.csv")
        found.append((title, [values(rows, rows, f"{each}:busy_ms")[0] for each in CONTENDERS]))
    return found


def draw_step_times() -> None:
    """Write `STEP_TIMES`: a group of bars for each model, one bar for each contender."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(8, 2.8))
    times = step_times()
    for number, (contender, color) in enumerate(zip(CONTENDERS.values(), _BARS, strict=True)):
        own_ms = [ms[number] for _, ms in times]
        bars = axes.barh([group + 0.27 * (number - 1) for group in range(len(times))], own_ms, 0.25, color=color)
        axes.bar_label(bars, [f"{ms:.2f}" for ms in own_ms], padding=3, fontsize=8)
        bars.set_label(contender)
    axes.set_yticks(range(len(times)), [title for title, _ in times])
    axes.invert_yaxis()
    axes.set_xlabel("GPU time of a training step on 4 x H200, ms (less is better)")
    _save(figure, axes, STEP_TIMES)


def step_parts() -> tuple[list[tuple[str, float]], float]:
    """Return the parts of the gain over TorchRec by name, and what is left, in ms of GPU time; [] without rows.

    A part is the difference of two contenders that differ in it alone. Each contender is the fastest of its group that
    agrees, by `work_ms`: the GPU's own time without waits for peers, which are long in steps that the CPU limits.
    """
    if not PART_ROWS.exists():
        return [], 0.0
    rows = read_rows(PART_ROWS)
    ms = [
        min(float(row["work_ms"]) for row in rows if row["contender"] in group and row["agrees"] == "True")
        for group in _PARTS.values()
    ]
    return [(name, above - below) for name, above, below in zip([*_PARTS][1:], ms, ms[1:], strict=False)], ms[-1]


def draw_step_parts() -> None:
    """Write `STEP_PARTS`: one bar, TorchRec's step, divided into the parts of the gain and what is left of the step.

    A part that makes the step longer is not drawn, so such rows are refused.
    """
    parts, left_ms = step_parts()
    if not parts:
        return
    longer = [f"{name} {ms:.2f}" for name, ms in parts if ms < 0]
    assert not longer, f"{PART_ROWS}: a part makes the step longer: {', '.join(longer)} ms; show a table instead"
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(8, 1.4))
    begin = 0.0
    for (name, ms), color in zip([("dlrm-overlap", left_ms), *reversed(parts)], _PART_COLORS, strict=True):
        bar = axes.barh(0, ms, 0.6, left=begin, color=color, label=name)
        axes.bar_label(bar, [f"{ms:.2f}"], label_type="center", fontsize=8)
        begin += ms
    axes.set_yticks([])
    axes.set_xlabel("GPU time of TorchRec's fastest step without waits, and what makes dlrm-overlap's shorter, ms")
    _save(figure, axes, STEP_PARTS)


def draw_timelines() -> None:
    """Write `TIMELINES`: what the GPU did in one traced step, of TorchRec and of ours, on one axis of time."""
    plt = _pyplot()
    rows = read(f"{TIMELINE_ROWS}/timeline_mlperf.csv")
    figure, axes = plt.subplots(figsize=(8, 2.8))
    heights: dict[tuple[str, str], float] = {}
    for contender, title in TIMELINE_CONTENDERS.items():
        top = max(heights.values(), default=-1.0) + 1.8  # a line for the title
        heights |= {(contender, lane): top + number for number, lane in enumerate(_LANES)}
        own = [row for row in rows if row["contender"] == contender]
        for row in own:
            lane = next(lane for lane, kinds in _LANES.items() if row["kind"] in kinds)
            begin, end = float(row["begin_us"]) / 1e3, float(row["end_us"]) / 1e3
            axes.barh(heights[contender, lane], end - begin, 0.8, left=begin, color=_COLORS[row["kind"]], lw=0)
        end = max(float(row["end_us"]) for row in own) / 1e3
        axes.text(0, top - 0.9, f"{title}: {end:.2f} ms", va="center", fontsize=9, weight="bold")
    axes.set_yticks([*heights.values()], [lane for _, lane in heights], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms since the step began, on one GPU")
    for kinds, label in _LEGEND:
        axes.bar(0, 0, color=_COLORS[kinds], label=label)
    _save(figure, axes, TIMELINES)


def curve_label(rows: list[dict[str, str]]) -> str:
    """Return the label of the curve with these rows, which ends in its last value."""
    return f"{rows[0]['name']}, {_METRICS[rows[0]['metric']]}: {float(rows[-1]['value']):.3f}"


def draw_curves() -> None:
    """Write `CURVES`: loss and AUROC of two models of MovieLens-100k while they train."""
    plt = _pyplot()
    rows = read(CURVE_ROWS)
    figure, panels = plt.subplots(1, 2, figsize=(8, 2.8))
    for axes, (title, styles) in zip(panels, _PANELS.items(), strict=True):
        for model, color in zip(dict.fromkeys(row["name"] for row in rows), _CURVE_COLORS, strict=True):
            for metric, style in styles.items():
                own = [row for row in rows if (row["name"], row["metric"]) == (model, metric)]
                steps, values = [int(row["step"]) for row in own], [float(row["value"]) for row in own]
                axes.plot(steps, values, style, color=color, label=curve_label(own))
        axes.set_xlabel("step")
        axes.set_title(title, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7)
    figure.tight_layout()
    _write(figure, CURVES)


def draw_learning(name: str) -> None:
    """Write a picture of `LEARNING`: NE of held-out samples against training samples; a line per contender and seed."""
    plt = _pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(8, 2.8))
    for axes, (title, file) in zip(panels, LEARNING[name].items(), strict=True):
        rows = read(file)
        for contender, (style, color) in _LEARNING_STYLES.items():
            for seed in dict.fromkeys(row["seed"] for row in rows):
                own = [row for row in rows if (row["contender"], row["seed"]) == (contender, seed)]
                samples, values = [int(row["samples"]) for row in own], [float(row["ne"]) for row in own]
                shown = contender if own and seed == "0" else None
                axes.plot(samples, values, style, color=color, lw=1.5, label=shown)
        axes.set_xlabel("training samples")
        axes.set_title(f"{title}: NE", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7)
    figure.tight_layout()
    _write(figure, FOLDER / name)


def drift_curves(name: str) -> dict[str, tuple[str, list[float]]]:
    """Return for each contender in the rows of `bench drift` its label, and its NE day by day, means over the seeds.

    A label ends in the NE of the last day.
    """
    rows = read(f"{name}.csv")
    found = {}
    for contender in _DESIGNS:
        own = [row for row in rows if row["contender"] == contender]
        if own:
            days = range(1, int(own[0]["days"]) + 1)
            means = [fmean(float(row["ne"]) for row in own if int(row["day"]) == day) for day in days]
            found[contender] = (f"{contender}: {means[-1]:.3f}", means)
    return found


def draw_drift(name: str) -> None:
    """Write a picture of `DRIFTS`: NE of each day while new ids replace old ones, for each way to give ids rows."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(8, 3.2))
    curves = drift_curves(name)
    for contender, (label, means) in curves.items():
        color, style = _DESIGNS[contender]
        axes.plot(range(1, len(means) + 1), means, style, color=color, label=label)
    later = [value for _, means in curves.values() for value in means[2:]]
    axes.set_ylim(min(later) - 0.005, max(later) + 0.015)  # the first days are above
    axes.set_xlabel("simulated day")
    axes.set_ylabel("NE before training (less is better)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), title="contender: NE of day 30"
    )
    _write(figure, FOLDER / f"{name}.svg")


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
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=5)
    _write(figure, path)


def _write(figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    text = path.read_text()
    path.write_text(re.sub(r" +$", "", text, flags=re.MULTILINE).replace("<svg ", '<svg style="background:white" ', 1))


if __name__ == "__main__":
    draw_step_times()
    draw_step_parts()
    draw_timelines()
    draw_curves()
    for name in LEARNING:
        draw_learning(name)
    for name in DRIFTS:
        draw_drift(name)
