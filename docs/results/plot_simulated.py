"""Draw the simulated figures of `docs/simulator.md` from their rows: `simulated_*.svg`, beside this file.

Run it as `python docs/results/plot_simulated.py [FOLDER]`; by default it reads and writes beside this file.
"""

import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from simulated_products_table import ASSUMPTIONS, WAYS, product_key

Row = Mapping[str, str]

LINK_GB_PER_S, MEMORY_GB_PER_S = 354.1, 4225.0  # of configs/simulate/h200.yaml

LAYERS = {"out": "attention out", "fc2": "FC-2", "fc1_backward": "FC-1 backward", "qkv_backward": "QKV backward"}
LOOKS = {
    "torchrec's exchange": ("#9aa5b1", "o"),
    "fused": ("#e08e45", "s"),
    "fused, aggregator": ("#1f6f8b", "^"),
}
NETWORK_LOOKS = (("#1f6f8b", "o"), ("#e08e45", "s"), ("#9aa5b1", "^"), ("#252525", "D"))
WAY_LOOKS = (("#9aa5b1", "////"), ("#f0b27a", ""), ("#1f6f8b", ""), ("#d9dee3", "...."))


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file that `dlrm-overlap simulate --output` has written."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def variant(row: Row) -> str:
    """Return what a row is called in the legend."""
    if row["backend"] == "torchrec":
        return "torchrec's exchange"
    return "fused, aggregator" if int(row["aggregate_bytes"]) else "fused"


def lines(
    axes: Axes, rows: Sequence[Row], x: str, name: Callable[[Row], str] = variant, from_ms: float | None = None
) -> None:
    """Draw ms over the column `x`, which is logarithmic, a line for each name.

    From `from_ms` on, milliseconds are logarithmic too; without it they begin at 0.
    """
    for label, others in zip(dict.fromkeys(map(name, rows)), NETWORK_LOOKS, strict=False):
        points = sorted((float(row[x]), float(row["ms"])) for row in rows if name(row) == label)
        colour, marker = LOOKS.get(label, others)
        axes.plot(*zip(*points, strict=True), marker=marker, color=colour, ms=4, label=label)
    axes.set_xscale("log", base=2)
    ticks = sorted({float(row[x]) for row in rows})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if from_ms:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=from_ms or 0)
    axes.legend(frameon=False)
    axes.set_ylabel("ms, simulated")


def draw_scaling(folder: Path) -> None:
    """Draw weak scaling of MLPerf's step by the plan, and with tables that are divided evenly, side by side."""
    titles = {"auto": "tables by the plan", "even": "tables divided evenly"}
    figure, panels = plt.subplots(1, len(titles), figsize=(9, 3.2), layout="constrained")
    rows = read_rows(folder / "simulated_weak.csv")
    for axes, (plan, title) in zip(panels, titles.items(), strict=True):
        lines(axes, [row for row in rows if row["plan"] == plan], "world_size", from_ms=2 if plan == "auto" else None)
        axes.set_title(f"Simulated: MLPerf's step, {title}", fontsize=9)
        axes.set_xlabel("GPUs, 8 a host, 400 Gb/s and 8192 samples each")
    _save(figure, folder / "simulated_scaling.svg")


def draw_p1(folder: Path) -> None:
    """Draw the step of arXiv 2305.06942's model, a panel for each number of samples."""
    rows = read_rows(folder / "simulated_p1.csv")
    counts = sorted({int(row["samples"]) for row in rows})
    figure, panels = plt.subplots(1, len(counts), figsize=(9, 3.2), layout="constrained", squeeze=False)
    for axes, samples in zip(panels[0], counts, strict=True):
        lines(axes, [row for row in rows if int(row["samples"]) == samples], "world_size")
        axes.set_title(f"Simulated: {samples} samples a node", fontsize=9)
        axes.set_xlabel("nodes of a 2-D torus, 200 Gb/s")
    _save(figure, folder / "simulated_p1.svg")


