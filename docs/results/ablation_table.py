"""Print the tables of the ablation in `step.md`, as Markdown, from the rows of `bench ablation`.

Run it as `python docs/results/ablation_table.py [ROWS.csv]`; by default it reads `ablation.csv`, beside this file.
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dlrm_overlap.bench.step_contenders import ABLATION

FOLDER = Path(__file__).parent
_HEADS = {"torchrec": ("`torchrec` with", "saves, ms"), "pgas_graph": ("`pgas_graph` without", "costs, ms")}


def milliseconds(time_ms: float) -> str:
    """Return a time as the tables of `step.md` have it: two digits behind the point, or three below 1 ms."""
    return f"{time_ms:.2f}" if time_ms >= 1 else f"{time_ms:.3f}"


def ablation_table(rows: Sequence[Mapping[str, str]], reference: str) -> list[str]:
    """Return the lines of the table of all contenders that are measured against `reference`, the greatest gain first.

    Where a contender's losses are not the reference's, there is no difference of their times to tell.
    """
    title, gain = _HEADS[reference]
    found = {row["contender"]: row for row in rows}
    shown = []
    for name, text in ABLATION[reference].items():
        if name in found:
            own, beside = float(found[name]["median_ms"]), float(found[name]["reference_ms"])
            difference = beside - own if reference == "torchrec" else own - beside
            told = f"{difference:.2f}" if found[name]["over_reference"] else "-"
            cells = [f"{text} (`{name}`)", milliseconds(own), milliseconds(beside), told]
            shown.append((-difference, f"| {' | '.join(cells)} |"))
    head = [f"| {title} | ms a step | `{reference}` in the same turns | {gain} |", "|---|---|---|---|"]
    return head + [line for _, line in sorted(shown)]


def main(path: str | Path = FOLDER / "ablation.csv") -> None:
    """Print both tables of the file `path`."""
    with Path(path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    print("\n\n".join("\n".join(ablation_table(rows, reference)) for reference in ABLATION))


if __name__ == "__main__":
    main(*sys.argv[1:])
