"""Print the tables of `docs/simulator.md` that show steps and stages, as Markdown, from the simulated rows beside it.

Run it as `python docs/results/simulated_tables.py`. Numbers are shown as the rows have them; `off` and `over` compare
them. The tables of measured rows are `simulator_check.py`'s, that of products is `simulated_products_table.py`'s.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Row = Mapping[str, str]

FOLDER = Path(__file__).parent
VARIANTS = (("torchrec", False), ("fused", False), ("fused", True))
"""the columns of a table of variants: backend, and whether puts are gathered"""


def read_rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a file beside this one."""
    with (FOLDER / name).open(newline="") as file:
        return list(csv.DictReader(file))


def variants(rows: Sequence[Row]) -> list[str]:
    """Return the ms of torchrec's exchange, of fused, and of fused with an aggregator, by rows alike in all else."""
    found = {(row["backend"], row["aggregate_bytes"] != "0"): row["ms"] for row in rows}
    return [found[variant] for variant in VARIANTS]


def over(ms: Sequence[str]) -> str:
    """Return how many times as fast as torchrec's exchange fused with an aggregator is."""
    return f"{float(ms[0]) / float(ms[2]):.2f}x"


def off(ms: Sequence[str]) -> str:
    """Return by how much shorter than with torchrec's exchange the fused step is."""
    return f"{100 - 100 * float(ms[1]) / float(ms[0]):.1f}%"


def lines(rows: Sequence[Row], names: Sequence[str], compare: Callable[[Sequence[str]], str]) -> dict[str, str]:
    """Return for each value of the columns `names` the cells of the variants and their comparison."""
    keys = dict.fromkeys(tuple(row[name] for name in names) for row in rows)
    made = {}
    for key in sorted(keys, key=lambda key: [float(value) for value in key]):
        ms = variants([row for row in rows if tuple(row[name] for name in names) == key])
        made[" | ".join(key)] = " | ".join([*ms, compare(ms)])
    return made


def grid(rows: Sequence[Row], names: Sequence[str], column: str) -> list[str]:
    """Return a line for each value of the columns `names`, with the ms of each value of `column` in order."""
    values = sorted({float(row[column]) for row in rows})
    keys = dict.fromkeys(tuple(row[name] for name in names) for row in rows)
    found = {(*(row[name] for name in names), float(row[column])): row["ms"] for row in rows}
    ordered = sorted(keys, key=lambda key: (float(key[0]), *key[1:]))
    shown = [[f"{float(key[0]):g}", *key[1:], *(found[*key, value] for value in values)] for key in ordered]
    return [f"| {' | '.join(cells)} |" for cells in shown]


def scaling() -> list[str]:
    """Return the lines of MLPerf's step: by the plan, with the work of the fullest ranks, and with even tables."""
    rows = read_rows("simulated_weak.csv")
    plan, even = (
        lines([row for row in rows if row["plan"] == kind], ["world_size"], over) for kind in ("auto", "even")
    )
    fullest = {row["world_size"]: row for row in rows if row["plan"] == "auto"}
    shown = []
    for gpus, cells in plan.items():
        work = [f"{float(fullest[gpus][f'fullest_{of}']):.3g}" for of in ("memory", "links", "ids")]
        shown.append(f"| {gpus} | {', '.join(work)} | {fullest[gpus]['idle_ranks']} | {cells} | {even[gpus]} |")
    return shown


def shares_of_ids() -> list[str]:
    """Return the lines of the sensitivity to ids: their bytes, and how they share the links."""
    rows = read_rows("simulated_p1_ids.csv")
    keys = dict.fromkeys((row["samples"], row["id_bytes"], row["ids"]) for row in rows)
    shown = []
    for key in keys:
        of = [row for row in rows if (row["samples"], row["id_bytes"], row["ids"]) == key]
        ms = {row["backend"]: row["ms"] for row in of}
        shown.append(f"| {' | '.join([*key, *ms.values(), off(list(ms.values()))])} |")
    return shown


def tables() -> dict[str, list[str]]:
    """Return the lines of each table below its head, by the file that has its rows."""
    rows = lines(read_rows("simulated_p1.csv"), ["samples", "hosts"], off)
    return {
        "simulated_weak.csv": scaling(),
        "simulated_p1.csv": [f"| {key} | {cells} |" for key, cells in rows.items()],
        "simulated_p1_ids.csv": shares_of_ids(),
        "simulated_slices.csv": grid(read_rows("simulated_slices.csv"), ["nic_gbit_per_s"], "slice_bags"),
        "simulated_aggregator.csv": grid(read_rows("simulated_aggregator.csv"), ["aggregate_us"], "aggregate_bytes"),
    }


if __name__ == "__main__":
    for name, table in tables().items():
        print("\n".join([f"\n{name}", *table]))