def draw_slices(folder: Path) -> None:
    """Draw the stage over the size of a slice, a line for each rate of the NICs."""
    rows = [
        row for row in read_rows(folder / "simulated_slices.csv") if int(row["slice_bags"]) > 1
    ]  # 1.6 s at every rate
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    lines(axes, rows, "slice_bags", lambda row: f"{float(row['nic_gbit_per_s']):g} Gb/s a GPU", from_ms=10)
    axes.set_title("Simulated: embedding stage on 16 hosts of 8 GPUs, fused", fontsize=9)
    axes.set_xlabel("bags a slice")
    _save(figure, folder / "simulated_slices.svg")


def draw_pays(folder: Path) -> None:
    """Draw how much faster the fused stage is, over the memory's time by the links' time, a line for each network."""
    rows = read_rows(folder / "simulated_pays.csv")
    networks = {
        ("1", "400.0"): ("one host of 8", LINK_GB_PER_S),
        ("16", "1600.0"): ("16 hosts of 8, 1600 Gb/s a GPU", 200.0),
        ("16", "400.0"): ("16 hosts of 8, 400 Gb/s a GPU", 50.0),
        ("16", "100.0"): ("16 hosts of 8, 100 Gb/s a GPU", 12.5),
    }
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for (key, (label, gb_per_s)), (colour, marker) in zip(networks.items(), NETWORK_LOOKS, strict=True):
        of = [row for row in rows if (row["hosts"], row["nic_gbit_per_s"]) == key]
        baseline, fused = ([row for row in of if row["backend"] == name] for name in ("torchrec", "fused"))
        speedups = [float(a["ms"]) / float(b["ms"]) for a, b in zip(baseline, fused, strict=True)]
        ratios = [float(b["hbm_bytes"]) / MEMORY_GB_PER_S / (float(b["link_bytes"]) / gb_per_s) for b in fused]
        axes.plot(ratios, speedups, marker=marker, color=colour, ms=4, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.axhline(1, color="black", lw=0.6)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("time of the memory over that of the slowest links, for their bytes alone")
    axes.set_ylabel("times as fast as torchrec's exchange")
    axes.set_title("Simulated: where fusing the embedding stage pays, 1 to 128 ids a bag", fontsize=9)
    axes.legend(frameon=False)
    _save(figure, folder / "simulated_pays.svg")


def draw_products(folder: Path) -> None:
    """Draw how much faster each way is than product, then reduce-scatter, a group of bars for each product."""
    rows = read_rows(folder / "simulated_products.csv")
    assumed = [row for row in rows if all(row[name] == rows[0][name] for name in ASSUMPTIONS)]
    # The gradient of the first layer's input has the shape of the second layer.
    serial = [row for row in assumed if row["way"] == "serial" and row["layer"] != "fc1_backward"]
    labels = [f"{row['name']}\n{row['ranks']} ranks, {LAYERS[row['layer']]}" for row in serial]
    figure, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
    width = 0.8 / len(WAYS)
    for number, (way, (colour, hatch)) in enumerate(zip(WAYS, WAY_LOOKS, strict=True)):
        times = {product_key(row): float(row["ms"]) for row in assumed if row["way"] == way}
        speedups = [float(row["ms"]) / times[product_key(row)] for row in serial]
        places = [i + width * (number - 1.5) for i in range(len(serial))]
        axes.bar(places, speedups, width, color=colour, hatch=hatch, edgecolor="black", lw=0.3, label=way)
    axes.set_xticks(range(len(serial)), labels, fontsize=6, rotation=90)
    axes.set_ylim(0.9, 1.6)
    axes.axhline(1, color="black", lw=0.6)
    axes.set_ylabel("times as fast as serial, simulated")
    axes.set_title("Simulated: product, reduce-scatter and all-gather of transformers' layers, T3's GPU", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=4)
    _save(figure, folder / "simulated_products.svg")


def _save(figure: plt.Figure, path: Path) -> None:  # pyright: ignore[reportPrivateImportUsage]
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(folder: str | Path = Path(__file__).parent) -> None:
    """Draw all figures of the rows in `folder`."""
    # Text stays text, and the same rows give the same file.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "simulated", "font.size": 8, "hatch.linewidth": 0.4}
    for draw in (draw_scaling, draw_p1, draw_slices, draw_pays, draw_products):
        draw(Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
