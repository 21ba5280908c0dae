"""Draws the picture of README from measured rows: `python -m tests.pictures`. It needs the extra `plots`.

Text stays text in the SVG, so `test_pages.py` compares its numbers with the rows.
"""

import re
from pathlib import Path

from tests.pages import FOLDER, strongest
from tests.simulated_pages import read

STEP_TIMES = FOLDER / "step_times.svg"
MODELS = {"mlperf": "DLRM-DCNv2 (MLPerf)", "dot": "DLRM, dot products", "sequence": "item histories"}
CONTENDERS = ("TorchRec as users run it", "TorchRec's fastest configuration", "dlrm-overlap")


def step_times() -> list[tuple[str, list[float]]]:
    """Return for each model its name and the GPU times of `CONTENDERS`, in ms."""
    found = []
    for name, title in MODELS.items():
        rows = read(f"four_h200/step_{name}.csv")
        of = {row["contender"]: float(row["busy_ms"]) for row in reversed(rows)}
        found.append((title, [of["torchrec"], float(strongest(rows, "busy_ms")["busy_ms"]), of["pgas_graph"]]))
    return found


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


if __name__ == "__main__":
    draw_step_times()
