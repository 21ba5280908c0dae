"""Draw `stage.svg`, the figure in README, from the rows of `bench stage`.

Run it as `python docs/results/plot_stage.py [ROWS.csv] [PICTURE.svg]`; by default it reads `stage.csv` and writes
`stage.svg`, both beside this file.
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent
CONTENDERS = {
    "baseline": ("FBGEMM + NCCL + unpack", "#9aa5b1"),
    "torchrec": ("TorchRec", "#c9ced6"),
    "pgas": ("pgas", "#1f6f8b"),
    "fused": ("fused", "#e08e45"),
}


def read_shapes(path: Path) -> Sequence[Mapping[str, Mapping[str, str]]]:
    """Return one mapping a shape, in the file's order: from the contender's name to its row of `path`."""
    shapes: dict[tuple[str, ...], dict[str, Mapping[str, str]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            shape = tuple(row[name] for name in ("tables", "rows", "dim", "multi_hot", "global_batch"))
            shapes.setdefault(shape, {})[row["contender"]] = row
    return list(shapes.values())


def title(row: Mapping[str, str]) -> str:
    """Return two lines that name a row's shape, as in the tables of `stage.md`."""
    per_gpu = int(row["tables"]) // int(row["world_size"])
    return f"{per_gpu} x {int(row['rows']) / 1e6:g}M x {row['dim']}\n{row['global_batch']}, {row['multi_hot']}"


def milliseconds(text: str) -> str:
    """Return a time in ms as the tables of README have it: three digits, at most two behind the point."""
    return f"{float(text):.2f}"


def draw(shapes: Sequence[Mapping[str, Mapping[str, str]]], path: Path) -> None:
    """Draw each shape's times over its baseline's, with the time in ms above each bar and the limit across them."""
    # Text stays text, and the same rows give the same file.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "stage", "font.size": 8}
    figure, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
    width = 0.8 / len(CONTENDERS)
    for i, shape in enumerate(shapes):
        base = float(shape["baseline"]["median_ms"])
        for k, (contender, (label, colour)) in enumerate(CONTENDERS.items()):
            median = shape[contender]["median_ms"]
            place, height = i - 0.4 + (k + 0.5) * width, float(median) / base
            axes.bar(place, height, width * 0.94, color=colour, label=label if i == 0 else "_")
            axes.text(place, height + 0.02, milliseconds(median), ha="center", va="bottom", fontsize=7)
        limit = float(shape["baseline"]["limit_ms"]) / base
        axes.hlines(limit, i - 0.42, i + 0.42, color="black", lw=1.2, label="limit of the hardware" if i == 0 else "_")
    axes.set_xticks(range(len(shapes)), [title(shape["baseline"]) for shape in shapes])
    axes.set_xlabel("tables a GPU x rows x dim; global batch, ids a bag")
    axes.set_ylabel("time / FBGEMM + NCCL + unpack")
    row = shapes[0]["baseline"]
    axes.set_title(f"Embedding stage, forward, {row['gpu']}, {row['weight_dtype']}; above each bar: ms", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=3, loc="upper left")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(rows: str | Path = FOLDER / "stage.csv", picture: str | Path = FOLDER / "stage.svg") -> None:
    """Draw the figure of the file `rows` to the file `picture`."""
    draw(read_shapes(Path(rows)), Path(picture))


if __name__ == "__main__":
    main(*sys.argv[1:])
