"""Print the tables of products with a reduce-scatter in `docs/simulator.md`, as Markdown, from simulated rows.

Run it as `python docs/results/simulated_products_table.py [ROWS.csv]`; by default it reads `simulated_products.csv`,
beside this file. Means are geometric, over the rows' models, layers and numbers of ranks.
"""

import csv
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

Row = Mapping[str, str]

FOLDER = Path(__file__).parent
WAYS = ("software", "near_memory", "arbitrated", "ideal")
ASSUMPTIONS = ("link_gb_per_s", "tflop_per_s", "update_factor", "gather")


def product_key(row: Row) -> tuple[str, ...]:
    """Return what tells a product from others, whatever the way."""
    return tuple(row[name] for name in ("name", "ranks", "layer", *ASSUMPTIONS))


def gains(rows: Sequence[Row], way: str) -> list[tuple[float, float]]:
    """Return for each product the speedup of `way` over `serial`, and its bytes of memory over those of `serial`."""
    serial = {product_key(row): row for row in rows if row["way"] == "serial"}
    found = [(row, serial[product_key(row)]) for row in rows if row["way"] == way]
    return [
        (float(base["ms"]) / float(row["ms"]), float(row["memory_mb"]) / float(base["memory_mb"]))
        for row, base in found
    ]


def geomean(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def group(row: Row) -> tuple[str, ...]:
    """Return the assumptions of a row, and whether its model is one of those with about 500 billion parameters."""
    return (*(row[name] for name in ASSUMPTIONS), "on 32 ranks" if row["ranks"] == "32" else "on 8 and 16 ranks")


def table(rows: Sequence[Row]) -> list[str]:
    """Return a line for each group of rows: speedups and bytes less, mean and greatest."""
    head = [
        "| models | link, GB/s | TFLOP/s | time of an update | gather | " + " | ".join(WAYS) + " | bytes less |",
        "|" + "---|" * (6 + len(WAYS)),
    ]
    for key in dict.fromkeys(map(group, rows)):
        of = [row for row in rows if group(row) == key]
        link, tflop, update, gather, where = key
        cells = [where, f"{float(link):g}", f"{float(tflop):.0f}", f"{float(update):g}", gather.lower()]
        for way in WAYS:
            speedups = [speedup for speedup, _ in gains(of, way)]
            cells.append(f"{100 * geomean(speedups) - 100:.0f}%, {100 * max(speedups) - 100:.0f}%")
        moved = [share for _, share in gains(of, "arbitrated")]
        cells.append(f"{100 - 100 * geomean(moved):.0f}%, {100 - 100 * min(moved):.0f}%")
        head.append(f"| {' | '.join(cells)} |")
    return head


def main(path: str | Path = FOLDER / "simulated_products.csv") -> None:
    """Print the table of the file `path`."""
    with Path(path).open(newline="") as file:
        print("\n".join(table(list(csv.DictReader(file)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
