"""Print the tables of `collectives.md`, as Markdown, from the rows of `bench collectives`.

Run it as `python docs/results/collectives_table.py [ROWS.csv]`; by default it reads `collectives.csv` beside this file.
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dlrm_overlap.bench.request import CollectivesRequest
from dlrm_overlap.comm.calls import fastest_way

FOLDER = Path(__file__).parent
CONTENDERS = {
    "nccl": "NCCL",
    "nccl_registered": "registered",
    "nccl_copy_engines": "its copy engines",
    "dma": "`dma`",
    "stores": "`stores`",
}
TABLES, ALL_GATHER_TABLES = (
    [(operation, beside, captured) for beside in ("nothing", "compute") for captured in ("True", "False")]
    for operation in ("all_to_all", "all_gather")
)
"""operation, what runs beside, whether captured"""


def microseconds(row: Mapping[str, str]) -> str:
    """Return a row's median as the tables have it: whole microseconds from 100 on, one digit behind the point below."""
    time_us = float(row["median_ms"]) * 1e3
    return f"{time_us:.0f}" if time_us >= 100 else f"{time_us:.1f}"


def collectives_table(rows: Sequence[Mapping[str, str]], operation: str, beside: str, captured: str) -> list[str]:
    """Return the lines of a table: a line a size, with the medians, what `auto` takes, and the best of all over that.

    The best is that of all rows; of the stores with various numbers of programs the table has those that are launched.
    """
    kept = [row for row in rows if (row["operation"], row["beside"], row["captured"]) == (operation, beside, captured)]
    heads = ["MB a peer", *CONTENDERS.values(), "`auto` takes", "best / that", "its GB/s"]
    if beside == "compute":
        heads[-1] = "product alone"
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for size in dict.fromkeys(row["mb_per_peer"] for row in kept):
        same = [row for row in kept if row["mb_per_peer"] == size]
        found = {row["contender"]: row for row in same if is_todays(row)}
        taken = found[fastest_way(int(size) << 20, beside, captured == "True")]
        best = min(float(row["median_ms"]) for row in same) / float(taken["median_ms"])
        last = float(taken["product_ms"]) * 1e3 if beside == "compute" else float(taken["gb_per_s"])
        cells = [size, *(microseconds(found[name]) if name in found else "-" for name in CONTENDERS)]
        cells += [f"`{taken['contender']}`", f"{best:.2f}", f"{last:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def is_todays(row: Mapping[str, str]) -> bool:
    """Return whether a row is of what is launched today: stores by the number of programs that they have."""
    return row["contender"] != "stores" or row["store_programs"] == str(CollectivesRequest.store_programs)


def main(path: str | Path = FOLDER / "collectives.csv") -> None:
    """Print all tables of the file `path`."""
    with Path(path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    operations = {row["operation"] for row in rows}
    for table in (each for each in (*TABLES, *ALL_GATHER_TABLES) if each[0] in operations):
        print(*table, *collectives_table(rows, *table), "", sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
