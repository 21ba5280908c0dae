"""Print the tables of `gemm.md`, as Markdown, from the rows of `bench gemm`: `python docs/results/gemm_table.py`."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
OPERATORS = ("all_gather", "reduce_scatter")
FILES = ("gemm.csv", "gemm_two.csv")
CONTENDERS = ("serial", "torch", "copies", "pushes", "tiles", "triggered", "auto")


def gemm_table(rows: Sequence[Mapping[str, str]], operator: str) -> list[str]:
    """Return the lines of an operator's table, times in us: a line a shape.

    The last columns are the fraction of the floor that `auto` reaches, and its speedup over `serial` and `torch`.
    """
    measured = {row["contender"] for row in rows if row["operator"] == operator}
    names = [name for name in CONTENDERS if name in measured]
    heads = ["M, K, N", "product", "links", *(f"`{name}`" for name in names), "of the floor", "over the two"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    shapes: dict[str, dict[str, Mapping[str, str]]] = {}
    for row in rows:
        if row["operator"] == operator:
            shapes.setdefault(", ".join(row[name] for name in "mkn"), {})[row["contender"]] = row
    for shape, found in shapes.items():
        auto = found["auto"]
        links_us = float(auto["link_bytes"]) / float(auto["link_gb_per_s"]) / 1e3
        times_us = [1e3 * float(auto["gemm_ms"]), links_us, *(1e3 * float(found[n]["median_ms"]) for n in names)]
        over = [float(found[name]["median_ms"]) / float(auto["median_ms"]) for name in ("serial", "torch")]
        cells = [shape, *(f"{each:.0f}" for each in times_us), f"{float(auto['of_floor']):.0%}"]
        lines.append(f"| {' | '.join([*cells, ', '.join(f'{each:.2f}x' for each in over)])} |")
    return lines


def main() -> None:
    """Print both tables of each file."""
    for name in FILES:
        with (FOLDER / name).open(newline="") as file:
            rows = list(csv.DictReader(file))
        for operator in OPERATORS:
            print("\n".join(gemm_table(rows, operator)), end="\n\n")


if __name__ == "__main__":
    main()
